# SPDX-License-Identifier: Apache-2.0
"""Norms with fp8 output by a given scale.

Sources: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467; Ba, Kiros and
Hinton, Layer Normalization, arXiv:1607.06450; saturation: OCP 8-bit Floating Point Specification
1.0.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from precast._base.dtypes import dtype_word
from precast._base.errors import DtypeRuntimeError
from precast._base.rounding import saturated
from precast._base.torch import torch
from precast._op.declaration import Kind
from precast._op.decorators import CheckedOp, reference_of
from precast._op.docs import completed, documented
from precast._op.validation import check_memory_apart, check_one_number
from precast._ops.norm._norm import norm
from precast._ops.norm.fused_add_rmsnorm import fused_add_rmsnorm
from precast._ops.norm.layernorm import check_call, checked_output, layernorm, standardized
from precast._ops.norm.rmsnorm import normalized, rmsnorm

P = ParamSpec("P")
R = TypeVar("R")


#: What references say of an output, which they make.
_OF_REFERENCES = """
Parameters
----------
out : torch.Tensor
    Its dtype is that of the quantised result; nothing else of it is read.

Returns
-------
torch.Tensor
    Shape of ``input``, dtype of ``out``.
"""


def _over_scale(x: torch.Tensor, scale: torch.Tensor | float, dtype: torch.dtype) -> torch.Tensor:
    """Return ``saturated(x * (1 / scale))``, computed in fp32."""
    number = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    return saturated(x * number.reciprocal(), dtype)


def _scale_tensor(export: str, scale: float, input: torch.Tensor) -> torch.Tensor:
    """Put a scale that is a number on the device of ``input``, without waiting for the device."""
    if isinstance(scale, bool) or not isinstance(scale, (float, int)):
        raise TypeError(f"{export}: scale must be a torch.Tensor, got {type(scale).__name__}")
    if not torch.compiler.is_compiling():
        warnings.warn(
            f"{export}: scale as a float is deprecated; pass a float32 tensor of shape (1,) on the "
            "device of input",
            FutureWarning,
            stacklevel=3,
        )
    return torch.full((1,), scale, dtype=torch.float32, device=input.device)


def _check(
    export: str,
    out: torch.Tensor,
    input: torch.Tensor,
    scale: torch.Tensor,
    residual: torch.Tensor | None = None,
    gemma: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
) -> None:
    if residual is not None:
        check_memory_apart(export, "out", out, residual, "residual")
    if gemma is not None and beta is not None:
        check_call(export, input, gemma, beta, out)
    check_one_number(export, "scale", scale, input)


def _checked_fp8_output(
    export: str, input: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor | None:
    """Raise DtypeRuntimeError for an output without modules; the loader has another error."""
    dtype = getattr(out, "dtype", None)
    if dtype is torch.float8_e4m3fn or dtype is torch.float8_e5m2 or dtype is None:
        checked_output(export, input, out)
        return out
    raise DtypeRuntimeError(
        f"{export}: out must be float8_e4m3fn or float8_e5m2, got {dtype_word(dtype)}"
    )


def _quantizing(
    tensors: str, description: str, op_type: str = "rmsnorm"
) -> Callable[[Callable[P, R]], CheckedOp[P, R]]:
    """Make a norm of ``tensors`` by a scale, for which a Python number is deprecated."""

    def decorate(function: Callable[P, R]) -> CheckedOp[P, R]:
        reference = reference_of(function)
        reference.__doc__ = completed(reference, _OF_REFERENCES)
        tensor = (
            "{name} if isinstance({name}, _torch.Tensor) else "
            f"_scale_tensor({function.__name__!r}, {{name}}, input)"
        )
        return norm(
            "norm_quant",
            f"out!:like(input,U=e4m3|e5m2,apart) input:T[*rows(1-2),hidden] {tensors} scale:scale "
            "eps:float(0-) enable_pdl:pdl",
            description,
            op_type=op_type,
            out_description="Says the type of the output.",
            variants={
                "": {"out_dtype": "float8_e4m3fn"},
                "_e5m2": {"out_dtype": "float8_e5m2"},
            },
            choose=lambda out, **others: (
                "_e5m2" if str(getattr(out, "dtype", "")).endswith("float8_e5m2") else ""
            ),
            check=_check,
            kinds={"scale": Kind("Tensor {name}", tensor, names={"_scale_tensor": _scale_tensor})},
            new={"out": _checked_fp8_output} if op_type == "layernorm" else None,
        )(function)

    return decorate


def rmsnorm_quant_reference(
    out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | float,
    eps: float = 1e-6,
) -> torch.Tensor:
    """:func:`rmsnorm_quant` in plain PyTorch on any device, out of place."""
    return _over_scale(normalized(input.float(), weight.float(), eps), scale, out.dtype)


@_quantizing(
    "weight:T[hidden]",
    "Each row divided by its root mean square, times a weight, over a scale, in fp8.",
)
@documented(rmsnorm)
def rmsnorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | float,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    r"""Apply RMSNorm to each row, divide by a scale and write fp8.

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


def fused_add_rmsnorm_quant_reference(
    out: torch.Tensor,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | float,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`fused_add_rmsnorm_quant` in plain PyTorch on any device, out of place.

    Returns
    -------
    tuple of torch.Tensor
        The norm of the fp32 sum over ``scale`` in the dtype of ``out``, and the sum in the dtype of
        ``input``; each rounded once.
    """
    x = input.float() + residual.float()
    y = normalized(x, weight.float(), eps)
    return _over_scale(y, scale, out.dtype), x.to(input.dtype)


@_quantizing(
    "residual!:like(input,apart) weight:T[hidden]",
    "The sum of two tensors, and the norm of each row of it over a scale, in fp8.",
)
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


def layernorm_quant_reference(
    out: torch.Tensor,
    input: torch.Tensor,
    gemma: torch.Tensor,
    beta: torch.Tensor,
    scale: torch.Tensor | float,
    eps: float = 1e-6,
) -> torch.Tensor:
    """:func:`layernorm_quant` in plain PyTorch on any device, out of place."""
    y = standardized(input.float(), eps) * gemma.float() + beta.float()
    return _over_scale(y, scale, out.dtype)


@_quantizing(
    "gemma:any[hidden] beta:any[hidden]",
    "Each row centred and divided by its standard deviation, times a weight, plus a bias, over a "
    "scale, in fp8.",
    op_type="layernorm",
)
@documented(layernorm, rmsnorm_quant)
def layernorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    gemma: torch.Tensor,
    beta: torch.Tensor,
    scale: torch.Tensor | float,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    r"""Apply LayerNorm to each row, divide by a scale and write fp8.

    .. math:: out_{r,c} = \mathrm{sat}\left(\left(\frac{x_{r,c} - m_r}{\sqrt{v_r + eps}}
        \cdot gemma_c + beta_c\right) \cdot \frac{1}{scale}\right),

    with the mean :math:`m_r` and the variance :math:`v_r` of the row.

    Parameters
    ----------
    out : torch.Tensor
        Shape and device of ``input``, float8_e4m3fn or float8_e5m2, contiguous, memory of its own.
        Overwritten.
    input : torch.Tensor
        ``[rows, hidden]`` or ``[batch, heads, head_dim]``, bfloat16 or float16, contiguous, on a
        CUDA device. Left as it is.

    Raises
    ------
    ValueError
        As :func:`rmsnorm_quant`.
    precast.errors.DtypeRuntimeError
        A RuntimeError and a ValueError: ``input`` or ``out`` of another dtype or not contiguous,
        ``gemma`` or ``beta`` that is not float32.

    Notes
    -----
    The variance is taken around the mean in a second pass. Otherwise as :func:`rmsnorm_quant`.
    Source: arXiv:1607.06450.

    Examples
    --------
    >>> import torch, precast
    >>> out, one = torch.empty(1, 2, dtype=torch.float8_e4m3fn), torch.ones(2)
    >>> x, beta = torch.tensor([[1.0, 3.0]]).bfloat16(), torch.tensor([0.0, 1.0])
    >>> scale = torch.tensor([0.0125])
    >>> with precast.reference_mode():
    ...     precast.layernorm_quant(out, x, one, beta, scale)
    >>> out.float()
    tensor([[-80., 160.]])
    """
