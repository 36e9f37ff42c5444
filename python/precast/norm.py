# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, alone and fused with a residual, in the usual and in Gemma's form, and LayerNorm.

Sources: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467; Gemma Team,
Gemma, arXiv:2403.08295 (weights stored around zero).
"""

from __future__ import annotations

from precast._dispatch import Kernel, check_tensors
from precast._layernorm import layernorm, layernorm_reference
from precast._reference_checks import check_peer, check_rank, check_vector
from precast._torch import torch, torch_ops

__all__ = [
    "fused_add_rmsnorm",
    "fused_add_rmsnorm_reference",
    "gemma_fused_add_rmsnorm",
    "gemma_fused_add_rmsnorm_reference",
    "gemma_rmsnorm",
    "gemma_rmsnorm_reference",
    "layernorm",
    "layernorm_reference",
    "rmsnorm",
    "rmsnorm_reference",
]


def _normalized(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def rmsnorm_reference(input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """:func:`rmsnorm` in plain PyTorch: fp32 arithmetic, one cast at the end.

    Parameters
    ----------
    input : torch.Tensor
        ``[..., hidden]``, any device.
    weight : torch.Tensor
        ``[hidden]``.
    eps : float
        Added to the mean square.

    Returns
    -------
    torch.Tensor
        Shape and dtype of ``input``.

    Examples
    --------
    >>> import torch
    >>> rmsnorm_reference(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]))
    tensor([[0.8485, 2.2627]])
    """
    return _normalized(input.float(), weight.float(), eps).to(input.dtype)


def gemma_rmsnorm_reference(
    input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """:func:`gemma_rmsnorm` in plain PyTorch: fp32 arithmetic, one cast at the end.

    Parameters
    ----------
    input : torch.Tensor
        ``[..., hidden]``, any device.
    weight : torch.Tensor
        ``[hidden]``, one less than the multiplier.
    eps : float
        Added to the mean square.

    Returns
    -------
    torch.Tensor
        Shape and dtype of ``input``.

    Examples
    --------
    >>> import torch
    >>> gemma_rmsnorm_reference(torch.tensor([[3.0, 4.0]]), torch.tensor([0.0, 1.0]))
    tensor([[0.8485, 2.2627]])
    """
    return _normalized(input.float(), weight.float() + 1.0, eps).to(input.dtype)


def fused_add_rmsnorm_reference(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`fused_add_rmsnorm` in plain PyTorch, out of place.

    Parameters
    ----------
    input, residual : torch.Tensor
        ``[..., hidden]``, any device.
    weight : torch.Tensor
        ``[hidden]``.
    eps : float
        Added to the mean square.

    Returns
    -------
    tuple of torch.Tensor
        The norm of the fp32 sum, and the sum; each cast once to the dtype of ``input``.

    Examples
    --------
    >>> import torch
    >>> one, weight = torch.tensor([[1.0, 1.0]]), torch.tensor([1.0, 2.0])
    >>> fused_add_rmsnorm_reference(torch.tensor([[2.0, 3.0]]), one, weight)
    (tensor([[0.8485, 2.2627]]), tensor([[3., 4.]]))
    """
    x = input.float() + residual.float()
    return _normalized(x, weight.float(), eps).to(input.dtype), x.to(input.dtype)


def gemma_fused_add_rmsnorm_reference(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`gemma_fused_add_rmsnorm` in plain PyTorch, out of place.

    Parameters
    ----------
    input, residual : torch.Tensor
        ``[..., hidden]``, any device.
    weight : torch.Tensor
        ``[hidden]``, one less than the multiplier.
    eps : float
        Added to the mean square.

    Returns
    -------
    tuple of torch.Tensor
        The norm of the fp32 sum, and the sum; each cast once to the dtype of ``input``.

    Examples
    --------
    >>> import torch
    >>> one, weight = torch.tensor([[1.0, 1.0]]), torch.tensor([0.0, 1.0])
    >>> gemma_fused_add_rmsnorm_reference(torch.tensor([[2.0, 3.0]]), one, weight)
    (tensor([[0.8485, 2.2627]]), tensor([[3., 4.]]))
    """
    x = input.float() + residual.float()
    return _normalized(x, weight.float() + 1.0, eps).to(input.dtype), x.to(input.dtype)


def _check(
    export: str, input: torch.Tensor, weight: torch.Tensor, name: str, peer: torch.Tensor
) -> None:
    check_rank(export, input)
    check_vector(export, "weight", weight, input, input.dtype)
    check_peer(export, name, peer, input, may_be_input=name == "out")


def _rmsnorm_into(
    input: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, enable_pdl: bool
) -> None:
    _check("rmsnorm", input, weight, "out", out)
    out.copy_(rmsnorm_reference(input, weight, eps))


def _gemma_rmsnorm_into(
    input: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, enable_pdl: bool
) -> None:
    _check("gemma_rmsnorm", input, weight, "out", out)
    out.copy_(gemma_rmsnorm_reference(input, weight, eps))


def _fused_add_rmsnorm_into(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, enable_pdl: bool
) -> None:
    _check("fused_add_rmsnorm", input, weight, "residual", residual)
    normalized, x = fused_add_rmsnorm_reference(input, residual, weight, eps)
    input.copy_(normalized)
    residual.copy_(x)


def _gemma_fused_add_rmsnorm_into(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, enable_pdl: bool
) -> None:
    _check("gemma_fused_add_rmsnorm", input, weight, "residual", residual)
    normalized, x = gemma_fused_add_rmsnorm_reference(input, residual, weight, eps)
    input.copy_(normalized)
    residual.copy_(x)


_RMSNORM_SCHEMA = "(Tensor input, Tensor weight, float eps, Tensor(a!) out, bool enable_pdl) -> ()"
_FUSED_ADD_SCHEMA = (
    "(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float eps, bool enable_pdl) -> ()"
)
_rmsnorm = Kernel("norm", "rmsnorm", schema=_RMSNORM_SCHEMA, reference=_rmsnorm_into)
_gemma_rmsnorm = Kernel(
    "norm", "gemma_rmsnorm", schema=_RMSNORM_SCHEMA, reference=_gemma_rmsnorm_into
)
_fused_add_rmsnorm = Kernel(
    "norm", "fused_add_rmsnorm", schema=_FUSED_ADD_SCHEMA, reference=_fused_add_rmsnorm_into
)
_gemma_fused_add_rmsnorm = Kernel(
    "norm",
    "gemma_fused_add_rmsnorm",
    schema=_FUSED_ADD_SCHEMA,
    reference=_gemma_fused_add_rmsnorm_into,
)


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
    Sum and products are float32, rounded once to nearest even. Allocates only a missing ``out``;
    safe in CUDA graphs; not differentiable. Source: arXiv:1910.07467.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     precast.rmsnorm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]))
    tensor([[0.8485, 2.2627]])
    """
    try:
        if out is None:
            out = torch.empty_like(input)
        if torch.compiler.is_compiling():
            torch_ops.rmsnorm(input, weight, eps, out, enable_pdl is not False)
        else:
            _rmsnorm[input.dtype, input.get_device()](
                input, weight, eps, out, enable_pdl is not False
            )
    except (AttributeError, TypeError):
        check_tensors("rmsnorm", input=input, weight=weight, out=out)
        raise
    return out


def gemma_rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    r""":func:`rmsnorm` with ``weight + 1`` in place of ``weight``, as Gemma stores its weights.

    .. math:: out_{r,c} = \mathrm{round}\left(\frac{x_{r,c}}{\sqrt{\frac{1}{n} \sum_k x_{r,k}^2
        + eps}} \cdot (w_c + 1)\right)

    Parameters
    ----------
    input : torch.Tensor
        ``[rows, hidden]`` or ``[batch, heads, head_dim]``, as :func:`rmsnorm` takes it.
    weight : torch.Tensor
        ``[hidden]``, contiguous, dtype and device of ``input``; one less than the multiplier.
    eps : float
        Added to the mean square.
    out : torch.Tensor, optional
        As :func:`rmsnorm` takes it; may be ``input``. Default: a new tensor.
    enable_pdl : bool, optional
        Programmatic dependent launch. Default: on; without effect below compute capability 9.0.

    Returns
    -------
    torch.Tensor
        ``out``, or the new tensor.

    Raises
    ------
    ValueError
        As :func:`rmsnorm`.

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
    try:
        if out is None:
            out = torch.empty_like(input)
        pdl = enable_pdl is not False
        if torch.compiler.is_compiling():
            torch_ops.gemma_rmsnorm(input, weight, eps, out, pdl)
        else:
            _gemma_rmsnorm[input.dtype, input.get_device()](input, weight, eps, out, pdl)
    except (AttributeError, TypeError):
        check_tensors("gemma_rmsnorm", input=input, weight=weight, out=out)
        raise
    return out


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
    weight : torch.Tensor
        ``[hidden]``, contiguous, dtype and device of ``input``.
    eps : float
        Added to the mean square.
    enable_pdl : bool, optional
        Programmatic dependent launch. Default: on; without effect below compute capability 9.0.

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
    try:
        pdl = enable_pdl is not False
        if torch.compiler.is_compiling():
            torch_ops.fused_add_rmsnorm(input, residual, weight, eps, pdl)
        else:
            _fused_add_rmsnorm[input.dtype, input.get_device()](input, residual, weight, eps, pdl)
    except (AttributeError, TypeError):
        check_tensors("fused_add_rmsnorm", input=input, residual=residual, weight=weight)
        raise


def gemma_fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    r""":func:`fused_add_rmsnorm` with ``weight + 1`` in place of ``weight``; both in place.

    .. math::

        x_{r,c} &= input_{r,c} + residual_{r,c}, \quad residual_{r,c} = \mathrm{round}(x_{r,c}) \\
        input_{r,c} &= \mathrm{round}\left(\frac{x_{r,c}}{\sqrt{\frac{1}{n} \sum_k x_{r,k}^2
        + eps}} \cdot (w_c + 1)\right)

    Parameters
    ----------
    input, residual : torch.Tensor
        As :func:`fused_add_rmsnorm` takes them; both overwritten.
    weight : torch.Tensor
        ``[hidden]``, contiguous, dtype and device of ``input``; one less than the multiplier.
    eps : float
        Added to the mean square.
    enable_pdl : bool, optional
        Programmatic dependent launch. Default: on; without effect below compute capability 9.0.

    Raises
    ------
    ValueError
        As :func:`fused_add_rmsnorm`.

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
    try:
        pdl = enable_pdl is not False
        if torch.compiler.is_compiling():
            torch_ops.gemma_fused_add_rmsnorm(input, residual, weight, eps, pdl)
        else:
            _gemma_fused_add_rmsnorm[input.dtype, input.get_device()](
                input, residual, weight, eps, pdl
            )
    except (AttributeError, TypeError):
        check_tensors("gemma_fused_add_rmsnorm", input=input, residual=residual, weight=weight)
        raise
