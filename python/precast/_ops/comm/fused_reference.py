# SPDX-License-Identifier: Apache-2.0
"""What the fused all-reduce computes and refuses, in plain PyTorch.

Sources: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467; scaling by
groups: DeepSeek-AI, arXiv:2412.19437, section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence

from precast._base.torch import torch
from precast._op.validation import check_contiguous, check_memory_apart
from precast._ops.comm.patterns import (
    GROUP,
    NO_QUANT,
    TENSOR,
    TOKEN,
    AllReduceFusionPattern,
    fusion_of,
)
from precast._ops.norm.rmsnorm import normalized
from precast._ops.quantize._reference_8bit import group_quant, quantize, token_quant

EPS = 1e-10
FP8_MAX = 448.0
#: Vectors of 16 bytes in a row of a norm at most (kMaxRowVecs of comm/allreduce_cut.cuh).
MAX_ROW_BYTES = 2048 * 16


def reduced(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in the order of ranks, in float32, rounded once."""
    total = inputs[0].float()
    for input in inputs[1:]:
        total = total + input.float()
    return total.to(inputs[0].dtype)


def quantized(
    y: torch.Tensor, mode: int, group_size: int, scale_factor: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The codes and the scales of a norm, which is rounded."""
    if mode == NO_QUANT:
        return None, None
    if mode == TENSOR:
        assert scale_factor is not None
        scale = scale_factor.float().reshape(())
        return quantize(y.float(), scale, torch.float8_e4m3fn), None
    if mode == TOKEN:
        return token_quant(y.float(), EPS, torch.float8_e4m3fn)
    eps = EPS * FP8_MAX  # the least scale, not the least magnitude
    return group_quant(y.float(), group_size, eps, torch.float8_e4m3fn, True, packed=True)


def allreduce_fusion_reference(
    inputs: Sequence[torch.Tensor],
    pattern: int = AllReduceFusionPattern.kAllReduce,
    residual_in: torch.Tensor | None = None,
    rms_gamma: torch.Tensor | None = None,
    rms_eps: float = 1e-6,
    scale_factor: torch.Tensor | None = None,
    block_quant_group_size: int | None = None,
    weight_bias: float = 0.0,
) -> tuple[torch.Tensor | None, ...]:
    """:func:`allreduce_fusion` in plain PyTorch, given the inputs of all ranks.

    Parameters
    ----------
    inputs : sequence of torch.Tensor
        The input of each rank, in their order.

    Returns
    -------
    tuple of torch.Tensor or None
        The sum, or for patterns with a norm: the sum with the residual, the norm, its codes and
        their scales; None for what the pattern does not have.
    """
    total = reduced(inputs)
    if pattern == AllReduceFusionPattern.kAllReduce:
        return (total,)
    mode = fusion_of("allreduce_fusion", pattern).mode
    assert residual_in is not None and rms_gamma is not None
    return followed(
        total,
        residual_in,
        rms_gamma,
        rms_eps,
        weight_bias,
        mode,
        block_quant_group_size or 0,
        scale_factor,
    )


def followed(
    total: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_bias: float,
    mode: int,
    group_size: int,
    scale_factor: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """What follows the sum: with the residual, the norm, codes and scales."""
    x = total.float() + residual.float()
    y = normalized(x, weight.float() + weight_bias, eps).to(total.dtype)
    return x.to(total.dtype), y, *quantized(y, mode, group_size, scale_factor)


def check_plain(export: str, input: torch.Tensor, output: torch.Tensor) -> None:
    check_contiguous(export, input=input, output=output)


def check_norm(
    export: str,
    input: torch.Tensor,
    residual_in: torch.Tensor,
    rms_gamma: torch.Tensor,
    residual_out: torch.Tensor | None,
    norm_out: torch.Tensor | None,
    quant_out: torch.Tensor | None,
    scale_out: torch.Tensor | None,
    scale_factor: torch.Tensor | None,
    quant_mode: int,
    block_quant_group_size: int,
) -> None:
    """What the binding checks."""
    check_contiguous(
        export,
        input=input,
        residual_in=residual_in,
        rms_gamma=rms_gamma,
        residual_out=residual_out,
        norm_out=norm_out,
        quant_out=quant_out,
    )
    rows, hidden = input.shape
    if hidden * input.itemsize > MAX_ROW_BYTES:
        raise ValueError(
            f"{export}: input's last dimension must be at most {MAX_ROW_BYTES // input.itemsize}, "
            f"got {hidden}"
        )
    if quant_mode != NO_QUANT and input.dtype == torch.float32:
        raise ValueError(
            f"{export}: input must be float16 or bfloat16 for a pattern with quantisation, got "
            f"float32"
        )
    wanted = {"quant_out": (quant_out, quant_mode != NO_QUANT)}
    wanted["scale_factor"] = (scale_factor, quant_mode == TENSOR)
    wanted["scale_out"] = (scale_out, quant_mode in (GROUP, TOKEN))
    for name, (tensor, is_wanted) in wanted.items():
        if is_wanted and tensor is None:
            raise ValueError(f"{export}: {name} must be a tensor for this pattern, got None")
    if quant_mode == GROUP and scale_out is not None:
        _check_group_scales(export, scale_out, rows, hidden, block_quant_group_size)
    elif quant_mode == TOKEN and scale_out is not None:
        if scale_out.dtype != torch.float32 or [*scale_out.shape] != [rows, 1]:
            raise ValueError(
                f"{export}: scale_out must be float32 of shape {[rows, 1]}, got {scale_out.dtype} "
                f"of shape {[*scale_out.shape]}"
            )
        check_contiguous(export, scale_out=scale_out)
    outputs: dict[str, torch.Tensor] = {}
    for name, output in (
        ("norm_out", norm_out),
        ("residual_out", residual_out),
        ("quant_out", quant_out),
        ("scale_out", scale_out),
    ):
        if output is None:
            continue
        check_memory_apart(export, name, output, rms_gamma, "rms_gamma")
        for other_name, other in outputs.items():
            check_memory_apart(export, name, output, other, other_name)
        outputs[name] = output


def _check_group_scales(
    export: str, scales: torch.Tensor, rows: int, hidden: int, group_size: int
) -> None:
    if group_size not in (16, 32, 64, 128):
        raise ValueError(
            f"{export}: block_quant_group_size must be 16, 32, 64 or 128, got {group_size}"
        )
    if hidden % group_size:
        raise ValueError(
            f"{export}: input's last dimension must be a multiple of block_quant_group_size "
            f"{group_size}, got {hidden}"
        )
    words, stride = -(-(hidden // group_size) // 4), -(-rows // 4) * 4
    if scales.dtype != torch.int32:
        raise ValueError(f"{export}: scale_out must be int32, got {scales.dtype}")
    if [*scales.shape] != [rows, words]:
        raise ValueError(
            f"{export}: scale_out must have shape {[rows, words]}, got {[*scales.shape]}"
        )
    if (rows > 1 and scales.stride(0) != 1) or (words > 1 and scales.stride(1) != stride):
        raise ValueError(
            f"{export}: scale_out must have strides {[1, stride]} (column-major, rows rounded up "
            f"to 4), got {[*scales.stride()]}"
        )
