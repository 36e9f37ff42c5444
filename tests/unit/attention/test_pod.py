# SPDX-License-Identifier: Apache-2.0
"""Prefill beside decode in reference mode: numbers, what is launched, and errors."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from attention_dense import I32, cache_of, causal, dense, indptr, pages_of
from attention_support import record_launches, workspace

import precast
from precast._ops.attention import kernels
from precast._ops.attention import run as runs
from precast._ops.attention.parts import run_beside
from precast.errors import PlanMismatchError

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 4
SIZES = (HEADS, KV_HEADS, DIM, PAGE)
F32 = {"q_data_type": "float32"}
POD, BATCH = precast.PODWithPagedKVCacheWrapper, precast.BatchPODWithPagedKVCacheWrapper

pytestmark = pytest.mark.usefixtures("reference_mode")


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


class Part:
    """A batch in pages of its own cache, and what must come of it."""

    def __init__(self, q_lens, lens, seed):
        g = torch.Generator().manual_seed(seed)
        self.q_lens, self.lens = q_lens, lens
        self.pages, _ = pages_of(lens, PAGE, torch.randperm(24, generator=g))
        self.cache = cache_of([self.pages], 24, PAGE, KV_HEADS, DIM, g)
        self.q = torch.randn(sum(q_lens), HEADS, DIM, generator=g)

    def expected(self, masks=None, **options):
        states, row = [], 0
        for request, n in enumerate(self.q_lens):
            k, v = self.pages.tokens(self.cache, request)
            mask = None if masks is None else masks[request]
            states.append(dense(self.q[row : row + n], k, v, mask, **options))
            row += n
        return tuple(torch.cat(part).float() for part in zip(*states))

    @property
    def causal(self):
        return [causal(n, m) for n, m in zip(self.q_lens, self.lens)]


# -- one request beside a batch -------------------------------------------------------------------


class Call:
    """The prefill of one request, and the decode of three."""

    def __init__(self):
        g = torch.Generator().manual_seed(7)
        self.decode = Part([1, 1, 1], [9, 0, 5], seed=8)
        self.q = torch.randn(5, HEADS, DIM, generator=g)
        self.k, self.v = torch.randn(2, 11, KV_HEADS, DIM, generator=g)

    def planned(self, layout="NHD", **options):
        wrapper = POD(workspace(), layout)
        wrapper.plan(*self.decode.pages.table, *SIZES, **{**F32, **options})
        return wrapper

    @property
    def arguments(self):
        return self.q, self.k, self.v, self.decode.q, self.decode.cache


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_one_request_beside_a_batch(layout, is_causal):
    call = Call()
    q, k, v, q_d, cache = call.arguments
    if layout == "HND":
        k, v, cache = k.transpose(0, 1), v.transpose(0, 1), cache.transpose(2, 3)
    wrapper = call.planned(layout, sm_scale=0.2)
    out_p, out_d = wrapper.run(
        q, k, v, q_d, cache, causal_p=is_causal, kv_layout_p=layout, sm_scale_p=0.3
    )
    mask = causal(5, 11) if is_causal else None
    close(out_p, dense(call.q, call.k, call.v, mask, sm_scale=0.3)[0].float())
    close(out_d, call.decode.expected(sm_scale=0.2)[0])


def test_masks_and_windows_of_the_prefill():
    call = Call()
    mask = torch.rand(5, 11, generator=torch.Generator().manual_seed(1)) < 0.5
    want = dense(call.q, call.k, call.v, mask)[0].float()
    wrapper = call.planned()
    close(wrapper.run(*call.arguments, custom_mask_p=mask)[0], want)
    packed = precast.packbits(mask.flatten(), "little")
    close(wrapper.run(*call.arguments, packed_custom_mask_p=packed)[0], want)
    near = torch.arange(11) >= torch.arange(6, 11).unsqueeze(-1) - 2
    want = dense(call.q, call.k, call.v, near)[0].float()
    close(wrapper.run(*call.arguments, window_left_p=2)[0], want)


def test_scales_are_those_of_the_decode():
    call = Call()
    scales = {"q_scale": 2.0, "k_scale": torch.tensor(0.5), "v_scale": 3.0}
    out_p, out_d = call.planned().run(*call.arguments, **scales)
    close(out_p, dense(call.q, call.k, call.v)[0].float())
    close(out_d, 3 * call.decode.expected()[0])


def test_log_sum_exps_are_returned_if_asked_for():
    call = Call()
    wrapper = call.planned()
    want_p, want_d = dense(call.q, call.k, call.v), call.decode.expected()
    for p, d in ((True, False), (False, True), (True, True)):
        outs, (lse_p, lse_d) = wrapper.run(*call.arguments, return_lse_p=p, return_lse_d=d)
        close(outs, (want_p[0].float(), want_d[0]))
        assert ((lse_p is None), (lse_d is None)) == (not p, not d)
        if p:
            close(lse_p, want_p[1].float())
        if d:
            close(lse_d, want_d[1])


def test_what_a_run_launches(monkeypatch):
    call = Call()
    wrapper, launched = call.planned(), record_launches(monkeypatch)
    wrapper.run(*call.arguments)
    assert launched == ["run_ragged", "run_paged"]  # The first plans, too.


def test_buffers_of_a_graph():
    call = Call()
    tables = call.decode.pages.table
    buffers = [torch.zeros_like(tables[0]), torch.zeros(24, dtype=I32), torch.zeros_like(tables[2])]
    wrapper = POD(workspace(), "NHD", True, *buffers)
    assert wrapper.is_cuda_graph_enabled
    wrapper.plan(*tables, *SIZES, **F32)
    assert torch.equal(buffers[0], tables[0])
    close(wrapper.run(*call.arguments)[1], call.decode.expected()[0])
    with pytest.raises(ValueError, match="batch size should be fixed in cudagraph mode"):
        wrapper.plan(tables[0][:2], tables[1], tables[2][:1], *SIZES, **F32)
    with pytest.raises(ValueError, match="paged_kv_indices_buffer should be a"):
        POD(workspace(), "NHD", True, buffers[0], None, buffers[2])


def test_options_of_the_decode_are_those_of_the_plan():
    call = Call()
    wrapper = call.planned(window_left=4, sm_scale=0.5)
    want = wrapper.run(*call.arguments)[1]
    same = {"window_left_d": 4, "sm_scale_d": 0.5, "causal_d": True, "kv_layout_d": "NHD"}
    assert torch.equal(wrapper.run(*call.arguments, **same)[1], want)
    for option, value, words in (
        ("window_left_d", 3, "must be 4 as in plan"),
        ("sm_scale_d", 0.1, "must be 0.5 as in plan"),
        ("pos_encoding_mode_d", "ALIBI", "must be 'NONE' as in plan"),
        ("rope_theta_d", 5e5, "must be None as in plan"),
        ("kv_layout_d", "HND", "must be 'NHD' as the wrapper has it"),
    ):
        with pytest.raises(PlanMismatchError, match=rf"PODWith\w+\.run: {option} {words}"):
            wrapper.run(*call.arguments, **{option: value})


def test_what_a_pod_does_not_take():
    call = Call()
    with pytest.raises(NotImplementedError, match="custom_mask_d must be None"):
        call.planned().run(*call.arguments, custom_mask_d=torch.ones(3, 9).bool())
    with pytest.raises(NotImplementedError, match="jit_args must be None"):
        POD(workspace(), jit_args=["name"])
    with pytest.raises(TypeError, match="takes no further arguments by position, got 1: int"):
        call.planned().run(*call.arguments, *[None] * 2, *[False, "NHD", "NONE", None, -1, None],
                           None, False, None, None, False, "NHD", "NONE", None, -1, None, None,
                           None, None, None, False, False, None, 5)  # fmt: skip
    with pytest.raises(PlanMismatchError, match="there is no plan"):
        POD(workspace()).run(*call.arguments)


def test_errors_say_which_part_they_are_of():
    call = Call()
    q, k, v, q_d, cache = call.arguments
    wrapper = call.planned()
    with pytest.raises(ValueError, match=r"num_qo_heads must be .*\(the prefill, whose argum"):
        wrapper.run(q[:, :3], k, v, q_d, cache)
    with pytest.raises(ValueError, match=r"paged_kv_cache_d must have .*\(the decode, with _d\)"):
        wrapper.run(q, k, v, q_d, cache[:, :, :2])


# -- two batches ----------------------------------------------------------------------------------


def batches():
    return Part([4, 3], [4, 11], seed=3), Part([1, 1, 2], [9, 0, 5], seed=4)


def planned(prefill, decode, layout="NHD", **options):
    wrapper = BATCH(workspace(), layout)
    tables = [t for part in (prefill, decode) for t in (indptr(part.q_lens), *part.pages.table)]
    wrapper.plan(*tables, *SIZES, **{**F32, **options})
    return wrapper


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_two_batches(layout, is_causal):
    prefill, decode = batches()
    caches = [p.cache.transpose(2, 3) if layout == "HND" else p.cache for p in (prefill, decode)]
    wrapper = planned(prefill, decode, layout, sm_scale=0.3)
    given = prefill.q, caches[0], decode.q, tuple(caches[1].unbind(1))
    outs, lses = wrapper.run(*given, causal_p=is_causal, return_lse=True)
    masks = prefill.causal if is_causal else None
    want = prefill.expected(masks, sm_scale=0.3), decode.expected(sm_scale=0.3)
    close(outs, (want[0][0], want[1][0]))
    close(lses, (want[0][1], want[1][1]))
    assert all(map(torch.equal, wrapper.run(*given, causal_p=is_causal), outs))


def test_work_is_divided_for_the_mask_of_a_run(monkeypatch):
    """Causal work is half of the whole; the next plan starts with what the latest run needed."""
    prefill, decode = batches()
    wrapper, launched = planned(prefill, decode), []
    part, inner = wrapper._prefill, kernels.launch
    monkeypatch.setattr(kernels, "launch", lambda *args: launched.append(1) or inner(*args))
    given = prefill.q, prefill.cache, decode.q, decode.cache
    mask = torch.ones(sum(n * m for n, m in zip(prefill.q_lens, prefill.lens)), dtype=torch.bool)
    want = {True: prefill.expected(prefill.causal)[0], False: prefill.expected()[0]}
    runs = ((True, None, 0), (False, None, 1), (False, mask, 0), (True, None, 1), (True, mask, 1))
    for is_causal, custom_mask, divisions in runs:
        launched.clear()
        out, _ = wrapper.run(*given, causal_p=is_causal, custom_mask_p=custom_mask)
        sees_causally = is_causal and custom_mask is None
        close(out, want[sees_causally])
        assert (len(launched), part._plan.shape.causal) == (divisions, sees_causally)
    assert planned(prefill, decode)._prefill._plan.shape.causal
    tables = [t for p in (prefill, decode) for t in (indptr(p.q_lens), *p.pages.table)]
    wrapper.plan(*tables, *SIZES, **F32)
    assert not part._plan.shape.causal
    monkeypatch.setattr(part, "_is_capturing", lambda: True)
    close(wrapper.run(*given, causal_p=True)[0], want[True])
    assert not part._plan.shape.causal, "the division would be in the graph"


def test_a_failed_run_leaves_plan_and_workspace(monkeypatch):
    prefill, decode = batches()
    wrapper, shapes = planned(prefill, decode), []
    before, inner = wrapper._prefill._plan, kernels.launch
    monkeypatch.setattr(
        kernels, "launch", lambda plan, *rest: shapes.append(plan.shape) or inner(plan, *rest)
    )
    given = prefill.q, prefill.cache, decode.q, decode.cache
    with pytest.raises(ValueError):
        wrapper.run(prefill.q[1:], *given[1:])  # Not causal, so the work was divided again.
    assert wrapper._prefill._plan is before
    assert shapes == [before.shape._replace(causal=False), before.shape]
    close(wrapper.run(*given, causal_p=True)[0], prefill.expected(prefill.causal)[0])


def test_a_mask_holds_for_one_run():
    prefill, decode = batches()
    wrapper = planned(prefill, decode)
    given = prefill.q, prefill.cache, decode.q, decode.cache
    g = torch.Generator().manual_seed(5)
    masks = [torch.rand(n, m, generator=g) < 0.6 for n, m in zip(prefill.q_lens, prefill.lens)]
    flat = torch.cat([mask.flatten() for mask in masks])
    want, plain = prefill.expected(masks)[0], prefill.expected()[0]
    packed = torch.cat([precast.packbits(mask.flatten(), "little") for mask in masks])
    for _ in range(2):
        close(wrapper.run(*given, custom_mask_p=flat)[0], want)
        close(wrapper.run(*given)[0], plain)
        close(wrapper.run(*given, packed_custom_mask_p=packed, causal_p=True)[0], want)
        close(wrapper.run(*given, causal_p=True)[0], prefill.expected(prefill.causal)[0])


def test_scales_are_those_of_the_second_batch():
    prefill, decode = batches()
    scales = {"q_scale": 2.0, "k_scale": 0.5, "v_scale": 3.0}
    given = prefill.q, prefill.cache, decode.q, decode.cache
    out_p, out_d = planned(prefill, decode).run(*given, **scales)
    close(out_p, prefill.expected()[0])
    close(out_d, 3 * decode.expected()[0])


def test_what_two_batches_launch(monkeypatch):
    launched = record_launches(monkeypatch)
    prefill, decode = batches()
    planned(prefill, decode).run(prefill.q, prefill.cache, decode.q, decode.cache, causal_p=True)
    assert launched == ["plan", "plan", "run_paged", "run_paged"]


def test_a_plan_that_fails_in_one_part_leaves_the_plan_before():
    prefill, decode = batches()
    wrapper = planned(prefill, decode)
    given = prefill.q, prefill.cache, decode.q, decode.cache
    want = wrapper.run(*given)
    tables = [t for part in batches() for t in (indptr(part.q_lens), *part.pages.table)]
    tables[-1] = tables[-1][:1]
    with pytest.raises(ValueError, match=r"last_page_len.*\(the decode, with _d\)"):
        wrapper.plan(*tables, *SIZES, **F32)
    assert all(map(torch.equal, wrapper.run(*given), want))


def test_a_run_that_fails_leaves_the_plan():
    prefill, decode = batches()
    wrapper = planned(prefill, decode)
    given = prefill.q, prefill.cache, decode.q, decode.cache
    before = wrapper._prefill._plan
    short = torch.ones(3).bool()
    with pytest.raises(ValueError, match=r"custom_mask_p must have at least 49 elem"):
        wrapper.run(*given, custom_mask_p=short, causal_p=True)
    with pytest.raises(ValueError, match=r"\(the decode, with _d\)"):
        wrapper.run(*given[:2], decode.q[:2], decode.cache, causal_p=True)
    assert wrapper._prefill._plan is before
    with pytest.raises(PlanMismatchError, match="there is no plan"):
        BATCH(workspace()).run(*given)


@pytest.mark.parametrize(
    "options",
    [
        {"q_data_type": None, "data_type": "float32"},
        {"q_data_type": "float32", "data_type": "float32"},
    ],
)
def test_data_types(options):
    prefill, decode = batches()
    wrapper = planned(prefill, decode, **options)
    assert not wrapper.is_cuda_graph_enabled
    for part in (wrapper._prefill, wrapper._decode):
        assert part._cached_q_data_type is part._cached_kv_data_type is torch.float32


@pytest.mark.parametrize("kind", [POD, BATCH])
def test_torch_compile_makes_one_graph(kind):
    if kind is POD:
        call = Call()
        wrapper, given = call.planned(), call.arguments
    else:
        prefill, decode = batches()
        wrapper = planned(prefill, decode)
        given = prefill.q, prefill.cache, decode.q, decode.cache
        wrapper.run(*given, causal_p=True)
    torch._dynamo.reset()
    want = wrapper.run(*given, causal_p=True)
    run = torch.compile(
        lambda *args: wrapper.run(*args, causal_p=True), fullgraph=True, backend="aot_eager"
    )
    assert all(map(torch.equal, run(*given), want))


def test_a_part_has_leave_to_overlap_for_one_run_that_launches_nothing_else(monkeypatch):
    monkeypatch.setattr(runs, "_reference", False)
    first, second = (SimpleNamespace(_overlap=n) for n in (runs.WITH_NEXT, runs.WITH_PREVIOUS))
    assert runs._overlapping(second, is_alone=True) == runs.WITH_PREVIOUS
    assert runs._overlapping(second, is_alone=True) == 0
    second._overlap = runs.WITH_PREVIOUS
    assert runs._overlapping(second, is_alone=False) is True
    assert second._overlap == 0
    assert [runs._overlapping(first, is_alone=False) for _ in range(2)] == [runs.WITH_NEXT] * 2


@pytest.mark.parametrize(
    ("overlap", "rows", "batch", "has_leave"),
    [(runs.WITH_NEXT, 3, 1, True), (runs.WITH_NEXT, 0, 1, False)]
    + [(runs.WITH_NEXT, 3, 0, False), (0, 3, 1, False)],
)
def test_a_part_overlaps_one_that_has_launched_and_allows_it(overlap, rows, batch, has_leave):
    plan = SimpleNamespace(shape=SimpleNamespace(batch_size=batch))
    first, second = SimpleNamespace(_overlap=overlap, _plan=plan), SimpleNamespace(_overlap=0)
    run_beside(first, second, torch.empty(rows, 1, 64))
    assert second._overlap == (runs.WITH_PREVIOUS if has_leave else 0)


def test_parameters_are_flashinfers():
    def names(function):
        return " ".join(inspect.signature(function).parameters)

    assert names(POD.plan) == (
        "self indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size "
        "pos_encoding_mode window_left q_data_type kv_data_type data_type sm_scale rope_scale "
        "rope_theta non_blocking"
    )
    assert names(POD.run) == (
        "self q_p k_p v_p q_d paged_kv_cache_d custom_mask_p packed_custom_mask_p causal_p "
        "kv_layout_p pos_encoding_mode_p sm_scale_p window_left_p rope_scale_p rope_theta_p "
        "return_lse_p custom_mask_d packed_custom_mask_d causal_d kv_layout_d pos_encoding_mode_d "
        "sm_scale_d window_left_d rope_scale_d rope_theta_d q_scale k_scale v_scale return_lse_d "
        "use_fp16_qk_reduction enable_pdl args"
    )
    assert names(BATCH.run) == (
        "self q_p paged_kv_cache_p q_d paged_kv_cache_d custom_mask_p packed_custom_mask_p "
        "causal_p q_scale k_scale v_scale return_lse use_fp16_qk_reduction enable_pdl"
    )
    assert precast.pod.PODWithPagedKVCacheWrapper is POD
