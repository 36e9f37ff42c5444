# SPDX-License-Identifier: Apache-2.0
"""The fused mixture of experts, beside torch's grouped products with the same steps in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from _experts import DEEPSEEK_RANK, MIXTRAL, QWEN, QWEN_RANK, Layer, numbers, selection
from _harness import Case
from _script import script

import precast
from precast.testing import Tolerance, poison

DTYPES = ("bf16",)
TOKENS = (1, 8, 64, 1024, 4096, 16384)
#: Sums of rounded numbers; those of e4m3 also of codes next to a boundary.
CLOSE = {False: Tolerance(2.0**-6, 3e-2), True: Tolerance(2.0**-3, 0.2)}


class Memory:
    """What is no operand: scales of FP8, and scratch memory."""

    def __init__(self, scales: list[torch.Tensor], workspace: torch.Tensor) -> None:
        self.scales, self.workspace = scales, workspace


def _weights(*shape: int) -> torch.Tensor:
    return numbers(*shape).mul_(shape[-1] ** -0.5)


def _blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An e4m3 weight with scales of blocks of 128 x 128."""
    experts, rows, columns = weight.shape
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device="cuda")
    scales = torch.empty(experts, rows // 128, columns // 128, device="cuda")
    for expert, matrix in enumerate(weight):
        blocks = matrix.float().view(rows // 128, 128, columns // 128, 128)
        scales[expert] = blocks.abs().amax((1, 3)) / 448
        codes[expert] = (blocks / scales[expert, :, None, :, None]).view(rows, columns)
    return codes, scales


def _bind(is_fp8: bool) -> Callable[..., Any]:
    def bind(moe: Callable[..., Any]) -> Callable[..., Any]:
        def run(
            x: torch.Tensor,
            experts: torch.Tensor,
            weights: torch.Tensor,
            fc1: torch.Tensor,
            fc2: torch.Tensor,
            memory: Memory,
            out: torch.Tensor,
        ) -> torch.Tensor:
            moe(
                *(x, experts, weights, fc1, fc2, x.dtype, memory.scales),
                use_deepseek_fp8_block_scale=is_fp8,
                output=out,
                workspace_buffer=memory.workspace,
            )
            return out

        return run

    return bind


def _eager(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    fc1: torch.Tensor,
    fc2: torch.Tensor,
    memory: Memory,
    out: torch.Tensor,
) -> torch.Tensor:
    """With ``torch._grouped_mm``; nothing is read by the host."""
    flat = experts.flatten().long()
    by_expert = flat.argsort(stable=True)
    counts = torch.zeros(len(fc1), dtype=torch.int32, device=x.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    ends = counts.cumsum(0).int()
    rows = x[by_expert // experts.shape[1]]
    up, gate = torch._grouped_mm(rows, fc1.mT, ends).chunk(2, dim=1)
    rows = torch._grouped_mm(torch.nn.functional.silu(gate) * up, fc2.mT, ends)
    back = torch.empty_like(rows)
    back[by_expert] = rows
    return out.copy_((back.view(*experts.shape, -1) * weights[..., None]).sum(1))


def _case(layer: Layer, tokens: int, is_fp8: bool) -> Case:
    hidden, inter, experts, topk = layer[1:]
    rows, size = tokens * topk, 1 if is_fp8 else 2
    touched = min(experts, rows)

    def make() -> tuple[Any, ...]:
        fc1, fc2 = _weights(experts, 2 * inter, hidden), _weights(experts, hidden, inter)
        scales: list[torch.Tensor] = []
        if is_fp8:
            (fc1, first), (fc2, second) = _blocks(fc1), _blocks(fc2)
            scales = [first, second]
        needed = precast.cutlass_fused_moe_workspace_size(
            *(tokens, hidden, inter, experts, topk),
            x_dtype=torch.bfloat16,
            weight_dtype=fc1.dtype,
            use_deepseek_fp8_block_scale=is_fp8,
        )
        memory = Memory(scales, torch.empty(needed, dtype=torch.uint8, device="cuda"))
        weights = numbers(tokens, topk, dtype=torch.float32).sigmoid()
        out = poison(torch.empty(tokens, hidden, dtype=torch.bfloat16, device="cuda"))
        x = numbers(tokens, hidden)
        return x, selection(layer, tokens), weights, fc1, fc2, memory, out

    return Case(
        "cutlass_fused_moe",
        f"{layer.name}{' FP8' if is_fp8 else ''}, {tokens} tokens",
        # At least the weights of experts that may have tokens, tokens and results.
        touched * 3 * hidden * inter * size + 4 * tokens * hidden,
        make,
        bind=_bind(is_fp8),
        eager=None if is_fp8 else _eager,
        flops=6 * rows * hidden * inter,
        dtype=torch.float8_e4m3fn if is_fp8 else torch.bfloat16,
        close=CLOSE[is_fp8],
        tolerances={6: CLOSE[is_fp8]},
    )


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for layer, is_fp8 in (
        (QWEN_RANK, False),
        (QWEN, False),
        (MIXTRAL, False),
        (QWEN, True),
        (DEEPSEEK_RANK, True),
    ):
        for tokens in TOKENS:
            yield _case(layer, tokens, is_fp8)


if __name__ == "__main__":
    script(__file__)
