# SPDX-License-Identifier: Apache-2.0
"""Rows that a filter cuts down, as rows: probabilities renormalised, logits masked."""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.decorators import backend_requirement, served_by
from precast._op.dispatch import Kernel, check_tensors
from precast._op.torch_ops import torch_ops
from precast._op.validation import check_dtype
from precast._ops.sampling._arguments import (
    Real,
    Whole,
    check_by_row,
    check_distributions,
    check_result,
    given,
    real,
    whole,
)
from precast._ops.sampling._filters import top_k_threshold, top_p_threshold, weights_of_probs
from precast._ops.sampling._formula import renormalized
from precast._ops.sampling._trace import rows_trace
from precast.api_logging import precast_api


def top_k_renorm_probs_reference(probs: torch.Tensor, top_k: torch.Tensor | int) -> torch.Tensor:
    """:func:`top_k_renorm_probs` in plain PyTorch.

    Parameters
    ----------
    probs, top_k : torch.Tensor or int
        Those of the function, on any device.

    Returns
    -------
    torch.Tensor
        Shape and dtype of ``probs``.

    Examples
    --------
    >>> import torch
    >>> top_k_renorm_probs_reference(torch.tensor([[0.125, 0.5, 0.375]]), 1).tolist()
    [[0.0, 1.0, 0.0]]
    """
    weights = weights_of_probs(probs)
    return renormalized(weights, top_k_threshold(weights, top_k)).to(probs.dtype)


def top_p_renorm_probs_reference(probs: torch.Tensor, top_p: torch.Tensor | float) -> torch.Tensor:
    """:func:`top_p_renorm_probs` in plain PyTorch.

    Parameters
    ----------
    probs, top_p : torch.Tensor or float
        Those of the function, on any device.

    Returns
    -------
    torch.Tensor
        Shape and dtype of ``probs``.

    Examples
    --------
    >>> import torch
    >>> top_p_renorm_probs_reference(torch.tensor([[0.125, 0.5, 0.375]]), 0.25).tolist()
    [[0.0, 1.0, 0.0]]
    """
    weights = weights_of_probs(probs)
    least = top_p_threshold(weights, top_p, weights == weights)
    return renormalized(weights, least).to(probs.dtype)


def top_k_mask_logits_reference(logits: torch.Tensor, top_k: torch.Tensor | int) -> torch.Tensor:
    """:func:`top_k_mask_logits` in plain PyTorch.

    Parameters
    ----------
    logits, top_k : torch.Tensor or int
        Those of the function, on any device.

    Returns
    -------
    torch.Tensor
        Shape and dtype of ``logits``.

    Examples
    --------
    >>> import torch
    >>> top_k_mask_logits_reference(torch.tensor([[0.5, 2.0, 1.0]]), 2).tolist()
    [[-inf, 2.0, 1.0]]
    """
    x = logits.float()
    least = top_k_threshold(x.masked_fill(x.isnan(), -torch.inf), top_k)
    return logits.masked_fill(x < least, -torch.inf)


def _check(
    export: str,
    name: str,
    x: torch.Tensor,
    parameters: dict[str, torch.Tensor | None],
    out: torch.Tensor,
) -> None:
    check_distributions(export, name, x)
    check_by_row(export, x, name, parameters)
    check_dtype(export, "out", out, x.dtype)
    check_result(export, name, x, out)


def _renorm_public(
    probs: Any, values: Any, number: Any, out: Any, enable_pdl: Any
) -> tuple[Any, ...]:
    return probs, given(values, number), False


def _mask_public(
    logits: Any, values: Any, number: Any, out: Any, enable_pdl: Any
) -> tuple[Any, ...]:
    return logits, given(values, number)


def _top_k_into(
    probs: torch.Tensor,
    top_k_arr: torch.Tensor | None,
    top_k: int,
    out: torch.Tensor,
    enable_pdl: bool,
) -> None:
    _check("top_k_renorm_probs", "probs", probs, {"top_k": top_k_arr}, out)
    out.copy_(top_k_renorm_probs_reference(probs, given(top_k_arr, top_k)))


def _top_p_into(
    probs: torch.Tensor,
    top_p_arr: torch.Tensor | None,
    top_p: float,
    out: torch.Tensor,
    enable_pdl: bool,
) -> None:
    _check("top_p_renorm_probs", "probs", probs, {"top_p": top_p_arr}, out)
    out.copy_(top_p_renorm_probs_reference(probs, given(top_p_arr, top_p)))


def _mask_into(
    logits: torch.Tensor,
    top_k_arr: torch.Tensor | None,
    top_k: int,
    out: torch.Tensor,
    enable_pdl: bool,
) -> None:
    _check("top_k_mask_logits", "logits", logits, {"top_k": top_k_arr}, out)
    out.copy_(top_k_mask_logits_reference(logits, given(top_k_arr, top_k)))


_top_k = Kernel(
    "sampling",
    "top_k_renorm_probs",
    schema="(Tensor probs, Tensor? top_k_arr, SymInt top_k, Tensor(a!) out, bool enable_pdl) -> ()",
    reference=_top_k_into,
    public=_renorm_public,
)

_top_p = Kernel(
    "sampling",
    "top_p_renorm_probs",
    schema="(Tensor probs, Tensor? top_p_arr, float top_p, Tensor(a!) out, bool enable_pdl) -> ()",
    reference=_top_p_into,
    public=_renorm_public,
)

_mask = Kernel(
    "sampling",
    "top_k_mask_logits",
    schema="(Tensor logits, Tensor? top_k_arr, SymInt top_k, Tensor(a!) out, "
    "bool enable_pdl) -> ()",
    reference=_mask_into,
    public=_mask_public,
)


@precast_api(
    trace=rows_trace(
        "top_k_renorm_probs", "probs", "top_k", top_k_renorm_probs_reference, "renorm_probs"
    )
)
@backend_requirement({}, common_check=served_by("sampling"))
def top_k_renorm_probs(
    probs: torch.Tensor, top_k: Whole, is_deterministic: bool = False
) -> torch.Tensor:
    r"""Keep the ``top_k`` likeliest of each distribution, as shares of their sum.

    .. math:: out_{i, t} = p_{i, t} [p_{i, t} \ge \tau_i] / \sum_s p_{i, s} [p_{i, s} \ge \tau_i]

    Rows and filters are as :mod:`precast.sampling` says.

    Parameters
    ----------
    probs : torch.Tensor
        ``[rows, vocabulary]``, float32, float16 or bfloat16.
    top_k : int or torch.Tensor
        How many are kept, or int32 ``[rows]``. Below 1, or from the vocabulary on: all.
    is_deterministic : bool
        Without effect: results never depend on timing.

    Returns
    -------
    torch.Tensor
        Shape and dtype of ``probs``. A row without mass is 0, a row with a NaN is NaN throughout.

    Raises
    ------
    ValueError
        Arguments that do not fit.

    Notes
    -----
    Reads and writes each row once.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     precast.top_k_renorm_probs(torch.tensor([[0.125, 0.5, 0.375]]), 1)
    tensor([[0., 1., 0.]])
    """
    try:
        top_k_arr, number = whole(top_k)
        out = torch.empty(probs.shape, dtype=probs.dtype, device=probs.device)
        if torch.compiler.is_compiling():
            torch_ops.top_k_renorm_probs(probs, top_k_arr, number, out, True)
        else:
            _top_k[probs.dtype, probs.get_device()](probs, top_k_arr, number, out, True)
    except (AttributeError, TypeError):
        check_tensors("top_k_renorm_probs", probs=probs)
        raise
    return out


@precast_api(
    trace=rows_trace(
        "top_p_renorm_probs", "probs", "top_p", top_p_renorm_probs_reference, "renorm_probs"
    )
)
@backend_requirement({}, common_check=served_by("sampling"))
def top_p_renorm_probs(
    probs: torch.Tensor, top_p: Real, is_deterministic: bool = False
) -> torch.Tensor:
    r"""Keep the likeliest with a share ``top_p`` of each distribution, as shares of their sum.

    .. math:: out_{i, t} = p_{i, t} [p_{i, t} \ge \tau_i] / \sum_s p_{i, s} [p_{i, s} \ge \tau_i]

    Rows and filters are as :mod:`precast.sampling` says.

    Parameters
    ----------
    probs : torch.Tensor
        ``[rows, vocabulary]``, float32, float16 or bfloat16.
    top_p : float or torch.Tensor
        The share of the mass, or float32 ``[rows]``. From 1 on: all; at 0 and below: the likeliest.
    is_deterministic : bool
        Without effect: results never depend on timing.

    Returns
    -------
    torch.Tensor
        Shape and dtype of ``probs``. A row without mass is 0, a row with a NaN is NaN throughout.

    Raises
    ------
    ValueError
        Arguments that do not fit.

    Notes
    -----
    FlashInfer's returns float32 for 16-bit rows.

    Reads and writes each row once.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     precast.top_p_renorm_probs(torch.tensor([[0.125, 0.5, 0.375]]), 0.25)
    tensor([[0., 1., 0.]])
    """
    try:
        top_p_arr, number = real(top_p)
        out = torch.empty(probs.shape, dtype=probs.dtype, device=probs.device)
        if torch.compiler.is_compiling():
            torch_ops.top_p_renorm_probs(probs, top_p_arr, number, out, True)
        else:
            _top_p[probs.dtype, probs.get_device()](probs, top_p_arr, number, out, True)
    except (AttributeError, TypeError):
        check_tensors("top_p_renorm_probs", probs=probs)
        raise
    return out


@precast_api(
    trace=rows_trace(
        "top_k_mask_logits", "logits", "top_k", top_k_mask_logits_reference, "masked_logits"
    )
)
@backend_requirement({}, common_check=served_by("sampling"))
def top_k_mask_logits(logits: torch.Tensor, top_k: Whole) -> torch.Tensor:
    r"""Keep the ``top_k`` largest logits of each row; the others become minus infinity.

    .. math:: out_{i, t} = x_{i, t} \text{ if } x_{i, t} \ge \tau_i \text{ else } -\infty

    Rows and filters are as :mod:`precast.sampling` says.

    Parameters
    ----------
    logits : torch.Tensor
        ``[rows, vocabulary]``, float32, float16 or bfloat16.
    top_k : int or torch.Tensor
        How many are kept, or int32 ``[rows]``. Below 1, or from the vocabulary on: all.

    Returns
    -------
    torch.Tensor
        Shape and dtype of ``logits``. What is kept keeps its bits. NaN is no number here: it stays,
        and does not count; where a row has fewer than ``top_k`` numbers, all stay.

    Raises
    ------
    ValueError
        Arguments that do not fit.

    Notes
    -----
    Reads and writes each row once.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     precast.top_k_mask_logits(torch.tensor([[0.5, 2.0, 1.0]]), 2)
    tensor([[-inf, 2., 1.]])
    """
    try:
        top_k_arr, number = whole(top_k)
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        if torch.compiler.is_compiling():
            torch_ops.top_k_mask_logits(logits, top_k_arr, number, out, True)
        else:
            _mask[logits.dtype, logits.get_device()](logits, top_k_arr, number, out, True)
    except (AttributeError, TypeError):
        check_tensors("top_k_mask_logits", logits=logits)
        raise
    return out


#: FlashInfer's other names of the two.
top_k_renorm_prob = top_k_renorm_probs
top_p_renorm_prob = top_p_renorm_probs
