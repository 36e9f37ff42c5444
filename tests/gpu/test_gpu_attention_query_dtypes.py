# SPDX-License-Identifier: Apache-2.0
"""Queries of 8 bits give the bits of the same queries in 16, also in CUDA graphs and compiled.

Where kernels for Hopper multiply e4m3, results are near instead (test_gpu_attention_sm90.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import precast

E4M3 = torch.float8_e4m3fn
LENGTHS = (1, 0, 37, 300)
QUERIES = (1, 0, 5, 64)
PAGE = 16
dtypes = pytest.mark.parametrize(
    ("q_dtype", "kv_dtype", "o_dtype"),
    [
        (E4M3, E4M3, torch.bfloat16),
        (E4M3, E4M3, torch.float16),
        (torch.float8_e5m2, torch.bfloat16, torch.bfloat16),
    ],
)


def _bounds(sizes: list[int]) -> torch.Tensor:
    return torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()


def _planned(q_dtype: torch.dtype, kv_dtype: torch.dtype, o_dtype: torch.dtype) -> Any:
    pages = [-(-length // PAGE) for length in LENGTHS]
    last = [length - PAGE * max(count - 1, 0) for length, count in zip(LENGTHS, pages)]
    wrapper = precast.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    )
    wrapper.plan(
        _bounds([*QUERIES]),
        _bounds(pages),
        torch.arange(sum(pages), dtype=torch.int32, device="cuda").flip(0),
        torch.tensor(last, dtype=torch.int32, device="cuda"),
        *(8, 2, 128, PAGE),
        causal=True,
        q_data_type=q_dtype,
        kv_data_type=kv_dtype,
        o_data_type=o_dtype,
    )
    return wrapper


def _call(
    q_dtype: torch.dtype, kv_dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.randn(sum(QUERIES), 8, 128, device="cuda", generator=generator)
    pages = sum(-(-length // PAGE) for length in LENGTHS)
    cache = torch.randn(pages, 2, PAGE, 2, 128, device="cuda", generator=generator)
    return q.to(q_dtype), cache.to(kv_dtype)


@dtypes
def test_bits_are_those_of_16_bit_queries(
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    o_dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    q, cache = _call(q_dtype, kv_dtype, generator)
    scales = {"q_scale": 0.5, "k_scale": 2.0, "v_scale": 3.0}
    wrapper = _planned(q_dtype, kv_dtype, o_dtype)
    out, lse = wrapper.run(q, cache, **scales, return_lse=True)
    wide = kv_dtype if kv_dtype.itemsize == 2 else o_dtype
    want = _planned(wide, kv_dtype, o_dtype).run(q.to(wide), cache, **scales, return_lse=True)
    assert out.dtype is o_dtype
    if wrapper._plan.multiplies_fp8:  # Probabilities are rounded to e4m3.
        torch.testing.assert_close(out, want[0], atol=0.3, rtol=0.1)
        torch.testing.assert_close(lse, want[1], atol=6e-2, rtol=0)
        return
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])


def test_a_graph_converts_what_the_queries_hold_at_replay(generator: torch.Generator) -> None:
    q, cache = _call(E4M3, E4M3, generator)
    wrapper = _planned(E4M3, E4M3, torch.bfloat16)
    out = torch.empty(q.shape, dtype=torch.bfloat16, device="cuda")
    wrapper.run(q, cache, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(q, cache, out=out)
    other, _ = _call(E4M3, E4M3, generator)
    q.copy_(other)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, wrapper.run(other, cache))


def test_other_dtypes_than_planned_leave_the_output(generator: torch.Generator) -> None:
    q, cache = _call(E4M3, E4M3, generator)
    wrapper = _planned(E4M3, E4M3, torch.bfloat16)
    out = torch.full(q.shape, 7.0, dtype=torch.bfloat16, device="cuda")
    for wrong in (q.bfloat16(), q.to(torch.float8_e5m2)):
        with pytest.raises(ValueError, match="does not match the q_data_type"):
            wrapper.run(wrong, cache, out=out)
    assert bool((out == 7).all())
