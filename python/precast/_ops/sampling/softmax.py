# SPDX-License-Identifier: Apache-2.0
"""Softmax of rows of logits with a temperature."""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.export import Export, launches
from precast._ops.sampling._arguments import (
    Real,
    check_by_row,
    check_distributions,
    check_result,
    kinds,
)
from precast._ops.sampling._filters import weights_of_logits
from precast._ops.sampling._inverse_cdf import row_sums
from precast._ops.sampling._trace import rows_trace
from precast.api_logging import precast_api


def softmax_reference(
    logits: torch.Tensor, temperature: torch.Tensor | float | None = None
) -> torch.Tensor:
    """:func:`softmax` in plain PyTorch, in the kernel's order of additions.

    Parameters
    ----------
    logits, temperature : torch.Tensor or float
        Those of the function, on any device.

    Returns
    -------
    torch.Tensor
        The shape of ``logits``, float32.

    Examples
    --------
    >>> import torch
    >>> softmax_reference(torch.zeros(1, 4), 0.5)
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    weights = weights_of_logits(logits, 1.0 if temperature is None else temperature)
    return weights * (1 / row_sums(weights)[:, None])


def _check(export: str, logits: torch.Tensor, temperature: Real, out: torch.Tensor) -> None:
    check_distributions(export, "logits", logits)
    check_by_row(export, logits, "logits", {"temperature": temperature})
    check_result(export, "logits", logits, out)


_SOFTMAX = Export(
    "sampling",
    "softmax",
    "logits:T temperature:temperature out!:f32 enable_pdl:pdl",
    reference=softmax_reference,
    check=_check,
    new={
        "out": lambda logits: torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    },
    kinds=kinds("softmax", "logits"),
)


@precast_api(
    trace=rows_trace("softmax", "logits", "temperature", softmax_reference, "probs", "float32")
)
@launches(_SOFTMAX)
def softmax(
    logits: torch.Tensor,
    temperature: Real | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    r"""Probabilities of logits at a temperature.

    .. math:: out_{i, t} = \exp(x_{i, t} / T_i) / \sum_s \exp(x_{i, s} / T_i)

    Rows are as :mod:`precast.sampling` says.

    Parameters
    ----------
    logits : torch.Tensor
        ``[rows, vocabulary]``, float32, float16 or bfloat16.
    temperature : float or torch.Tensor, optional
        A number from 0 on, or float32 ``[rows]``. At 0, the maxima share the mass. Default: 1. A
        negative one in a tensor is not checked, and its row means nothing.
    enable_pdl : bool, optional
        Programmatic dependent launch. Default: on; without effect below compute capability 9.0.

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
