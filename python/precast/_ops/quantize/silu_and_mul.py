# SPDX-License-Identifier: Apache-2.0
"""SwiGLU's activation with 8-bit quantisation of the product, which is not written in 16 bits.

Sources: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202; scales of groups: DeepSeek-AI,
DeepSeek-V3 Technical Report, arXiv:2412.19437.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, launches
from precast._op.validation import check_half
from precast._ops.quantize._outputs import (
    DTYPE,
    GROUPS,
    check_scales,
    group_scales,
    quantized_half,
)
from precast._ops.quantize._reference_8bit import group_quant, quantize, silu_and_mul, token_quant
from precast._ops.quantize._trace_8bit import quant_trace
from precast._ops.quantize.per_tensor import per_token_quant_fp8, static_quant_fp8
from precast._ops.quantize.per_token_group import per_token_group_quant_8bit
from precast.api_logging import precast_api


def silu_and_mul_quant_reference(
    input: torch.Tensor, scale: torch.Tensor, dst_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """:func:`silu_and_mul_quant` in plain PyTorch on any device."""
    return quantize(silu_and_mul(input), scale, dst_dtype)


def silu_and_mul_per_token_quant_reference(
    input: torch.Tensor, eps: float = 1e-10, dst_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`silu_and_mul_per_token_quant` in plain PyTorch on any device."""
    return token_quant(silu_and_mul(input), eps, dst_dtype)


_STATIC = Export(
    "silu_and_mul_quant",
    "silu_and_mul_quant",
    "input:T[*size] scale:f32[.] out!:U=e4m3|e5m2|i8 enable_pdl:pdl",
    reference=silu_and_mul_quant_reference,
    check=lambda export, out, input: check_half(export, out, input, out.dtype),
    new={"out": quantized_half},
    derived=DTYPE,
)
_PER_TOKEN = Export(
    "silu_and_mul_quant",
    "silu_and_mul_per_token_quant",
    "input:T[*size] eps:float(1e-30-) out!:U=e4m3|e5m2|i8 out_scale!:f32 enable_pdl:pdl",
    reference=silu_and_mul_per_token_quant_reference,
    check=check_scales,
    new={
        "out": quantized_half,
        "out_scale": "input.new_empty(*input.shape[:-1], 1, dtype=_torch.float32)",
    },
    derived=DTYPE,
)


@precast_api(
    trace=quant_trace(_STATIC, "silu(gate) * up, quantised with a given dequantisation scale.")
)
@launches(_STATIC)
@documented(static_quant_fp8)
def silu_and_mul_quant(
    input: torch.Tensor,
    scale: torch.Tensor,
    dst_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    r"""Apply SwiGLU's activation and quantise to 8 bits with a given scale.

    .. math::

        out_c = \mathrm{sat}\left(\frac{g_c}{1 + e^{-g_c}} \cdot u_c \cdot \frac{1}{scale}\right),
        \quad g = input_{:n},\ u = input_{n:}

    Parameters
    ----------
    input : torch.Tensor
        ``[..., 2 * n]``, float16 or bfloat16, on a CUDA device. The last dimension has stride 1,
        the others merge into at most two strides. 16-byte aligned rows and ``n`` in whole 16 bytes
        are fastest.
    out : torch.Tensor, optional
        The quantised values ``[..., n]``, strides as above. Default: a new tensor.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, device or strides other than above; an
        ``out`` that overlaps ``input``.
    precast.errors.OutputShapeError
        An ``out`` of another shape (an ``AssertionError`` and a ``ValueError``).

    Notes
    -----
    The activation and the product are float32 and are not rounded to 16 bits before they are
    quantised. The activation's exponential and division are exact to about 2e-5, so that a value
    may differ from the reference's by one where the value lies between two. Quantisation, NaN and
    infinity are those of :func:`static_quant_fp8`. Safe in CUDA graphs; not differentiable.

    Examples
    --------
    >>> import torch, precast
    >>> x = torch.tensor([[1.0, 0.0, 2.0, 3.0]])
    >>> with precast.reference_mode():
    ...     precast.silu_and_mul_quant(x, torch.tensor([0.5])).float()
    tensor([[3., 0.]])
    """


@precast_api(
    trace=quant_trace(
        _PER_TOKEN, "silu(gate) * up, quantised, and a dequantisation scale for each row."
    )
)
@launches(_PER_TOKEN)
@documented(silu_and_mul_quant, per_token_quant_fp8)
def silu_and_mul_per_token_quant(
    input: torch.Tensor,
    eps: float = 1e-10,
    dst_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Apply SwiGLU's activation and quantise to 8 bits with a scale for each token.

    .. math::

        y_c = \frac{g_c}{1 + e^{-g_c}} \cdot u_c, \quad
        s = \frac{\max(\max_c |y_c|, eps)}{\max(Q)}, \quad
        x_{q,c} = \mathrm{sat}\left(y_c \cdot \frac{1}{s}\right)

    Raises
    ------
    ValueError, precast.errors.OutputShapeError
        As :func:`silu_and_mul_quant`; an ``eps`` that is too small or not finite.

    Notes
    -----
    As :func:`silu_and_mul_quant` and :func:`per_token_quant_fp8`; scales are exact to about 2e-5.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     precast.silu_and_mul_per_token_quant(torch.tensor([[1.0, 0.0, 2.0, 3.0]]))[1]
    tensor([[0.0033]])
    """


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
    """
    y = silu_and_mul(input)
    return group_quant(y, group_size, eps, dst_dtype, scale_ue8m0, use_packed_ue8m0)


_GROUP = Export(
    "silu_and_mul_quant",
    "silu_and_mul_per_token_group_quant",
    "input:T[*size(1-)] group_size:int eps:float(1e-30-) scale_ue8m0:bool out!:U=e4m3|e5m2|i8 "
    "out_scale!:f32|i32 enable_pdl:pdl",
    reference=silu_and_mul_per_token_group_quant_reference,
    check=check_scales,
    new={"out": quantized_half, "out_scale": group_scales},
    derived=GROUPS,
)


@precast_api(
    trace=quant_trace(
        _GROUP, "silu(gate) * up, quantised, and a dequantisation scale for each group of a row."
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
    r"""Apply SwiGLU's activation and quantise to 8 bits with a scale for each group of a token.

    .. math::

        y_c = \frac{g_c}{1 + e^{-g_c}} \cdot u_c, \quad
        s_j = \frac{\max(\max_{c \in j} |y_c|, eps)}{\max(Q)}, \quad
        x_{q,c} = \mathrm{sat}\left(y_c \cdot \frac{1}{s_j}\right)

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
