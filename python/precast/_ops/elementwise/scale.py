# SPDX-License-Identifier: Apache-2.0
"""Multiplication of a tensor by a number."""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.decorators import backend_requirement, served_by
from precast._op.dispatch import Kernel, check_tensors
from precast._op.torch_ops import torch_ops
from precast._op.validation import check_peer
from precast.api_logging import precast_api
from precast.trace import Scalar, Tensor, TraceTemplate, Var


def scale_reference(input: torch.Tensor, factor: float) -> torch.Tensor:
    """:func:`scale` in plain PyTorch: fp32 arithmetic, one cast at the end.

    Parameters
    ----------
    input : torch.Tensor
        Any shape and device, float16, bfloat16 or float32.
    factor : float
        The multiplier.

    Returns
    -------
    torch.Tensor
        Shape and dtype of ``input``.

    Examples
    --------
    >>> import torch
    >>> scale_reference(torch.tensor([1.0, -2.0]), 0.5)
    tensor([ 0.5000, -1.0000])
    """
    return (input.float() * factor).to(input.dtype)


def _scale_into(input: torch.Tensor, factor: float, out: torch.Tensor, enable_pdl: bool) -> None:
    check_peer("scale", "out", out, input)
    out.copy_(scale_reference(input, factor))


_scale = Kernel(
    "scale",
    "scale",
    schema="(Tensor input, float factor, Tensor(a!) out, bool enable_pdl) -> ()",
    reference=_scale_into,
)

_TRACE = TraceTemplate(
    op_type="elementwise",
    name_prefix="scale",
    description="out = input * factor",
    axes={"*size": Var()},  # One axis for each dimension of the call.
    inputs={"input": Tensor(["*size"]), "factor": Scalar("float32")},
    outputs={"output": Tensor(["*size"], dtype_from="input", param="out")},
    reference=scale_reference,
)


@precast_api(trace=_TRACE)
@backend_requirement({}, common_check=served_by("scale"))
def scale(
    input: torch.Tensor,
    factor: float,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    r"""Multiply every element by one number.

    .. math:: out = \mathrm{round}(input \cdot factor)

    Parameters
    ----------
    input : torch.Tensor
        Any shape; float16, bfloat16 or float32; on a CUDA device. The last dimension has stride 1
        and the others merge into at most two strides: any contiguous tensor, 2-D tensors with
        strided rows, slices of the last dimension. Addresses need no alignment; 16-byte aligned
        rows are fastest.
    factor : float
        The multiplier, rounded to float32.
    out : torch.Tensor, optional
        Where to write: shape, dtype and device of ``input``, strides as above. May be ``input``.
        Default: a new tensor.
    enable_pdl : bool, optional
        Programmatic dependent launch. Default: on; without effect below compute capability 9.0.

    Returns
    -------
    torch.Tensor
        ``out``, or the new tensor.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device or strides other than above.

    Notes
    -----
    The product is float32, rounded once to nearest even. Allocates only a missing ``out``; safe in
    CUDA graphs; not differentiable.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     precast.scale(torch.tensor([1.0, -2.0]), 0.5)
    tensor([ 0.5000, -1.0000])
    """
    try:
        if out is None:
            out = torch.empty_like(input)
        if torch.compiler.is_compiling():
            torch_ops.scale(input, factor, out, enable_pdl is not False)
        else:
            _scale[input.dtype, input.get_device()](input, factor, out, enable_pdl is not False)
    except (AttributeError, TypeError):
        check_tensors("scale", input=input, out=out)
        raise
    return out
