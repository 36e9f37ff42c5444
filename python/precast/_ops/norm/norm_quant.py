# SPDX-License-Identifier: Apache-2.0
"""RMSNorm with fp8 output by a given scale.

Sources: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467; saturation: OCP
8-bit Floating Point Specification 1.0.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, launches
from precast._ops.norm._quant import check_scale, over_scale, quant_trace, scale_kinds
from precast._ops.norm.rmsnorm import normalized, rmsnorm
from precast.api_logging import precast_api


def rmsnorm_quant_reference(
    out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | float,
    eps: float = 1e-6,
) -> torch.Tensor:
    """:func:`rmsnorm_quant` in plain PyTorch on any device, out of place.

    Parameters
    ----------
    out : torch.Tensor
        Its dtype is that of the result; nothing else of it is read.

    Returns
    -------
    torch.Tensor
        Shape of ``input``, dtype of ``out``.

    Examples
    --------
    >>> import torch
    >>> out, weight = torch.empty(1, 2, dtype=torch.float8_e4m3fn), torch.tensor([1.0, 2.0])
    >>> rmsnorm_quant_reference(out, torch.tensor([[3.0, 4.0]]), weight, 0.01).float()
    tensor([[ 88., 224.]])
    """
    return over_scale(normalized(input.float(), weight.float(), eps), scale, out.dtype)


_RMSNORM_QUANT = Export(
    "norm_quant",
    "rmsnorm_quant",
    "out!:like(input,U=e4m3|e5m2,apart) input:T[*rows(1-2),hidden] weight:T[hidden] scale:scale "
    "eps:float enable_pdl:pdl",
    reference=rmsnorm_quant_reference,
    check=check_scale,
    kinds=scale_kinds("rmsnorm_quant"),
)
_TRACE = quant_trace(
    _RMSNORM_QUANT,
    "Each row divided by its root mean square, times a weight, over a scale, in fp8.",
    rmsnorm_quant_reference,
)


@precast_api(trace=_TRACE)
@launches(_RMSNORM_QUANT)
@documented(rmsnorm)
def rmsnorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | float,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    r"""RMSNorm of each row, divided by a scale and written as fp8.

    .. math:: out_{r,c} = \mathrm{sat}\left(\frac{x_{r,c}}{\sqrt{\frac{1}{n} \sum_k x_{r,k}^2
        + eps}} \cdot w_c \cdot \frac{1}{scale}\right)

    Parameters
    ----------
    out : torch.Tensor
        Shape and device of ``input``, float8_e4m3fn or float8_e5m2, memory of its own; stride 1 in
        the last dimension, any in the others. Overwritten.
    input : torch.Tensor
        ``[rows, hidden]`` or ``[batch, heads, head_dim]``, float16 or bfloat16, on a CUDA device;
        strides as :func:`rmsnorm` takes them. Left as it is.
    scale : torch.Tensor
        One float32 number on the device of ``input``, shape ``[1]`` or ``[]``: what a consumer
        multiplies ``out`` by. A float is deprecated.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device or strides other than above;
        an ``out`` that overlaps ``input``.

    Warns
    -----
    FutureWarning
        If ``scale`` is a float.

    Notes
    -----
    All arithmetic is float32, the reciprocal correctly rounded; the result is rounded once to
    nearest even, and what is beyond the largest number becomes that number. NaN stays NaN.
    ``scale`` is read on the GPU: no allocation and no wait, safe in CUDA graphs. Not
    differentiable. Source: arXiv:1910.07467.

    Examples
    --------
    >>> import torch, precast
    >>> out = torch.empty(1, 2, dtype=torch.float8_e4m3fn)
    >>> x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0])
    >>> scale = torch.tensor([0.01])
    >>> with precast.reference_mode():
    ...     precast.rmsnorm_quant(out, x, weight, scale)
    >>> out.float()
    tensor([[ 88., 224.]])
    """
