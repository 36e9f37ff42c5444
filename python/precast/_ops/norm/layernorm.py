# SPDX-License-Identifier: Apache-2.0
"""LayerNorm.

Source: Ba, Kiros and Hinton, Layer Normalization, arXiv:1607.06450.
"""

from __future__ import annotations

from precast._base.errors import DtypeRuntimeError
from precast._base.torch import torch
from precast._ops.norm._norm import norm


def layernorm_reference(
    input: torch.Tensor, gemma: torch.Tensor, beta: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """:func:`layernorm` in plain PyTorch on any device: fp32 arithmetic, one cast at the end."""
    return (standardized(input.float(), eps) * gemma.float() + beta.float()).to(input.dtype)


def standardized(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Centre fp32 rows and divide them by their standard deviation."""
    centered = x - x.mean(dim=-1, keepdim=True)
    return centered * torch.rsqrt(centered.square().mean(dim=-1, keepdim=True) + eps)


def checked_output(export: str, input: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Make an output that is missing; a dtype without modules is a DtypeRuntimeError for engines.

    The loader, which would raise another error, runs after this.
    """
    if input.dtype is not torch.bfloat16 and input.dtype is not torch.float16:
        raise DtypeRuntimeError(f"{export}: input must be bfloat16 (or float16), got {input.dtype}")
    return torch.empty_like(input) if out is None else out


def check_call(
    export: str, input: torch.Tensor, gemma: torch.Tensor, beta: torch.Tensor, out: torch.Tensor
) -> None:
    """Raise DtypeRuntimeError for what engines expect one: strides, and parameters not float32."""
    for name, tensor in (("input", input), ("out", out)):
        if not tensor.is_contiguous():
            raise DtypeRuntimeError(
                f"{export}: {name} must be contiguous, got strides {[*tensor.stride()]}; call "
                f".contiguous()"
            )
    for name, vector in (("gemma", gemma), ("beta", beta)):
        if vector.dtype is not torch.float32:
            raise DtypeRuntimeError(f"{export}: {name} must be float32, got {vector.dtype}")


@norm(
    "norm",
    "input:T[*rows(1-2),hidden] gemma:any[hidden] beta:any[hidden] eps:float(0-) out!:like(input) "
    "enable_pdl:pdl",
    "Each row centred and divided by its standard deviation, times a weight, plus a bias.",
    op_type="layernorm",
    check=check_call,
    new={"out": checked_output},
)
def layernorm(
    input: torch.Tensor,
    gemma: torch.Tensor,
    beta: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    r"""Centre each row, divide by its standard deviation, multiply by a weight and add a bias.

    .. math:: out_{r,c} = \mathrm{round}\left(\frac{x_{r,c} - m_r}{\sqrt{v_r + eps}} \cdot gemma_c
        + beta_c\right), \quad m_r = \frac{1}{n} \sum_k x_{r,k},
        \quad v_r = \frac{1}{n} \sum_k (x_{r,k} - m_r)^2

    Parameters
    ----------
    input : torch.Tensor
        ``[rows, hidden]`` or ``[batch, heads, head_dim]``, bfloat16 (or float16), contiguous, on a
        CUDA device. Any hidden size.
    gemma : torch.Tensor
        The weight (usually called gamma), ``[hidden]``, float32, contiguous.
    beta : torch.Tensor
        The bias, ``[hidden]``, float32, contiguous.
    eps : float
        Added to the variance.
    out : torch.Tensor, optional
        Shape, dtype and device of ``input``, contiguous. May be ``input``. Default: a new tensor.

    Returns
    -------
    torch.Tensor
        Shape and dtype of ``input``; ``out`` if it is given.

    Raises
    ------
    precast.errors.DtypeRuntimeError
        Another dtype of ``input``, ``gemma`` or ``beta``, or an ``input`` or ``out`` that is not
        contiguous (a ``RuntimeError`` and a ``ValueError``).
    ValueError
        A tensor that is not on a CUDA device; another shape, or an ``out`` other than above.

    Notes
    -----
    All arithmetic is float32, the variance around the mean, rounded once to nearest even.
    Allocates only a missing ``out``; safe in CUDA graphs; not differentiable. Source:
    arXiv:1607.06450.

    Examples
    --------
    >>> import torch, precast
    >>> x = torch.tensor([[1.0, 3.0]], dtype=torch.bfloat16)
    >>> with precast.reference_mode():
    ...     precast.layernorm(x, torch.ones(2), torch.tensor([0.0, 1.0]))
    tensor([[-1.,  2.]], dtype=torch.bfloat16)
    """
