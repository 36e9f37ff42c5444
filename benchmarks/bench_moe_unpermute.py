# SPDX-License-Identifier: Apache-2.0
"""Weighted sums of the rows that the experts of tokens computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from _experts import MIXTRAL, QWEN, TOKENS, Layer, numbers, order
from _harness import Case
from _script import script

from precast.testing import poison

DTYPES = ("bf16",)


def _eager(
    x: torch.Tensor, of_slot: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    rows = x[of_slot.long()]  # [tokens, slots, columns]
    return out.copy_((rows * weights[..., None]).sum(1))


def _case(layer: Layer, tokens: int) -> Case:
    hidden, rows = layer.hidden, tokens * layer.topk

    def make() -> tuple[Any, ...]:
        weights = numbers(tokens, layer.topk, dtype=torch.float32).sigmoid()
        out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="cuda")
        return numbers(rows, hidden), order(layer, tokens)[1], weights, poison(out)

    return Case(
        "moe_unpermute",
        f"{layer.name}, {tokens} tokens",
        2 * hidden * (tokens + rows),
        make,
        bind=lambda f: lambda x, of_slot, weights, out: f(x, of_slot, weights, out=out),
        eager=_eager,
    )


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for layer in (QWEN, MIXTRAL):
        for tokens in TOKENS:
            yield _case(layer, tokens)


if __name__ == "__main__":
    script(__file__)
