# SPDX-License-Identifier: Apache-2.0
"""RMSNorm with SiLU behind it.

Sources: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467; the decoder of
Wan's VAE, arXiv:2503.20314, which uses the two together.
"""

from __future__ import annotations

from precast._base.dtypes import dtype_word
from precast._base.errors import UnsupportedConfigError
from precast._base.rounding import saturated
from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, op
from precast._ops.norm._trace import norm_trace
from precast._ops.norm.rmsnorm import normalized, rmsnorm
from precast.api_logging import precast_api

#: Legal element types of the output.
OUTPUT_TYPES = ("float16", "bfloat16", "float8_e4m3fn")


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

    Examples
    --------
    >>> import torch
    >>> fused_rmsnorm_silu_reference(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]))
    tensor([[0.5942, 2.0495]])
    """
    y = torch.nn.functional.silu(normalized(input.float(), weight.float(), eps))
    return saturated(y, input.dtype if out is None else out.dtype)


def check_output_type(export: str, out: torch.Tensor, input: torch.Tensor) -> None:
    """Raise UnsupportedConfigError for an output type that no module writes."""
    name = dtype_word(out.dtype)
    if name not in (*OUTPUT_TYPES, dtype_word(input.dtype)):
        raise UnsupportedConfigError(
            f"{export}: out must be {' or '.join(OUTPUT_TYPES)}, got {name}"
        )


def _check(
    export: str, input: torch.Tensor, out: torch.Tensor, block_scale: torch.Tensor | None
) -> None:
    check_output_type(export, out, input)
    if block_scale is not None:
        raise ValueError(
            f"{export}: block_scale must be None, as out is {dtype_word(out.dtype)}, which has no "
            f"scales; it is for NVFP4 output, which is not implemented"
        )


_FUSED_RMSNORM_SILU = Export(
    "norm_gate",
    "fused_rmsnorm_silu",
    "input:T[*rows(1-2),hidden] weight:T[hidden] eps:float "
    "out!:like(input,U=f16|bf16|e4m3|T) block_scale?:any enable_pdl:pdl",
    reference=fused_rmsnorm_silu_reference,
    check=_check,
)
_TRACE = norm_trace(
    _FUSED_RMSNORM_SILU,
    "Each row divided by its root mean square, times a weight, and the SiLU of that.",
    fused_rmsnorm_silu_reference,
    variants={"": {"left_out": ("block_scale",)}},
)


@precast_api(trace=_TRACE)
@op("norm_gate")
@documented(rmsnorm)
def fused_rmsnorm_silu(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    block_scale: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    r"""RMSNorm of each row, and the SiLU of it.

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
    if out is None:
        out = torch.empty_like(input)
    try:
        _FUSED_RMSNORM_SILU.launch(input, weight, eps, out, block_scale, enable_pdl)
    except UnsupportedConfigError as error:
        if str(out.dtype) == "torch.float4_e2m1fn_x2":
            raise UnsupportedConfigError(
                "fused_rmsnorm_silu: NVFP4 output (out of float4_e2m1fn_x2, with block_scale) is "
                f"not implemented; legal: {', '.join(OUTPUT_TYPES)}. Fix: quantise a bfloat16 out"
            ) from error
        raise
    return out
