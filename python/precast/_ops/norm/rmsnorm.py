# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, in the usual and in Gemma's form.

Sources: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467; Gemma Team,
Gemma, arXiv:2403.08295 (weights stored around zero).
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.docs import documented
from precast._ops.norm._norm import norm


def normalized(x: torch.Tensor, weight: torch.Tensor | float, eps: float) -> torch.Tensor:
    """Divide fp32 rows by their root mean square and multiply by a weight."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def rmsnorm_reference(input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """:func:`rmsnorm` in plain PyTorch on any device: fp32 arithmetic, one cast at the end."""
    return normalized(input.float(), weight.float(), eps).to(input.dtype)


def gemma_rmsnorm_reference(
    input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """:func:`gemma_rmsnorm` in plain PyTorch on any device: fp32 arithmetic, one cast."""
    return normalized(input.float(), weight.float() + 1.0, eps).to(input.dtype)


_ARGUMENTS = (
    "input:T[*rows(1-2),hidden] weight:T[hidden] eps:float(0-) out!:like(input) enable_pdl:pdl"
)


@norm("norm", _ARGUMENTS, "Each row divided by its root mean square, times a weight.")
def rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    r"""Divide each row by its root mean square and multiply by a weight.

    .. math:: out_{r,c} = \mathrm{round}\left(\frac{x_{r,c}}{\sqrt{\frac{1}{n} \sum_k x_{r,k}^2
        + eps}} \cdot w_c\right)

    Parameters
    ----------
    input : torch.Tensor
        ``[rows, hidden]``, or ``[batch, heads, head_dim]`` for a norm of each head; float16 or
        bfloat16, on a CUDA device. The last dimension has stride 1, the others any stride: slices
        of a packed qkv work in place. Any hidden size; a multiple of 8 at 16-byte aligned rows is
        fastest.
    weight : torch.Tensor
        ``[hidden]``, contiguous, dtype and device of ``input``.
    eps : float
        Added to the mean square.
    out : torch.Tensor, optional
        Shape, dtype and device of ``input``, strides as above. May be ``input``. Default: a new
        tensor.

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
    Sum and products are float32, rounded once to nearest even. Allocates only a missing ``out``;
    safe in CUDA graphs; not differentiable. Source: arXiv:1910.07467.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     precast.rmsnorm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]))
    tensor([[0.8485, 2.2627]])
    """


@norm("norm", _ARGUMENTS, "Each row divided by its root mean square, times a weight plus one.")
@documented(rmsnorm)
def gemma_rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    r"""Apply :func:`rmsnorm` with ``weight + 1`` in place of ``weight``, as Gemma stores weights.

    .. math:: out_{r,c} = \mathrm{round}\left(\frac{x_{r,c}}{\sqrt{\frac{1}{n} \sum_k x_{r,k}^2
        + eps}} \cdot (w_c + 1)\right)

    Parameters
    ----------
    weight : torch.Tensor
        ``[hidden]``, contiguous, dtype and device of ``input``; one less than the multiplier.

    Notes
    -----
    ``weight + 1`` is taken in float32. Otherwise as :func:`rmsnorm`. Source: arXiv:2403.08295.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     precast.gemma_rmsnorm(torch.tensor([[3.0, 4.0]]), torch.tensor([0.0, 1.0]))
    tensor([[0.8485, 2.2627]])
    """
