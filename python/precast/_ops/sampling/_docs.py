# SPDX-License-Identifier: Apache-2.0
"""The parts that docstrings of sampling have in common; :func:`documented` fills them in."""

from __future__ import annotations

#: Rows and filters, for all functions.
ROWS = """
Parameters
----------
probs : torch.Tensor
    ``[rows, vocabulary]``, float32, float16 or bfloat16.
logits : torch.Tensor
    ``[rows, vocabulary]``, float32, float16 or bfloat16.
top_k : int or torch.Tensor
    How many are kept, or int32 ``[rows]``. Below 1, or from the vocabulary on: all.
top_p : float or torch.Tensor
    The share of the mass, or float32 ``[rows]``. From 1 on: all; at 0 and below: the likeliest.
min_p : float or torch.Tensor
    The share of the largest probability, or float32 ``[rows]``. At 0 and below: all; from 1 on: the
    likeliest.
is_deterministic : bool
    Without effect: results never depend on timing.

Raises
------
ValueError
    Arguments that do not fit.
"""

#: The other arguments of draws.
DRAW = """
Parameters
----------
indices : torch.Tensor, optional
    ``[outputs]``, int32 or int64: the row of each output. Default: each row once.
filter_apply_order : str
    ``"top_k_first"``: top-p is a share of the mass that top-k keeps. ``"joint"``: a share of the
    whole mass, and a token must belong to both sets.
deterministic : bool
    Without effect: results never depend on timing.
generator : torch.Generator, optional
    Where seed and offset come from. Default: the device's own.
check_nan : bool
    Raise if there is a NaN, **for which the call waits for the GPU**.
seed, offset : int or torch.Tensor, optional
    Key and counter of the random numbers: two integers, or int64 or uint64 tensors, ``[1]`` or
    ``[outputs]``; equal ones give equal tokens. Default: a generator's; 0 for a reference.
return_valid : bool
    Return also whether each row was a distribution.

Raises
------
ValueError
    Arguments that do not fit; a NaN that ``check_nan`` finds.
"""

#: What draws return: without ``return_valid``, and with it.
TOKENS = """
Returns
-------
torch.Tensor
    Tokens, ``[outputs]``, int32 or the dtype of ``indices``.
"""
TOKENS_AND_VALID = """
Returns
-------
torch.Tensor or tuple of torch.Tensor
    Tokens, ``[outputs]``, int32 or the dtype of ``indices``; with ``return_valid`` also bools
    ``[outputs]``.
"""
