# SPDX-License-Identifier: Apache-2.0
"""8-bit quantisation with one scale for a whole tensor, given or found, or one for each token.

Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, launches
from precast._ops.quantize._outputs import DTYPE, check_scales, quantized_like
from precast._ops.quantize._reference_8bit import quantize, token_quant
from precast._ops.quantize._trace_8bit import quant_trace
from precast.api_logging import precast_api

#: Elements of ``workspace``, in which each CTA leaves the largest magnitude that it found.
WORKSPACE_SIZE = 512


def static_quant_fp8_reference(
    x: torch.Tensor, scale: torch.Tensor, dst_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """:func:`static_quant_fp8` in plain PyTorch on any device, bit for bit."""
    return quantize(x.float(), scale.reshape(()), dst_dtype)  # One number in any shape.


def per_tensor_quant_fp8_reference(
    x: torch.Tensor, eps: float = 1e-10, dst_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`per_tensor_quant_fp8` in plain PyTorch on any device, bit for bit."""
    quantized, scale = token_quant(x.float().reshape(1, -1), eps, dst_dtype)
    return quantized.view(x.shape), scale.view(1)


def per_token_quant_fp8_reference(
    x: torch.Tensor, eps: float = 1e-10, dst_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`per_token_quant_fp8` in plain PyTorch on any device, bit for bit."""
    return token_quant(x.float(), eps, dst_dtype)


def _check_dynamic(export: str, workspace: torch.Tensor) -> None:
    if workspace.numel() < WORKSPACE_SIZE:
        raise ValueError(
            f"{export}: workspace must have at least {WORKSPACE_SIZE} elements, got shape "
            f"{[*workspace.shape]}"
        )


_STATIC = Export(
    "quantize",
    "static_quant_fp8",
    "x:T[*size(1-)] scale:f32[.] out!:like(x,U=e4m3|e5m2|i8,apart) enable_pdl:pdl",
    reference=static_quant_fp8_reference,
    new={"out": quantized_like},
    derived=DTYPE,
)
_DYNAMIC = Export(
    "quantize",
    "per_tensor_quant_fp8",
    "x:T[*size(1-)] eps:float(1e-30-) out!:like(x,U=e4m3|e5m2|i8,apart) out_scale!:f32[.] "
    "workspace!:f32 enable_pdl:pdl",
    reference=per_tensor_quant_fp8_reference,
    check=_check_dynamic,
    new={
        "out": quantized_like,
        "out_scale": "x.new_empty(1, dtype=_torch.float32)",
        "workspace": f"x.new_empty({WORKSPACE_SIZE}, dtype=_torch.float32)",
    },
    derived=DTYPE,
)
_PER_TOKEN = Export(
    "quantize",
    "per_token_quant_fp8",
    "x:T[*tokens,hidden] eps:float(1e-30-) out!:like(x,U=e4m3|e5m2|i8,apart) out_scale!:f32 "
    "enable_pdl:pdl",
    reference=per_token_quant_fp8_reference,
    check=check_scales,
    new={
        "out": quantized_like,
        "out_scale": "x.new_empty(*x.shape[:-1], 1, dtype=_torch.float32)",
    },
    derived=DTYPE,
)


@precast_api(
    trace=quant_trace(
        _PER_TOKEN,
        "Quantised rows and the dequantisation scale that each row's largest magnitude needs.",
    )
)
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
        The least amax, at least 1e-30: where all are zeros, the scale is that of ``eps``.
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


@precast_api(trace=quant_trace(_STATIC, "A tensor quantised with a given dequantisation scale."))
@launches(_STATIC)
@documented(per_token_quant_fp8)
def static_quant_fp8(
    x: torch.Tensor,
    scale: torch.Tensor,
    dst_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    r"""Quantise a tensor to 8 bits with a given scale.

    .. math:: out = \mathrm{sat}\left(x \cdot \frac{1}{scale}\right)

    Parameters
    ----------
    x : torch.Tensor
        Any shape; float16, bfloat16 or float32; on a CUDA device. The last dimension has stride 1
        and the others merge into at most two strides. 16-byte aligned rows are fastest.
    scale : torch.Tensor
        ``[1]``, float32, on the same device: the *dequantisation* scale, by which the quantised
        values are multiplied to get the numbers back.

    Returns
    -------
    torch.Tensor
        The quantised values, of the shape of ``out``; ``out`` itself if it is given.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device or strides other than above;
        an ``out`` that overlaps ``x``.

    Notes
    -----
    The reciprocal and the product are float32 of IEEE, then one rounding to nearest even that
    saturates: 448 for e4m3, 57344 for e5m2, -128 and 127 for int8, infinities included. NaN stays
    NaN; int8, which has none, gets 0. Allocates only a missing ``out``; safe in CUDA graphs; not
    differentiable.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     precast.static_quant_fp8(torch.tensor([1.0, 900.0]), torch.tensor([2.0])).float()
    tensor([  0.5000, 448.0000])
    """


@precast_api(
    trace=quant_trace(
        _DYNAMIC,
        "A quantised tensor and the one dequantisation scale that its largest magnitude needs.",
    )
)
@launches(_DYNAMIC, returns=("out", "out_scale"))
@documented(static_quant_fp8, per_token_quant_fp8)
def per_tensor_quant_fp8(
    x: torch.Tensor,
    eps: float = 1e-10,
    dst_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Quantise a tensor to 8 bits with the scale that its largest number needs.

    .. math::

        s = \frac{\max(\max |x|, eps)}{\max(Q)}, \quad
        x_q = \mathrm{sat}\left(x \cdot \frac{1}{s}\right)

    Parameters
    ----------
    out_scale : torch.Tensor, optional
        ``[1]``, float32. Default: a new tensor.
    workspace : torch.Tensor, optional
        512 or more float32 that the call overwrites. Default: a new tensor.

    Returns
    -------
    tuple of torch.Tensor
        The quantised values, and the *dequantisation* scale ``[1]`` in float32.

    Raises
    ------
    ValueError
        As :func:`static_quant_fp8`; an ``eps`` that is too small or not finite.

    Notes
    -----
    No synchronisation with the host. One kernel up to 640 KiB (16 KiB but on compute capability 9.0
    and 10.x) and, where ``x`` is aligned, from 10 MiB on: its CTAs wait for each other and keep
    what they can of ``x``. Otherwise two kernels. The result does not depend on the order of
    execution. :math:`\max(Q)` is 448 for e4m3, 57344 for e5m2, 127 for int8; rounding as
    in :func:`static_quant_fp8`. A NaN in ``x`` makes the scale NaN and with it every value; an
    infinity makes the scale infinite, other values 0, and its own NaN. Safe in CUDA graphs; not
    differentiable.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     x_q, x_s = precast.per_tensor_quant_fp8(torch.tensor([1.0, -224.0]))
    >>> x_q.float(), x_s
    (tensor([   2., -448.]), tensor([0.5000]))
    """


@precast_api
def scaled_fp8_quant(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to e4m3 as vLLM calls it: with a given scale, or by tensor or token without one.

    Parameters
    ----------
    input : torch.Tensor
        As :func:`static_quant_fp8` takes it.
    scale : torch.Tensor, optional
        ``[1]``, float32: the dequantisation scale. Default: found from ``input``.
    use_per_token_if_dynamic : bool
        Without ``scale``: one scale a token, not one in all.
    output : torch.Tensor, optional
        The quantised values. Default: a new tensor.

    Returns
    -------
    tuple of torch.Tensor
        What :func:`static_quant_fp8`, :func:`per_tensor_quant_fp8` or :func:`per_token_quant_fp8`
        returns; ``scale`` itself in the first case.

    Raises
    ------
    ValueError
        As those.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     x_q, x_s = precast.scaled_fp8_quant(torch.tensor([[1.0, -224.0]]))
    >>> x_q.float(), x_s
    (tensor([[   2., -448.]]), tensor([0.5000]))
    """
    if scale is not None:
        return static_quant_fp8(input, scale, out=output), scale
    if use_per_token_if_dynamic:
        return per_token_quant_fp8(input, out=output)
    return per_tensor_quant_fp8(input, out=output)


@documented(scaled_fp8_quant)
def scaled_fp8_quant_reference(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`scaled_fp8_quant` in plain PyTorch on any device, bit for bit."""
    if scale is not None:
        return static_quant_fp8_reference(input, scale), scale
    if use_per_token_if_dynamic:
        return per_token_quant_fp8_reference(input)
    return per_tensor_quant_fp8_reference(input)
