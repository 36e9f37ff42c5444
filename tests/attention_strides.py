# SPDX-License-Identifier: Apache-2.0
"""Calls of attention whose values have other strides than their keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import precast

I32 = torch.int32
HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 8
TABLE = [0, 2, 3], [4, 1, 0], [3, 8]
MODELS = {"NHD": (8, PAGE, KV_HEADS, DIM), "HND": (8, KV_HEADS, PAGE, DIM)}

#: From keys and values to a result.
Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def spread(x: torch.Tensor, by: int) -> torch.Tensor:
    """Return the same values with gaps after each row: all strides but the last one are larger."""
    wide = x.new_zeros(*x.shape[:-1], x.shape[-1] + 16 * by)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def turned(x: torch.Tensor) -> torch.Tensor:
    """Return the same values with the order of two strides exchanged."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def calls(device: str, dtype: torch.dtype) -> dict[str, tuple[Call, tuple[int, ...]]]:
    """Make each call and the shape of its keys, which is that of its values."""
    generator = torch.Generator(device).manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=I32, device=device)

    rows, tokens, table = ints([0, 3, 4]), ints([0, 5, 14]), [ints(t) for t in TABLE]
    decoded, q = normal(2, HEADS, DIM), normal(4, HEADS, DIM)
    types: dict[str, Any] = {"q_data_type": dtype}

    def workspace() -> torch.Tensor:
        return torch.empty(32 << 20, dtype=torch.uint8, device=device)

    def ragged(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        wrapper = precast.BatchPrefillWithRaggedKVCacheWrapper(workspace())
        wrapper.plan(rows, tokens, HEADS, KV_HEADS, DIM, causal=True, **types)
        return wrapper.run(q, k, v)

    def single_decode(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return precast.single_decode_with_kv_cache(q[0], k, v)

    def single_prefill(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return precast.single_prefill_with_kv_cache(q, k, v, causal=True)

    def sparse(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        wrapper = precast.VariableBlockSparseAttentionWrapper(workspace())
        seen = torch.ones(KV_HEADS, 1, 2, dtype=torch.bool, device=device)
        sizes = ints([4]).expand(KV_HEADS, 1), ints([6, 8]).expand(KV_HEADS, 2)
        wrapper.plan(seen, *sizes, HEADS, KV_HEADS, DIM, **types)
        return wrapper.run(q.transpose(0, 1).contiguous(), k.transpose(0, 1), v.transpose(0, 1))

    def of_pages(layout: str) -> dict[str, Call]:
        def decode(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            wrapper = precast.BatchDecodeWithPagedKVCacheWrapper(workspace(), layout)
            wrapper.plan(*table, HEADS, KV_HEADS, DIM, PAGE, **types)
            return wrapper.run(decoded, (k, v))

        def prefill(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            wrapper = precast.BatchPrefillWithPagedKVCacheWrapper(workspace(), layout)
            wrapper.plan(rows, *table, HEADS, KV_HEADS, DIM, PAGE, causal=True, **types)
            return wrapper.run(q, (k, v))

        def append(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            new, places = normal(2, 4, KV_HEADS, DIM), (ints([0, 0, 1, 1]), ints([9, 10, 6, 7]))
            precast.append_paged_kv_cache(
                *new, *places, (k, v), table[1], table[0], table[2], layout
            )
            return torch.stack([k, v])

        return {"decode": decode, "prefill": prefill, "append": append}

    plain: dict[str, Call] = {
        "ragged": ragged,
        "single_decode": single_decode,
        "single_prefill": single_prefill,
        "variable sparse": sparse,
    }
    made = {name: (call, (14, KV_HEADS, DIM)) for name, call in plain.items()}
    for layout, shape in MODELS.items():
        made |= {f"{name} {layout}": (call, shape) for name, call in of_pages(layout).items()}
    return made


def results(name: str, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Run a call with equal strides, then with values, with keys, and with both in other ones."""
    found = []
    for change_k, change_v in (
        (torch.clone, torch.clone),
        (torch.clone, lambda x: spread(x, 1)),
        (lambda x: spread(x, 2), torch.clone),
        (lambda x: spread(x, 1), turned),
        (turned, lambda x: spread(x, 3)),
    ):
        call, shape = calls(device, dtype)[name]
        generator = torch.Generator(device).manual_seed(5)
        k, v = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(2))
        found.append(call(change_k(k), change_v(v)))
    return found


NAMES = [
    *("ragged", "single_decode", "single_prefill", "variable sparse"),
    *(f"{name} {layout}" for layout in MODELS for name in ("decode", "prefill", "append")),
]
