# SPDX-License-Identifier: Apache-2.0
"""MLA on a GPU: 3,200 random cases against float64, fresh ones each time, and what it promises.

A failure shows its case, whose ``seed`` makes it again: ``draw(seed, Space())``.
``PRECAST_TEST_SEED`` sets the first. Cases are of the modules that are there: all of them where
they may be compiled. Whatever no request has is NaN, in pages, in queries and in outputs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mla_cases import Batch, Case, Space, draw, expected, make, plan, problem, run, wrapper_of
from test_gpu_attention import no_waiting

import precast
from precast._base.dtypes import DTYPE_WORDS
from precast._ops.mla import tiles
from precast._runtime.loader import loader
from precast.errors import UnsupportedConfigError
from precast.mla import BatchMLAPagedAttentionWrapper

BF16, E4M3, I32 = torch.bfloat16, torch.float8_e4m3fn, torch.int32
SHARDS, CASES = 40, 80
WORKSPACE = 256 << 20
FIRST = int(os.environ.get("PRECAST_TEST_SEED") or int.from_bytes(os.urandom(3), "little"))
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
#: Kernels of every GPU, and those that a plan takes by itself.
BACKENDS = ["fa2", "auto"] if IS_HOPPER else ["fa2"]


@functools.cache
def _is_there(op: str, *config: Any) -> bool:
    names = ("dtype_q", "dtype_kv", "head_dim_ckv", "head_dim_kpe")
    axes = {name: DTYPE_WORDS.get(str(value), value) for name, value in zip(names, config)}
    major, minor = torch.cuda.get_device_capability()
    try:
        found = loader.resolve(op, axes, f"{major}.{minor}")
    except UnsupportedConfigError:
        return False
    return found.path is not None or found.steps[-1].accepted


def served(case: Case) -> bool:
    config = case.dtype, case.kv_dtype, case.head_dim_ckv, case.head_dim_kpe
    return all(_is_there(op, *config) for op in ("mla", "mla_sm90")[: 1 + IS_HOPPER])


@pytest.fixture
def workspace() -> torch.Tensor:
    """May hold anything."""
    return torch.full((WORKSPACE,), 0xFF, dtype=torch.uint8, device="cuda")


def checked(case: Case, batch: Batch, workspace: torch.Tensor, backend: str) -> str:
    wrapper = wrapper_of(case, batch, workspace, backend)
    return problem(case, run(case, batch, wrapper), expected(case, batch))


# -- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_cases(shard: int, workspace: torch.Tensor) -> None:
    first = (FIRST + shard) << 20
    print(f"PRECAST_TEST_SEED={FIRST}: seeds from {first} on")
    drawn = (draw(seed, Space()) for seed in range(first, first + 100 * CASES))
    problems, count = [], 0
    for case in itertools.islice(filter(served, drawn), CASES):
        count += 1
        batch = make(case, "cuda")
        want = expected(case, batch)
        for backend in BACKENDS:
            wrapper = wrapper_of(case, batch, workspace, backend)
            text = problem(case, run(case, batch, wrapper), want)
            if text:
                problems.append(f"{backend}: {text}")
    assert problems == []
    assert count == CASES, "few modules are there"


def case_of(**changes: Any) -> Case:
    """A decode of DeepSeek's shape, of two requests."""
    usual = Case(
        seed=7,
        dtype=BF16,
        kv_dtype=BF16,
        head_dim_ckv=512,
        head_dim_kpe=64,
        heads=128,
        q_lens=[1, 1],
        kv_lens=[700, 4000],
        page_size=64,
        causal=True,
        sm_scale=1 / math.sqrt(192),
        form="csr",
        layout="joined",
        lengths_on_host=False,
        query_form="split",
        lse="base2",
    )
    return dataclasses.replace(usual, **changes)


SHAPES: dict[str, dict[str, Any]] = {
    "one long request": {"q_lens": [1], "kv_lens": [100_000]},
    "heads 16": {"heads": 16, "q_lens": [1] * 8, "kv_lens": [9000] * 8},
    "300 requests": {"q_lens": [1] * 300, "kv_lens": [*range(0, 1200, 4)], "heads": 32},
    "drafts": {"q_lens": [4] * 5, "kv_lens": [3, 4, 64, 1000, 5000], "heads": 16},
    "a chunk of a prefill": {"q_lens": [300, 7], "kv_lens": [2300, 7], "heads": 16},
    "odd heads": {"heads": 20, "q_lens": [3, 5], "kv_lens": [900, 130]},
    "no tokens": {"q_lens": [2, 0, 1], "kv_lens": [0, 0, 0]},
    "e4m3": {"kv_dtype": E4M3, "ckv_scale": 0.5, "kpe_scale": 0.02},
    "e4m3 with scales of tokens": {"kv_dtype": E4M3, "kpe_scale": 0.02, "scale_arr": True},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_models(name: str, backend: str, workspace: torch.Tensor) -> None:
    case = case_of(**SHAPES[name])
    assert checked(case, make(case, "cuda"), workspace, backend) == ""


def test_scales_of_tokens_of_any_size(workspace: torch.Tensor) -> None:
    """Scales that differ by many powers of two leave P times a scale with enough bits."""
    case = case_of(kv_dtype=E4M3, kpe_scale=1.0, scale_arr=True, heads=16)
    batch = make(case, "cuda")
    assert batch.scale_arr is not None
    exponents = torch.randint(-14, 3, batch.scale_arr.shape, device="cuda").float()
    batch.scale_arr.copy_(torch.where(batch.scale_arr.isnan(), torch.nan, exponents.exp2()))
    for backend in BACKENDS:
        assert checked(case, batch, workspace, backend) == ""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
def test_pages_do_not_change_a_bit(
    kv_dtype: torch.dtype, backend: str, workspace: torch.Tensor
) -> None:
    """The same tokens in pages of other sizes and in other memory."""
    more = {} if kv_dtype is BF16 else {"ckv_scale": 0.5, "kpe_scale": 0.25}
    first: Any = None
    tokens: Any = None
    for size in (64, 1, 2, 3, 8, 16, 32, 128):
        for layout in ("joined", "apart", "pages"):
            case = case_of(page_size=size, layout=layout, kv_dtype=kv_dtype, **more)
            batch = make(case, "cuda")
            slots = [slots_of(case, pages, n) for pages, n in zip(batch.pages, case.kv_lens)]
            now = [[part[at] for part in (batch.ckv, batch.kpe)] for at in slots]
            if tokens is None:
                tokens = [[part.clone() for part in parts] for parts in now]
            for at, parts in zip(slots, tokens):
                batch.ckv.view(torch.uint8 if kv_dtype is E4M3 else BF16)[at] = parts[0].view(
                    torch.uint8 if kv_dtype is E4M3 else BF16
                )
                batch.kpe.view(torch.uint8 if kv_dtype is E4M3 else BF16)[at] = parts[1].view(
                    torch.uint8 if kv_dtype is E4M3 else BF16
                )
            got = run(case, batch, wrapper_of(case, batch, workspace, backend))
            first = first or got
            assert all(torch.equal(a, b) for a, b in zip(got, first)), (size, layout)


def slots_of(case: Case, pages: list[int], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    entries = torch.arange(count)
    page = torch.tensor(pages, dtype=torch.long)[entries // case.page_size]
    return page.cuda(), (entries % case.page_size).cuda()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_workspace_with_little_room(backend: str) -> None:
    """Without room for partial results no tile is split; the numbers are the same."""
    case = case_of()
    batch = make(case, "cuda")
    for size in (16, 1 << 20, 8 << 20):
        small = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
        assert checked(case, batch, small, backend) == ""


@pytest.mark.parametrize("backend", BACKENDS)
def test_runs_are_repeatable(backend: str, workspace: torch.Tensor) -> None:
    case = case_of(q_lens=[1] * 40, kv_lens=[*range(50, 6000, 150)][:40])
    batch = make(case, "cuda")
    wrapper = wrapper_of(case, batch, workspace, backend)
    first = run(case, batch, wrapper)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(run(case, batch, wrapper), first))


# -- plans and graphs -----------------------------------------------------------------------------


def graphed(workspace: torch.Tensor, batch: int, pages: int, backend: str) -> Any:
    sizes = {"qo_indptr": batch + 1, "kv_indptr": batch + 1, "kv_indices": pages}
    sizes["kv_len_arr"] = batch
    buffers = {name: torch.zeros(n, dtype=I32, device="cuda") for name, n in sizes.items()}
    return BatchMLAPagedAttentionWrapper(workspace, use_cuda_graph=True, backend=backend, **buffers)


def batches() -> Iterator[tuple[Case, Batch]]:
    """Batches over one pool, with the queries of the first."""
    pool: Any = None
    for kv_lens in ([700, 4000, 1], [0, 64, 65], [9000, 1, 300], [0, 0, 0]):
        case = case_of(q_lens=[1] * 3, kv_lens=kv_lens)
        batch = make(case, "cuda")
        if pool is None:
            big = make(case_of(q_lens=[1] * 3, kv_lens=[9000, 4000, 64]), "cuda")
            pool = torch.nan_to_num(big.ckv), torch.nan_to_num(big.kpe), big
        batch.ckv, batch.kpe, batch.cache = pool[0], pool[1], None
        batch.q_nope, batch.q_pe, batch.query = pool[2].q_nope, pool[2].q_pe, pool[2].query
        yield case, batch


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_runs_by_later_plans(backend: str, workspace: torch.Tensor) -> None:
    all_of_them = [*batches()]
    case, batch = all_of_them[0]
    wrapper = graphed(workspace, 3, 400, backend)
    plan(case, batch, wrapper)
    out, lse = torch.empty_like(batch.q_nope), torch.empty(3, 128, device="cuda")
    given = {"out": out, "lse": lse, "return_lse": True}
    tensors = batch.q_nope, batch.q_pe, batch.ckv, batch.kpe
    wrapper.run(*tensors, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(*tensors, **given)
    for case, batch in (*all_of_them, *reversed(all_of_them)):
        plan(case, batch, wrapper)
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        assert problem(case, (out, lse), expected(case, batch)) == ""


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_of_a_run_inside_of_a_graph(backend: str, workspace: torch.Tensor) -> None:
    """``kv_len`` and ``page_table`` are read when the graph is replayed."""
    all_of_them = [*batches()]
    case, batch = all_of_them[0]
    wrapper = graphed(workspace, 3, 3 * 200, backend)
    plan(case, batch, wrapper)
    width = 150
    lens, table = torch.zeros(3, dtype=I32, device="cuda"), torch.zeros(3, width, dtype=I32)
    table = table.cuda()
    out = torch.empty_like(batch.q_nope)

    def fill(case: Case, batch: Batch) -> None:
        lens.copy_(batch.kv_lens)
        columns = min(width, batch.table.shape[1])
        table[:, :columns] = batch.table[:, :columns]

    def call() -> None:
        wrapper.run(
            *(batch.q_nope, batch.q_pe, batch.ckv, batch.kpe),
            out=out,
            kv_len=lens,
            page_table=table,
        )

    fill(case, batch)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for case, each in all_of_them:
        fill(case, each)
        out.fill_(math.nan)
        graph.replay()
        assert problem(case, (out, None), expected(case, each)) == ""


@pytest.mark.parametrize("backend", BACKENDS)
def test_plans_of_the_same_memory_follow_what_it_holds(
    backend: str, workspace: torch.Tensor
) -> None:
    case = case_of()
    batch = make(case, "cuda")
    wrapper = wrapper_of(case, batch, workspace, backend)
    block = wrapper._plan.block
    for kv_lens in ([700, 4000], [699, 2000], [0, 4000], [641, 1]):
        changed = dataclasses.replace(case, kv_lens=kv_lens)
        batch.kv_lens.copy_(torch.tensor(kv_lens, dtype=I32))
        plan(changed, batch, wrapper)
        assert wrapper._plan.block is block
        assert problem(changed, run(changed, batch, wrapper), expected(changed, batch)) == ""


@pytest.mark.parametrize("backend", BACKENDS)
def test_plans_of_other_lists_take_the_block_before(backend: str, workspace: torch.Tensor) -> None:
    case = case_of()
    batch = make(case, "cuda")
    wrapper = wrapper_of(case, batch, workspace, backend)
    run(case, batch, wrapper)  # It chooses the tile.
    plan(case, batch, wrapper)
    block = wrapper._plan.block
    for kv_lens in ([700, 4000], [64, 2000], [3000, 0]):
        changed = dataclasses.replace(case, kv_lens=kv_lens, seed=case.seed + 1)
        other = make(changed, "cuda")
        plan(changed, other, wrapper)
        assert wrapper._plan.block is block
        assert problem(changed, run(changed, other, wrapper), expected(changed, other)) == ""
    wrong = dataclasses.replace(other, kv_indices=other.kv_indices.view(1, -1))
    with pytest.raises(ValueError, match="kv_indices must have one dimension"):
        plan(changed, wrong, wrapper)
    assert problem(changed, run(changed, other, wrapper), expected(changed, other)) == ""


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_waited_for(backend: str, workspace: torch.Tensor) -> None:
    case = case_of()
    batch = make(case, "cuda")
    wrapper = wrapper_of(case, batch, workspace, backend)
    run(case, batch, wrapper)
    with no_waiting():
        plan(case, batch, wrapper)
        got = run(case, batch, wrapper)
    assert problem(case, got, expected(case, batch)) == ""


@pytest.mark.skipif(not IS_HOPPER, reason="needs compute capability 9.0")
def test_which_kernels_run_a_plan(workspace: torch.Tensor) -> None:
    for backend, is_theirs in (("auto", True), ("fa3", True), ("fa2", False)):
        case = case_of()
        wrapper = wrapper_of(case, make(case, "cuda"), workspace, backend)
        assert wrapper._plan.shape.sm90 is is_theirs
        want = tiles.SM90_BLOCK_M if is_theirs else 64
        assert wrapper._plan.shape.block_m == want
    case = case_of(sm_scale=-0.1, lengths_on_host=False)
    batch = make(case, "cuda")
    wrapper = wrapper_of(case, batch, workspace)
    assert not wrapper._plan.shape.sm90
    run(case, batch, wrapper)  # which chooses the tile again, now that it knows the queries
    assert not wrapper._plan.shape.sm90


# -- functions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
def test_functions_over_block_tables(
    kv_dtype: torch.dtype, q_len: int, workspace: torch.Tensor
) -> None:
    case = case_of(q_lens=[q_len] * 3, kv_lens=[700, 64, 5000], kv_dtype=kv_dtype, heads=64)
    batch = make(case, "cuda")
    want = expected(case, batch)
    query = batch.query.view(3, q_len, 64, 576)
    given = (query, batch.cache, workspace, 128, 512, 64, batch.table, batch.kv_lens, 5000)
    scale = {"bmm1_scale": case.sm_scale}
    for _ in range(2):  # The second call finds the plan of the first.
        out, lse = precast.trtllm_batch_decode_with_kv_cache_mla(*given, **scale, return_lse=True)
        assert problem(case, (out.view(-1, 64, 512), lse), want) == ""
        same = precast.xqa_batch_decode_with_kv_cache_mla(*given, **scale)
        assert torch.equal(same, out)
    number = {"bmm1_scale": torch.tensor([case.sm_scale], device="cuda")}
    torch.testing.assert_close(precast.xqa_batch_decode_with_kv_cache_mla(*given, **number), out)
    ragged = precast.trtllm_batch_decode_with_kv_cache_mla(
        batch.query, *given[1:], **scale, cum_seq_lens_q=batch.qo_indptr, max_q_len=q_len
    )
    assert torch.equal(ragged, out.view_as(ragged))


def test_functions_in_a_graph(workspace: torch.Tensor) -> None:
    all_of_them = [*batches()]
    case, batch = all_of_them[0]
    width = 150
    lens, table = batch.kv_lens.clone(), torch.zeros(3, width, dtype=I32, device="cuda")
    cache = torch.cat([batch.ckv, batch.kpe], -1)

    def fill(batch: Batch) -> None:
        lens.copy_(batch.kv_lens)
        columns = min(width, batch.table.shape[1])
        table[:, :columns] = batch.table[:, :columns]

    def call() -> torch.Tensor:
        return precast.trtllm_batch_decode_with_kv_cache_mla(
            *(batch.query.view(3, 1, 128, 576), cache, workspace, 128, 512, 64, table, lens),
            9000,
            bmm1_scale=case.sm_scale,
        )

    fill(batch)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for case, each in all_of_them:
        fill(each)
        out.fill_(math.nan)
        graph.replay()
        assert problem(case, (out.view(3, 128, 512), None), expected(case, each)) == ""


# -- torch.compile, errors ------------------------------------------------------------------------


def test_compiled(workspace: torch.Tensor) -> None:
    case = case_of()
    batch = make(case, "cuda")
    wrapper = wrapper_of(case, batch, workspace)
    tensors = batch.q_nope, batch.q_pe, batch.ckv, batch.kpe
    compiled = torch.compile(lambda *given: 2 * wrapper.run(*given), fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled(*tensors), 2 * wrapper.run(*tensors))


def test_errors_leave_everything_as_it_was(workspace: torch.Tensor) -> None:
    case = case_of()
    batch = make(case, "cuda")
    wrapper = wrapper_of(case, batch, workspace)
    out = torch.full_like(batch.q_nope, 7.0, memory_format=torch.contiguous_format)
    given = {
        "q_nope": batch.q_nope,
        "q_pe": batch.q_pe,
        "ckv_cache": batch.ckv,
        "kpe_cache": batch.kpe,
    }
    before = {name: tensor.clone() for name, tensor in given.items()}
    for name, wrong in (
        ("q_nope", batch.q_nope.half()),
        ("q_pe", batch.q_pe[:1]),
        ("q_pe", batch.q_pe[..., :32]),
        ("ckv_cache", batch.ckv[:, :32]),
        ("kpe_cache", batch.kpe.float()),
        ("kpe_cache", batch.kpe[1:]),
        ("q_nope", batch.q_nope.cpu()),
        ("out", out[:, :64]),
        ("out", batch.ckv.as_strided(out.shape, out.stride())),
    ):
        with pytest.raises((ValueError, TypeError), match=name):
            wrapper.run(**{**given, "out": out, name: wrong})
    torch.cuda.synchronize()
    assert (out == 7).all()
    for name, tensor in given.items():
        assert torch.equal(tensor.view(torch.int16), before[name].view(torch.int16)), name
    assert problem(case, run(case, batch, wrapper), expected(case, batch)) == ""
