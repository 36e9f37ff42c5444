# SPDX-License-Identifier: Apache-2.0
"""8-bit quantisation with one scale a token."""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.export import Export, launches
from precast._ops.quantize._outputs import quantized_like
from precast._ops.quantize._reference_8bit import token_quant
from precast._ops.quantize._trace_8bit import quant_trace
from precast._ops.quantize._validation import check_token_scales
from precast.api_logging import precast_api


def per_token_quant_fp8_reference(
    x: torch.Tensor, eps: float = 1e-10, dst_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`per_token_quant_fp8` in plain PyTorch on any device, bit for bit."""
    return token_quant(x.float(), eps, torch.float8_e4m3fn if dst_dtype is None else dst_dtype)


_PER_TOKEN = Export(
    "quantize",
    "per_token_quant_fp8",
    "x:T[*tokens,hidden] eps:float out!:like(x,U=e4m3|e5m2|i8,apart) out_scale!:f32 enable_pdl:pdl",
    reference=per_token_quant_fp8_reference,
    check=check_token_scales,
    new={
        "out": quantized_like,
        "out_scale": "x.new_empty(*x.shape[:-1], 1, dtype=_torch.float32)",
    },
    derived={"dst_dtype": lambda out: out.dtype},
)
_TRACE = quant_trace(
    _PER_TOKEN,
    "Quantised rows and the dequantisation scale that each row's largest magnitude needs.",
    per_token_quant_fp8_reference,
)


@precast_api(trace=_TRACE)
@launches(_PER_TOKEN)
def per_token_quant_fp8(
    x: torch.Tensor,
    eps: float = 1e-10,
    dst_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Quantise each token to 8 bits with the scale that its largest number needs.

    .. math::

        s_r = \frac{\max(\max_c |x_{rc}|, eps)}{\max(Q)}, \quad
        x_{q,rc} = \mathrm{sat}\left(x_{rc} \cdot \frac{1}{s_r}\right)

    Parameters
    ----------
    x : torch.Tensor
        ``[..., hidden]``, float16, bfloat16 or float32, on a CUDA device. The last dimension has
        stride 1 and at most 2^30 elements, the others merge into at most two strides. 16-byte
        aligned rows are fastest.
    eps : float
        The least amax, at least 1e-30. A token of zeros has the scale of ``eps``.
    dst_dtype : torch.dtype, optional
        float8_e4m3fn, float8_e5m2 or int8; that of ``out`` if both are given. Default: that of
        ``out``, else float8_e4m3fn.
    out : torch.Tensor, optional
        The quantised values: shape and device of ``x``, strides as above. Default: a new tensor.
    out_scale : torch.Tensor, optional
        ``[..., 1]``, float32. Default: a new tensor.

    Returns
    -------
    tuple of torch.Tensor
        The quantised values, and the *dequantisation* scales ``[..., 1]`` in float32.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device or strides other than above;
        outputs that overlap ``x`` or each other; an ``eps`` that is too small or not finite.

    Notes
    -----
    :math:`\max(Q)` is 448 for e4m3, 57344 for e5m2, 127 for int8. Arithmetic and rounding are
    those of :func:`per_tensor_quant_fp8`, and so are NaN and infinity, which concern their token
    alone. Safe in CUDA graphs; not differentiable.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     x_q, x_s = precast.per_token_quant_fp8(torch.tensor([[1.0, -224.0]]))
    >>> x_q.float(), x_s
    (tensor([[   2., -448.]]), tensor([[0.5000]]))
    """
