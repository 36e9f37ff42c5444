# SPDX-License-Identifier: Apache-2.0
"""Attention on a GPU beyond numbers: plans without waiting, graphs, batch invariance, compile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import precast

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 128, 16
BF16 = torch.bfloat16
I32 = torch.int32
WORKSPACE = 64 << 20


@pytest.fixture
def workspace() -> torch.Tensor:
    """May hold anything."""
    return torch.full((WORKSPACE,), 0xFF, dtype=torch.uint8, device="cuda")


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """An error for what waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Batch:
    """Requests over one cache, with lengths on the device."""

    def __init__(self, lens: list[int], generator: torch.Generator, pages: int = 600) -> None:
        counts = torch.tensor([-(-n // PAGE) for n in lens])
        order = torch.randperm(pages, device="cuda", generator=generator)
        self.indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to("cuda", I32)
        self.indices = order[: int(counts.sum())].to(I32)
        last = [(n - 1) % PAGE + 1 if n else 0 for n in lens]
        self.last = torch.tensor(last, dtype=I32, device="cuda")
        self.q = torch.randn(len(lens), HEADS, DIM, device="cuda", generator=generator).to(BF16)
        shape = (pages, 2, PAGE, KV_HEADS, DIM)
        self.cache = torch.randn(shape, device="cuda", generator=generator).to(BF16)

    @property
    def table(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.indptr, self.indices, self.last

    def expected(self) -> torch.Tensor:
        wrapper = precast.BatchDecodeWithPagedKVCacheWrapper
        return wrapper.reference(self.q.float(), self.cache, *self.table)[0]


SHAPE: tuple[int, ...] = (HEADS, KV_HEADS, DIM, PAGE)
PLAN: dict[str, Any] = {"q_data_type": BF16}


def close(out: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(out.float(), want.float(), rtol=1e-2, atol=1e-2)


def decode(workspace: torch.Tensor, **options: Any) -> Any:
    return precast.BatchDecodeWithPagedKVCacheWrapper(
        workspace, **{"use_tensor_cores": True, **options}
    )


# -- plans ----------------------------------------------------------------------------------------


def test_plan_and_run_wait_for_nothing(workspace: torch.Tensor, generator: torch.Generator) -> None:
    batch = Batch([1, 900, 33, 0, 257], generator)
    rows = torch.tensor([0, 1, 2, 3, 4, 5], dtype=I32, device="cuda")
    wrapper = decode(workspace)
    prefill = precast.BatchPrefillWithPagedKVCacheWrapper(workspace)
    want = batch.expected()
    wrapper.plan(*batch.table, *SHAPE, **PLAN)  # Loads what it needs.
    wrapper.run(batch.q, batch.cache)
    prefill.plan(rows, *batch.table, *SHAPE, causal=True, **PLAN)
    prefill.run(batch.q, batch.cache)
    mask = torch.ones(4096, dtype=torch.bool, device="cuda")
    with no_waiting():
        wrapper.plan(*batch.table, *SHAPE, **PLAN)
        out = wrapper.run(batch.q, batch.cache)
        precast.fast_decode_plan(wrapper, *batch.table, *SHAPE, **PLAN)
        fast = wrapper.run(batch.q, batch.cache)
        prefill.plan(rows, *batch.table, *SHAPE, causal=True, **PLAN)
        rest = prefill.run(batch.q, batch.cache)
        prefill.plan(rows, *batch.table, *SHAPE, custom_mask=mask, **PLAN)
    for result in (out, fast, rest):
        close(result, want)


def test_lengths_on_the_host_plan_the_same(
    workspace: torch.Tensor, generator: torch.Generator
) -> None:
    batch = Batch([700, 3, 64], generator)
    wrapper = decode(workspace)
    wrapper.plan(*batch.table, *SHAPE, **PLAN)
    out = wrapper.run(batch.q, batch.cache)
    wrapper.plan(*(t.cpu().long() for t in batch.table), *SHAPE, **PLAN)
    assert torch.equal(wrapper.run(batch.q, batch.cache), out)


def test_a_workspace_of_the_size_that_is_asked_for(
    workspace: torch.Tensor, generator: torch.Generator
) -> None:
    batch = Batch([4000, 1, 1, 2000], generator)
    wrapper = decode(workspace)
    wrapper.plan(*batch.table, *SHAPE, **PLAN)
    want = wrapper.run(batch.q, batch.cache)
    float_bytes, int_bytes = wrapper.workspace_size(*batch.table, *SHAPE, **PLAN)
    assert 0 < float_bytes <= WORKSPACE
    guard = 4096
    buffers = [
        torch.full((size + guard,), 0xA5, dtype=torch.uint8, device="cuda")
        for size in (float_bytes, int_bytes)
    ]
    wrapper.reset_workspace_buffer(buffers[0][:float_bytes], buffers[1][:int_bytes])
    wrapper.plan(*batch.table, *SHAPE, **PLAN)
    assert torch.equal(wrapper.run(batch.q, batch.cache), want)
    for buffer, size in zip(buffers, (float_bytes, int_bytes)):
        assert buffer[size:].eq(0xA5).all()


def test_wrappers_share_a_float_workspace(
    workspace: torch.Tensor, generator: torch.Generator
) -> None:
    batches = [Batch([3000, 70], generator), Batch([5, 600, 81], generator)]
    wrappers = [decode(workspace) for _ in batches]
    for wrapper, batch in zip(wrappers, batches):
        wrapper.plan(*batch.table, *SHAPE, **PLAN)
    for _ in range(3):
        for wrapper, batch in zip(wrappers, batches):
            close(wrapper.run(batch.q, batch.cache), batch.expected())


@pytest.mark.parametrize("kv_dtype", [BF16, torch.float8_e4m3fn])
def test_head_dims_of_two_kinds(
    workspace: torch.Tensor, generator: torch.Generator, kv_dtype: torch.dtype
) -> None:
    """As in the prefill of MLA, from slices of wider tensors."""
    rows = torch.tensor([0, 300, 301, 700], dtype=I32, device="cuda")
    tokens = torch.tensor([0, 300, 1200, 1900], dtype=I32, device="cuda")
    q = torch.randn(700, HEADS, 256, device="cuda", generator=generator).to(BF16)[..., :192]
    kv = torch.randn(1900, KV_HEADS, 320, device="cuda", generator=generator).to(kv_dtype)
    k, v = kv[..., :192], kv[..., 192:]
    wrapper = precast.BatchPrefillWithRaggedKVCacheWrapper(workspace)
    heads = HEADS, KV_HEADS, 192, 128
    wrapper.plan(rows, tokens, *heads, causal=True, **PLAN, kv_data_type=kv_dtype)
    out, lse = wrapper.run_return_lse(q, k, v, k_scale=0.5, v_scale=2.0)
    want = wrapper.reference(q.float(), k, v, rows, tokens, causal=True, k_scale=0.5, v_scale=2.0)
    close(out, want[0])
    torch.testing.assert_close(lse, want[1], rtol=1e-3, atol=1e-3)


# -- the same bits --------------------------------------------------------------------------------


def test_a_call_gives_the_same_bits_again(
    workspace: torch.Tensor, generator: torch.Generator
) -> None:
    batch = Batch([5000, 17, 0, 900, 1, 64], generator)
    wrapper = decode(workspace)
    wrapper.plan(*batch.table, *SHAPE, **PLAN)
    out, lse = wrapper.run_return_lse(batch.q, batch.cache)
    for _ in range(20):
        again = wrapper.run_return_lse(batch.q, batch.cache)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)


@pytest.mark.parametrize("split", [{"fixed_split_size": 8}, {"disable_split_kv": True}])
@pytest.mark.parametrize("prefill", [False, True])
def test_a_request_does_not_depend_on_the_batch(
    workspace: torch.Tensor, generator: torch.Generator, split: dict[str, Any], prefill: bool
) -> None:
    lens = [3000, 17, 900, 1, 1300, 64]
    batch = Batch(lens, generator)
    q_lens = [40, 17, 200, 1, 3, 64] if prefill else [1] * len(lens)
    starts = torch.tensor([0, *q_lens]).cumsum(0).to("cuda", I32)
    q = torch.randn(sum(q_lens), HEADS, DIM, device="cuda", generator=generator).to(BF16)

    def run(rows: torch.Tensor, q: torch.Tensor, *table: torch.Tensor) -> Any:
        wrapper: Any
        if prefill:
            wrapper = precast.BatchPrefillWithPagedKVCacheWrapper(workspace)
            wrapper.plan(rows, *table, *SHAPE, causal=True, **PLAN, **split)
        else:
            wrapper = decode(workspace)
            wrapper.plan(*table, *SHAPE, **PLAN, **split)
        return wrapper.run_return_lse(q, batch.cache)

    out, lse = run(starts, q, *batch.table)
    first = batch.indptr.tolist()
    for i in range(len(lens)):
        own = slice(int(starts[i]), int(starts[i + 1]))
        alone = run(
            torch.tensor([0, q_lens[i]], dtype=I32),
            q[own],
            torch.tensor([0, first[i + 1] - first[i]], dtype=I32),
            batch.indices[first[i] : first[i + 1]],
            batch.last[i : i + 1],
        )
        assert torch.equal(alone[0], out[own])
        assert torch.equal(alone[1], lse[own])


# -- graphs ---------------------------------------------------------------------------------------


def graphed(workspace: torch.Tensor, batch: Batch, room: int = 600) -> Any:
    size = batch.last.numel()
    return decode(
        workspace,
        use_cuda_graph=True,
        paged_kv_indptr_buffer=torch.zeros(size + 1, dtype=I32, device="cuda"),
        paged_kv_indices_buffer=torch.zeros(room, dtype=I32, device="cuda"),
        paged_kv_last_page_len_buffer=torch.zeros(size, dtype=I32, device="cuda"),
    )


def test_a_graph_runs_by_later_plans(workspace: torch.Tensor, generator: torch.Generator) -> None:
    lens = ([1, 1, 1, 1], [2000, 5, 0, 900], [64, 4000, 17, 3], [0, 0, 0, 0])
    batches = [Batch(each, generator) for each in lens]
    wrapper = graphed(workspace, batches[0])
    q, cache = batches[0].q, batches[0].cache
    wrapper.plan(*batches[0].table, *SHAPE, **PLAN)
    out = torch.empty_like(q)
    wrapper.run(q, cache, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(q, cache, out=out)
    for batch in (*batches, *reversed(batches)):
        batch.q, batch.cache = q, cache
        wrapper.plan(*batch.table, *SHAPE, **PLAN)
        out.fill_(torch.nan)
        graph.replay()
        close(out, batch.expected())


def test_a_plan_inside_of_a_graph(workspace: torch.Tensor, generator: torch.Generator) -> None:
    batches = [Batch(each, generator) for each in ([700, 1, 30], [3, 2500, 400], [0, 64, 65])]
    first = batches[0]
    wrapper = graphed(workspace, first)
    buffers = (
        wrapper._paged_kv_indptr_buf,
        wrapper._paged_kv_indices_buf,
        wrapper._paged_kv_last_page_len_buf,
    )

    def fill(batch: Batch) -> None:
        for buffer, values in zip(buffers, batch.table):
            buffer[: values.numel()].copy_(values)

    q, cache, out = first.q, first.cache, torch.empty_like(first.q)
    fill(first)
    wrapper.plan(*buffers, *SHAPE, **PLAN)
    wrapper.run(q, cache, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.plan(*buffers, *SHAPE, **PLAN)
        wrapper.run(q, cache, out=out)
    for batch in batches:
        batch.q, batch.cache = q, cache
        fill(batch)
        graph.replay()
        close(out, batch.expected())


def test_one_request_in_a_graph(generator: torch.Generator) -> None:
    q = torch.randn(HEADS, DIM, device="cuda", generator=generator).to(BF16)
    k, v = torch.randn(2, 900, KV_HEADS, DIM, device="cuda", generator=generator).to(BF16)
    want = precast.single_decode_with_kv_cache(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = precast.single_decode_with_kv_cache(q, k, v)
    graph.replay()
    assert torch.equal(out, want)


# -- torch.compile --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(workspace: torch.Tensor, generator: torch.Generator, mode: str) -> None:
    batch = Batch([70, 900], generator)
    wrapper = decode(workspace)
    wrapper.plan(*batch.table, *SHAPE, **PLAN)
    compiled = torch.compile(lambda q, cache: 2 * wrapper.run(q, cache), fullgraph=True, mode=mode)
    for _ in range(3):  # The compiler's own graphs are captured at the second call.
        got = compiled(batch.q, batch.cache).clone()
        assert torch.equal(got, 2 * wrapper.run(batch.q, batch.cache))
    k = batch.cache[:40, 0].flatten(0, 1)
    single = torch.compile(
        lambda q, k: precast.single_prefill_with_kv_cache(q, k, k, causal=True), fullgraph=True
    )
    want = precast.single_prefill_with_kv_cache(batch.q, k, k, causal=True)
    assert torch.equal(single(batch.q, k), want)


# -- limits ---------------------------------------------------------------------------------------


def test_nothing_to_do(workspace: torch.Tensor) -> None:
    zero = torch.zeros(1, dtype=I32, device="cuda")
    none = torch.zeros(0, dtype=I32, device="cuda")
    wrapper = decode(workspace)
    wrapper.plan(zero, none, none, *SHAPE, **PLAN)
    q = torch.empty(0, HEADS, DIM, dtype=BF16, device="cuda")
    cache = torch.empty(1, 2, PAGE, KV_HEADS, DIM, dtype=BF16, device="cuda")
    assert wrapper.run(q, cache).shape == q.shape
    k = torch.empty(0, KV_HEADS, DIM, dtype=BF16, device="cuda")
    out, lse = precast.single_prefill_with_kv_cache_return_lse(q.new_ones(3, HEADS, DIM), k, k)
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()
    assert precast.single_prefill_with_kv_cache(q, k, k).shape == q.shape


def test_caches_beyond_2_31_elements(workspace: torch.Tensor, free_memory: None) -> None:
    page = 2 * PAGE * KV_HEADS * DIM
    pages = 2**31 // page + 100
    if torch.cuda.mem_get_info()[0] < 3 * pages * page:
        pytest.skip("needs 3 bytes of free memory for each of 2^31 elements")
    cache = torch.empty(pages, 2, PAGE, KV_HEADS, DIM, dtype=BF16, device="cuda")
    cache[0], cache[-1] = 1.0, 3.0
    table = torch.tensor([0, 1, 2]), torch.tensor([pages - 1, 0]), torch.tensor([PAGE, 3])
    wrapper = decode(workspace)
    wrapper.plan(*table, *SHAPE, **PLAN)
    out = wrapper.run(torch.ones(2, HEADS, DIM, dtype=BF16, device="cuda"), cache)
    assert out[0].eq(3).all()
    assert out[1].eq(1).all()


def test_the_second_device(generator: torch.Generator) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    batch = Batch([700, 30], generator)
    want = batch.expected()
    wrapper = decode(torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda:1"))
    wrapper.plan(*(t.to("cuda:1") for t in batch.table), *SHAPE, **PLAN)
    out = wrapper.run(batch.q.to("cuda:1"), batch.cache.to("cuda:1"))
    assert out.device == torch.device("cuda:1")
    close(out.cpu(), want.cpu())


def test_what_kernels_reject(workspace: torch.Tensor, generator: torch.Generator) -> None:
    batch = Batch([70, 900], generator)
    wrapper = decode(workspace)
    wrapper.plan(*batch.table, *SHAPE, **PLAN)
    out = torch.full_like(batch.q, 7.0)
    with pytest.raises(
        ValueError, match="must have an address and strides that are a multiple of 16"
    ):
        wrapper.run(torch.randn(2, HEADS, DIM + 1, device="cuda").to(BF16)[..., 1:], batch.cache)
    with pytest.raises(
        ValueError, match=r"paged_kv_cache must have shape \[pages, 2, .*, 128\], got"
    ):
        wrapper.run(batch.q, batch.cache[..., :64], out=out)
    with pytest.raises(ValueError, match="sinks must"):
        wrapper.run(batch.q, batch.cache, out=out, sinks=torch.zeros(3, device="cuda"))
    with pytest.raises(ValueError, match="overlap"):
        wrapper.run(batch.q, batch.cache, out=batch.q)
    assert out.eq(7).all()
    small = torch.empty(64, dtype=torch.uint8, device="cuda")
    wrapper.reset_workspace_buffer(workspace, small)
    with pytest.raises(ValueError, match="int_workspace must have at least"):
        wrapper.plan(*batch.table, *SHAPE, **PLAN)
