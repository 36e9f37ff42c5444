# SPDX-License-Identifier: Apache-2.0
"""Routing by a table: a sector of the logits read for each expert, and a row of the table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from _harness import Case
from _script import script

from precast.fused_moe import hash_topk_reference

DTYPES = ("f32",)
EXPERTS, VOCABULARY, TOPK, SCALE = 384, 129280, 6, 2.5
SECTOR = 32  # bytes, the least that a load reads
TOKENS = (1, 64, 1024, 16384, 65536)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for tokens in TOKENS:

        def make(tokens: int = tokens) -> tuple[Any, ...]:
            logits = torch.randn(tokens, EXPERTS, device="cuda")
            ids = torch.randint(0, VOCABULARY, (tokens,), device=logits.device)
            table = torch.randint(0, EXPERTS, (VOCABULARY, TOPK), device=logits.device)
            return logits, ids, table.int(), 1, SCALE

        yield Case(
            "hash_topk",
            f"{tokens} tokens, {TOPK} of {EXPERTS} and a shared one",
            tokens * ((TOPK + 1) * SECTOR + 8 + (TOPK + 1) * 8),
            make,
            bind=lambda route: lambda *args: route(*args),
            eager=hash_topk_reference,
        )


if __name__ == "__main__":
    script(__file__)
