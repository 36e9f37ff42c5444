# SPDX-License-Identifier: Apache-2.0
"""8-bit quantisation with one scale a token."""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.decorators import backend_requirement, served_by
from precast._op.dispatch import Kernel, check_tensors
from precast._op.torch_ops import torch_ops
from precast._ops.quantize._outputs import check_given_dtype, given, new_codes
from precast._ops.quantize._reference_8bit import token_quant
from precast._ops.quantize._trace_8bit import token_trace
from precast._ops.quantize._validation import check_codes, check_eps, check_row_scales
from precast.api_logging import precast_api


def per_token_quant_fp8_reference(
    x: torch.Tensor, eps: float = 1e-10, dst_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`per_token_quant_fp8` in plain PyTorch, bit for bit.

    Parameters
    ----------
    x : torch.Tensor
        ``[..., hidden]``, any device.
    eps : float
        The least amax.
    dst_dtype : torch.dtype, optional
        float8_e4m3fn (the default), float8_e5m2 or int8.

    Returns
    -------
    tuple of torch.Tensor
        Codes in the shape of ``x``, and scales ``[..., 1]`` in float32.

    Examples
    --------
    >>> import torch
    >>> x_q, x_s = per_token_quant_fp8_reference(torch.tensor([[1.0, -224.0], [0.0, 7.0]]))
    >>> x_q.float(), x_s
    (tensor([[   2., -448.],
            [   0.,  448.]]), tensor([[0.5000],
            [0.0156]]))
    """
    return token_quant(x.float(), eps, torch.float8_e4m3fn if dst_dtype is None else dst_dtype)


def _into(
    x: torch.Tensor, eps: float, out: torch.Tensor, out_scale: torch.Tensor, enable_pdl: bool
) -> None:
    check_codes("per_token_quant_fp8", out, x)
    check_eps("per_token_quant_fp8", eps)
    check_row_scales("per_token_quant_fp8", out_scale, x, 1, torch.float32)
    quantized, scale = per_token_quant_fp8_reference(x, eps, out.dtype)
    out.copy_(quantized)
    out_scale.copy_(scale)


_kernel = Kernel(
    "quantize",
    "per_token_quant_fp8",
    schema="(Tensor x, float eps, Tensor(a!) out, Tensor(b!) out_scale, bool enable_pdl) -> ()",
    reference=_into,
    axes=("x", "out"),
)

_TRACE = token_trace(
    "per_token_quant_fp8",
    "Codes of each token and the dequantisation scale that its largest number needs.",
    per_token_quant_fp8_reference,
    param="x",
)


@precast_api(trace=_TRACE)
@backend_requirement({}, common_check=served_by("quantize"))
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
        The codes: shape and device of ``x``, strides as above. Default: a new tensor.
    out_scale : torch.Tensor, optional
        ``[..., 1]``, float32. Default: a new tensor.
    enable_pdl : bool, optional
        Programmatic dependent launch. Default: on; without effect below compute capability 9.0.

    Returns
    -------
    tuple of torch.Tensor
        The codes, and the *dequantisation* scales ``[..., 1]`` in float32.

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
    try:
        if out is None:
            out = new_codes(x, dst_dtype)
        elif dst_dtype is not None:
            check_given_dtype("per_token_quant_fp8", "dst_dtype", dst_dtype, "out", out)
        if out_scale is None:
            out_scale = x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
        pdl = enable_pdl is not False
        if torch.compiler.is_compiling():
            torch_ops.per_token_quant_fp8(x, eps, out, out_scale, pdl)
        else:
            _kernel[x.dtype, out.dtype, x.get_device()](x, eps, out, out_scale, pdl)
    except (AttributeError, TypeError):
        check_tensors("per_token_quant_fp8", x=x, out=out, **given(out_scale=out_scale))
        raise
    return out, out_scale
