# SPDX-License-Identifier: Apache-2.0
"""Keys and values of latent attention in e4m3: 16 bits of the projection read, 8 bits written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from _harness import Case
from _script import script

from precast.concat_ops import concat_mla_kv_quant_fp8_reference
from precast.testing import poison

DTYPES = ("bf16", "f16")
NOPE, ROPE, V = 128, 64, 128
SHAPES = ((1, 128), (64, 128), (2048, 128), (16384, 128), (16384, 12))


def _eager(kv: torch.Tensor, pe: torch.Tensor, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    results = concat_mla_kv_quant_fp8_reference(kv, pe)
    return tuple(target.copy_(result) for target, result in zip(outputs, results))


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, heads in SHAPES:

        def make(tokens: int = tokens, heads: int = heads) -> tuple[Any, ...]:
            kv = torch.randn(tokens, heads, NOPE + V, device="cuda").to(dtype)
            latent = torch.randn(tokens, 512 + ROPE, device="cuda").to(dtype)
            outputs = (
                poison(torch.empty(tokens, heads, size, dtype=torch.float8_e4m3fn, device="cuda"))
                for size in (NOPE + ROPE, V)
            )
            return kv, latent[:, 512:], *outputs

        read, written = heads * (NOPE + V) + ROPE, heads * (NOPE + ROPE + V)
        yield Case(
            "concat_mla_kv_quant_fp8",
            f"[{tokens}, {heads}, {NOPE} + {V}] + {ROPE}",
            tokens * (read * dtype.itemsize + written),
            make,
            bind=lambda pack: lambda *args: pack(*args),
            eager=_eager,
        )


if __name__ == "__main__":
    script(__file__)
