# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode in one plan and one launch, in reference mode: numbers and errors."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from attention_dense import I32, cache_of, causal, dense, indptr, pages_of
from attention_support import record_launches, workspace

import precast
from precast._ops.attention import heuristics
from precast.errors import CacheLayoutError, PlanMismatchError

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 4
SIZES = (HEADS, KV_HEADS, DIM, DIM, PAGE)
F32 = {"q_data_type": "float32", "kv_data_type": "float32"}
#: A prefill, two decodes, a chunk, a request without tokens, one without queries.
Q_LENS, LENS = [6, 1, 1, 3, 2, 0], [6, 1, 9, 12, 0, 5]

pytestmark = pytest.mark.usefixtures("reference_mode")


class Mixed:
    """A batch with queries, cache, and what must come of it."""

    def __init__(self, q_lens=Q_LENS, lens=LENS, seed=1, spare=0):
        g = torch.Generator().manual_seed(seed)
        # Pages may have room for more tokens than there are.
        held = [n + spare if n else 0 for n in lens]
        self.pages, _ = pages_of(held, PAGE, torch.randperm(32, generator=g))
        self.pages = self.pages._replace(lengths=lens)
        self.cache = cache_of([self.pages], 32, PAGE, KV_HEADS, DIM, g)
        self.q = torch.randn(sum(q_lens), HEADS, DIM, generator=g)
        self.q_lens, self.lens = q_lens, lens

    @property
    def table(self):
        lengths = torch.tensor(self.lens, dtype=I32)
        return indptr(self.q_lens), self.pages.indptr, self.pages.indices, lengths

    def expected(self, is_causal=True, **options):
        states, row = [], 0
        for request, (n, m) in enumerate(zip(self.q_lens, self.lens)):
            k, v = self.pages.tokens(self.cache, request)
            mask = causal(n, m) if is_causal else None
            states.append(dense(self.q[row : row + n], k, v, mask, **options))
            row += n
        return tuple(torch.cat(part).float() for part in zip(*states))


def planned(batch, layout="NHD", **options):
    wrapper = precast.BatchAttention(layout, "cpu")
    wrapper.plan(*batch.table, *SIZES, **{**F32, "causal": True, **options})
    return wrapper


def close(got, want):
    for mine, theirs in zip(got, want):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("spare", [0, 9])
def test_a_mixed_batch(layout, is_causal, spare):
    batch = Mixed(spare=spare)
    cache = batch.cache.transpose(2, 3) if layout == "HND" else batch.cache
    wrapper = planned(batch, layout, causal=is_causal, sm_scale=0.2)
    got, want = wrapper.run(batch.q, cache), batch.expected(is_causal, sm_scale=0.2)
    close(got, want)
    pair = tuple(cache.unbind(1))
    assert all(map(torch.equal, wrapper.run(batch.q, pair), got))


def test_it_is_the_prefill_with_last_pages():
    batch = Mixed()
    rows, starts, pages, _ = batch.table
    prefill = precast.BatchPrefillWithPagedKVCacheWrapper(workspace())
    last = batch.pages.last_page_len
    prefill.plan(rows, starts, pages, last, HEADS, KV_HEADS, DIM, PAGE, causal=True, **F32)
    want = prefill.run_return_lse(batch.q, batch.cache)
    assert all(map(torch.equal, planned(batch).run(batch.q, batch.cache), want))


def test_one_plan_and_one_launch(monkeypatch):
    batch, launched = Mixed(), record_launches(monkeypatch)
    planned(batch).run(batch.q, batch.cache)
    assert launched == ["plan", "run_paged"]


def test_scales_and_outputs_of_the_caller():
    batch = Mixed()
    wrapper, want = planned(batch), batch.expected(sm_scale=DIM**-0.5 * 0.5)
    out, lse = torch.empty_like(batch.q), torch.empty(batch.q.shape[:2])
    got = wrapper.run(batch.q, batch.cache, out, lse, torch.tensor(0.5), torch.tensor(3.0))
    assert got[0] is out
    assert got[1] is lse
    close(got, (3 * want[0], want[1]))
    close(wrapper.run(batch.q, batch.cache, k_scale=0.5), want)


def test_a_soft_cap_is_that_of_the_plan():
    batch = Mixed()
    wrapper = planned(batch, logits_soft_cap=2.0)
    want = batch.expected(logits_soft_cap=2.0)
    close(wrapper.run(batch.q, batch.cache), want)
    close(wrapper.run(batch.q, batch.cache, logits_soft_cap=2.0), want)
    for capped, cap in ((wrapper, 3.0), (planned(batch), 2.0)):
        with pytest.raises(PlanMismatchError, match=r"logits_soft_cap must be .* as in plan"):
            capped.run(batch.q, batch.cache, logits_soft_cap=cap)
    with pytest.raises(ValueError, match="logits_soft_cap must be a finite number"):
        wrapper.run(batch.q, batch.cache, logits_soft_cap=math.nan)


def test_a_run_is_that_of_the_latest_plan():
    first, later = Mixed(), Mixed([1, 1, 4], [7, 3, 4], seed=2)
    wrapper = planned(first)
    wrapper.plan(*later.table, *SIZES, causal=True, **F32)
    close(wrapper.run(later.q, later.cache), later.expected())
    assert (wrapper._max_q_len, wrapper._max_kv_len) == (4, 7)


def test_lengths_of_other_integers_plan_the_same():
    batch = Mixed()
    wrapper = precast.BatchAttention(device="cpu")
    wrapper.plan(*(t.long() for t in batch.table), *SIZES, causal=True, **F32)
    close(wrapper.run(batch.q, batch.cache), batch.expected())


def test_the_workspace_is_enough_for_every_tile(monkeypatch):
    monkeypatch.setattr(heuristics, "get_device_sm_count", lambda device: 132)
    device = torch.device("cuda")
    most = heuristics.most_partial_bytes(device)
    assert most == heuristics.partial_bytes(device, 128, 256) == 8 * 132 * 2 * 128 * 258


# -- errors ---------------------------------------------------------------------------------------


def test_a_run_needs_a_plan():
    batch = Mixed()
    with pytest.raises(PlanMismatchError, match=r"BatchAttention\.run: there is no plan"):
        precast.BatchAttention(device="cpu").run(batch.q, batch.cache)


@pytest.mark.parametrize(
    ("at", "change", "words"),
    [
        (1, lambda t: t[:-1], "kv_indptr should be the same|kv_indptr must have shape"),
        (3, lambda t: t[:-1], r"kv_len must have shape \[6\], got \[5\]"),
        (0, lambda t: t[:-1], "must have shape"),
    ],
)
def test_tables_of_one_batch(at, change, words):
    batch = Mixed()
    wrapper = planned(batch)
    want = wrapper.run(batch.q, batch.cache)
    table = [*batch.table]
    table[at] = change(table[at])
    with pytest.raises(ValueError, match=words):
        wrapper.plan(*table, *SIZES, **F32)
    assert all(map(torch.equal, wrapper.run(batch.q, batch.cache), want))


def test_arguments_of_other_backends():
    batch = Mixed()
    with pytest.raises(NotImplementedError, match="use_profiler must be False"):
        planned(batch, use_profiler=True)
    for option in ("profiler_buffer", "kv_cache_sf"):
        with pytest.raises(NotImplementedError, match=f"{option} must be None"):
            planned(batch).run(batch.q, batch.cache, **{option: torch.ones(2)})


def test_what_does_not_fit_the_plan():
    batch = Mixed()
    wrapper, out = planned(batch), torch.full_like(batch.q, 7.0)
    for q, cache, error, words in (
        (batch.q[:-1], batch.cache, ValueError, r"does not match qo_indptr\[-1\] \(13\)"),
        (batch.q.half(), batch.cache, ValueError, "dtype of q, torch.float16, does not match"),
        (batch.q, batch.cache.half(), ValueError, "dtype of kv_cache, torch.float16, does not"),
        (batch.q, batch.cache[:, :, :2], ValueError, "kv_cache must have 2 heads and pages of 4"),
        (batch.q, (batch.cache,), CacheLayoutError, "kv_cache must be a torch.Tensor or a tuple"),
    ):
        with pytest.raises(error, match=words):
            wrapper.run(q, cache, out)
    assert out.eq(7).all()


@pytest.mark.parametrize("device", ["cuda", "nothing", 1.5, None])
def test_devices(device):
    with pytest.raises((TypeError, ValueError), match="BatchAttention: device must be a"):
        precast.BatchAttention(device=device)


def test_torch_compile_makes_one_graph():
    batch = Mixed()
    wrapper = planned(batch)
    torch._dynamo.reset()
    run = torch.compile(lambda q, kv: wrapper.run(q, kv), fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, run(batch.q, batch.cache), wrapper.run(batch.q, batch.cache)))


def test_parameters_are_flashinfers():
    def names(function):
        return " ".join(inspect.signature(function).parameters)

    kind = precast.BatchAttention
    assert names(kind.__init__) == "self kv_layout device"
    assert names(kind.plan) == (
        "self qo_indptr kv_indptr kv_indices kv_len_arr num_qo_heads num_kv_heads head_dim_qk "
        "head_dim_vo page_size causal sm_scale logits_soft_cap q_data_type kv_data_type "
        "use_profiler"
    )
    assert names(kind.run) == (
        "self q kv_cache out lse k_scale v_scale logits_soft_cap profiler_buffer kv_cache_sf"
    )
    assert precast.attention.BatchAttention is kind
