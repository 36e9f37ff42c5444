# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's mixtures of experts as an engine calls them: tuned, with their own memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def fused(moe: Callable[..., Any]) -> Callable[..., Any]:
    """Their function with our arguments; its first call with a number of tokens tunes it.

    Products by block scales have no tactics, so they are not tuned.

    Raises
    ------
    ValueError
        For weights of 4 bits, whose bytes have another order in FlashInfer.
    """
    import flashinfer

    memory: dict[Any, torch.Tensor] = {}

    def call(
        x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, *rest: Any, **options: Any
    ) -> Any:
        fc1, fc2 = rest[:2]
        if options["use_w4_group_scaling"]:
            raise ValueError("FlashInfer's weights of 4 bits have another order")
        has_blocks = options["use_deepseek_fp8_block_scale"]
        key = x.shape, experts.shape, fc2.shape, fc2.dtype
        is_new = key not in memory
        if is_new:
            size = flashinfer.fused_moe.cutlass_fused_moe_workspace_size(
                *(*x.shape, fc2.shape[2], len(fc2), experts.shape[1]),
                x_dtype=x.dtype,
                weight_dtype=fc1.dtype,
                use_deepseek_fp8_block_scale=has_blocks,
            )
            memory[key] = torch.empty(size, dtype=torch.uint8, device=x.device)
        options["workspace_buffer"] = memory[key]
        if is_new and not has_blocks:
            with flashinfer.autotune(True, tuning_buckets=(len(x),)):
                moe(x, experts, weights, *rest, **options)
        return moe(x, experts, weights, *rest, **options)

    return call


def few(moe: Callable[..., Any]) -> Callable[..., Any]:
    """Their function for few tokens, with scratch memory that it keeps up from call to call."""
    import flashinfer

    memory: list[torch.Tensor] = []

    def call(x: torch.Tensor, *rest: Any, scratchpad: Any, **options: Any) -> Any:
        if not memory:
            memory.append(flashinfer.fused_moe.alloc_scratchpad(x.device))
        return moe(x, *rest, scratchpad=memory[0], **options)

    return call
