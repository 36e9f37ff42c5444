# SPDX-License-Identifier: Apache-2.0
"""SwiGLU's activation with 8-bit quantisation by groups of the product.

Sources: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202; DeepSeek-AI, DeepSeek-V3
Technical Report, arXiv:2412.19437.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.export import Export, launches
from precast._ops.quantize._outputs import group_scales, quantized_half
from precast._ops.quantize._reference_8bit import group_quant, silu_and_mul
from precast._ops.quantize._trace_8bit import rows_trace
from precast._ops.quantize._validation import check_group_scales
from precast.api_logging import precast_api


def silu_and_mul_per_token_group_quant_reference(
    input: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    dst_dtype: torch.dtype | None = None,
    scale_ue8m0: bool = False,
    use_packed_ue8m0: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`silu_and_mul_per_token_group_quant` in plain PyTorch; scales are row-major.

    Parameters
    ----------
    input : torch.Tensor
        ``[..., 2 * n]``, any device.
    group_size : int
        Divides ``n``.
    eps : float
        The least amax.
    dst_dtype : torch.dtype, optional
        float8_e4m3fn (the default), float8_e5m2 or int8.
    scale_ue8m0 : bool
        Scales are rounded up to powers of two.
    use_packed_ue8m0 : bool
        Scales are biased exponents, four an int32.

    Returns
    -------
    tuple of torch.Tensor
        Quantised values ``[..., n]``, and scales ``[..., n // group_size]`` in float32, or
        ``[..., ceil(n // group_size / 4)]`` in int32.

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
    group_size : int
        16, 32, 64 or 128 elements.
    eps : float
        The least amax, at least 1e-30.
    dst_dtype : torch.dtype, optional
        float8_e4m3fn, float8_e5m2 or int8; that of ``out`` if both are given. Default: that of
        ``out``, else float8_e4m3fn.
    column_major_scales, scale_tma_aligned, scale_ue8m0, use_packed_ue8m0 : bool
        The layout and form of the scales, as for :func:`per_token_group_quant_8bit`.
    out : torch.Tensor, optional
        The quantised values ``[..., n]``. Default: a new tensor.
    out_scale : torch.Tensor, optional
        The scales at any strides; int32 means packed. Default: a new tensor.
    enable_pdl : bool, optional
        Programmatic dependent launch. Default: on; without effect below compute capability 9.0.

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
