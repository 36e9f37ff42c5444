# SPDX-License-Identifier: Apache-2.0
"""Multiplication of a tensor by a number."""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.export import Export, launches
from precast.api_logging import precast_api
from precast.trace.derive import template_of


def scale_reference(input: torch.Tensor, factor: float) -> torch.Tensor:
    """:func:`scale` in plain PyTorch on any device: fp32 arithmetic, one cast at the end."""
    return (input.float() * factor).to(input.dtype)


_SCALE = Export(
    "scale",
    "scale",
    "input:T[*size] factor:float out!:like(input) enable_pdl:pdl",
    reference=scale_reference,
)


@precast_api(trace=template_of(_SCALE, "elementwise", "out = input * factor", scale_reference))
@launches(_SCALE)
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

    Returns
    -------
    torch.Tensor
        Shape and dtype of ``input``; ``out`` if it is given.

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
