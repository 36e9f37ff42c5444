# SPDX-License-Identifier: Apache-2.0
"""Copies of tokens in the order of experts, as e4m3 with scales of 128 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from _experts import DEEPSEEK_RANK, QWEN, TOKENS, Layer, numbers, order
from _harness import Case
from _script import script

from precast.fused_moe import moe_permute_quant_reference

DTYPES = ("bf16",)


def _case(layer: Layer, tokens: int) -> Case:
    hidden, rows = layer.hidden, tokens * layer.topk

    def make() -> tuple[Any, ...]:
        return numbers(tokens, hidden), order(layer, tokens)[1]

    return Case(
        "moe_permute_quant",
        f"{layer.name}, {tokens} tokens",
        hidden * (2 * tokens + rows) + 4 * rows * hidden // 128,
        make,
        bind=lambda f: f,
        eager=moe_permute_quant_reference,
    )


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for layer in (QWEN, DEEPSEEK_RANK):
        for tokens in TOKENS:
            yield _case(layer, tokens)


if __name__ == "__main__":
    script(__file__)
