# SPDX-License-Identifier: Apache-2.0
"""RMSNorm fused with a residual, with fp8 output by a given scale.

Sources: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467; saturation: OCP
8-bit Floating Point Specification 1.0.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, launches
from precast._op.validation import check_memory_apart
from precast._ops.norm._quant import check_scale, over_scale, quant_trace, scale_kinds
from precast._ops.norm.fused_add_rmsnorm import fused_add_rmsnorm
from precast._ops.norm.norm_quant import rmsnorm_quant
from precast._ops.norm.rmsnorm import normalized
from precast.api_logging import precast_api


def fused_add_rmsnorm_quant_reference(
    out: torch.Tensor,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | float,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`fused_add_rmsnorm_quant` in plain PyTorch on any device, out of place.

    Parameters
    ----------
    out : torch.Tensor
        Its dtype is that of the first result; nothing else of it is read.

    Returns
    -------
    tuple of torch.Tensor
        The norm of the fp32 sum over ``scale`` in the dtype of ``out``, and the sum in the dtype of
        ``input``; each rounded once.

    Examples
    --------
    >>> import torch
    >>> out, weight = torch.empty(1, 2, dtype=torch.float8_e4m3fn), torch.tensor([1.0, 2.0])
    >>> x, one = torch.tensor([[2.0, 3.0]]), torch.tensor([[1.0, 1.0]])
    >>> quantized, added = fused_add_rmsnorm_quant_reference(out, x, one, weight, 0.01)
    >>> quantized.float(), added
    (tensor([[ 88., 224.]]), tensor([[3., 4.]]))
    """
    x = input.float() + residual.float()
    y = normalized(x, weight.float(), eps)
    return over_scale(y, scale, out.dtype), x.to(input.dtype)


def _check(
    export: str,
    out: torch.Tensor,
    input: torch.Tensor,
    residual: torch.Tensor,
    scale: torch.Tensor,
) -> None:
    check_memory_apart(export, "out", out, residual, "residual")
    check_scale(export, scale, input)


_FUSED_ADD_RMSNORM_QUANT = Export(
    "norm_quant",
    "fused_add_rmsnorm_quant",
    "out!:like(input,U=e4m3|e5m2,apart) input:T[*rows(1-2),hidden] residual!:like(input,apart) "
    "weight:T[hidden] scale:scale eps:float enable_pdl:pdl",
    reference=fused_add_rmsnorm_quant_reference,
    check=_check,
    kinds=scale_kinds("fused_add_rmsnorm_quant"),
)
_TRACE = quant_trace(
    _FUSED_ADD_RMSNORM_QUANT,
    "The sum of two tensors, and the norm of each row of it over a scale, in fp8.",
    fused_add_rmsnorm_quant_reference,
)


@precast_api(trace=_TRACE)
@launches(_FUSED_ADD_RMSNORM_QUANT)
@documented(rmsnorm_quant, fused_add_rmsnorm)
def fused_add_rmsnorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | float,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    r"""Add ``input`` to ``residual`` in place, and write the RMSNorm of the sum as fp8.

    .. math::

        x_{r,c} &= input_{r,c} + residual_{r,c}, \quad residual_{r,c} = \mathrm{round}(x_{r,c}) \\
        out_{r,c} &= \mathrm{sat}\left(\frac{x_{r,c}}{\sqrt{\frac{1}{n} \sum_k x_{r,k}^2 + eps}}
        \cdot w_c \cdot \frac{1}{scale}\right)

    Parameters
    ----------
    out : torch.Tensor
        As :func:`rmsnorm_quant` takes it, apart from ``residual``, too. Overwritten.

    Raises
    ------
    ValueError
        As :func:`rmsnorm_quant`; also if ``residual`` overlaps ``input`` or ``out``.

    Warns
    -----
    FutureWarning
        If ``scale`` is a float.

    Notes
    -----
    The norm takes the float32 sum; only the sum in memory is rounded. Otherwise as
    :func:`rmsnorm_quant`. Source: arXiv:1910.07467.

    Examples
    --------
    >>> import torch, precast
    >>> out = torch.empty(1, 2, dtype=torch.float8_e4m3fn)
    >>> x, residual = torch.tensor([[2.0, 3.0]]), torch.tensor([[1.0, 1.0]])
    >>> weight, scale = torch.tensor([1.0, 2.0]), torch.tensor([0.01])
    >>> with precast.reference_mode():
    ...     precast.fused_add_rmsnorm_quant(out, x, residual, weight, scale)
    >>> out.float(), residual
    (tensor([[ 88., 224.]]), tensor([[3., 4.]]))
    """
