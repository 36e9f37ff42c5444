# SPDX-License-Identifier: Apache-2.0
"""The wrapper whose runs take sinks and a scale by position."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

import precast

I32 = torch.int32
HEADS = 4

pytestmark = pytest.mark.usefixtures("reference_mode")


def planned(**options):
    wrapper = precast.BatchAttentionWithAttentionSinkWrapper(
        torch.empty(1024, dtype=torch.uint8), head_dim_qk=64, head_dim_vo=64
    )
    bounds = torch.tensor([0, 2, 5], dtype=I32)
    pages = torch.tensor([0, 1, 3], dtype=I32)
    last = torch.tensor([5, 8], dtype=I32)
    wrapper.plan(
        bounds, pages, torch.tensor([2, 0, 1], dtype=I32), last, HEADS, 2, 64, 8,
        causal=True, q_data_type="float32", **options,
    )  # fmt: skip
    return wrapper


def call():
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(5, HEADS, 64, generator=generator)
    cache = torch.randn(3, 2, 8, 2, 64, generator=generator)
    return q, cache, torch.randn(HEADS, generator=generator)


@pytest.mark.parametrize("given", [None, 0.3])
def test_a_run_is_the_prefill_with_sinks_and_this_scale(given):
    q, cache, sink = call()
    other = precast.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1024, dtype=torch.uint8))
    other._plan = planned(sm_scale=0.05)._plan
    want = other.run(q, cache, sinks=sink, return_lse=True)
    got = planned(sm_scale=given).run(q, cache, sink, 0.05, return_lse=True)
    torch.testing.assert_close(got, want)
    both = planned(sm_scale=given).run_return_lse(q, cache, sink, 0.05 / 3, q_scale=3.0)
    torch.testing.assert_close(both, want)


def test_without_them_it_is_the_prefill():
    q, cache, sink = call()
    other = precast.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1024, dtype=torch.uint8))
    other._plan = planned()._plan
    assert torch.equal(planned().run(q, cache), other.run(q, cache))
    assert torch.equal(planned().run(q, cache, sinks=sink), other.run(q, cache, sinks=sink))


@pytest.mark.parametrize(
    ("args", "options", "error", "words"),
    [
        ((torch.zeros(3),), {}, ValueError, r"sinks must have shape \[4\], got \[3\]"),
        (("x",), {}, TypeError, "sink must be a torch.Tensor, got str"),
        ((None, math.nan), {}, ValueError, "sm_scale must be a finite number, got nan"),
        ((None, "x"), {}, TypeError, "sm_scale must be a number, got str 'x'"),
        ((torch.zeros(4),), {"sinks": torch.zeros(4)}, ValueError, "sink and sinks were both"),
    ],
)
def test_wrong_arguments_are_named_and_nothing_is_written(args, options, error, words):
    q, cache, _ = call()
    out = torch.full_like(q, 7.0)
    with pytest.raises(error, match=words):
        planned().run(q, cache, *args, out=out, **options)
    assert out.eq(7).all()


def test_a_scale_of_zero_cannot_be_replaced():
    with pytest.raises(ValueError, match="sm_scale cannot replace the plan's, which is 0"):
        planned(sm_scale=0.0).run(*call(), 0.5)


def test_its_parameters_are_those_that_engines_pass():
    kind = precast.BatchAttentionWithAttentionSinkWrapper
    names = (
        "self float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf paged_kv_indptr_buf "
        "paged_kv_indices_buf paged_kv_last_page_len_buf custom_mask_buf mask_indptr_buf backend "
        "pos_encoding_mode use_fp16_qk_reduction q_data_type kv_data_type head_dim_qk head_dim_vo "
        "window_left"
    )
    assert [*inspect.signature(kind.__init__).parameters] == names.split()
    assert issubclass(kind, precast.BatchPrefillWithPagedKVCacheWrapper)
    assert precast.attention.BatchAttentionWithAttentionSinkWrapper is kind


def test_errors_have_its_name():
    with pytest.raises(TypeError, match=r"BatchAttentionWithAttentionSinkWrapper: .*head_dim_qk"):
        precast.BatchAttentionWithAttentionSinkWrapper(torch.empty(8), head_dim_qk="x")
