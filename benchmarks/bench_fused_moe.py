# SPDX-License-Identifier: Apache-2.0
"""The fused mixture of experts, beside torch's grouped products with the same steps in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _experts import DEEPSEEK_RANK, GPT_OSS, MIXTRAL, QWEN, QWEN_RANK, Layer, numbers, selection
from _harness import Case
from _script import script

import precast
from precast.testing import Tolerance, poison

DTYPES = ("bf16",)
TOKENS = (1, 8, 64, 1024, 4096, 16384)
#: How weights are stored, and the bytes of a number.
BF16, FP8, MXFP4, INT4 = "", " FP8", " MXFP4", " int4"
BYTES = {BF16: 2.0, FP8: 1.0, MXFP4: 17 / 32, INT4: 33 / 64}
#: Sums of rounded numbers; those of e4m3 also of codes next to a boundary.
CLOSE = {
    BF16: Tolerance(2.0**-6, 3e-2),
    FP8: Tolerance(2.0**-3, 0.2),
    MXFP4: Tolerance(2.0**-6, 3e-2),
    INT4: Tolerance(2.0**-3, 0.2),
}


class Memory:
    """What is no operand: scales, and scratch memory."""

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


def _packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of MXFP4 with the size of a weight's, in any order, and scales."""
    experts, rows, columns = weight.shape
    codes = torch.empty(experts, rows, columns // 2, dtype=torch.uint8, device="cuda")
    shape = experts, rows // 64, columns // 128, 16, 16
    scales = torch.empty(shape, dtype=torch.uint8, device="cuda")
    exponent = 126 - round(math.log2(columns) / 2)
    return codes.random_(0, 256), scales.random_(exponent - 1, exponent + 1)


def _int4(fc1: torch.Tensor, fc2: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Both weights as numbers of int4, in any order, and the eight scales of a call."""
    weights, scales, of_columns, factors = [], [], [], []
    for weight in (fc1, fc2):
        experts, rows, columns = weight.shape
        codes = torch.empty(experts, rows, columns // 2, dtype=torch.uint8, device="cuda")
        weights.append(codes.random_(0, 256))
        shape = experts, rows // 64, columns // 128, 8, 8
        scales.append(torch.rand(shape, device=codes.device).mul_(0.4 * columns**-0.5).bfloat16())
        of_columns.append((32 + numbers(columns).float()).bfloat16())
        factors.append(torch.full((experts,), 1 / 32, device=codes.device))
    none = torch.empty(0, dtype=torch.bfloat16, device="cuda")
    return *weights, *scales, *of_columns, none, none, *factors


def _bind(stored: str) -> Callable[..., Any]:
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
                use_deepseek_fp8_block_scale=stored == FP8,
                use_w4_group_scaling=stored in (MXFP4, INT4),
                use_packed_weights=stored == INT4,
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


def _case(layer: Layer, tokens: int, stored: str) -> Case:
    hidden, inter, experts, topk = layer[1:]
    rows, size = tokens * topk, BYTES[stored]
    touched = min(experts, rows)

    def make() -> tuple[Any, ...]:
        fc1, fc2 = _weights(experts, 2 * inter, hidden), _weights(experts, hidden, inter)
        scales: list[torch.Tensor] = []
        if stored == INT4:
            fc1, fc2, *scales = _int4(fc1, fc2)
        elif stored != BF16:
            quantised = _blocks if stored == FP8 else _packed
            (fc1, first), (fc2, second) = quantised(fc1), quantised(fc2)
            scales = [first, second]
        needed = precast.cutlass_fused_moe_workspace_size(
            *(tokens, hidden, inter, experts, topk),
            x_dtype=torch.bfloat16,
            weight_dtype=fc1.dtype,
            use_deepseek_fp8_block_scale=stored == FP8,
            use_w4_group_scaling=stored in (MXFP4, INT4),
            use_packed_weights=stored == INT4,
        )
        memory = Memory(scales, torch.empty(needed, dtype=torch.uint8, device="cuda"))
        weights = numbers(tokens, topk, dtype=torch.float32).sigmoid()
        out = poison(torch.empty(tokens, hidden, dtype=torch.bfloat16, device="cuda"))
        x = numbers(tokens, hidden)
        return x, selection(layer, tokens), weights, fc1, fc2, memory, out

    return Case(
        "cutlass_fused_moe",
        f"{layer.name}{stored}, {tokens} tokens",
        # At least the weights of experts that may have tokens, tokens and results.
        round(touched * 3 * hidden * inter * size) + 4 * tokens * hidden,
        make,
        bind=_bind(stored),
        eager=_eager if stored == BF16 else None,
        flops=6 * rows * hidden * inter,
        dtype=torch.float8_e4m3fn if stored == FP8 else torch.bfloat16,
        close=CLOSE[stored],
        tolerances={6: CLOSE[stored]},
        touches_part=True,
    )


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for layer, stored in (
        (QWEN_RANK, BF16),
        (QWEN, BF16),
        (MIXTRAL, BF16),
        (QWEN, FP8),
        (DEEPSEEK_RANK, FP8),
        (GPT_OSS, MXFP4),
        (GPT_OSS, INT4),
    ):
        for tokens in TOKENS:
            yield _case(layer, tokens, stored)


if __name__ == "__main__":
    script(__file__)
