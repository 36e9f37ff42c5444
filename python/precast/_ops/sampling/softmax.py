# SPDX-License-Identifier: Apache-2.0
"""Softmax of rows of logits with a temperature."""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.decorators import backend_requirement, served_by
from precast._op.dispatch import Kernel, check_tensors
from precast._op.torch_ops import torch_ops
from precast._op.validation import check_dtype
from precast._ops.sampling._arguments import (
    Real,
    check_by_row,
    check_distributions,
    check_result,
    given,
    heat,
)
from precast._ops.sampling._filters import weights_of_logits
from precast._ops.sampling._masses import row_sums
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


def _softmax_into(
    logits: torch.Tensor,
    temperature_arr: torch.Tensor | None,
    temperature: float,
    out: torch.Tensor,
    enable_pdl: bool,
) -> None:
    check_distributions("softmax", "logits", logits)
    check_by_row("softmax", logits, "logits", {"temperature": temperature_arr})
    check_dtype("softmax", "out", out, torch.float32)
    check_result("softmax", "logits", logits, out)
    out.copy_(softmax_reference(logits, given(temperature_arr, temperature)))


def _public(
    logits: Any, temperature_arr: Any, temperature: Any, out: Any, enable_pdl: Any
) -> tuple[Any, ...]:
    return logits, given(temperature_arr, temperature), enable_pdl


_softmax = Kernel(
    "sampling",
    "softmax",
    schema="(Tensor logits, Tensor? temperature_arr, float temperature, Tensor(a!) out, "
    "bool enable_pdl) -> ()",
    reference=_softmax_into,
    public=_public,
)


@precast_api(
    trace=rows_trace("softmax", "logits", "temperature", softmax_reference, "probs", "float32")
)
@backend_requirement({}, common_check=served_by("sampling"))
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
    try:
        temperature_arr, number = heat("softmax", 1.0 if temperature is None else temperature)
        out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        if torch.compiler.is_compiling():
            torch_ops.softmax(logits, temperature_arr, number, out, enable_pdl is not False)
        else:
            _softmax[logits.dtype, logits.get_device()](
                logits, temperature_arr, number, out, enable_pdl is not False
            )
    except (AttributeError, TypeError):
        check_tensors("softmax", logits=logits)
        raise
    return out
