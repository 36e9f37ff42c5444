# SPDX-License-Identifier: Apache-2.0
"""SwiGLU's activation with 8-bit quantisation by groups of the product.

Sources: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202; DeepSeek-AI, DeepSeek-V3
Technical Report, arXiv:2412.19437.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.decorators import backend_requirement, served_by
from precast._op.dispatch import Kernel, check_tensors
from precast._op.torch_ops import torch_ops
from precast._ops.quantize._outputs import (
    check_given_dtype,
    check_given_scales,
    check_layout,
    given,
    new_codes,
    new_group_scales,
)
from precast._ops.quantize._reference_8bit import group_quant, silu_and_mul
from precast._ops.quantize._trace_8bit import group_trace
from precast._ops.quantize._validation import check_codes, check_eps, check_groups
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
        Codes ``[..., n]``, and scales ``[..., n // group_size]`` in float32, or
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


def _group_into(
    input: torch.Tensor,
    group_size: int,
    eps: float,
    scale_ue8m0: bool,
    out: torch.Tensor,
    out_scale: torch.Tensor,
    enable_pdl: bool,
) -> None:
    export = "silu_and_mul_per_token_group_quant"
    check_codes(export, out, input, gated=True)
    check_eps(export, eps)
    packed = check_groups(export, out, out_scale, group_size, scale_ue8m0, input, "input")
    y = silu_and_mul(input)
    quantized, scale = group_quant(y, group_size, eps, out.dtype, scale_ue8m0, packed)
    out.copy_(quantized)
    out_scale.copy_(scale)


_group = Kernel(
    "silu_and_mul_quant",
    "silu_and_mul_per_token_group_quant",
    schema="(Tensor input, int group_size, float eps, bool scale_ue8m0, Tensor(a!) out, "
    "Tensor(b!) out_scale, bool enable_pdl) -> ()",
    reference=_group_into,
    axes=("input", "out"),
)


@precast_api(
    trace=group_trace(
        "silu_and_mul_per_token_group_quant",
        "Codes of silu(gate) * up and a dequantisation scale for each group of a token's elements.",
        silu_and_mul_per_token_group_quant_reference,
        param="input",
        gated=True,
    )
)
@backend_requirement({}, common_check=served_by("silu_and_mul_quant"))
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
        The codes ``[..., n]``. Default: a new tensor.
    out_scale : torch.Tensor, optional
        The scales at any strides; int32 means packed. Default: a new tensor.
    enable_pdl : bool, optional
        Programmatic dependent launch. Default: on; without effect below compute capability 9.0.

    Returns
    -------
    tuple of torch.Tensor
        The codes, and the *dequantisation* scales ``[..., n // group_size]`` in float32, or
        ``[..., ceil(n // group_size / 4)]`` words in int32.

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
    export = "silu_and_mul_per_token_group_quant"
    try:
        check_layout(export, column_major_scales, scale_tma_aligned, scale_ue8m0, use_packed_ue8m0)
        if out is None:
            out = new_codes(input, dst_dtype, gated=True)
        elif dst_dtype is not None:
            check_given_dtype(export, "dst_dtype", dst_dtype, "out", out)
        if out_scale is None:
            out_scale = new_group_scales(
                export, out, group_size, column_major_scales, scale_tma_aligned, use_packed_ue8m0
            )
        elif column_major_scales or use_packed_ue8m0:
            check_given_scales(
                export, out_scale, column_major_scales, scale_tma_aligned, use_packed_ue8m0
            )
        pdl = enable_pdl is not False
        if torch.compiler.is_compiling():
            torch_ops.silu_and_mul_per_token_group_quant(
                input, group_size, eps, scale_ue8m0, out, out_scale, pdl
            )
        else:
            kernel = _group[input.dtype, out.dtype, input.get_device()]
            kernel(input, group_size, eps, scale_ue8m0, out, out_scale, pdl)
    except (AttributeError, TypeError):
        check_tensors(export, input=input, out=out, **given(out_scale=out_scale))
        raise
    return out, out_scale
