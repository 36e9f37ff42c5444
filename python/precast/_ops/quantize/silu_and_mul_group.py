# SPDX-License-Identifier: Apache-2.0
"""SwiGLU's activation with 8-bit quantisation by groups of the product.

Sources: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202; DeepSeek-AI, DeepSeek-V3
Technical Report, arXiv:2412.19437.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, launches
from precast._ops.quantize._outputs import group_scales, quantized_half
from precast._ops.quantize._reference_8bit import group_quant, silu_and_mul
from precast._ops.quantize._trace_8bit import rows_trace
from precast._ops.quantize._validation import check_group_scales
from precast._ops.quantize.per_token_group import per_token_group_quant_8bit
from precast._ops.quantize.silu_and_mul import silu_and_mul_quant
from precast.api_logging import precast_api


def silu_and_mul_per_token_group_quant_reference(
    input: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    dst_dtype: torch.dtype | None = None,
    scale_ue8m0: bool = False,
    use_packed_ue8m0: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`silu_and_mul_per_token_group_quant` in plain PyTorch on any device.

    Scales are row-major.

    Examples
    --------
    >>> import torch
    >>> silu_and_mul_per_token_group_quant_reference(torch.ones(1, 128), 64)[1]
    tensor([[0.0016]])
    """
    dtype = torch.float8_e4m3fn if dst_dtype is None else dst_dtype
    y = silu_and_mul(input)
    return group_quant(y, group_size, eps, dtype, scale_ue8m0, use_packed_ue8m0)


_GROUP = Export(
    "silu_and_mul_quant",
    "silu_and_mul_per_token_group_quant",
    "input:T[*size] group_size:int eps:float scale_ue8m0:bool out!:U=e4m3|e5m2|i8 "
    "out_scale!:f32|i32 enable_pdl:pdl",
    reference=silu_and_mul_per_token_group_quant_reference,
    check=check_group_scales,
    new={"out": quantized_half, "out_scale": group_scales},
    derived={
        "dst_dtype": lambda out: out.dtype,
        "use_packed_ue8m0": lambda out_scale: out_scale.dtype == torch.int32,
    },
)


@precast_api(
    trace=rows_trace(
        "silu_and_mul_per_token_group_quant",
        "silu(gate) * up, quantised, and a dequantisation scale for each group of a row.",
        silu_and_mul_per_token_group_quant_reference,
        scales="group",
        gated=True,
    )
)
@launches(_GROUP)
@documented(silu_and_mul_quant, per_token_group_quant_8bit)
def silu_and_mul_per_token_group_quant(
    input: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    dst_dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    scale_tma_aligned: bool = False,
    scale_ue8m0: bool = False,
    use_packed_ue8m0: bool = False,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""SwiGLU's activation, quantised to 8 bits with a scale for each group of a token's elements.

    .. math::

        y_c = \frac{g_c}{1 + e^{-g_c}} \cdot u_c, \quad
        s_j = \frac{\max(\max_{c \in j} |y_c|, eps)}{\max(Q)}, \quad
        x_{q,c} = \mathrm{sat}\left(y_c \cdot \frac{1}{s_j}\right)

    Parameters
    ----------
    input : torch.Tensor
        ``[..., 2 * n]``, as :func:`silu_and_mul_quant` takes it; ``group_size`` divides ``n``.

    Returns
    -------
    tuple of torch.Tensor
        The quantised values, and the *dequantisation* scales ``[..., n // group_size]`` in float32,
        or ``[..., ceil(n // group_size / 4)]`` words in int32.

    Raises
    ------
    ValueError, precast.errors.OutputShapeError
        As :func:`silu_and_mul_quant` and :func:`per_token_group_quant_8bit`.

    Notes
    -----
    As :func:`silu_and_mul_quant` and :func:`per_token_group_quant_8bit`; scales that are not powers
    of two are exact to about 2e-5.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     precast.silu_and_mul_per_token_group_quant(torch.ones(1, 128), 64)[1]
    tensor([[0.0016]])
    """
