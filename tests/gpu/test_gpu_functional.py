# SPDX-License-Identifier: Apache-2.0
"""Attention without a plan on a GPU: random calls, graphs, shared workspaces, no waiting."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_calls import problem
from attention_cases import Space
from functional_calls import Drawn, call, draw, made
from test_gpu_attention import no_waiting
from test_gpu_attention_random import served

import precast

BF16, E4M3, I32 = torch.bfloat16, torch.float8_e4m3fn, torch.int32
HEADS, KV_HEADS, DIM, PAGE, WIDTH = 8, 2, 128, 16, 300
WORKSPACE = 256 << 20
SHARDS, CASES = 12, 50
FIRST = int(os.environ.get("PRECAST_TEST_SEED") or int.from_bytes(os.urandom(3), "little"))
XQA = precast.xqa_batch_decode_with_kv_cache
#: Of which cases are drawn.
FUNCTIONS = (
    XQA,
    precast.trtllm_batch_context_with_kv_cache,
    precast.trtllm_batch_decode_with_kv_cache,
    precast.trtllm_fmha_v2_prefill,
    precast.xqa,
)


@pytest.fixture
def workspace() -> torch.Tensor:
    """May hold anything."""
    return torch.full((WORKSPACE,), 0xFF, dtype=torch.uint8, device="cuda")


# -- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_calls(shard: int, workspace: torch.Tensor) -> None:
    """Against the references on the same tensors; ``draw(seed, Space(...))`` makes a case again."""
    first = (FIRST + shard) << 20
    print(f"PRECAST_TEST_SEED={FIRST}: seeds from {first} on")
    space = Space(most_pairs=1 << 22)
    drawn = (draw(seed, space) for seed in range(first, first + 100 * CASES))
    problems, count = [], 0
    for case in itertools.islice((each for each in drawn if served(each.case)), CASES):
        count += 1
        text = _problem(case, workspace)
        if text:
            problems.append(f"{case}: {text}")
    assert problems == []
    assert count == CASES, "few modules are there"


def _problem(drawn: Drawn, workspace: torch.Tensor) -> str | None:
    assert getattr(precast, drawn.function) in FUNCTIONS
    given = made(drawn, "cuda", workspace)
    out, lse = call(drawn, given)
    again = made(drawn, "cuda", workspace)
    with precast.reference_mode():
        want, want_lse = call(drawn, again)
    # A result that there is none of compares as zeros.
    sums = (torch.zeros(1),) * 2 if lse is None else (lse, want_lse)
    return problem(drawn.case, (out, sums[0]), (want.float(), sums[1]))


@pytest.mark.parametrize("group", [1, 4, 8, 16])
@pytest.mark.parametrize("count", [1, 7, 128])
def test_decodes_of_long_requests(
    count: int, group: int, workspace: torch.Tensor, generator: torch.Generator
) -> None:
    batch = Batch([WIDTH * PAGE - 7 * i for i in range(count)], generator, group=group)
    batch.close(XQA(**batch.arguments(workspace)))


# -- a batch --------------------------------------------------------------------------------------


class Batch:
    """Requests over one cache, whose lengths and pages may be changed in place."""

    def __init__(
        self,
        lens: list[int],
        generator: torch.Generator,
        q_len: int = 1,
        group: int = 4,
        pages: int = 2000,
        kv_dtype: torch.dtype = BF16,
    ) -> None:
        self.q_len = q_len
        shape = len(lens) * q_len, KV_HEADS * group, DIM
        self.q = torch.randn(shape, device="cuda", generator=generator).to(BF16)
        cache = torch.randn(pages, 2, KV_HEADS, PAGE, DIM, device="cuda", generator=generator)
        self.cache = cache.to(kv_dtype)
        self.table = torch.empty(len(lens), WIDTH, dtype=I32, device="cuda")
        self.lens = torch.empty(len(lens), dtype=I32, device="cuda")
        self.fill(lens, generator)

    def fill(self, lens: list[int], generator: torch.Generator) -> None:
        """Other lengths and pages at the same addresses."""
        pages = self.cache.shape[0]
        made = torch.randint(pages, self.table.shape, device="cuda", generator=generator)
        self.table.copy_(made)
        self.lens.copy_(torch.tensor(lens, dtype=I32))

    def arguments(self, workspace: torch.Tensor, **options: Any) -> dict[str, Any]:
        return {
            "query": self.q,
            "kv_cache": self.cache,
            "workspace_buffer": workspace,
            "block_tables": self.table,
            "seq_lens": self.lens,
            "max_seq_len": WIDTH * PAGE,
            "bmm1_scale": DIM**-0.5,
            "kv_layout": "HND",
            "q_len_per_req": self.q_len,
            **options,
        }

    def expected(self, **options: Any) -> torch.Tensor:
        with precast.reference_mode():
            return XQA(**self.arguments(torch.zeros(64 << 20, dtype=torch.uint8).cuda(), **options))

    def close(self, out: torch.Tensor, **options: Any) -> None:
        want = self.expected(**options).float()
        torch.testing.assert_close(out.float(), want, rtol=1e-2, atol=1e-2)


def drafts(batch: Batch, generator: torch.Generator) -> torch.Tensor:
    """A mask of any drafts."""
    shape = (batch.lens.numel(), batch.q_len, 2 * -(-batch.q_len // 32))
    mask = torch.randint(1 << 16, shape, device="cuda", generator=generator)
    return mask.to(torch.uint16)


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize("q_len", [2, 4, 15, 33, 65])
def test_draft_masks(
    q_len: int, kv_dtype: torch.dtype, workspace: torch.Tensor, generator: torch.Generator
) -> None:
    """Tiles of all sizes, splits, requests that are shorter than their drafts, windows.

    The longer drafts of 16 bits run on the kernels for Hopper.
    """
    lens = [4000, q_len, 0, q_len + 1, max(1, q_len - 2), 700, 64]
    batch = Batch(lens, generator, q_len, kv_dtype=kv_dtype)
    mask = drafts(batch, generator)
    shifted = torch.empty(mask.numel() + 1, dtype=torch.uint16, device="cuda")[1:].view_as(mask)
    shifted.copy_(mask)
    for window in (-1, 0, q_len, 100):
        out = XQA(**batch.arguments(workspace, mask=mask, window_left=window))
        batch.close(out, mask=mask, window_left=window)
        again = XQA(**batch.arguments(workspace, mask=shifted, window_left=window))
        assert torch.equal(again, out), "a mask may start at any word"


def test_a_graph_reads_the_mask_of_its_replay(
    workspace: torch.Tensor, generator: torch.Generator
) -> None:
    batch = Batch([900, 3, 77], generator, q_len=5)
    mask, out = drafts(batch, generator), torch.empty_like(batch.q)
    given = batch.arguments(workspace, out=out, mask=mask)
    XQA(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        XQA(**given)
    for lens in ([900, 3, 77], [4, 2000, 0]):
        batch.fill(lens, generator)
        mask.copy_(drafts(batch, generator))
        graph.replay()
        batch.close(out, mask=mask)


# -- one workspace --------------------------------------------------------------------------------


def test_calls_of_any_batch_share_a_workspace(
    workspace: torch.Tensor, generator: torch.Generator
) -> None:
    batches = [
        Batch([4000, 70], generator),
        Batch([5] * 200, generator),
        Batch([600, 81, 0], generator, q_len=5),
    ]
    masks = [None, None, drafts(batches[2], generator)]
    for _ in range(3):
        for batch, mask in zip(batches, masks):
            batch.close(XQA(**batch.arguments(workspace, mask=mask)), mask=mask)


def test_nothing_is_written_outside_of_the_workspace(generator: torch.Generator) -> None:
    batch = Batch([3000, 17, 900], generator, q_len=3)
    mask = drafts(batch, generator)
    for size in (1 << 20, 3 << 20):
        buffer = torch.full((size + 8192,), 0xA5, dtype=torch.uint8, device="cuda")
        out = XQA(**batch.arguments(buffer[4096 : 4096 + size], mask=mask))
        batch.close(out, mask=mask)
        assert buffer[:4096].eq(0xA5).all()
        assert buffer[4096 + size :].eq(0xA5).all()


def test_the_least_workspace_is_enough(generator: torch.Generator) -> None:
    batch = Batch([3000, 17, 900], generator)
    with pytest.raises(ValueError, match="workspace_buffer must have at least") as error:
        XQA(**batch.arguments(torch.zeros(1024, dtype=torch.uint8, device="cuda")))
    least = int(str(error.value).partition("at least ")[2].partition(" ")[0])
    batch.close(XQA(**batch.arguments(torch.zeros(least, dtype=torch.uint8, device="cuda"))))


# -- waiting and memory ---------------------------------------------------------------------------


def _calls(workspace: torch.Tensor, generator: torch.Generator) -> dict[str, Callable[[], Any]]:
    batch = Batch([1, 900, 33, 0, 257], generator)
    some = Batch([300, 20], generator, q_len=4)
    bounds = torch.tensor([0, 3, 8], dtype=I32, device="cuda")
    ragged = {"q_cu_seq_lens": bounds, "q_len_per_req": 5}
    prefill = some.arguments(workspace)
    for name in ("max_seq_len", "q_len_per_req"):
        del prefill[name]
    sizes = {"max_q_len": 5, "max_kv_len": 300, "batch_size": 2, "bmm2_scale": 1.0}
    scale = torch.full((1,), 0.1, device="cuda")
    narrow = batch.arguments(workspace, out=torch.empty_like(batch.q), bmm1_scale=scale)
    narrow["query"] = batch.q.to(E4M3)
    masked = some.arguments(workspace, mask=drafts(some, generator))
    return {
        "decode": functools.partial(XQA, **batch.arguments(workspace)),
        "drafts": functools.partial(XQA, **masked),
        "ragged": functools.partial(XQA, **some.arguments(workspace, **ragged)),
        "8 bits": functools.partial(XQA, **narrow),
        "context": functools.partial(
            precast.trtllm_batch_context_with_kv_cache,
            **prefill,
            **sizes,
            cum_seq_lens_q=bounds,
            cum_seq_lens_kv=bounds,
        ),
    }


NAMES = ("decode", "drafts", "ragged", "8 bits", "context")


@pytest.mark.parametrize("name", NAMES)
def test_calls_wait_for_nothing(
    name: str, workspace: torch.Tensor, generator: torch.Generator
) -> None:
    function = _calls(workspace, generator)[name]
    want = function()  # Loads what it needs.
    torch.cuda.synchronize()
    with no_waiting():
        got = function()
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_the_output_is_allocated(
    name: str, workspace: torch.Tensor, generator: torch.Generator
) -> None:
    function = _calls(workspace, generator)[name]
    out = function()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    out = function()
    made = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    assert made <= 1, out.shape


# -- graphs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("is_warm", [False, True])
def test_a_graph_reads_the_lengths_of_its_replay(
    is_warm: bool, q_len: int, workspace: torch.Tensor, generator: torch.Generator
) -> None:
    steps = ([1, 1, 1, 1], [2000, 5, 0, 900], [64, 4000, 17, 3], [0, 0, 0, 0])
    batch = Batch(steps[0], generator, q_len)
    mask = drafts(batch, generator) if q_len > 1 else None
    out = torch.empty_like(batch.q)
    # Loads the modules, from other addresses and with another width of the table.
    other = Batch(steps[0][:3], generator, q_len)
    given = other.arguments(workspace, mask=None if mask is None else mask[:3])
    XQA(**{**given, "block_tables": other.table[:, :7].contiguous()})
    given = batch.arguments(workspace, out=out, mask=mask)
    if is_warm:
        XQA(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):  # As layers of a model.
            XQA(**given)
    for lens in (*steps, *reversed(steps)):
        batch.fill(lens, generator)
        batch.q.normal_(generator=generator)
        out.fill_(torch.nan)
        graph.replay()
        batch.close(out, mask=mask)


def test_an_eager_call_between_replays_does_not_disturb_them(
    workspace: torch.Tensor, generator: torch.Generator
) -> None:
    batch, other = Batch([900, 3], generator), Batch([50] * 40, generator)
    out = XQA(**batch.arguments(workspace))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        XQA(**batch.arguments(workspace, out=out))
    for lens in ([900, 3], [4, 2000]):
        batch.fill(lens, generator)
        other.close(XQA(**other.arguments(workspace)))
        graph.replay()
        batch.close(out)


# -- torch.compile --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode: str, workspace: torch.Tensor, generator: torch.Generator) -> None:
    batch = Batch([70, 900], generator)
    given = batch.arguments(workspace)
    del given["query"]
    compiled = torch.compile(lambda q: 2 * XQA(q, **given), fullgraph=True, mode=mode)
    for _ in range(3):  # The compiler's own graphs are captured at the second call.
        assert torch.equal(compiled(batch.q).clone(), 2 * XQA(batch.q, **given))


# -- the wrapper ----------------------------------------------------------------------------------


def test_a_wrapper_with_the_same_pages_gives_the_same_bits(
    workspace: torch.Tensor, generator: torch.Generator
) -> None:
    batch = Batch([WIDTH * PAGE, 900, 33, 257], generator)
    out = XQA(**batch.arguments(workspace))
    counts = [-(-n // PAGE) for n in batch.lens.tolist()]
    indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=I32, device="cuda")
    indices = torch.cat([row[:n] for row, n in zip(batch.table, counts)])
    last = (batch.lens - 1) % PAGE + 1
    wrapper = precast.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    wrapper.plan(indptr, indices, last, HEADS, KV_HEADS, DIM, PAGE, q_data_type=BF16)
    assert torch.equal(wrapper.run(batch.q, batch.cache), out)
