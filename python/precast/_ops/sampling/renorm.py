# SPDX-License-Identifier: Apache-2.0
"""Rows that a filter cuts down, as rows: probabilities renormalised, logits masked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precast._base.torch import torch
from precast._op.export import Export, launches
from precast._op.validation import check_dtype
from precast._ops.sampling._arguments import (
    Real,
    Whole,
    check_by_row,
    check_distributions,
    check_result,
    kinds,
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


def _export(name: str, x: str, parameter: str, reference: Callable[..., torch.Tensor]) -> Export:
    """The rows ``x``, cut down by ``parameter``."""

    def check(export: str, out: torch.Tensor, **given: Any) -> None:
        check_distributions(export, x, given[x])
        check_by_row(export, given[x], x, {parameter: given[parameter]})
        check_dtype(export, "out", out, given[x].dtype)
        check_result(export, x, given[x], out)

    return Export(
        "sampling",
        name,
        f"{x}:T {parameter}:{parameter} out!:tensor enable_pdl:pdl_on",
        reference=reference,
        check=check,
        new={"out": f"_torch.empty({x}.shape, dtype={x}.dtype, device={x}.device)"},
        kinds=kinds(name, x),
    )


_TOP_K = _export("top_k_renorm_probs", "probs", "top_k", top_k_renorm_probs_reference)
_TOP_P = _export("top_p_renorm_probs", "probs", "top_p", top_p_renorm_probs_reference)
_MASK = _export("top_k_mask_logits", "logits", "top_k", top_k_mask_logits_reference)


@precast_api(
    trace=rows_trace(
        "top_k_renorm_probs", "probs", "top_k", top_k_renorm_probs_reference, "renorm_probs"
    )
)
@launches(_TOP_K)
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


@precast_api(
    trace=rows_trace(
        "top_p_renorm_probs", "probs", "top_p", top_p_renorm_probs_reference, "renorm_probs"
    )
)
@launches(_TOP_P)
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


@precast_api(
    trace=rows_trace(
        "top_k_mask_logits", "logits", "top_k", top_k_mask_logits_reference, "masked_logits"
    )
)
@launches(_MASK)
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


#: FlashInfer's other names of the two.
top_k_renorm_prob = top_k_renorm_probs
top_p_renorm_prob = top_p_renorm_probs
