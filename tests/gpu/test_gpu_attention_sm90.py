# SPDX-License-Identifier: Apache-2.0
"""The attention kernels for Hopper: random cases against the references, and what they promise.

Everything else that tests attention runs on them, too, where a call is one of theirs.
"""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from attention_calls import WORKSPACE_BYTES, call, expected, make, problem
from attention_cases import Case, Space, draw
from attention_dense import causal, dense, indptr

import precast
from precast._ops.attention import kernels, single, sm90
from precast._ops.attention.functional import context
from precast.prefill import batch_prefill_with_ragged_kv_cache_reference

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not IS_HOPPER, reason="needs compute capability 9.0")

SHARDS, CASES = 20, 60
FIRST = int(os.environ.get("PRECAST_TEST_SEED") or int.from_bytes(os.urandom(3), "little"))
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
COMPILED = {(96, 96)}  # when they are called: no profile but full has them
PREBUILT = sorted(sm90._HEAD_DIMS - COMPILED)
HEAD_DIMS = [*PREBUILT, *(pytest.param(dims, marks=pytest.mark.jit) for dims in COMPILED)]
FP8_HEAD_DIMS = sorted(sm90._FP8_HEAD_DIMS)
SPACES = {
    "16 bits": Space(kv_dtypes=(E4M3,), head_dims=tuple(PREBUILT)),
    "e4m3": Space(dtypes=(E4M3,), kv_dtypes=(E4M3,), head_dims=tuple(FP8_HEAD_DIMS)),
}
HEADS, KV_HEADS = 8, 2


def _is_theirs(case: Case) -> bool:
    rows = max(case.q_lens) * case.group
    fewest = sm90.fewest_rows(case.head_dim_vo, case.kv_dtype.itemsize)
    return case.kind in ("paged", "ragged", "single_prefill") and rows >= fewest


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_cases(shard: int, space: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_random_cases(shard, SPACES[space], monkeypatch)


@pytest.mark.jit
@pytest.mark.parametrize("shard", range(4))
def test_random_cases_of_other_head_dims(shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    space = Space(kv_dtypes=(E4M3,), head_dims=tuple(sorted(COMPILED)))
    check_random_cases(shard, space, monkeypatch)


def check_random_cases(shard: int, space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    first = (FIRST + shard) << 20
    print(f"PRECAST_TEST_SEED={FIRST}: seeds from {first} on")
    workspace = torch.full((WORKSPACE_BYTES,), 0xFF, dtype=torch.uint8, device="cuda")
    chosen, inner = [], sm90.with_tile
    monkeypatch.setattr(sm90, "with_tile", lambda shape: chosen.append(shape) or inner(shape))
    drawn = (draw(seed, space) for seed in range(first, first + 400 * CASES))
    problems, count = [], 0
    for case in itertools.islice(filter(_is_theirs, drawn), CASES):
        count += 1
        batch = make(case, "cuda")
        text = problem(case, call(case, batch, workspace), expected(case, batch))
        if text:
            problems.append(text)
    assert problems == []
    assert count == CASES, "few cases are theirs"
    assert len(chosen) >= CASES, "other kernels ran"


def workspace() -> torch.Tensor:
    return torch.full((256 << 20,), 0xFF, dtype=torch.uint8, device="cuda")


class Batch:
    """Requests of random lengths, ragged and in pages of any size; what is behind them is NaN."""

    def __init__(
        self,
        q_lens,
        kv_lens,
        generator,
        head_dims=(128, 128),
        heads=(HEADS, KV_HEADS),
        dtype=BF16,
        kv_dtype=None,
    ):
        self.heads, self.head_dims = heads, head_dims
        self.dtype, self.kv_dtype = dtype, kv_dtype or dtype
        self.q_lens, self.kv_lens = q_lens, kv_lens
        self.q_bounds, self.kv_bounds = indptr(q_lens), indptr(kv_lens)
        tokens, dims = sum(kv_lens), head_dims

        def random(*shape):
            return torch.randn(shape, device="cuda", generator=generator)

        self.q = _padded(random(sum(q_lens), heads[0], dims[0]).to(dtype))
        self.k = _padded(random(tokens, heads[1], dims[0]).to(self.kv_dtype))
        self.v = _padded(random(tokens, heads[1], dims[1]).to(self.kv_dtype))

    def pages(self, page_size, generator):
        """The same tokens in pages; table entries behind the last one name no page."""
        counts = [-(-n // page_size) for n in self.kv_lens]
        total = sum(counts)
        places = torch.randperm(total + 3, device="cuda", generator=generator)[:total]
        caches = []
        for x in (_bytes(self.k), _bytes(self.v)):
            cache = x.new_full((total + 3, page_size, *x.shape[1:]), NAN_BYTE)
            for i, (first, count) in enumerate(zip(indptr(counts).tolist(), counts)):
                entries = x.new_full((count * page_size, *x.shape[1:]), NAN_BYTE)
                begin = int(self.kv_bounds[i])
                entries[: self.kv_lens[i]] = x[begin : begin + self.kv_lens[i]]
                cache[places[first : first + count]] = entries.view(count, *cache.shape[1:])
            caches.append(cache.view(self.kv_dtype))
        garbage = torch.full((5,), 0x7FFFFFF0, dtype=torch.int32, device="cuda")
        last = [(n - 1) % page_size + 1 if n else 0 for n in self.kv_lens]
        table = indptr(counts), torch.cat([places.int(), garbage]), torch.tensor(last).int()
        return table, tuple(caches)

    def sizes(self):
        return *self.heads, self.head_dims[0]

    def dtypes(self):
        return {"q_data_type": self.dtype, "kv_data_type": self.kv_dtype}

    def expected(self, **options):
        outs, sums = [], []
        for i, n in enumerate(self.q_lens):
            (q0, q1), (k0, k1) = (x[i : i + 2].tolist() for x in (self.q_bounds, self.kv_bounds))
            mask = causal(n, k1 - k0).cuda() if options.get("causal") else None
            out, lse = dense(self.q[q0:q1], self.k[k0:k1], self.v[k0:k1], mask)
            outs.append(out)
            sums.append(lse)
        return torch.cat(outs), torch.cat(sums)


#: Numbers of this byte alone are NaN in each type.
NAN_BYTE = 0xFF


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """The same memory, of which any type has all operators."""
    return x.view(torch.uint8)


def _padded(x: torch.Tensor) -> torch.Tensor:
    """The same with NaN before and behind it."""
    memory = _bytes(x).new_full((x.shape[0] + 64, *_bytes(x).shape[1:]), NAN_BYTE)
    memory[32 : 32 + x.shape[0]] = _bytes(x)
    return memory.view(x.dtype)[32 : 32 + x.shape[0]]


def run_ragged(batch: Batch, on_device=False, **options):
    wrapper = precast.BatchPrefillWithRaggedKVCacheWrapper(workspace(), backend="fa3")
    bounds = batch.q_bounds, batch.kv_bounds
    bounds = [x.cuda() for x in bounds] if on_device else bounds
    dims = {"head_dim_vo": batch.head_dims[1]}
    wrapper.plan(*bounds, *batch.sizes(), **dims, **batch.dtypes(), **options)
    assert wrapper._plan.shape.sm90
    return wrapper.run(batch.q, batch.k, batch.v, return_lse=True)


def run_paged(batch: Batch, page_size, generator, kv_layout="NHD", **options):
    wrapper = precast.BatchPrefillWithPagedKVCacheWrapper(workspace(), kv_layout, backend="fa3")
    table, caches = batch.pages(page_size, generator)
    if kv_layout == "HND":
        caches = tuple(x.transpose(1, 2).contiguous() for x in caches)
    wrapper.plan(
        batch.q_bounds,
        *table,
        *batch.sizes(),
        page_size,
        head_dim_vo=batch.head_dims[1],
        **batch.dtypes(),
        **options,
    )
    assert wrapper._plan.shape.sm90
    return wrapper.run(batch.q, caches, return_lse=True)


LENGTHS = [1, 0, 129, 300, 64], [500, 77, 129, 1000, 64]
#: One that is copied in each way: by eight tokens, by four, and by one.
PAGE_SIZES = 1, 2, 4, 5, 8, 12, 16, 20, 24, 64, 128, 256


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3], ids=str)
def test_page_sizes_do_not_change_a_bit(head_dims, is_causal, kv_dtype, generator):
    batch = Batch(*LENGTHS, generator, head_dims, kv_dtype=kv_dtype)
    out, lse = run_ragged(batch, causal=is_causal)
    want, sums = batch.expected(causal=is_causal)
    torch.testing.assert_close(out.double(), want, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double(), sums, atol=1e-3, rtol=1e-3)
    for page_size, layout in itertools.product(PAGE_SIZES, ("NHD", "HND")):
        again, again_lse = run_paged(batch, page_size, generator, layout, causal=is_causal)
        assert torch.equal(again, out), page_size
        assert torch.equal(again_lse, lse), page_size


#: Tiles of at most 64 rows, whose KV blocks two warpgroups share: none, one, two, and many.
FEW = [16, 1, 0, 3, 7, 16, 2], [3000, 77, 10, 128, 129, 16, 0]


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_left": 100, "causal": True}])
def test_few_rows(head_dims, options, generator):
    batch = Batch(*FEW, generator, head_dims)
    out, lse = run_ragged(batch, **options)
    want, sums = batch_prefill_with_ragged_kv_cache_reference(
        batch.q, batch.k, batch.v, batch.q_bounds, batch.kv_bounds, o_dtype=torch.float32, **options
    )
    torch.testing.assert_close(out.float(), want, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse, sums.float(), atol=1e-3, rtol=1e-3)
    for page_size in (1, 5, 16, 64):
        again, again_lse = run_paged(batch, page_size, generator, **options)
        assert torch.equal(again, out), page_size
        assert torch.equal(again_lse, lse), page_size


def test_many_tiles_are_taken_by_tickets(generator):
    """More than two for each CTA; a run leaves the plan as it was, so the next one is the same."""
    batch = Batch([700, 16, 900] * 8, [900, 800, 900] * 8, generator, heads=(32, 8))
    wrapper = precast.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    bounds = batch.q_bounds, batch.kv_bounds
    wrapper.plan(*bounds, *batch.sizes(), causal=True, q_data_type=BF16)
    plan = wrapper._int_workspace_buffer.clone()
    want, _ = batch.expected(causal=True)
    for _ in range(3):
        out = torch.full_like(batch.q, torch.nan)
        wrapper.run(batch.q, batch.k, batch.v, out=out)
        torch.testing.assert_close(out.double(), want, atol=1e-2, rtol=1e-2)
        assert torch.equal(wrapper._int_workspace_buffer, plan)


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_queries_of_any_size_with_keys_of_e4m3(head_dims, dtype, generator):
    """They are converted by rows, in which numbers of very different sizes stand side by side."""
    batch = Batch([200, 300], [700, 300], generator, head_dims, dtype=dtype, kv_dtype=E4M3)
    sizes = torch.randint(-12, 1, batch.q.shape, device="cuda", generator=generator)
    rows = torch.randint(-3, 4, batch.q.shape[:2], device="cuda", generator=generator)
    batch.q.mul_(torch.exp2(sizes + rows.unsqueeze(-1)).to(dtype))
    batch.q[5] = 0
    out, lse = run_ragged(batch, causal=True)
    want, sums = batch.expected(causal=True)
    # They are multiplied in FP8, which loses about 2^-10 of a score of this size.
    torch.testing.assert_close(out.double(), want, atol=1e-2, rtol=1e-2)
    tolerance = 1e-2 if dtype == BF16 else 2e-3
    torch.testing.assert_close(lse.double(), sums, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_each_score_of_keys_of_e4m3(head_dims, dtype, generator):
    """A log-sum-exp of one key is its score, so each bit of a query counts."""
    count = 400
    batch = Batch(
        [65] * count, [1] * count, generator, head_dims, heads=(2, 2), dtype=dtype, kv_dtype=E4M3
    )
    _, lse = run_ragged(batch)
    _, sums = batch.expected()
    error = (lse.double() - sums).square().mean().sqrt().item()
    # By a model of the tensor cores 1.0e-4 to 3.1e-4, and 9.3e-4 if a float16 is a sum of two.
    assert error < 4.5e-4


@pytest.mark.parametrize("page_size", [0, 16, 5])
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3], ids=str)
def test_requests_without_keys_between_others(kv_dtype, page_size, generator):
    """Producers find the work tiles of such requests long before consumers compute the others."""
    count = 600
    kv_lens = [2000 if i % 6 == 0 else 0 for i in range(count)]
    batch = Batch([64] * count, kv_lens, generator, heads=(16, 8), kv_dtype=kv_dtype)
    options = {"disable_split_kv": True}
    if page_size:
        out, lse = run_paged(batch, page_size, generator, **options)
    else:
        out, lse = run_ragged(batch, **options)
    want, sums = batch.expected()
    torch.testing.assert_close(out.double(), want, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double(), sums, atol=1e-2, rtol=1e-2)


def custom_mask(batch, generator):
    pairs = sum(n * m for n, m in zip(batch.q_lens, batch.kv_lens))
    return {"custom_mask": torch.rand(pairs, device="cuda", generator=generator) < 0.7}


def items(batch, generator):
    """Prefixes and items of any length: a query sees as many tokens of its item as its place."""
    count, width = len(batch.q_lens), 400
    given = {"device": "cuda", "generator": generator}
    prefix = torch.randint(100, (count,), **given)
    return {
        "prefix_len_ptr": prefix.to(torch.uint32),
        "token_pos_in_items_ptr": torch.randint(30, (count * width,), **given).to(torch.uint16),
        "token_pos_in_items_len": width,
    }


SCORES = {
    "soft cap": lambda *_: {"causal": True, "logits_soft_cap": 20.0},
    "soft cap and window": lambda *_: {"logits_soft_cap": 5.0, "window_left": 99},
    "ALiBi": lambda *_: {"causal": True, "pos_encoding_mode": "ALIBI"},
    "ALiBi and soft cap": lambda *_: {"pos_encoding_mode": "ALIBI", "logits_soft_cap": 20.0},
    "RoPE": lambda *_: {"causal": True, "pos_encoding_mode": "ROPE_LLAMA"},
    "RoPE and custom mask": lambda *x: {"pos_encoding_mode": "ROPE_LLAMA", **custom_mask(*x)},
    "custom mask": custom_mask,
    "custom mask and soft cap": lambda *x: {"logits_soft_cap": 20.0, **custom_mask(*x)},
    "items": items,
    "negative scale": lambda *_: {"causal": True, "sm_scale": -0.1},
    "scale of zero": lambda *_: {"sm_scale": 0.0},
}


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("scores", SCORES)
def test_other_scores(head_dims, scores, generator):
    """In all ways to copy keys: ragged, in pages of eight tokens, of four, and in others."""
    batch = Batch(*LENGTHS, generator, head_dims)
    options = SCORES[scores](batch, generator)
    out, lse = run_ragged(batch, **options)
    bounds = batch.q_bounds, batch.kv_bounds
    want, sums = batch_prefill_with_ragged_kv_cache_reference(
        batch.q, batch.k, batch.v, *bounds, o_dtype=torch.float32, **options
    )
    tolerance = 2e-2 if "RoPE" in scores else 1e-2  # Rotated numbers are rounded, too.
    torch.testing.assert_close(out.float(), want.float(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, sums.float(), atol=tolerance, rtol=tolerance)
    for page_size in (16, 4, 5):
        again, again_lse = run_paged(batch, page_size, generator, **options)
        assert torch.equal(again, out), page_size
        assert torch.equal(again_lse, lse), page_size


def test_a_run_may_have_other_scores_than_its_plan(generator):
    batch = Batch(*LENGTHS, generator)
    wrapper = precast.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    bounds = batch.q_bounds, batch.kv_bounds
    wrapper.plan(*bounds, *batch.sizes(), causal=True, q_data_type=BF16)
    options = {"causal": True, "logits_soft_cap": 5.0}
    want, _ = batch_prefill_with_ragged_kv_cache_reference(
        batch.q, batch.k, batch.v, *bounds, o_dtype=torch.float32, **options
    )
    out = wrapper.forward(batch.q, batch.k, batch.v, **options)
    torch.testing.assert_close(out.float(), want, atol=1e-2, rtol=1e-2)
    wrapper._logits_soft_cap = 5.0  # as engines set it
    assert torch.equal(wrapper.run(batch.q, batch.k, batch.v), out)
    assert wrapper._plan.shape.sm90


def test_strides_of_zero(generator):
    """Keys and values of one head that all query heads share, as expand() makes them."""
    batch = Batch([200, 90], [300, 90], generator, heads=(HEADS, 1))
    want, _ = batch.expected(causal=True)
    batch.heads = HEADS, KV_HEADS
    batch.k, batch.v = (x.expand(-1, KV_HEADS, -1) for x in (batch.k, batch.v))
    out, _ = run_ragged(batch, causal=True)
    torch.testing.assert_close(out.double(), want, atol=1e-2, rtol=1e-2)


def test_queries_with_a_stride_of_zero_are_an_error(generator):
    """Which the kernels cannot read; nothing is written."""
    batch = Batch([200, 90], [300, 90], generator)
    wrapper = precast.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    wrapper.plan(batch.q_bounds, batch.kv_bounds, *batch.sizes(), q_data_type=BF16)
    out = torch.full_like(batch.q, 7.0)
    for shared in (batch.q[:, :1].expand(-1, HEADS, -1), batch.q[:1].expand(290, -1, -1)):
        with pytest.raises(ValueError, match=r"q must have no stride of 0"):
            wrapper.run(shared, batch.k, batch.v, out=out)
    assert out.eq(7.0).all()


@pytest.mark.parametrize("lengths", [LENGTHS, FEW], ids=["many rows", "few rows"])
def test_lengths_on_the_device_change_nothing(lengths, generator):
    batch = Batch(*lengths, generator)
    for mine, others in zip(run_ragged(batch), run_ragged(batch, on_device=True)):
        assert torch.equal(mine, others)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 12, 16, 40, 64])
def test_groups(group, generator):
    """Tiles have whole groups, so some rows of a tile may be empty."""
    batch = Batch([130, 70], [200, 70], generator, heads=(2 * group, 2))
    out, lse = run_ragged(batch, causal=True)
    want, sums = batch.expected(causal=True)
    torch.testing.assert_close(out.double(), want, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double(), sums, atol=1e-3, rtol=1e-3)


def test_a_batch_of_no_tokens(generator):
    batch = Batch([200, 90], [0, 0], generator)
    out, lse = run_ragged(batch)
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()


def test_results_of_a_request_with_a_split_size_do_not_depend_on_the_batch(generator):
    batch = Batch([200, 90, 300], [1000, 90, 700], generator)
    out, lse = run_ragged(batch, causal=True, fixed_split_size=256)
    for i in range(3):
        (q0, q1), (k0, k1) = (x[i : i + 2].tolist() for x in (batch.q_bounds, batch.kv_bounds))
        alone = Batch([batch.q_lens[i]], [batch.kv_lens[i]], generator)
        alone.q, alone.k, alone.v = batch.q[q0:q1], batch.k[k0:k1], batch.v[k0:k1]
        own, own_lse = run_ragged(alone, causal=True, fixed_split_size=256)
        assert torch.equal(own, out[q0:q1])
        assert torch.equal(own_lse, lse[q0:q1])


def test_a_graph_with_new_lengths_and_contents(generator):
    most = Batch([300, 300], [700, 900], generator)
    q, k, v = (x.clone() for x in (most.q, most.k, most.v))
    wrapper = precast.BatchPrefillWithRaggedKVCacheWrapper(
        workspace(),
        use_cuda_graph=True,
        qo_indptr_buf=torch.zeros(3, dtype=torch.int32, device="cuda"),
        kv_indptr_buf=torch.zeros(3, dtype=torch.int32, device="cuda"),
    )
    wrapper.plan(most.q_bounds, most.kv_bounds, *most.sizes(), causal=True, q_data_type=BF16)
    out = torch.empty_like(q)
    wrapper.run(q, k, v, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(q, k, v, out=out)
    for lengths in ([300, 300], [700, 900]), ([10, 250], [10, 1500]), ([0, 600], [5, 600]):
        batch = Batch(*lengths, generator)
        q[: len(batch.q)].copy_(batch.q)
        k[: len(batch.k)].copy_(batch.k)
        v[: len(batch.v)].copy_(batch.v)
        plan = batch.q_bounds, batch.kv_bounds, *batch.sizes()
        wrapper.plan(*plan, causal=True, q_data_type=BF16)
        graph.replay()
        want, _ = batch.expected(causal=True)
        torch.testing.assert_close(out[: len(want)].double(), want, atol=1e-2, rtol=1e-2)


def test_single_prefill_runs_on_them(generator, monkeypatch):
    launched = []
    inner = kernels.run_ragged_sm90[BF16, BF16, 128, 128, torch.cuda.current_device()]
    monkeypatch.setitem(
        kernels.run_ragged_sm90,
        (BF16, BF16, 128, 128, torch.cuda.current_device()),
        lambda *args: launched.append(1) or inner(*args),
    )
    batch = Batch([300], [400], generator)
    out = precast.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, causal=True)
    assert launched == [1]
    want, _ = batch.expected(causal=True)
    torch.testing.assert_close(out.double(), want, atol=1e-2, rtol=1e-2)


# -- queries, keys and values in e4m3 -------------------------------------------------------------


class Fp8Batch(Batch):
    """The same in e4m3."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, dtype=E4M3, **kwargs)


FP8_TYPES = {"q_data_type": E4M3, "kv_data_type": E4M3, "o_data_type": BF16}


def run_fp8(batch: Batch, page_size=0, generator=None, kv_layout="NHD", scales=None, **options):
    """Ragged, or in pages."""
    options = {"head_dim_vo": batch.head_dims[1], **FP8_TYPES, **options}
    if page_size:
        table, caches = batch.pages(page_size, generator)
        if kv_layout == "HND":
            caches = tuple(x.transpose(1, 2).contiguous() for x in caches)
        wrapper = precast.BatchPrefillWithPagedKVCacheWrapper(workspace(), kv_layout)
        wrapper.plan(batch.q_bounds, *table, *batch.sizes(), page_size, **options)
    else:
        wrapper = precast.BatchPrefillWithRaggedKVCacheWrapper(workspace())
        caches = batch.k, batch.v
        wrapper.plan(batch.q_bounds, batch.kv_bounds, *batch.sizes(), **options)
    assert wrapper._plan.multiplies_fp8
    given = (caches,) if page_size else caches
    return wrapper.run(batch.q, *given, return_lse=True, **(scales or {}))


def assert_near(got, want):
    """Probabilities are rounded to four bits, so what is summed up has an error of 2 % or so; and
    log-sum-exps are those of rounded probabilities, which matters where there are few."""
    (out, lse), (right, sums) = got, want
    assert out.isfinite().all()
    assert (out - right).square().mean().sqrt() < 0.035 * right.square().mean().sqrt()
    torch.testing.assert_close(out.double(), right.double(), atol=0.1, rtol=0.1)
    torch.testing.assert_close(lse.double(), sums.double(), atol=6e-2, rtol=0)
    is_sum = sums.isfinite()
    # 1.03e-2 was seen where an item has few keys.
    assert (lse - sums)[is_sum].square().mean().sqrt() < 1.5e-2


@pytest.mark.parametrize("head_dims", FP8_HEAD_DIMS, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_page_sizes_do_not_change_a_bit_of_fp8(head_dims, is_causal, generator):
    batch = Fp8Batch(*LENGTHS, generator, head_dims)
    out, lse = run_fp8(batch, causal=is_causal)
    assert_near((out, lse), batch.expected(causal=is_causal))
    for page_size, layout in itertools.product((1, 4, 5, 8, 12, 16, 24, 64, 256), ("NHD", "HND")):
        again = run_fp8(batch, page_size, generator, layout, causal=is_causal)
        assert torch.equal(again[0], out), page_size
        assert torch.equal(again[1], lse), page_size


@pytest.mark.parametrize("head_dims", FP8_HEAD_DIMS, ids=str)
@pytest.mark.parametrize("scores", [name for name in SCORES if "RoPE" not in name])
def test_other_scores_of_fp8(head_dims, scores, generator):
    batch = Fp8Batch(*LENGTHS, generator, head_dims)
    options = SCORES[scores](batch, generator)
    want = batch_prefill_with_ragged_kv_cache_reference(
        *(batch.q.bfloat16(), batch.k, batch.v, batch.q_bounds, batch.kv_bounds),
        o_dtype=torch.float32,
        return_lse=True,
        **options,
    )
    out, lse = run_fp8(batch, **options)
    assert_near((out, lse), want)
    for page_size in (16, 5):
        again = run_fp8(batch, page_size, generator, **options)
        assert torch.equal(again[0], out), page_size
        assert torch.equal(again[1], lse), page_size


@pytest.mark.parametrize("head_dims", FP8_HEAD_DIMS, ids=str)
@pytest.mark.parametrize("options", [{}, {"fixed_split_size": 256}, {"logits_soft_cap": 8.0}])
def test_sinks_of_fp8(head_dims, options, generator):
    """A sink joins sums that are 2^8 times as large as elsewhere: one is 0, and one dominates."""
    batch = Fp8Batch([200, 90, 70], [700, 90, 300], generator, head_dims)
    sinks = torch.randn(HEADS, device="cuda", generator=generator)
    sinks[0], sinks[1] = -torch.inf, 12.0
    scores = {name: x for name, x in options.items() if name == "logits_soft_cap"}
    want = batch_prefill_with_ragged_kv_cache_reference(
        *(batch.q.bfloat16(), batch.k, batch.v, batch.q_bounds, batch.kv_bounds),
        causal=True,
        sinks=sinks,
        o_dtype=torch.float32,
        return_lse=True,
        **scores,
    )
    got = run_fp8(batch, 16, generator, causal=True, scales={"sinks": sinks}, **options)
    assert_near(got, want)


def test_rotated_fp8_is_converted(generator):
    """Rotated numbers would be rounded to e4m3 once more, so a run converts the queries."""
    batch = Fp8Batch(*LENGTHS, generator)
    options = {"causal": True, "pos_encoding_mode": "ROPE_LLAMA"}
    wrapper = precast.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    bounds = batch.q_bounds, batch.kv_bounds
    wrapper.plan(*bounds, *batch.sizes(), **FP8_TYPES, **options)
    assert not wrapper._plan.multiplies_fp8
    out, lse = wrapper.run(batch.q, batch.k, batch.v, return_lse=True)
    want, sums = batch_prefill_with_ragged_kv_cache_reference(
        *(batch.q.bfloat16(), batch.k, batch.v, *bounds),
        o_dtype=torch.float32,
        return_lse=True,
        **options,
    )
    torch.testing.assert_close(out.float(), want, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, sums, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("is_by_position", [False, True])
@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 8.0}, {"fixed_split_size": 256}])
def test_scales_of_heads(options, is_by_position, generator):
    """In the plain and the general kernels, and where splits are combined."""
    batch = Fp8Batch([200, 90], [700, 90], generator)
    q_scale, k_scale, v_scale = (
        torch.rand(n, device="cuda", generator=generator) + 0.5 for n in (HEADS, KV_HEADS, KV_HEADS)
    )
    group = HEADS // KV_HEADS
    q = batch.q.float() * (q_scale * k_scale.repeat_interleave(group))[:, None]
    scores = {name: options[name] for name in ("logits_soft_cap",) if name in options}
    want, sums = batch_prefill_with_ragged_kv_cache_reference(
        *(q, batch.k.float(), batch.v.float(), batch.q_bounds, batch.kv_bounds),
        causal=True,
        return_lse=True,
        **scores,
    )
    want = want * v_scale.repeat_interleave(group)[:, None]
    wrapper = precast.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    bounds = batch.q_bounds, batch.kv_bounds
    wrapper.plan(*bounds, *batch.sizes(), causal=True, **FP8_TYPES, **options)
    scales = q_scale, k_scale, v_scale
    if is_by_position:
        got = wrapper.run(batch.q, batch.k, batch.v, *scales, return_lse=True)
    else:
        named = dict(zip(("q_scale", "k_scale", "v_scale"), scales))
        got = wrapper.run(batch.q, batch.k, batch.v, return_lse=True, **named)
    assert_near(got, (want, sums))


def test_scales_of_other_shapes_are_an_error(generator):
    batch = Fp8Batch([200], [300], generator)
    wrapper = precast.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    wrapper.plan(batch.q_bounds, batch.kv_bounds, *batch.sizes(), **FP8_TYPES)
    out = torch.full(batch.q.shape, 7.0, dtype=BF16, device="cuda")
    scale = torch.ones(HEADS - 1, device="cuda")
    for option in ("q_scale", "k_scale", "v_scale"):
        with pytest.raises(ValueError, match=f"{option} must be one number or have shape"):
            wrapper.run(batch.q, batch.k, batch.v, out=out, **{option: scale})
    assert out.eq(7.0).all()


@pytest.mark.parametrize("weight", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("hot", [0, 77_777, (1 << 17) - 1])
def test_a_hot_key_among_many_is_found(hot, weight, generator):
    """One of 128k keys has this share of the softmax; tensor cores that add up all of P V in e4m3
    lose either the key or the others."""
    count, n = 1 << 17, 128
    q = torch.zeros(n, 1, 128, device="cuda")
    q[..., 0] = 8.0
    k = torch.randn(count, 1, 128, device="cuda", generator=generator) * 0.25
    k[..., 0] = 0.0
    # exp(score) is weight / (1 - weight) times as much as all others have.
    score = torch.tensor((count - 1) * weight / (1 - weight)).log()
    k[hot, 0, 0] = 4.0
    sm_scale = float(score) / 32
    v = torch.randn(count, 1, 128, device="cuda", generator=generator)
    v[hot] = torch.randn(1, 128, device="cuda", generator=generator)
    v = v + 0.25  # so that the others have a mean
    batch = Fp8Batch([n], [count], generator, heads=(1, 1))
    batch.q, batch.k, batch.v = (x.to(E4M3) for x in (q, k, v))
    want = batch_prefill_with_ragged_kv_cache_reference(
        *(batch.q.float(), batch.k.float(), batch.v.float(), batch.q_bounds, batch.kv_bounds),
        sm_scale=sm_scale,
        return_lse=True,
    )
    out, lse = run_fp8(batch, sm_scale=sm_scale)
    torch.testing.assert_close(out.float(), want[0], atol=0.02, rtol=0.02)
    torch.testing.assert_close(lse, want[1], atol=2e-2, rtol=0)


def test_a_graph_of_fp8_with_new_lengths_and_contents(generator):
    most = Fp8Batch([300, 300], [700, 900], generator)
    q, k, v = (x.clone() for x in (most.q, most.k, most.v))
    scale = torch.ones(1, device="cuda")
    wrapper = precast.BatchPrefillWithRaggedKVCacheWrapper(
        workspace(),
        use_cuda_graph=True,
        qo_indptr_buf=torch.zeros(3, dtype=torch.int32, device="cuda"),
        kv_indptr_buf=torch.zeros(3, dtype=torch.int32, device="cuda"),
    )
    wrapper.plan(most.q_bounds, most.kv_bounds, *most.sizes(), causal=True, **FP8_TYPES)
    out = torch.empty(q.shape, dtype=BF16, device="cuda")
    wrapper.run(q, k, v, out=out, v_scale=scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(q, k, v, out=out, v_scale=scale)
    for factor, lengths in enumerate((([300, 300], [700, 900]), ([10, 250], [10, 1500])), 1):
        batch = Fp8Batch(*lengths, generator)
        for memory, x in ((q, batch.q), (k, batch.k), (v, batch.v)):
            memory[: len(x)].copy_(x)
        scale.fill_(factor)
        plan = batch.q_bounds, batch.kv_bounds, *batch.sizes()
        wrapper.plan(*plan, causal=True, **FP8_TYPES)
        graph.replay()
        want, _ = batch.expected(causal=True)
        got = out[: len(want)].double()
        assert (got - factor * want).square().mean().sqrt() < 0.035 * factor


def test_single_prefill_and_context_multiply_fp8(generator, monkeypatch):
    launched = []
    for table in (single.single_prefill_fp8, context._EXPORT_FP8):
        key = BF16, 128, 128, torch.cuda.current_device()
        monkeypatch.setitem(
            table, key, lambda *args, inner=table[key]: launched.append(1) or inner(*args)
        )
    batch = Fp8Batch([300], [400], generator)
    want = batch.expected(causal=True)
    got = precast.single_prefill_with_kv_cache(
        batch.q, batch.k, batch.v, causal=True, o_dtype=BF16, return_lse=True
    )
    assert_near(got, want)
    (_, pages, _), (keys, values) = batch.pages(16, generator)
    tables = pages[:25][None].int()
    out = precast.prefill.trtllm_batch_context_with_kv_cache(
        batch.q,
        (keys, values),
        torch.zeros(64 << 20, dtype=torch.uint8, device="cuda"),
        tables,
        torch.tensor([400], dtype=torch.int32, device="cuda"),
        300,
        400,
        128**-0.5,
        1.0,
        1,
        torch.tensor([0, 300], dtype=torch.int32, device="cuda"),
        torch.tensor([0, 400], dtype=torch.int32, device="cuda"),
        kv_layout="NHD",
        out_dtype=BF16,
    )
    assert_near((out, got[1]), want)
    assert launched == [1, 1]
