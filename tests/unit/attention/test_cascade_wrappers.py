# SPDX-License-Identifier: Apache-2.0
"""Wrappers for shared prefixes in reference mode: against one softmax over all tokens; errors."""

from __future__ import annotations

import inspect

import pytest
import torch
from attention_dense import I32, cache_of, causal, dense, indptr, pages_of
from attention_support import workspace

import precast
from precast.errors import PlanMismatchError

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 4
SIZES = (HEADS, KV_HEADS, DIM, PAGE)
F32 = {"q_data_type": "float32"}
MULTI = precast.MultiLevelCascadeAttentionWrapper
DECODE = precast.BatchDecodeWithSharedPrefixPagedKVCacheWrapper
PREFILL = precast.BatchPrefillWithSharedPrefixPagedKVCacheWrapper

pytestmark = pytest.mark.usefixtures("reference_mode")


class Tree:
    """Requests that share tokens: lengths of each group of each level, and queries of each."""

    def __init__(self, groups, lengths, q_lens, seed=1):
        g = torch.Generator().manual_seed(seed)
        pages, free = 64, torch.randperm(64, generator=g)
        self.q_lens, self.groups, self.levels = q_lens, groups, []
        for of_level in lengths:
            level, free = pages_of(of_level, PAGE, free)
            self.levels.append(level)
        self.cache = cache_of(self.levels, pages, PAGE, KV_HEADS, DIM, g)
        self.q = torch.randn(sum(q_lens), HEADS, DIM, generator=g)

    @property
    def tables(self):
        """What ``plan()`` takes: lists of a tensor for each level."""
        rows, starts = [], [0, *torch.tensor(self.q_lens).cumsum(0).tolist()]
        for groups in self.groups:
            ends = torch.tensor(groups).cumsum(0).tolist()
            rows.append(torch.tensor([0, *(starts[end] for end in ends)], dtype=I32))
        return [rows, *([level.table[i] for level in self.levels] for i in range(3))]

    def expected(self, is_causal=False, **options):
        """One softmax over the tokens of all levels."""
        outs, row = [], 0
        for request, n in enumerate(self.q_lens):
            seen = []
            for groups, level in zip(self.groups, self.levels):
                ends = torch.tensor(groups).cumsum(0)
                seen.append(level.tokens(self.cache, int((ends <= request).sum())))
            k, v = (torch.cat(parts) for parts in zip(*seen))
            own, mask = len(seen[-1][0]), torch.ones(n, len(k), dtype=torch.bool)
            if is_causal:
                mask[:, len(k) - own :] = causal(n, own)
            outs.append(dense(self.q[row : row + n], k, v, mask, **options)[0])
            row += n
        return torch.cat(outs).float()


#: Requests of each group, tokens of each group, queries of each request.
TREES = {
    "one level": ([[1, 1]], [[5, 9]], [2, 3]),
    "a prefix": ([[3], [1, 1, 1]], [[21], [5, 1, 8]], [1, 1, 1]),
    "three levels": ([[3], [1, 2], [1, 1, 1]], [[10], [7, 0], [3, 4, 9]], [2, 4, 1]),
    "nothing of their own": ([[2], [1, 1]], [[6], [0, 4]], [1, 2]),
}
trees = pytest.mark.parametrize("name", TREES)


def planned(tree, **options):
    wrapper = MULTI(len(tree.levels), workspace())
    wrapper.plan(*tree.tables, *SIZES, **{**F32, **options})
    return wrapper


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@trees
@pytest.mark.parametrize("is_causal", [False, True])
def test_levels_give_what_one_softmax_gives(name, is_causal):
    tree = Tree(*TREES[name])
    wrapper = planned(tree, causal=is_causal, sm_scale=0.2)
    got = wrapper.run(tree.q, tree.cache)
    close(got, tree.expected(is_causal, sm_scale=0.2))
    assert torch.equal(wrapper.forward(tree.q, tree.cache), got)
    assert torch.equal(wrapper.run(tree.q, tuple(tree.cache.unbind(1))), got)


def test_options_hold_in_every_level():
    tree = Tree(*TREES["three levels"])
    close(planned(tree, logits_soft_cap=2.0).run(tree.q, tree.cache), tree.expected(
        logits_soft_cap=2.0
    ))  # fmt: skip
    hnd = MULTI(3, workspace(), "HND")
    hnd.plan(*tree.tables, *SIZES, **F32)
    close(hnd.run(tree.q, tree.cache.transpose(2, 3)), tree.expected())


def test_a_run_is_that_of_the_latest_plan():
    trees = [Tree(*TREES["a prefix"], seed=seed) for seed in (1, 2)]
    wrapper = planned(trees[0])
    wrapper.begin_forward(*trees[1].tables, *SIZES, **F32)
    wrapper.end_forward()
    close(wrapper.run(trees[1].q, trees[1].cache), trees[1].expected())


# -- graphs ---------------------------------------------------------------------------------------


def graph_wrapper(tree, most_pages=40):
    tables = tree.tables
    buffers = [[torch.zeros_like(t) for t in tables[i]] for i in (0, 1, 3)]
    indices = [torch.zeros(most_pages, dtype=I32) for _ in tree.levels]
    buffers.insert(2, indices)
    return MULTI(len(tree.levels), workspace(), "NHD", True, *buffers), buffers


def test_buffers_of_a_graph_hold_the_tables():
    first, later = (Tree(*TREES["three levels"], seed=seed) for seed in (3, 4))
    wrapper, buffers = graph_wrapper(first)
    assert wrapper.is_cuda_graph_enabled
    assert not planned(first).is_cuda_graph_enabled
    for tree in (first, later):
        wrapper.plan(*tree.tables, *SIZES, **F32)
        close(wrapper.run(tree.q, tree.cache), tree.expected())
    for level, table in zip(buffers[2], later.tables[2]):
        assert torch.equal(level[: len(table)], table)


def test_rows_of_no_request_are_zeros_in_a_graph():
    tree = Tree(*TREES["a prefix"])
    wrapper, _ = graph_wrapper(tree)
    wrapper.plan(*tree.tables, *SIZES, **F32)
    fewer = tree.tables
    fewer[0] = [torch.tensor([0, 2], dtype=I32), torch.tensor([0, 1, 2, 2], dtype=I32)]
    # On a device the host does not know that there are fewer rows.
    wrapper.plan(*fewer, *SIZES, **F32)
    for level in wrapper._batch_prefill_wrappers:
        shape = level._plan.shape._replace(rows=-1)
        level._plan = level._plan._replace(shape=shape, block=None)
    out = wrapper.run(tree.q, tree.cache)
    close(out[:2], tree.expected()[:2])
    assert not out[2:].any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: b[:1] + [None] + b[2:], "paged_kv_indptr_buf_arr must be a list"),
        (lambda b: [b[0][:1], *b[1:]], "qo_indptr_buf_arr must have 2 tensors, one for each lev"),
        (lambda b: [[t.float() for t in b[0]], *b[1:]], r"qo_indptr_buf must be int32 .*level 0"),
    ],
)
def test_buffers_of_a_graph_are_needed(change, words):
    _, buffers = graph_wrapper(Tree(*TREES["a prefix"]))
    with pytest.raises((TypeError, ValueError), match=words):
        MULTI(2, workspace(), "NHD", True, *change(buffers))


# -- errors ---------------------------------------------------------------------------------------


def test_a_plan_that_fails_in_one_level_leaves_the_plan_before():
    tree = Tree(*TREES["a prefix"])
    wrapper = planned(tree)
    want = wrapper.run(tree.q, tree.cache)
    wrong = tree.tables
    wrong[3][1] = wrong[3][1][:2]
    with pytest.raises(ValueError, match=r"last_page_len.*level 1"):
        wrapper.plan(*wrong, *SIZES, **F32)
    assert torch.equal(wrapper.run(tree.q, tree.cache), want)
    graph, buffers = graph_wrapper(tree)
    graph.plan(*tree.tables, *SIZES, **F32)
    before = [[t.clone() for t in array] for array in buffers]
    with pytest.raises(ValueError, match=r"level 1"):
        graph.plan(*wrong, *SIZES, **F32)
    assert all(torch.equal(*pair) for arrays in zip(before, buffers) for pair in zip(*arrays))
    assert torch.equal(graph.run(tree.q, tree.cache), want)


def test_levels_have_the_same_queries():
    tree = Tree(*TREES["a prefix"])
    wrong = tree.tables
    wrong[0][0] = torch.tensor([0, 2], dtype=I32)
    words = "must end at the same number of queries, got 2 in level 0, 3 in level 1"
    with pytest.raises(ValueError, match=words):
        MULTI(2, workspace()).plan(*wrong, *SIZES, **F32)


def test_lists_have_a_tensor_for_each_level():
    tree = Tree(*TREES["a prefix"])
    wrapper = MULTI(3, workspace())
    with pytest.raises(ValueError, match="qo_indptr_arr must have 3 tensors, one for each level"):
        wrapper.plan(*tree.tables, *SIZES, **F32)
    for count in (0, 257):
        with pytest.raises(ValueError, match=f"num_levels must be 1 to 256, got {count}"):
            MULTI(count, workspace())


def test_a_run_needs_a_plan():
    tree = Tree(*TREES["a prefix"])
    with pytest.raises(PlanMismatchError, match=r"MultiLevel\w+.run: there is no plan. Fix: call"):
        MULTI(2, workspace()).run(tree.q, tree.cache)
    wrapper = planned(tree)
    wrapper.reset_workspace_buffer(workspace(), [workspace(), workspace()])
    with pytest.raises(PlanMismatchError, match="there is no plan"):
        wrapper.run(tree.q, tree.cache)
    wrapper.plan(*tree.tables, *SIZES, **F32)
    close(wrapper.run(tree.q, tree.cache), tree.expected())


def test_workspaces_of_levels():
    wrapper, one = planned(Tree(*TREES["a prefix"])), workspace()
    before = [level._int_workspace_buffer for level in wrapper._batch_prefill_wrappers]
    with pytest.raises(ValueError, match="int_workspace_buffers must be different ones"):
        wrapper.reset_workspace_buffer(workspace(), [one, one])
    with pytest.raises(ValueError, match=r"16-byte aligned.*int_workspace_buffers\[1\]"):
        wrapper.reset_workspace_buffer(workspace(), [one, workspace()[3:]])
    after = [level._int_workspace_buffer for level in wrapper._batch_prefill_wrappers]
    assert all(a is b for a, b in zip(before, after))


def test_torch_compile_makes_one_graph():
    tree = Tree(*TREES["three levels"])
    wrapper = planned(tree, causal=True)
    torch._dynamo.reset()
    run = torch.compile(lambda q, kv: wrapper.run(q, kv), fullgraph=True, backend="aot_eager")
    assert torch.equal(run(tree.q, tree.cache), wrapper.run(tree.q, tree.cache))


# -- one prefix without pages ---------------------------------------------------------------------


def of_prefix(q_lens, dtype, layout, seed=5):
    """A prefix, the rest in pages, and what must come of it."""
    g = torch.Generator().manual_seed(seed)
    lengths = [n + extra for n, extra in zip(q_lens, (0, 7, 3))]
    level, _ = pages_of(lengths, PAGE, torch.randperm(16, generator=g))
    cache = cache_of([level], 16, PAGE, KV_HEADS, DIM, g, dtype)
    q = torch.randn(sum(q_lens), HEADS, DIM, generator=g).to(dtype)
    shared = torch.randn(2, 11, KV_HEADS, DIM, generator=g).to(dtype)
    given = [x.transpose(0, 1).contiguous() if layout == "HND" else x for x in shared]
    own = cache.transpose(2, 3).contiguous() if layout == "HND" else cache

    def expected(is_causal=False, **options):
        outs, row = [], 0
        for request, n in enumerate(q_lens):
            tokens = level.tokens(cache, request)
            k, v = (torch.cat(parts) for parts in zip(shared, tokens))
            mask = torch.ones(n, len(k), dtype=torch.bool)
            if is_causal:
                mask[:, 11:] = causal(n, lengths[request])
            outs.append(dense(q[row : row + n], k, v, mask, **options)[0])
            row += n
        return torch.cat(outs)

    return level, (q, *given, own), expected


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_decode_after_a_prefix(layout):
    level, call, expected = of_prefix([1, 1, 1], torch.float32, layout)
    wrapper = DECODE(workspace(), layout)
    wrapper.begin_forward(*level.table, *SIZES, data_type="float32")
    close(wrapper.forward(*call), expected().float())
    wrapper.end_forward()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_prefill_after_a_prefix(layout, is_causal):
    q_lens = [3, 1, 4]
    level, call, expected = of_prefix(q_lens, torch.float16, layout)
    wrapper = PREFILL(workspace(), layout)
    wrapper.begin_forward(indptr(q_lens), *level.table, *SIZES)
    for scale in (None, 0.3):
        got = wrapper.forward(*call, causal=is_causal, sm_scale=scale)
        want = expected(is_causal, sm_scale=scale)
        torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=2e-3)


def test_data_types_of_a_decode():
    level, (q, *shared, own), _ = of_prefix([1, 1, 1], torch.float16, "NHD")
    wrapper = DECODE(workspace())
    wrapper.begin_forward(*level.table, *SIZES, data_type=torch.float8_e4m3fn)
    unique = wrapper._batch_decode_wrapper
    assert unique._cached_q_data_type is torch.float16
    assert unique._cached_kv_data_type is torch.float8_e4m3fn
    assert wrapper.forward(q, *shared, own.to(torch.float8_e4m3fn)).dtype is torch.float16
    with pytest.raises(TypeError, match=r"data_type must be a string or torch\.dtype, got int"):
        wrapper.begin_forward(*level.table, *SIZES, data_type=5)


@pytest.mark.parametrize("kind", [DECODE, PREFILL])
def test_a_forward_needs_a_plan(kind):
    _, call, _ = of_prefix([1, 1, 1], torch.float16, "NHD")
    words = rf"{kind.__name__}.forward: there is no plan"
    with pytest.raises(PlanMismatchError, match=words):
        kind(workspace()).forward(*call)


def test_errors_say_which_part_they_are_of():
    level, (q, k, v, own), _ = of_prefix([1, 1, 1], torch.float16, "NHD")
    wrapper = DECODE(workspace())
    wrapper.begin_forward(*level.table, *SIZES)
    with pytest.raises(ValueError, match=r"k_shared must have 3 dim.* \(the prefix\)"):
        wrapper.forward(q, k[0], v, own)
    with pytest.raises(ValueError, match=r"unique_kv_cache must have .* \(unique_kv_cache\)"):
        wrapper.forward(q, k, v, own[:, :, :2])


# -- names ----------------------------------------------------------------------------------------


def test_parameters_are_flashinfers():
    def names(function):
        return " ".join(inspect.signature(function).parameters)

    assert names(MULTI.__init__) == (
        "self num_levels float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf_arr "
        "paged_kv_indptr_buf_arr paged_kv_indices_buf_arr paged_kv_last_page_len_buf_arr"
    )
    assert names(MULTI.plan) == (
        "self qo_indptr_arr paged_kv_indptr_arr paged_kv_indices_arr paged_kv_last_page_len "
        "num_qo_heads num_kv_heads head_dim page_size causal pos_encoding_mode "
        "use_fp16_qk_reduction sm_scale window_left logits_soft_cap rope_scale rope_theta "
        "q_data_type kv_data_type"
    )
    assert names(MULTI.run) == names(MULTI.forward) == "self q paged_kv_cache"
    for kind in (MULTI, DECODE, PREFILL):
        assert getattr(precast.cascade, kind.__name__) is kind
