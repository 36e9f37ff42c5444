# SPDX-License-Identifier: Apache-2.0
"""Attention on a GPU: rejected plans, splits of a fixed size, masks, what graphs may not keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_gpu_attention import (
    BF16,
    DIM,
    HEADS,
    I32,
    KV_HEADS,
    PAGE,
    PLAN,
    SHAPE,
    WORKSPACE,
    Batch,
    close,
    decode,
    no_waiting,
)

import precast
from precast._ops.attention import buffers


@pytest.fixture
def workspace() -> torch.Tensor:
    """May hold anything."""
    return torch.full((WORKSPACE,), 0xFF, dtype=torch.uint8, device="cuda")


def on_host(batch: Batch) -> list[torch.Tensor]:
    return [table.cpu() for table in batch.table]


def test_a_rejected_plan_leaves_the_one_before(
    workspace: torch.Tensor, generator: torch.Generator
) -> None:
    batch, other = Batch([3000, 17, 900], generator), Batch([5, 6, 7], generator)
    wrapper = decode(workspace)
    wrapper.plan(*batch.table, *SHAPE, **PLAN)
    want = wrapper.run(batch.q, batch.cache)
    indptr, indices, last = other.table
    for tables, options in (
        ((indptr, indices, last[:2]), {}),
        ((indptr.long().cpu()[:3], indices, last.cpu()), {}),
        (other.table, {"q_len_per_req": 0}),
        (other.table, {"kv_data_type": torch.float32}),
        (other.table, {"rope_theta": 0.0}),
    ):
        with pytest.raises(ValueError, match="must"):
            wrapper.plan(*tables, HEADS, HEADS, DIM, 2 * PAGE, **{**PLAN, **options})
        assert torch.equal(wrapper.run(batch.q, batch.cache), want)
    prefill = precast.BatchPrefillWithPagedKVCacheWrapper(workspace)
    rows = torch.arange(4, dtype=I32)
    prefill.plan(rows, *batch.table, *SHAPE, causal=True, **PLAN)
    want = prefill.run(batch.q, batch.cache)
    short = torch.ones(17, dtype=torch.bool, device="cuda")
    with pytest.raises(ValueError, match="custom_mask must have at least 18 elements"):
        prefill.plan(rows, *on_host(other), *SHAPE, custom_mask=short, **PLAN)
    assert torch.equal(prefill.run(batch.q, batch.cache), want)


def test_a_workspace_that_is_too_small_for_a_plan_leaves_the_one_of_a_graph(
    workspace: torch.Tensor, generator: torch.Generator
) -> None:
    batch = Batch([700, 3], generator)
    wrapper = decode(
        workspace,
        use_cuda_graph=True,
        paged_kv_indptr_buffer=torch.zeros(3, dtype=I32, device="cuda"),
        paged_kv_indices_buffer=torch.zeros(600, dtype=I32, device="cuda"),
        paged_kv_last_page_len_buffer=torch.zeros(2, dtype=I32, device="cuda"),
    )
    wrapper.plan(*batch.table, *SHAPE, **PLAN)
    close(wrapper.run(batch.q, batch.cache), batch.expected())
    whole = wrapper._int_workspace_buffer
    wrapper._int_workspace_buffer = whole[:64]  # As engines do it.
    with pytest.raises(ValueError, match="int_workspace must have at least"):
        wrapper.plan(*on_host(batch), *SHAPE, **PLAN)
    wrapper._int_workspace_buffer = whole
    close(wrapper.run(batch.q, batch.cache), batch.expected())
    wrapper.plan(*on_host(batch), *SHAPE, **PLAN)
    close(wrapper.run(batch.q, batch.cache), batch.expected())


def test_other_heads_and_pages_reach_no_kernel(
    workspace: torch.Tensor, generator: torch.Generator
) -> None:
    batch = Batch([160] * 4, generator)
    wrapper = decode(workspace)
    wrapper.plan(*batch.table, *SHAPE, **PLAN)
    out = torch.full_like(batch.q, 7.0)
    for q, cache in (
        (batch.q, batch.cache[..., :1, :]),
        (batch.q, batch.cache[:, :, :8]),
        (batch.q[:, :4], batch.cache),
    ):
        with pytest.raises(ValueError, match=r"as in plan\(\)"):
            wrapper.run(q, cache, out=out[:, : q.shape[1]])
    assert out.eq(7).all()


@pytest.mark.parametrize("prefill", [False, True])
def test_parts_of_a_fixed_size_have_their_room(
    workspace: torch.Tensor, generator: torch.Generator, prefill: bool
) -> None:
    """With less of it a request would depend on the batch; lengths on the host show it."""
    lens = [1024, 2048, 5000]
    batch = Batch(lens, generator)
    rows = torch.tensor([0, 60, 61, 100], dtype=I32)
    q = torch.randn(100, HEADS, DIM, device="cuda", generator=generator).to(BF16)
    q = q if prefill else batch.q
    options: dict[str, Any] = {**PLAN, "fixed_split_size": 4}
    wrapper: Any
    if prefill:
        wrapper = precast.BatchPrefillWithPagedKVCacheWrapper(workspace)
        tables = [rows, *on_host(batch)]
        alone = [rows[:2], tables[1][:2], tables[2], tables[3][:1]]
        options["causal"] = True
    else:
        wrapper = decode(workspace)
        tables = on_host(batch)
        alone = [tables[0][:2], tables[1], tables[2][:1]]
    float_bytes, _ = wrapper.workspace_size(*tables, *SHAPE, **options)
    assert 0 < float_bytes <= WORKSPACE
    ints = wrapper._int_workspace_buffer
    wrapper.reset_workspace_buffer(workspace[: float_bytes - 16], ints)
    words = f"float_workspace_buffer must have at least {float_bytes} bytes for fixed_split_size=4"
    with pytest.raises(ValueError, match=words):
        wrapper.plan(*tables, *SHAPE, **options)
    wrapper.reset_workspace_buffer(workspace[:float_bytes], ints)
    wrapper.plan(*tables, *SHAPE, **options)
    out, lse = wrapper.run_return_lse(q, batch.cache)
    wrapper.plan(*alone, *SHAPE, **options)
    first = q[:60] if prefill else q[:1]
    own = wrapper.run_return_lse(first, batch.cache)
    assert torch.equal(own[0], out[: first.shape[0]])
    assert torch.equal(own[1], lse[: first.shape[0]])


def test_lengths_beside_are_not_waited_for(
    workspace: torch.Tensor, generator: torch.Generator
) -> None:
    batch = Batch([70, 900], generator)
    tables = on_host(batch)
    lens = torch.tensor([70, 900], dtype=I32, device="cuda")
    wrapper = decode(workspace)
    wrapper.plan(*tables, *SHAPE, seq_lens=lens, **PLAN)
    with no_waiting():
        wrapper.plan(*tables, *SHAPE, seq_lens=lens, **PLAN)
    close(wrapper.run(batch.q, batch.cache), batch.expected())


@pytest.mark.parametrize("rows_on_device", [False, True])
def test_masks_of_lengths_on_the_host_are_not_waited_for(
    workspace: torch.Tensor, generator: torch.Generator, rows_on_device: bool
) -> None:
    batch = Batch([70, 900], generator)
    tables = on_host(batch)
    rows = torch.arange(3, dtype=I32, device="cuda" if rows_on_device else "cpu")
    mask = torch.ones(970, dtype=torch.bool, device="cuda")
    wrapper = precast.BatchPrefillWithPagedKVCacheWrapper(workspace)
    wrapper.plan(rows, *tables, *SHAPE, custom_mask=mask, **PLAN)
    with no_waiting():
        wrapper.plan(rows, *tables, *SHAPE, custom_mask=mask, **PLAN)
    close(wrapper.run(batch.q, batch.cache), batch.expected())


def test_short_masks_reach_no_kernel(generator: torch.Generator) -> None:
    q = torch.randn(300, HEADS, DIM, device="cuda", generator=generator).to(BF16)
    k = torch.randn(300, KV_HEADS, DIM, device="cuda", generator=generator).to(BF16)
    one = torch.ones(1, 1, dtype=torch.bool, device="cuda")
    with pytest.raises(ValueError, match="custom_mask must have 90000 elements"):
        precast.single_prefill_with_kv_cache(q, k, k, custom_mask=one)
    with pytest.raises(ValueError, match="packed_custom_mask must have at least 11250 elements"):
        precast.single_prefill_with_kv_cache(q, k, k, packed_custom_mask=one.byte().view(-1))


def test_slopes_that_a_graph_makes_are_its_own(generator: torch.Generator) -> None:
    def decoded(q: torch.Tensor) -> torch.Tensor:
        k = keys[:, :1].expand(-1, q.shape[0], -1).contiguous()
        out = precast.single_decode_with_kv_cache(q, k, k, pos_encoding_mode="ALIBI")
        assert isinstance(out, torch.Tensor)
        return out

    keys = torch.randn(200, 1, DIM, device="cuda", generator=generator).to(BF16)
    q = torch.randn(13, DIM, device="cuda", generator=generator).to(BF16)
    decoded(q[:3])  # Loads the kernels.
    key = ("alibi_slopes_13", q.device)
    buffers._cache_buf.pop(key, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decoded(q)
    assert key not in buffers._cache_buf
    graph.replay()
    assert torch.equal(out, decoded(q))
    want = precast.decode.single_decode_with_kv_cache_reference(
        q.float(), keys.expand(-1, 13, -1), keys.expand(-1, 13, -1), pos_encoding_mode="ALIBI"
    )
    close(out, want)


@pytest.mark.parametrize("backend", ["fa2", "auto"])
def test_lengths_on_the_gpu_take_the_tile_of_lengths_on_the_host(
    workspace: torch.Tensor, generator: torch.Generator, backend: str
) -> None:
    """From the first run on; a captured run keeps its tile, and waits for nothing."""
    wrapper = precast.BatchPrefillWithRaggedKVCacheWrapper(workspace, backend=backend)
    on_host = precast.BatchPrefillWithRaggedKVCacheWrapper(workspace.clone(), backend=backend)
    sizes = 32, 8, 128
    for count, length in ((4, 1024), (4, 1024), (4, 1), (2, 12)):
        rows = torch.arange(0, (count + 1) * length, length, dtype=I32, device="cuda")
        q = torch.randn(count * length, 32, 128, device="cuda", generator=generator).to(BF16)
        k, v = torch.randn(2, len(q), 8, 128, device="cuda", generator=generator).to(BF16)
        wrapper.plan(rows, rows, *sizes, causal=True, **PLAN)
        on_host.plan(rows.cpu(), rows.cpu(), *sizes, causal=True, **PLAN)
        want = on_host.run(q, k, v)
        with no_waiting():
            out = wrapper.run(q, k, v)
        shapes = [w._plan.shape for w in (wrapper, on_host)]
        assert shapes[0].block_m == shapes[1].block_m
        assert shapes[0].sm90 == shapes[1].sm90
        assert torch.equal(out, want)
        assert torch.equal(wrapper.run(q, k, v), want)
    wrapper.plan(*[torch.tensor([0, 2048], dtype=I32, device="cuda")] * 2, *sizes, **PLAN)
    q = torch.randn(2048, 32, 128, device="cuda", generator=generator).to(BF16)
    k, v = torch.randn(2, 2048, 8, 128, device="cuda", generator=generator).to(BF16)
    before, out, graph = wrapper._plan.shape.block_m, torch.empty_like(q), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(q, k, v, out=out)
    assert wrapper._plan.shape.block_m == before
    graph.replay()
    want, _ = wrapper.reference(q, k, v, *[torch.tensor([0, 2048], dtype=I32)] * 2)
    torch.testing.assert_close(out.float(), want.float(), atol=1e-2, rtol=1e-2)
