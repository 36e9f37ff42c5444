# SPDX-License-Identifier: Apache-2.0
"""Make rows of rows: softmax of logits, renormalised probabilities and masked logits."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import ParamSpec

from precast._base.torch import torch
from precast._op.decorators import CheckedOp
from precast._op.docs import documented
from precast._op.export import Export, launches
from precast._ops.sampling._arguments import Real, Whole, check_rows, kinds
from precast._ops.sampling._docs import ROWS
from precast._ops.sampling._formula import (
    renormalized,
    top_k_threshold,
    top_p_threshold,
    weights_of_logits,
    weights_of_probs,
)
from precast._ops.sampling._inverse_cdf import row_sums
from precast._ops.sampling._trace import rows_trace
from precast.api_logging import precast_api

P = ParamSpec("P")


def _rows(
    reference: Callable[..., torch.Tensor], output: str, dtype: str | None = None
) -> Callable[[Callable[P, torch.Tensor]], CheckedOp[P, torch.Tensor]]:
    """Make an op of a function without a body, whose arguments are rows and a number."""

    def decorate(function: Callable[P, torch.Tensor]) -> CheckedOp[P, torch.Tensor]:
        name, parameters = function.__name__, inspect.signature(function).parameters
        x, number, *_ = parameters
        export = Export(
            "sampling",
            name,
            f"{x}:T=f32|f16|bf16[rows,vocab] {number}:{number} "
            f"out!:like({x}{',f32' if dtype else ''}) "
            f"enable_pdl:{'pdl' if 'enable_pdl' in parameters else 'pdl_on'}",
            reference=reference,
            check=check_rows,
            new={
                "out": f"_torch.empty({x}.shape, device={x}.device, "
                f"dtype={f'_torch.{dtype}' if dtype else f'{x}.dtype'})"
            },
            kinds=kinds(name, x),
        )
        op = launches(export)(documented(ROWS)(function))
        return precast_api(trace=rows_trace(reference, output, dtype))(op)

    return decorate


def softmax_reference(
    logits: torch.Tensor, temperature: torch.Tensor | float | None = None
) -> torch.Tensor:
    """:func:`softmax` in plain PyTorch on any device, in the kernel's order of additions."""
    weights = weights_of_logits(logits, 1.0 if temperature is None else temperature)
    return weights * (1 / row_sums(weights)[:, None])


def top_k_renorm_probs_reference(probs: torch.Tensor, top_k: torch.Tensor | int) -> torch.Tensor:
    """:func:`top_k_renorm_probs` in plain PyTorch on any device."""
    weights = weights_of_probs(probs)
    return renormalized(weights, top_k_threshold(weights, top_k)).to(probs.dtype)


def top_p_renorm_probs_reference(probs: torch.Tensor, top_p: torch.Tensor | float) -> torch.Tensor:
    """:func:`top_p_renorm_probs` in plain PyTorch on any device."""
    weights = weights_of_probs(probs)
    threshold = top_p_threshold(weights, top_p, weights == weights)
    return renormalized(weights, threshold).to(probs.dtype)


def top_k_mask_logits_reference(logits: torch.Tensor, top_k: torch.Tensor | int) -> torch.Tensor:
    """:func:`top_k_mask_logits` in plain PyTorch on any device."""
    x = logits.float()
    threshold = top_k_threshold(x.masked_fill(x.isnan(), -torch.inf), top_k)
    return logits.masked_fill(x < threshold, -torch.inf)


@_rows(softmax_reference, "probs", "float32")
def softmax(
    logits: torch.Tensor,
    temperature: torch.Tensor | float | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    r"""Compute the probabilities of logits at a temperature.

    .. math:: out_{i, t} = \exp(x_{i, t} / T_i) / \sum_s \exp(x_{i, s} / T_i)

    Rows are as :mod:`precast.sampling` says.

    Parameters
    ----------
    temperature : float or torch.Tensor, optional
        A number from 0 on, or float32 ``[rows]``. At 0, the maxima share the mass. Default: 1. A
        negative one in a tensor is not checked, and its row means nothing.

    Returns
    -------
    torch.Tensor
        The shape of ``logits``, float32. Rows with a NaN or plus infinity, and rows of minus
        infinity alone, are NaN, as in PyTorch.

    Raises
    ------
    ValueError
        Arguments that do not fit; a number below 0 as temperature.
    TypeError
        A temperature that is no number.

    Notes
    -----
    Reads and writes each row once; the maximum is subtracted first. The order of additions depends
    on the vocabulary alone, so a row does not depend on those around it.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     precast.softmax(torch.zeros(1, 4), temperature=0.5)
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """


@_rows(top_k_renorm_probs_reference, "renorm_probs")
def top_k_renorm_probs(
    probs: torch.Tensor, top_k: Whole, is_deterministic: bool = False
) -> torch.Tensor:
    r"""Keep the ``top_k`` likeliest of each distribution, as shares of their sum.

    .. math:: out_{i, t} = p_{i, t} [p_{i, t} \ge \tau_i] / \sum_s p_{i, s} [p_{i, s} \ge \tau_i]

    Rows and filters are as :mod:`precast.sampling` says.

    Returns
    -------
    torch.Tensor
        Shape and dtype of ``probs``. A row without mass is 0, a row with a NaN is NaN throughout.

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


@_rows(top_p_renorm_probs_reference, "renorm_probs")
@documented(top_k_renorm_probs)
def top_p_renorm_probs(
    probs: torch.Tensor, top_p: Real, is_deterministic: bool = False
) -> torch.Tensor:
    r"""Keep the likeliest with a share ``top_p`` of each distribution, as shares of their sum.

    .. math:: out_{i, t} = p_{i, t} [p_{i, t} \ge \tau_i] / \sum_s p_{i, s} [p_{i, s} \ge \tau_i]

    Rows and filters are as :mod:`precast.sampling` says.

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


@_rows(top_k_mask_logits_reference, "masked_logits")
def top_k_mask_logits(logits: torch.Tensor, top_k: Whole) -> torch.Tensor:
    r"""Keep the ``top_k`` largest logits of each row; the others become minus infinity.

    .. math:: out_{i, t} = x_{i, t} \text{ if } x_{i, t} \ge \tau_i \text{ else } -\infty

    Rows and filters are as :mod:`precast.sampling` says.

    Returns
    -------
    torch.Tensor
        Shape and dtype of ``logits``. What is kept keeps its bits. NaN is no number here: it stays,
        and does not count; where a row has fewer than ``top_k`` numbers, all stay.

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
