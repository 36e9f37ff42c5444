# SPDX-License-Identifier: Apache-2.0
"""Draws from distributions that top-k and top-p cut down, one after the other or both at once."""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.export import op
from precast._ops.sampling._arguments import (
    Real,
    Whole,
    draw_outputs,
    explain_draw,
    is_joint,
    refuse_nan,
)
from precast._ops.sampling._filters import weights_of_logits, weights_of_probs
from precast._ops.sampling._formula import chosen
from precast._ops.sampling._kernels import draw_export
from precast._ops.sampling._trace import draw_trace
from precast.api_logging import precast_api


def top_k_top_p_sampling_from_probs_reference(
    probs: torch.Tensor,
    top_k: torch.Tensor | int,
    top_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    seed: torch.Tensor | int = 0,
    offset: torch.Tensor | int = 0,
) -> torch.Tensor:
    """:func:`top_k_top_p_sampling_from_probs` in plain PyTorch: the same tokens, bit for bit.

    Parameters
    ----------
    probs, top_k, top_p, indices, filter_apply_order : torch.Tensor or number
        Those of the function, on any device.
    seed, offset : int or torch.Tensor
        Those of the function. Default: 0.

    Returns
    -------
    torch.Tensor
        ``[outputs]``, int32 or the dtype of ``indices``.

    Examples
    --------
    >>> import torch
    >>> top_k_top_p_sampling_from_probs_reference(torch.tensor([[0.2, 0.7, 0.1]]), 2, 0.3).tolist()
    [1]
    """
    joint = filter_apply_order == "joint"
    weights = weights_of_probs(probs)
    tokens, _ = chosen(weights, indices, top_k, top_p, joint=joint, seed=seed, offset=offset)
    return tokens.to(torch.int32 if indices is None else indices.dtype)


def top_k_top_p_sampling_from_logits_reference(
    logits: torch.Tensor,
    top_k: torch.Tensor | int,
    top_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    seed: torch.Tensor | int = 0,
    offset: torch.Tensor | int = 0,
) -> torch.Tensor:
    """:func:`top_k_top_p_sampling_from_logits` in plain PyTorch, tokens too but where exp rounds.

    Parameters
    ----------
    logits, top_k, top_p, indices, filter_apply_order : torch.Tensor or number
        Those of the function, on any device.
    seed, offset : int or torch.Tensor
        Those of the function. Default: 0.

    Returns
    -------
    torch.Tensor
        ``[outputs]``, int32 or the dtype of ``indices``.

    Examples
    --------
    >>> import torch
    >>> top_k_top_p_sampling_from_logits_reference(torch.tensor([[0.2, 0.7, 0.1]]), 2, 0.3).tolist()
    [1]
    """
    joint = filter_apply_order == "joint"
    weights = weights_of_logits(logits, 1.0)
    tokens, _ = chosen(weights, indices, top_k, top_p, joint=joint, seed=seed, offset=offset)
    return tokens.to(torch.int32 if indices is None else indices.dtype)


_PROBS = draw_export("top_k_top_p_sampling_from_probs", ("top_k", "top_p"))
_LOGITS = draw_export("top_k_top_p_sampling_from_logits", ("top_k", "top_p"))
_PROBS_TRACE = draw_trace(
    *("top_k_top_p_sampling_from_probs", "probs", ("top_k", "top_p")),
    top_k_top_p_sampling_from_probs_reference,
)

_LOGITS_TRACE = draw_trace(
    *("top_k_top_p_sampling_from_logits", "logits", ("top_k", "top_p")),
    top_k_top_p_sampling_from_logits_reference,
)


@precast_api(trace=_PROBS_TRACE)
@op("sampling", explain=explain_draw)
def top_k_top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_k: Whole,
    top_p: Real,
    indices: torch.Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Whole | None = None,
    offset: Whole | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Draw a token from what top-k and top-p leave of each distribution.

    Rows, filters and random numbers are as :mod:`precast.sampling` says.

    Parameters
    ----------
    probs : torch.Tensor
        ``[rows, vocabulary]``, float32, float16 or bfloat16.
    top_k : int or torch.Tensor
        How many are kept, or int32 ``[rows]``. Below 1, or from the vocabulary on: all.
    top_p : float or torch.Tensor
        The share of the mass, or float32 ``[rows]``. From 1 on: all; at 0 and below: the likeliest.
    indices : torch.Tensor, optional
        ``[outputs]``, int32 or int64: the row of each output. Default: each row once.
    filter_apply_order : str
        ``"top_k_first"``: top-p is a share of the mass that top-k keeps. ``"joint"``: a share of
        the whole mass, and a token must belong to both sets.
    deterministic : bool
        Without effect: results never depend on timing.
    generator : torch.Generator, optional
        Where seed and offset come from. Default: the device's own.
    check_nan : bool
        Raise if there is a NaN, **for which the call waits for the GPU**.
    seed, offset : int or torch.Tensor, optional
        In place of a generator's: two integers, or int64 or uint64 tensors, ``[1]`` or
        ``[outputs]``; equal ones give equal tokens.
    return_valid : bool
        Return also whether each row was a distribution.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        Tokens, ``[outputs]``, int32 or the dtype of ``indices``; with ``return_valid`` also bools
        ``[outputs]``.

    Raises
    ------
    ValueError
        Arguments that do not fit; a NaN that ``check_nan`` finds.

    Notes
    -----
    One launch for both filters and the draw.

    Examples
    --------
    >>> import torch, precast
    >>> probs = torch.tensor([[0.1, 0.6, 0.3], [0.2, 0.2, 0.6]])
    >>> with precast.reference_mode():
    ...     precast.top_k_top_p_sampling_from_probs(probs, 2, 0.3, seed=1, offset=0)
    tensor([1, 2], dtype=torch.int32)
    """
    joint = is_joint("top_k_top_p_sampling_from_probs", filter_apply_order)
    if check_nan:
        refuse_nan(probs, "probs")
    random = generator, seed, offset
    out, valid = draw_outputs(probs, indices, return_valid)
    _PROBS.launch(probs, indices, top_k, top_p, joint, random, out, valid)
    return (out, valid) if return_valid else out


@precast_api(trace=_LOGITS_TRACE)
@op("sampling", explain=explain_draw)
def top_k_top_p_sampling_from_logits(
    logits: torch.Tensor,
    top_k: Whole,
    top_p: Real,
    indices: torch.Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Whole | None = None,
    offset: Whole | None = None,
) -> torch.Tensor:
    """Draw a token from what top-k and top-p leave of the softmax of each row of logits.

    Rows, filters and random numbers are as :mod:`precast.sampling` says.

    Parameters
    ----------
    logits : torch.Tensor
        ``[rows, vocabulary]``, float32, float16 or bfloat16.
    top_k : int or torch.Tensor
        How many are kept, or int32 ``[rows]``. Below 1, or from the vocabulary on: all.
    top_p : float or torch.Tensor
        The share of the mass, or float32 ``[rows]``. From 1 on: all; at 0 and below: the likeliest.
    indices : torch.Tensor, optional
        ``[outputs]``, int32 or int64: the row of each output. Default: each row once.
    filter_apply_order : str
        ``"top_k_first"``: top-p is a share of the mass that top-k keeps. ``"joint"``: a share of
        the whole mass, and a token must belong to both sets.
    deterministic : bool
        Without effect: results never depend on timing.
    generator : torch.Generator, optional
        Where seed and offset come from. Default: the device's own.
    check_nan : bool
        Raise if there is a NaN, **for which the call waits for the GPU**.
    seed, offset : int or torch.Tensor, optional
        In place of a generator's: two integers, or int64 or uint64 tensors, ``[1]`` or
        ``[outputs]``; equal ones give equal tokens.

    Returns
    -------
    torch.Tensor
        Tokens, ``[outputs]``, int32 or the dtype of ``indices``.

    Raises
    ------
    ValueError
        Arguments that do not fit; a NaN that ``check_nan`` finds.

    Notes
    -----
    One launch for softmax, both filters and the draw; no distribution is written.

    Examples
    --------
    >>> import torch, precast
    >>> logits = torch.tensor([[0.1, 0.6, 0.3], [0.2, 0.2, 0.6]])
    >>> with precast.reference_mode():
    ...     precast.top_k_top_p_sampling_from_logits(logits, 2, 0.3, seed=1, offset=0)
    tensor([1, 2], dtype=torch.int32)
    """
    joint = is_joint("top_k_top_p_sampling_from_logits", filter_apply_order)
    if check_nan:
        refuse_nan(logits, "logits")
    random = generator, seed, offset
    out, _ = draw_outputs(logits, indices, False)
    _LOGITS.launch(logits, indices, top_k, top_p, joint, random, out, None)
    return out
