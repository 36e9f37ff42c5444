# SPDX-License-Identifier: Apache-2.0
"""Attention over paged caches in NVFP4: 9 bytes are read for 16 keys or values.

A wrapper plans at its first call, which is not measured. Plain PyTorch dequantises the cache first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from _attention import PAGE, Arguments, Batch, Function, workspace
from _harness import Case
from _script import script
from bench_attention import DECODE, DECODES, FEW_PREFILLS, HEADS, PAGED

import precast
from precast.testing.tolerances import tolerance_of_attention

SCALE = 0.002
DIM = 128


def _packed(like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Any codes of keys and of values, and block scales with which the numbers are near 1."""
    codes, scales = (like[..., : DIM // n].to(torch.uint8).contiguous() for n in (2, 16))
    made = [torch.empty_like(x).random_(256) for x in (codes, codes)]
    made += [torch.empty_like(x).random_(90, 110).view(torch.float8_e4m3fn) for x in (scales,) * 2]
    return *made, torch.empty(1, device=like.device).fill_(SCALE)


def _case(op: str, batch: Batch, shape: str, dtype: torch.dtype) -> Case:
    decode = op == DECODE

    def make() -> Arguments:
        q, k, _, *table = batch.decode() if decode else batch.paged()
        return q, *_packed(k), *table

    def bind(wrapper: Function) -> Function:
        planned: list[Any] = []

        def call(q: Any, k: Any, v: Any, k_sf: Any, v_sf: Any, g: Any, *table: Any) -> Any:
            if not planned:
                more = {"use_tensor_cores": True} if decode else {}
                planned.append(wrapper(workspace(q), "NHD", **more))
                causal = {} if decode else {"causal": True}
                dtypes = {"q_data_type": q.dtype, "kv_data_type": torch.uint8}
                sizes = batch.qo_heads, batch.kv_heads, batch.dim, PAGE
                planned[0].plan(*table, *sizes, **dtypes, **causal)
            return planned[0].run(q, (k, v), k_scale=SCALE, v_scale=SCALE, kv_cache_sf=(k_sf, v_sf))

        return call

    def eager(q: Any, k: Any, v: Any, k_sf: Any, v_sf: Any, g: Any, *table: Any) -> Any:
        pairs = ((k, k_sf), (v, v_sf))
        k, v = (precast.nvfp4_kv_dequantize(*pair, g, q.dtype) for pair in pairs)
        return (batch.eager_decode if decode else batch.eager_paged)(q, k, v, *table)

    cache = 2 * sum(batch.lengths) * batch.kv_heads * batch.dim
    return Case(
        op,
        f"{batch.qo_heads}/{batch.kv_heads} NVFP4 KV {shape}",
        cache * 9 // 16 + 2 * sum(batch.queries) * batch.qo_heads * batch.dim * dtype.itemsize,
        make,
        bind,
        eager,
        batch.flops,
        close=tolerance_of_attention(dtype),
        reads=decode,
    )


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for count, tokens in DECODES:
        batch = Batch([1] * count, [tokens] * count, *HEADS[0], DIM, dtype, dtype)
        yield _case(DECODE, batch, f"b{count} {tokens}", dtype)
    for count, tokens in FEW_PREFILLS:
        lengths = [tokens] * count
        batch = Batch(lengths, lengths, *HEADS[0], DIM, dtype, dtype)
        yield _case(PAGED, batch, f"{count} x {tokens}", dtype)


if __name__ == "__main__":
    script(__file__)
