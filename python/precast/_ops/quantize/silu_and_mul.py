# SPDX-License-Identifier: Apache-2.0
"""SwiGLU's activation with 8-bit quantisation of the product, which is never written wide.

Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.decorators import backend_requirement, served_by
from precast._op.dispatch import Kernel, check_tensors
from precast._op.torch_ops import torch_ops
from precast._op.validation import check_one_number
from precast._ops.quantize._outputs import check_given_dtype, given, new_codes
from precast._ops.quantize._reference_8bit import codes, silu_and_mul, token_quant
from precast._ops.quantize._trace_8bit import of_e4m3, token_trace
from precast._ops.quantize._validation import check_codes, check_eps, check_row_scales
from precast.api_logging import precast_api
from precast.trace import Const, Tensor, TraceTemplate, Var


def silu_and_mul_quant_reference(
    input: torch.Tensor, scale: torch.Tensor, dst_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """:func:`silu_and_mul_quant` in plain PyTorch.

    Parameters
    ----------
    input : torch.Tensor
        ``[..., 2 * n]``, any device.
    scale : torch.Tensor
        ``[1]``, float32: what the codes are multiplied by to get the product back.
    dst_dtype : torch.dtype, optional
        float8_e4m3fn (the default), float8_e5m2 or int8.

    Returns
    -------
    torch.Tensor
        Codes ``[..., n]``.

    Examples
    --------
    >>> import torch
    >>> x = torch.tensor([[1.0, 0.0, 2.0, 3.0]])
    >>> silu_and_mul_quant_reference(x, torch.tensor([0.5])).float()
    tensor([[3., 0.]])
    """
    dtype = torch.float8_e4m3fn if dst_dtype is None else dst_dtype
    return codes(silu_and_mul(input), scale, dtype)


def silu_and_mul_per_token_quant_reference(
    input: torch.Tensor, eps: float = 1e-10, dst_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`silu_and_mul_per_token_quant` in plain PyTorch.

    Parameters
    ----------
    input : torch.Tensor
        ``[..., 2 * n]``, any device.
    eps : float
        The least amax.
    dst_dtype : torch.dtype, optional
        float8_e4m3fn (the default), float8_e5m2 or int8.

    Returns
    -------
    tuple of torch.Tensor
        Codes ``[..., n]``, and scales ``[..., 1]`` in float32.

    Examples
    --------
    >>> import torch
    >>> x = torch.tensor([[1.0, 0.0, 2.0, 3.0]])
    >>> silu_and_mul_per_token_quant_reference(x)[1]
    tensor([[0.0033]])
    """
    dtype = torch.float8_e4m3fn if dst_dtype is None else dst_dtype
    return token_quant(silu_and_mul(input), eps, dtype)


def _static_into(
    input: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, enable_pdl: bool
) -> None:
    check_codes("silu_and_mul_quant", out, input, gated=True)
    check_one_number("silu_and_mul_quant", "scale", scale, input)
    out.copy_(silu_and_mul_quant_reference(input, scale, out.dtype))


def _token_into(
    input: torch.Tensor, eps: float, out: torch.Tensor, out_scale: torch.Tensor, enable_pdl: bool
) -> None:
    export = "silu_and_mul_per_token_quant"
    check_codes(export, out, input, gated=True)
    check_eps(export, eps)
    check_row_scales(export, out_scale, input, 1, torch.float32, "input")
    quantized, scale = token_quant(silu_and_mul(input), eps, out.dtype)
    out.copy_(quantized)
    out_scale.copy_(scale)


_OP = "silu_and_mul_quant"
_static = Kernel(
    _OP,
    "silu_and_mul_quant",
    schema="(Tensor input, Tensor scale, Tensor(a!) out, bool enable_pdl) -> ()",
    reference=_static_into,
    axes=("input", "out"),
)
_token = Kernel(
    _OP,
    "silu_and_mul_per_token_quant",
    schema="(Tensor input, float eps, Tensor(a!) out, Tensor(b!) out_scale, bool enable_pdl) -> ()",
    reference=_token_into,
    axes=("input", "out"),
)
_STATIC_TRACE = TraceTemplate(
    op_type="quantization",
    name_prefix="silu_and_mul_quant",
    description="Codes of silu(gate) * up for a given dequantisation scale.",
    axes={
        "*num_tokens": Var(),
        "gate_up_size": Const(abbrev=""),
        "hidden_size": Const(abbrev="h", value="gate_up_size // 2"),
        "one": Const(abbrev="", sample=1),
    },
    inputs={
        "gate_up": Tensor(["*num_tokens", "gate_up_size"], param="input"),
        "scale": Tensor(["one"], dtype="float32", description="Multiplies the codes."),
    },
    outputs={"x_q": Tensor(["*num_tokens", "hidden_size"], "out", "float8_e4m3fn")},
    reference=silu_and_mul_quant_reference,
)


@precast_api(trace=of_e4m3(_STATIC_TRACE))
@backend_requirement({}, common_check=served_by("silu_and_mul_quant"))
def silu_and_mul_quant(
    input: torch.Tensor,
    scale: torch.Tensor,
    dst_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    r"""SwiGLU's activation, quantised to 8 bits with a given scale.

    .. math::

        out_c = \mathrm{sat}\left(\frac{g_c}{1 + e^{-g_c}} \cdot u_c \cdot \frac{1}{scale}\right),
        \quad g = input_{:n},\ u = input_{n:}

    Parameters
    ----------
    input : torch.Tensor
        ``[..., 2 * n]``, float16 or bfloat16, on a CUDA device. The last dimension has stride 1,
        the others merge into at most two strides. 16-byte aligned rows and ``n`` in whole 16 bytes
        are fastest.
    scale : torch.Tensor
        ``[1]``, float32: the *dequantisation* scale, by which the codes are multiplied.
    dst_dtype : torch.dtype, optional
        float8_e4m3fn, float8_e5m2 or int8; that of ``out`` if both are given. Default: that of
        ``out``, else float8_e4m3fn.
    out : torch.Tensor, optional
        The codes ``[..., n]``, strides as above. Default: a new tensor.
    enable_pdl : bool, optional
        Programmatic dependent launch. Default: on; without effect below compute capability 9.0.

    Returns
    -------
    torch.Tensor
        ``out``, or the new tensor.

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
    quantised. The activation's exponential and division are exact to about 2e-5, so that a code may
    differ from the reference's by one where the value lies between two. Quantisation, NaN and
    infinity are those of :func:`static_quant_fp8`. Safe in CUDA graphs; not differentiable.

    Examples
    --------
    >>> import torch, precast
    >>> x = torch.tensor([[1.0, 0.0, 2.0, 3.0]])
    >>> with precast.reference_mode():
    ...     precast.silu_and_mul_quant(x, torch.tensor([0.5])).float()
    tensor([[3., 0.]])
    """
    try:
        if out is None:
            out = new_codes(input, dst_dtype, gated=True)
        elif dst_dtype is not None:
            check_given_dtype("silu_and_mul_quant", "dst_dtype", dst_dtype, "out", out)
        pdl = enable_pdl is not False
        if torch.compiler.is_compiling():
            torch_ops.silu_and_mul_quant(input, scale, out, pdl)
        else:
            _static[input.dtype, out.dtype, input.get_device()](input, scale, out, pdl)
    except (AttributeError, TypeError):
        check_tensors("silu_and_mul_quant", input=input, scale=scale, out=out)
        raise
    return out


@precast_api(
    trace=token_trace(
        "silu_and_mul_per_token_quant",
        "Codes of silu(gate) * up and a dequantisation scale for each token.",
        silu_and_mul_per_token_quant_reference,
        param="input",
        gated=True,
    )
)
@backend_requirement({}, common_check=served_by("silu_and_mul_quant"))
def silu_and_mul_per_token_quant(
    input: torch.Tensor,
    eps: float = 1e-10,
    dst_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""SwiGLU's activation, quantised to 8 bits with a scale for each token.

    .. math::

        y_c = \frac{g_c}{1 + e^{-g_c}} \cdot u_c, \quad
        s = \frac{\max(\max_c |y_c|, eps)}{\max(Q)}, \quad
        x_{q,c} = \mathrm{sat}\left(y_c \cdot \frac{1}{s}\right)

    Parameters
    ----------
    input : torch.Tensor
        ``[..., 2 * n]``, as :func:`silu_and_mul_quant` takes it.
    eps : float
        The least amax, at least 1e-30.
    dst_dtype : torch.dtype, optional
        float8_e4m3fn, float8_e5m2 or int8; that of ``out`` if both are given. Default: that of
        ``out``, else float8_e4m3fn.
    out : torch.Tensor, optional
        The codes ``[..., n]``. Default: a new tensor.
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
    try:
        if out is None:
            out = new_codes(input, dst_dtype, gated=True)
        elif dst_dtype is not None:
            check_given_dtype("silu_and_mul_per_token_quant", "dst_dtype", dst_dtype, "out", out)
        if out_scale is None:
            out_scale = input.new_empty(*input.shape[:-1], 1, dtype=torch.float32)
        pdl = enable_pdl is not False
        if torch.compiler.is_compiling():
            torch_ops.silu_and_mul_per_token_quant(input, eps, out, out_scale, pdl)
        else:
            _token[input.dtype, out.dtype, input.get_device()](input, eps, out, out_scale, pdl)
    except (AttributeError, TypeError):
        check_tensors(
            "silu_and_mul_per_token_quant", input=input, out=out, **given(out_scale=out_scale)
        )
        raise
    return out, out_scale
