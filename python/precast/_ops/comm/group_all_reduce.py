# SPDX-License-Identifier: Apache-2.0
"""The fused all-reduce by a process group, NCCL's as a rule, and separate kernels."""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.mode import is_reference
from precast._ops.comm.fused_reference import EPS, FP8_MAX, followed, reduced
from precast._ops.comm.patterns import GROUP, TENSOR, TOKEN
from precast._ops.comm.workspace import GroupAllReduceFusionWorkspace


def all_reduce_by_group(
    workspace: GroupAllReduceFusionWorkspace, input: torch.Tensor, output: torch.Tensor
) -> None:
    """Write the sum of all ranks' inputs to ``output``, which may be ``input``."""
    if is_reference():
        output.copy_(reduced(workspace.gather(input)))
        return
    if output.data_ptr() != input.data_ptr():
        output.copy_(input)
    workspace.all_reduce(output)


def all_reduce_norm_by_group(
    workspace: GroupAllReduceFusionWorkspace, tensors: tuple[Any, ...]
) -> None:
    """Write what follows the sum; ``tensors`` are the arguments of the export ``allreduce_norm``.

    They are checked, and start with its input.
    """
    input, residual, weight, residual_out, norm_out, quant_out, scale_out, *numbers = tensors
    scale_factor, mode, group_size, eps, weight_bias = numbers
    if is_reference():
        total = reduced(workspace.gather(input))
    else:
        total = input.clone()
        workspace.all_reduce(total)
        if _by_kernels(total, tensors):
            return
    results = followed(total, residual, weight, eps, weight_bias, mode, group_size, scale_factor)
    outputs = (residual_out, norm_out, quant_out, scale_out)
    for output, result in zip(outputs, results):
        if output is not None and result is not None:
            output.copy_(result)


def _by_kernels(total: torch.Tensor, tensors: tuple[Any, ...]) -> bool:
    """Run what follows the sum by precast's separate kernels, if they have it."""
    from precast._ops.norm.fused_add_rmsnorm import fused_add_rmsnorm, gemma_fused_add_rmsnorm
    from precast._ops.quantize.per_tensor import per_token_quant_fp8, static_quant_fp8
    from precast._ops.quantize.per_token_group import per_token_group_quant_8bit

    _, residual, weight, residual_out, norm_out, quant_out, scale_out, *numbers = tensors
    scale_factor, mode, group_size, eps, weight_bias = numbers
    norms = {0.0: fused_add_rmsnorm, 1.0: gemma_fused_add_rmsnorm}
    norm = norms.get(float(weight_bias))
    if norm is None or total.dtype == torch.float32 or not total.is_cuda:
        return False
    added = residual.clone()
    norm(total, added, weight, eps)
    if residual_out is not None:
        residual_out.copy_(added)
    if norm_out is not None:
        norm_out.copy_(total)
    if mode == TENSOR:
        static_quant_fp8(total, scale_factor, out=quant_out)
    elif mode == TOKEN:
        per_token_quant_fp8(total, EPS, out=quant_out, out_scale=scale_out)
    elif mode == GROUP:
        per_token_group_quant_8bit(
            total,
            group_size,
            EPS * FP8_MAX,
            column_major_scales=True,
            scale_tma_aligned=True,
            scale_ue8m0=True,
            use_packed_ue8m0=True,
            out=quant_out,
            out_scale=scale_out,
        )
    return True
