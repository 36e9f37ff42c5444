# SPDX-License-Identifier: Apache-2.0
"""RMSNorm followed by SiLU, or multiplied by a sigmoid gate.

Sources: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467; the decoder of
Wan's VAE, arXiv:2503.20314, which has RMSNorm and SiLU; Kimi Team, Kimi Linear, arXiv:2510.26692,
whose delta attention ends in a gated norm of each head.
"""

from __future__ import annotations

from precast._base.dtypes import dtype_word
from precast._base.errors import UnsupportedConfigError
from precast._base.rounding import saturated
from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.validation import check_memory_apart
from precast._ops.norm._norm import norm
from precast._ops.norm.rmsnorm import normalized, rmsnorm


def fused_rmsnorm_silu_reference(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`fused_rmsnorm_silu` in plain PyTorch on any device, out of place.

    Parameters
    ----------
    out : torch.Tensor, optional
        Its dtype is that of the result; nothing else of it is read. Default: that of ``input``.
    """
    y = torch.nn.functional.silu(normalized(input.float(), weight.float(), eps))
    return saturated(y, input.dtype if out is None else out.dtype)


def _check_silu(export: str, out: torch.Tensor, block_scale: torch.Tensor | None) -> None:
    if block_scale is not None:
        raise ValueError(
            f"{export}: block_scale must be None, as out is {dtype_word(out.dtype)}, which has no "
            f"scales; it is for NVFP4 output, which is not implemented"
        )


def _explain_nvfp4(export: str, out: torch.Tensor | None) -> None:
    if out is not None and str(out.dtype) == "torch.float4_e2m1fn_x2":
        raise UnsupportedConfigError(
            f"{export}: NVFP4 output (out of float4_e2m1fn_x2, with block_scale) is not "
            "implemented; legal: float16, bfloat16, float8_e4m3fn. Fix: quantise a bfloat16 out"
        )


@norm(
    "norm_gate",
    "input:T[*rows(1-2),hidden] weight:T[hidden] eps:float(0-) "
    "out!:like(input,U=f16|bf16|e4m3|T) block_scale?:any enable_pdl:pdl",
    "Each row divided by its root mean square, times a weight, and the SiLU of that.",
    check=_check_silu,
    new={"out": "_torch.empty_like(input)"},
    explain=_explain_nvfp4,
    variants={"": {"left_out": ("block_scale",)}},
)
@documented(rmsnorm)
def fused_rmsnorm_silu(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    block_scale: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    r"""Apply RMSNorm to each row, and SiLU to the result.

    .. math::

        y_{r,c} &= \frac{x_{r,c}}{\sqrt{\frac{1}{n} \sum_k x_{r,k}^2 + eps}} \cdot w_c \\
        out_{r,c} &= \mathrm{round}\left(\frac{y_{r,c}}{1 + e^{-y_{r,c}}}\right)

    Parameters
    ----------
    out : torch.Tensor, optional
        Shape and device of ``input``, strides likewise; bfloat16, float16 or float8_e4m3fn. May be
        ``input``. Default: a new tensor of the dtype of ``input``.
    block_scale : torch.Tensor, optional
        For an ``out`` of float4_e2m1fn_x2 (NVFP4), which there is no kernel for; so it must be
        None.

    Returns
    -------
    torch.Tensor
        Shape of ``input``; ``out`` if it is given.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device or strides other than above;
        a ``block_scale``.
    UnsupportedConfigError
        A ValueError: an ``out`` of float4_e2m1fn_x2 or another dtype than above.

    Notes
    -----
    All arithmetic is float32, rounded once to nearest even; float8_e4m3fn has no scale and
    saturates. Allocates only a missing ``out``; safe in CUDA graphs; not differentiable. Sources:
    arXiv:1910.07467, arXiv:2503.20314.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     precast.fused_rmsnorm_silu(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]))
    tensor([[0.5942, 2.0495]])
    """


def rmsnorm_sigmoid_gate_reference(
    input: torch.Tensor,
    gate: torch.Tensor,
    eps: float = 1e-5,
    weight: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`rmsnorm_sigmoid_gate` in plain PyTorch on any device, out of place.

    Parameters
    ----------
    out : torch.Tensor, optional
        Its dtype is that of the result; nothing else of it is read. Default: that of ``input``.

    Returns
    -------
    torch.Tensor
        Shape of ``input``.
    """
    y = normalized(input.float(), 1.0 if weight is None else weight.float(), eps)
    return saturated(y * torch.sigmoid(gate.float()), input.dtype if out is None else out.dtype)


def _check_gate(
    export: str, input: torch.Tensor, gate: torch.Tensor, out: torch.Tensor | None
) -> None:
    name, written = ("input", input) if out is None else ("out", out)
    check_memory_apart(export, name, written, gate, "gate")


def _write_gated(
    input: torch.Tensor,
    gate: torch.Tensor,
    eps: float,
    weight: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    written = input if out is None else out
    written.copy_(rmsnorm_sigmoid_gate_reference(input, gate, eps, weight, out))


@norm(
    "norm_gate",
    "input!:T[*rows(1-2),hidden] gate:like(input) eps:float(0-) weight?:T[hidden] "
    "out!?:like(input,U=f16|bf16|e4m3|T) enable_pdl:pdl",
    "Each row divided by its root mean square, times the sigmoid of a gate.",
    check=_check_gate,
    write=_write_gated,
    out_description="Says its type.",
    variants={
        "": {"left_out": ("weight", "out")},
        "_out": {"left_out": ("weight",)},
        "_weight": {"left_out": ("out",)},
        "_weight_out": {},
    },
    choose=lambda weight=None, out=None, **others: (
        ("_weight" if weight is not None else "") + ("_out" if out is not None else "")
    ),
)
@documented(rmsnorm)
def rmsnorm_sigmoid_gate(
    input: torch.Tensor,
    gate: torch.Tensor,
    eps: float = 1e-5,
    *,
    weight: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = True,
) -> None:
    r"""Multiply the RMSNorm of each row or head by the sigmoid of a gate; in place without ``out``.

    .. math:: out_{r,c} = \mathrm{round}\left(\frac{x_{r,c}}{\sqrt{\frac{1}{n} \sum_k x_{r,k}^2
        + eps}} \cdot w_c \cdot \frac{1}{1 + e^{-gate_{r,c}}}\right)

    The norm is taken before the gate.

    Parameters
    ----------
    input : torch.Tensor
        ``[rows, hidden]``, or ``[batch, heads, head_dim]`` for a norm of each head; bfloat16 or
        float16, on a CUDA device; any hidden size, strides as :func:`rmsnorm` takes them.
        Overwritten, unless ``out`` is given.
    gate : torch.Tensor
        Shape, dtype and device of ``input``, other memory, strides likewise.
    weight : torch.Tensor, optional
        ``[hidden]``, contiguous, dtype and device of ``input``. Default: ones.
    out : torch.Tensor, optional
        Shape and device of ``input``, strides likewise; bfloat16, float16 or float8_e4m3fn. May be
        ``input``. Overwritten. Default: ``input``.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device or strides other than above; a
        ``gate`` that overlaps what is written.

    Notes
    -----
    All arithmetic is float32, rounded once to nearest even; float8_e4m3fn has no scale and
    saturates. ``weight`` and ``out`` are additions to FlashInfer's signature. No allocation; safe
    in CUDA graphs; not differentiable. Sources: arXiv:1910.07467, arXiv:2510.26692.

    Examples
    --------
    >>> import torch, precast
    >>> x, gate = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]])
    >>> with precast.reference_mode():
    ...     precast.rmsnorm_sigmoid_gate(x, gate)
    >>> x
    tensor([[0.4243, 0.9965]])
    """
