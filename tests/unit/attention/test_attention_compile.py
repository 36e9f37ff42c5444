# SPDX-License-Identifier: Apache-2.0
"""``torch.compile`` of runs and of one request: one graph, the numbers of the call without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import precast
from precast._op.torch_ops import torch_ops
from precast._ops.attention import sm90

HEAD_DIM = 256
I32 = torch.int32
ROWS = torch.tensor([0, 3, 4], dtype=I32)
TABLE = (
    torch.tensor([0, 2, 3], dtype=I32),
    torch.tensor([4, 1, 0], dtype=I32),
    torch.tensor([3, 8], dtype=I32),
)
SIZES = (4, 2, HEAD_DIM)
OPTIONS = {"causal": True, "q_data_type": "bfloat16"}

pytestmark = pytest.mark.usefixtures("reference_mode")


def tensor(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, HEAD_DIM, generator=generator).bfloat16()


def workspace() -> torch.Tensor:
    return torch.empty(1024, dtype=torch.uint8)


def check(call: Callable[..., object], *args: object) -> None:
    torch._dynamo.reset()
    want = call(*args)
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(*args)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("is_pair", [False, True])
def test_paged_prefill(is_pair: bool, return_lse: bool) -> None:
    wrapper = precast.BatchPrefillWithPagedKVCacheWrapper(workspace())
    wrapper.plan(ROWS, *TABLE, *SIZES, 8, **OPTIONS)
    cache = tensor(8, 2, 8, 2)
    given = (cache[:, 0], cache[:, 1]) if is_pair else cache
    check(lambda q, kv: wrapper.run(q, kv, return_lse=return_lse), tensor(4, 4), given)


def test_queries_of_8_bits() -> None:
    wrapper = precast.BatchPrefillWithPagedKVCacheWrapper(workspace())
    dtypes = {"q_data_type": "float8_e4m3fn", "o_data_type": "bfloat16"}
    wrapper.plan(ROWS, *TABLE, *SIZES, 8, **{**OPTIONS, **dtypes})
    q, cache = (tensor(*shape).to(torch.float8_e4m3fn) for shape in ((4, 4), (8, 2, 8, 2)))
    check(lambda q, kv: wrapper.run(q, kv), q, cache)


@pytest.mark.parametrize("is_paged", [False, True])
def test_queries_of_e4m3_on_hopper(is_paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With numbers of heads as scales, which only kernels for e4m3 take."""
    monkeypatch.setattr(sm90, "is_hopper", lambda device: True)
    dtypes = {"q_data_type": "float8_e4m3fn", "o_data_type": "bfloat16"}
    options = {**OPTIONS, **dtypes}
    q = tensor(4, 4).to(torch.float8_e4m3fn)
    scale = torch.tensor([0.5, 1.0, 1.5, 2.0])
    if is_paged:
        paged = precast.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend="fa3")
        paged.plan(ROWS, *TABLE, *SIZES, 8, **options)
        assert paged._plan.multiplies_fp8
        cache = tensor(8, 2, 8, 2).to(torch.float8_e4m3fn)
        check(lambda q, kv: paged.run(q, kv, q_scale=scale, return_lse=True), q, cache)
        return
    ragged = precast.BatchPrefillWithRaggedKVCacheWrapper(workspace(), backend="fa3")
    ragged.plan(ROWS, torch.tensor([0, 9, 20], dtype=I32), *SIZES, **options)
    assert ragged._plan.multiplies_fp8
    k, v = tensor(2, 20, 2).to(torch.float8_e4m3fn)
    check(lambda q, k, v: ragged.run(q, k, v, q_scale=scale, v_scale=2.0), q, k, v)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_ragged_prefill(layout: str) -> None:
    wrapper = precast.BatchPrefillWithRaggedKVCacheWrapper(workspace(), layout)
    wrapper.plan(ROWS, ROWS * 2, *SIZES, **OPTIONS)
    k = tensor(8, 2) if layout == "NHD" else tensor(2, 8)
    check(lambda q, k: wrapper.run_return_lse(q, k, k), tensor(4, 4), k)


def test_decode() -> None:
    wrapper = precast.BatchDecodeWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*TABLE, *SIZES, 8, q_data_type="bfloat16")
    check(lambda q, kv: wrapper.run_return_lse(q, kv), tensor(2, 4), tensor(8, 2, 8, 2))


def test_one_request() -> None:
    q, k = tensor(3, 4), tensor(5, 2)
    check(lambda q, k: precast.single_prefill_with_kv_cache(q, k, k, causal=True), q, k)
    check(lambda q, k: precast.single_decode_with_kv_cache(q[0], k, k), q, k)


def test_graphs_of_the_compiler_leave_out_what_reads_the_params_block() -> None:
    assert precast.merge_state  # Its import registers its torch op.
    unsafe = {
        name
        for name in ("run_paged", "run_ragged", "merge_state")
        if torch.Tag.cudagraph_unsafe in getattr(torch_ops, name).tags
    }
    assert unsafe == {"run_paged", "run_ragged"}
