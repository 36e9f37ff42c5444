# SPDX-License-Identifier: Apache-2.0
"""Draws from a whole distribution."""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.export import op
from precast._ops.sampling._arguments import Whole, draw_outputs, explain_draw, refuse_nan
from precast._ops.sampling._filters import weights_of_logits, weights_of_probs
from precast._ops.sampling._formula import chosen
from precast._ops.sampling._kernels import draw_export
from precast._ops.sampling._trace import draw_trace
from precast.api_logging import precast_api


def sampling_from_probs_reference(
    probs: torch.Tensor,
    indices: torch.Tensor | None = None,
    seed: torch.Tensor | int = 0,
    offset: torch.Tensor | int = 0,
) -> torch.Tensor:
    """:func:`sampling_from_probs` in plain PyTorch: the same tokens, bit for bit.

    Parameters
    ----------
    probs, indices : torch.Tensor
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
    >>> sampling_from_probs_reference(torch.tensor([[0.0, 1.0], [0.5, 0.5]]), seed=1).tolist()
    [1, 0]
    """
    tokens, _ = chosen(weights_of_probs(probs), indices, seed=seed, offset=offset)
    return tokens.to(torch.int32 if indices is None else indices.dtype)


def sampling_from_logits_reference(
    logits: torch.Tensor,
    indices: torch.Tensor | None = None,
    seed: torch.Tensor | int = 0,
    offset: torch.Tensor | int = 0,
) -> torch.Tensor:
    """:func:`sampling_from_logits` in plain PyTorch: the same but where ``exp`` rounds otherwise.

    Parameters
    ----------
    logits, indices : torch.Tensor
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
    >>> logits = torch.tensor([[-torch.inf, 1.0], [3.0, -torch.inf]])
    >>> sampling_from_logits_reference(logits).tolist()
    [1, 0]
    """
    tokens, _ = chosen(weights_of_logits(logits, 1.0), indices, seed=seed, offset=offset)
    return tokens.to(torch.int32 if indices is None else indices.dtype)


_PROBS = draw_export("sampling_from_probs")
_LOGITS = draw_export("sampling_from_logits")
_PROBS_TRACE = draw_trace("sampling_from_probs", "probs", (), sampling_from_probs_reference)
_LOGITS_TRACE = draw_trace("sampling_from_logits", "logits", (), sampling_from_logits_reference)


@precast_api(trace=_PROBS_TRACE)
@op("sampling", explain=explain_draw)
def sampling_from_probs(
    probs: torch.Tensor,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Whole | None = None,
    offset: Whole | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    r"""Draw a token from each distribution.

    .. math:: P(out_i = t) = p_{r_i, t} / \sum_s p_{r_i, s}

    Rows and random numbers are as :mod:`precast.sampling` says.

    Parameters
    ----------
    probs : torch.Tensor
        ``[rows, vocabulary]``, float32, float16 or bfloat16.
    indices : torch.Tensor, optional
        ``[outputs]``, int32 or int64: the row of each output. Default: each row once.
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

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     precast.sampling_from_probs(torch.tensor([[0.0, 1.0, 0.0]]), seed=1, offset=0)
    tensor([1], dtype=torch.int32)
    """
    if check_nan:
        refuse_nan(probs, "probs")
    random = generator, seed, offset
    out, valid = draw_outputs(probs, indices, return_valid)
    _PROBS.launch(probs, indices, random, out, valid)
    return (out, valid) if return_valid else out


@precast_api(trace=_LOGITS_TRACE)
@op("sampling", explain=explain_draw)
def sampling_from_logits(
    logits: torch.Tensor,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Whole | None = None,
    offset: Whole | None = None,
) -> torch.Tensor:
    r"""Draw a token from the softmax of each row of logits, which is not written anywhere.

    .. math:: P(out_i = t) \propto \exp(x_{r_i, t})

    Rows and random numbers are as :mod:`precast.sampling` says.

    Parameters
    ----------
    logits : torch.Tensor
        ``[rows, vocabulary]``, float32, float16 or bfloat16.
    indices : torch.Tensor, optional
        ``[outputs]``, int32 or int64: the row of each output. Default: each row once.
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
    Tokens are those that :func:`sampling_from_probs` draws from the softmax with the same seed and
    offset, but for rounding.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     precast.sampling_from_logits(torch.tensor([[0.0, 200.0, 0.0]]), seed=1, offset=0)
    tensor([1], dtype=torch.int32)
    """
    if check_nan:
        refuse_nan(logits, "logits")
    random = generator, seed, offset
    out, _ = draw_outputs(logits, indices, False)
    _LOGITS.launch(logits, indices, random, out, None)
    return out
