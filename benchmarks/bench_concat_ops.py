# SPDX-License-Identifier: Apache-2.0
"""concat_mla_k: each head's part read once, the shared part read from cache, the keys written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from _harness import Case
from _script import script

from precast.testing import poison

HEADS, NOPE, ROPE = 128, 128, 64
TOKENS = (1, 64, 2048, 16384)


def _eager(k: Any, k_nope: Any, k_rope: Any) -> None:
    k[..., :NOPE] = k_nope
    k[..., NOPE:] = k_rope


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for tokens in TOKENS:

        def make(tokens: int = tokens) -> tuple[torch.Tensor, ...]:
            k = poison(torch.empty(tokens, HEADS, NOPE + ROPE, dtype=dtype, device="cuda"))
            # A slice of the up-projection, which holds the values behind the keys.
            up = torch.randn(tokens, HEADS, 2 * NOPE, device="cuda").to(dtype)
            return k, up[..., :NOPE], torch.randn(tokens, 1, ROPE, device="cuda").to(dtype)

        yield Case(
            "concat_mla_k",
            f"[{tokens}, {HEADS}, {NOPE} + {ROPE}]",
            tokens * (HEADS * (2 * NOPE + ROPE) + ROPE) * dtype.itemsize,
            make,
            lambda concat: lambda k, nope, rope: concat(k, nope, rope),
            _eager,
        )


if __name__ == "__main__":
    script(__file__)
