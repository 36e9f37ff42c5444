# SPDX-License-Identifier: Apache-2.0
"""The function between the products of experts, as it is and quantised to e4m3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from _experts import MIXTRAL, QWEN, TOKENS, Layer, numbers, order
from _harness import Case
from _script import script

from precast import fused_moe
from precast.testing import Tolerance

DTYPES = ("bf16",)
#: Scales are those of sigmoids that are approximated.
OF_SCALES = Tolerance(2.0**-3, 2.0**-9)


def _cases(layer: Layer, tokens: int) -> Iterator[Case]:
    inter, rows = layer.inter, tokens * layer.topk
    label = f"{layer.name}, {tokens} tokens"

    def make() -> tuple[Any, ...]:
        offsets, _, experts = order(layer, tokens)
        return numbers(rows, 2 * inter), offsets, experts

    def make_quant() -> tuple[Any, ...]:
        scale = torch.empty(1, dtype=torch.float32, device="cuda").fill_(16.0)
        return *make(), scale

    read = 2 * 2 * inter * rows
    for op, size, of_op in (
        ("expert_activation", 2 * inter, make),
        ("expert_activation_quant", inter, make_quant),
        ("expert_activation_block_quant", inter + 4 * inter // 128, make),
    ):
        yield Case(
            op,
            label,
            read + size * rows,
            of_op,
            bind=lambda f: f,
            eager=getattr(fused_moe, f"{op}_reference"),
            close=None if op == "expert_activation" else OF_SCALES,
        )


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for layer in (QWEN, MIXTRAL):
        for tokens in TOKENS:
            yield from _cases(layer, tokens)


if __name__ == "__main__":
    script(__file__)
