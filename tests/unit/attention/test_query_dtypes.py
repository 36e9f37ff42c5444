# SPDX-License-Identifier: Apache-2.0
"""Queries of 8 bits are those of 16 bits with the same values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import precast
from precast.errors import UnsupportedConfigError

E4M3 = torch.float8_e4m3fn
BOUNDS = torch.tensor([0, 3, 4], dtype=torch.int32)
TABLE = (
    torch.tensor([0, 2, 3], dtype=torch.int32),
    torch.tensor([2, 0, 1], dtype=torch.int32),
    torch.tensor([3, 5], dtype=torch.int32),
)
DTYPES = [
    # queries, keys and values, outputs, and what kernels compute with
    (E4M3, E4M3, torch.bfloat16, torch.bfloat16),
    (E4M3, E4M3, torch.float16, torch.float16),
    (E4M3, torch.float16, torch.bfloat16, torch.float16),
    (torch.float8_e5m2, E4M3, torch.float32, torch.bfloat16),
]


@pytest.fixture(autouse=True)
def reference() -> Any:
    with precast.reference_mode():
        yield


def prefill(q: torch.dtype, kv: torch.dtype, o: torch.dtype | None) -> Any:
    wrapper = precast.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1 << 16, dtype=torch.uint8))
    dtypes = {"q_data_type": q, "kv_data_type": kv, "o_data_type": o}
    wrapper.plan(BOUNDS, *TABLE, 4, 2, 64, 8, causal=True, **dtypes)
    return wrapper


def decode(q: torch.dtype, kv: torch.dtype, o: torch.dtype | None) -> Any:
    wrapper = precast.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 16, dtype=torch.uint8))
    dtypes = {"q_data_type": q, "kv_data_type": kv, "o_data_type": o}
    wrapper.plan(*TABLE, 4, 2, 64, 8, **dtypes)
    return wrapper


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.mark.parametrize(("q_dtype", "kv_dtype", "o_dtype", "computed"), DTYPES)
@pytest.mark.parametrize(("planned", "rows"), [(prefill, 4), (decode, 2)])
def test_the_result_is_that_of_the_same_queries_in_16_bits(
    planned: Any,
    rows: int,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    o_dtype: torch.dtype,
    computed: torch.dtype,
) -> None:
    q, cache = numbers(rows, 4, 64, dtype=q_dtype), numbers(3, 2, 8, 2, 64, dtype=kv_dtype)
    wrapper = planned(q_dtype, kv_dtype, o_dtype)
    assert wrapper._cached_q_data_type is q_dtype
    assert wrapper._cached_o_data_type is o_dtype
    scales = {"q_scale": 0.5, "k_scale": 2.0, "v_scale": 3.0}
    out, lse = wrapper.run(q, cache, **scales, return_lse=True)
    want = planned(computed, kv_dtype, o_dtype).run(
        q.to(computed), cache, **scales, return_lse=True
    )
    assert out.dtype is o_dtype
    assert out.abs().max() > 0
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])
    given = torch.full_like(out, 7)
    assert wrapper.run(q, cache, **scales, out=given) is given
    assert torch.equal(given, out)


def test_queries_of_another_dtype_than_planned_are_an_error() -> None:
    q, cache = numbers(4, 4, 64, dtype=torch.bfloat16), numbers(3, 2, 8, 2, 64, dtype=E4M3)
    wrapper = prefill(E4M3, E4M3, torch.bfloat16)
    out = torch.full((4, 4, 64), 7.0, dtype=torch.bfloat16)
    for wrong in (q, q.to(torch.float8_e5m2)):
        with pytest.raises(ValueError, match="does not match the q_data_type"):
            wrapper.run(wrong, cache, out=out)
    with pytest.raises(ValueError, match=r"dtype of out: expected torch\.bfloat16"):
        wrapper.run(q.to(E4M3), cache, out=out.float())
    assert bool((out == 7).all())


def test_outputs_need_a_dtype_of_their_own() -> None:
    with pytest.raises(UnsupportedConfigError, match="o_data_type must be float16, bfloat16"):
        prefill(E4M3, E4M3, None)
    with pytest.raises(UnsupportedConfigError, match="kv_data_type must be"):
        prefill(E4M3, torch.int8, torch.bfloat16)
