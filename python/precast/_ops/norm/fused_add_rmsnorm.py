# SPDX-License-Identifier: Apache-2.0
"""RMSNorm fused with a residual, in the usual and in Gemma's form.

Sources: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467; Gemma Team,
Gemma, arXiv:2403.08295 (weights stored around zero).
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.docs import documented
from precast._ops.norm._norm import norm
from precast._ops.norm.rmsnorm import normalized, rmsnorm


def fused_add_rmsnorm_reference(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`fused_add_rmsnorm` in plain PyTorch on any device, out of place.

    Returns
    -------
    tuple of torch.Tensor
        The norm of the fp32 sum, and the sum; each cast once to the dtype of ``input``.
    """
    x = input.float() + residual.float()
    return normalized(x, weight.float(), eps).to(input.dtype), x.to(input.dtype)


def gemma_fused_add_rmsnorm_reference(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`gemma_fused_add_rmsnorm` in plain PyTorch on any device, out of place.

    Returns
    -------
    tuple of torch.Tensor
        The norm of the fp32 sum, and the sum; each cast once to the dtype of ``input``.
    """
    x = input.float() + residual.float()
    return normalized(x, weight.float() + 1.0, eps).to(input.dtype), x.to(input.dtype)


_ARGUMENTS = (
    "input!:T[*rows(1-2),hidden] residual!:like(input,apart) weight:T[hidden] eps:float(0-) "
    "enable_pdl:pdl"
)


@norm(
    "norm",
    _ARGUMENTS,
    "The sum of two tensors, and the root mean square norm of each row of it.",
)
@documented(rmsnorm)
def fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    r"""Add ``input`` to ``residual``, and write the RMSNorm of the sum to ``input``; both in place.

    .. math::

        x_{r,c} &= input_{r,c} + residual_{r,c}, \quad residual_{r,c} = \mathrm{round}(x_{r,c}) \\
        input_{r,c} &= \mathrm{round}\left(\frac{x_{r,c}}{\sqrt{\frac{1}{n} \sum_k x_{r,k}^2
        + eps}} \cdot w_c\right)

    Parameters
    ----------
    input : torch.Tensor
        ``[rows, hidden]`` or ``[batch, heads, head_dim]``, float16 or bfloat16, on a CUDA device;
        stride 1 in the last dimension, any in the others. Overwritten with the norm.
    residual : torch.Tensor
        Shape, dtype and device of ``input``, other memory, strides likewise. Overwritten with the
        sum.

    Raises
    ------
    ValueError
        As :func:`rmsnorm`; also if ``residual`` is the memory of ``input``.

    Notes
    -----
    The norm takes the float32 sum; only the sum in memory is rounded. No allocation; safe in CUDA
    graphs; not differentiable. Source: arXiv:1910.07467.

    Examples
    --------
    >>> import torch, precast
    >>> x, residual = torch.tensor([[2.0, 3.0]]), torch.tensor([[1.0, 1.0]])
    >>> with precast.reference_mode():
    ...     precast.fused_add_rmsnorm(x, residual, torch.tensor([1.0, 2.0]))
    >>> x, residual
    (tensor([[0.8485, 2.2627]]), tensor([[3., 4.]]))
    """


@norm(
    "norm",
    _ARGUMENTS,
    "The sum of two tensors, and the norm of each row of it, with a weight plus one.",
)
@documented(fused_add_rmsnorm)
def gemma_fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    r"""Apply :func:`fused_add_rmsnorm` with ``weight + 1`` in place of ``weight``; both in place.

    .. math::

        x_{r,c} &= input_{r,c} + residual_{r,c}, \quad residual_{r,c} = \mathrm{round}(x_{r,c}) \\
        input_{r,c} &= \mathrm{round}\left(\frac{x_{r,c}}{\sqrt{\frac{1}{n} \sum_k x_{r,k}^2
        + eps}} \cdot (w_c + 1)\right)

    Parameters
    ----------
    weight : torch.Tensor
        ``[hidden]``, contiguous, dtype and device of ``input``; one less than the multiplier.

    Notes
    -----
    ``weight + 1`` is taken in float32. Otherwise as :func:`fused_add_rmsnorm`. Source:
    arXiv:2403.08295.

    Examples
    --------
    >>> import torch, precast
    >>> x, residual = torch.tensor([[2.0, 3.0]]), torch.tensor([[1.0, 1.0]])
    >>> with precast.reference_mode():
    ...     precast.gemma_fused_add_rmsnorm(x, residual, torch.tensor([0.0, 1.0]))
    >>> x, residual
    (tensor([[0.8485, 2.2627]]), tensor([[3., 4.]]))
    """
