# SPDX-License-Identifier: Apache-2.0
"""The order of rows by experts, and copies of tokens in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from _experts import MIXTRAL, QWEN, TOKENS, Layer, numbers, order, selection
from _harness import Case
from _script import script

from precast.fused_moe import moe_sort_reference
from precast.testing import poison

DTYPES = ("bf16",)


def _sort(layer: Layer, tokens: int) -> Case:
    rows = tokens * layer.topk

    def make() -> tuple[Any, ...]:
        return selection(layer, tokens), layer.experts

    return Case(
        "moe_sort",
        f"{layer.name}, {tokens} tokens",
        # Experts, rows of slots and experts of rows.
        3 * 4 * rows,
        make,
        bind=lambda f: lambda selected, experts: f(selected, experts),
        eager=moe_sort_reference,
    )


def _permute(layer: Layer, tokens: int) -> Case:
    hidden, rows = layer.hidden, tokens * layer.topk

    def make() -> tuple[Any, ...]:
        out = torch.empty(rows, hidden, dtype=torch.bfloat16, device="cuda")
        return numbers(tokens, hidden), order(layer, tokens)[1], poison(out)

    def eager(x: torch.Tensor, of_slot: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        token = torch.arange(len(x), device=x.device).repeat_interleave(of_slot.shape[1])
        return out.index_copy_(0, of_slot.flatten().long(), x[token])

    return Case(
        "moe_permute",
        f"{layer.name}, {tokens} tokens",
        2 * hidden * (tokens + rows),
        make,
        bind=lambda f: lambda x, of_slot, out: f(x, of_slot, out=out),
        eager=eager,
    )


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for layer in (QWEN, MIXTRAL):
        for tokens in TOKENS:
            yield _sort(layer, tokens)
            yield _permute(layer, tokens)


if __name__ == "__main__":
    script(__file__)
