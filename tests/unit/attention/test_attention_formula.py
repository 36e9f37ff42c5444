# SPDX-License-Identifier: Apache-2.0
"""The references of attention against torch's own attention and cases that can be done by hand."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from precast._ops.attention.buffers import get_alibi_slopes
from precast._ops.attention.formula import attention, rotated_llama, unpacked_mask, visible
from precast.decode import batch_decode_with_paged_kv_cache_reference
from precast.decode import single_decode_with_kv_cache_reference as _decode
from precast.prefill import (
    batch_prefill_with_paged_kv_cache_reference,
    batch_prefill_with_ragged_kv_cache_reference,
)
from precast.prefill import single_prefill_with_kv_cache_reference as _prefill

LOG2E = math.log2(math.e)
single_decode = functools.partial(_decode, return_lse=True)
single_prefill = functools.partial(_prefill, return_lse=True)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


def tensors(n, m, heads=4, kv_heads=2, dim=16, dim_vo=16):
    return (
        torch.randn(n, heads, dim),
        torch.randn(m, kv_heads, dim),
        torch.randn(m, kv_heads, dim_vo),
    )


def sdpa(q, k, v, mask=None, scale=None):
    """Of torch, in float64."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out.transpose(0, 1)


def log_sum_exp(q, k, mask=None):
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("nhd,mhd->hnm", q, keys) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.logsumexp(-1).t() * LOG2E


def close(a, b, atol=2e-6):
    torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=atol)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 9), (5, 5), (3, 8)])
@pytest.mark.parametrize("dims", [(16, 16), (24, 16)])
def test_a_request_without_a_mask(n, m, dims):
    q, k, v = tensors(n, m, 6, 2, *dims)
    out, lse = single_prefill(q, k, v)
    close(out, sdpa(q, k, v))
    close(lse, log_sum_exp(q, k))


@pytest.mark.parametrize(("n", "m"), [(4, 4), (3, 9)])
def test_causal_is_aligned_to_the_last_token(n, m):
    q, k, v = tensors(n, m)
    mask = torch.ones(n, m, dtype=torch.bool).tril(m - n)
    assert mask[-1].all()
    out, lse = single_prefill(q, k, v, causal=True)
    close(out, sdpa(q, k, v, mask))
    close(lse, log_sum_exp(q, k, mask))


def test_causal_with_more_queries_than_tokens_leaves_the_first_empty():
    q, k, v = tensors(5, 2)
    out, lse = single_prefill(q, k, v, causal=True)
    assert torch.equal(out[:3], torch.zeros(3, 4, 16))
    assert lse[:3].eq(-math.inf).all()
    close(out[3:], sdpa(q[3:], k, v, torch.tensor([[True, False], [True, True]])))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_left", [0, 1, 3])
def test_a_window_holds_itself_and_as_many_before(causal, window_left):
    n, m = 4, 7
    q, k, v = tensors(n, m)
    position = torch.arange(m - n, m).unsqueeze(1)
    mask = torch.arange(m) >= position - window_left
    if causal:
        mask &= torch.arange(m) <= position
        assert mask.sum(1).tolist() == [window_left + 1] * n
    out, _ = single_prefill(q, k, v, causal=causal, window_left=window_left)
    close(out, sdpa(q, k, v, mask))


def test_a_custom_mask_takes_the_place_of_causal():
    q, k, v = tensors(4, 6)
    mask = torch.rand(4, 6) < 0.5
    mask[2] = False
    out, lse = single_prefill(q, k, v, custom_mask=mask, causal=True)
    seen = mask.any(1)
    close(out[seen], sdpa(q[seen], k, v, mask[seen]))
    assert out[2].eq(0).all()
    assert lse[2].eq(-math.inf).all()


def test_the_first_bit_of_a_mask_is_the_lowest():
    packed = torch.tensor([0b01000101, 0b10], dtype=torch.uint8)
    assert unpacked_mask(packed, 2, 5).int().tolist() == [[1, 0, 1, 0, 0], [0, 1, 0, 0, 1]]


def test_the_cap_bends_logits_before_masks():
    q, k, v = tensors(2, 5)
    q *= 20
    keys = k.repeat_interleave(2, 1)
    scores = torch.einsum("nhd,mhd->hnm", q, keys) / 4
    weights = (3 * torch.tanh(scores / 3)).softmax(-1)
    out, _ = single_prefill(q, k, v, logits_soft_cap=3.0)
    close(out, torch.einsum("hnm,mhd->nhd", weights, v.repeat_interleave(2, 1)), 1e-5)


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (4, [2**-2, 2**-4, 2**-6, 2**-8]),
        (3, [2**-4, 2**-8, 2**-2]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
    ],
)
def test_alibi_slopes(heads, slopes):
    assert get_alibi_slopes(heads).tolist() == slopes


def test_alibi_adds_the_distance_to_the_number_of_the_query():
    q, k, v = tensors(3, 5)
    bias = get_alibi_slopes(4).view(4, 1, 1) * (torch.arange(5) - torch.arange(3).unsqueeze(1))
    scores = torch.einsum("nhd,mhd->hnm", q, k.repeat_interleave(2, 1)) / 4 + bias
    out, lse = single_prefill(q, k, v, pos_encoding_mode="ALIBI")
    values = v.repeat_interleave(2, 1)
    close(out, torch.einsum("hnm,mhd->nhd", scores.softmax(-1), values), 1e-5)
    close(lse, scores.logsumexp(-1).t() * LOG2E, 1e-5)


def test_rope_turns_by_the_position_and_logits_know_the_distance_alone():
    x = torch.randn(1, 1, 8)
    rotated = rotated_llama(x.expand(3, 1, 8), torch.tensor([0, 1, 7]), 1.0, 1e4)
    close(rotated[0], x[0])
    angles = 7 / 1e4 ** (torch.arange(4) / 4)
    a, b = x[0, 0, :4], x[0, 0, 4:]
    close(rotated[2, 0, :4], a * angles.cos() - b * angles.sin(), 1e-5)
    close(rotated[2, 0, 4:], b * angles.cos() + a * angles.sin(), 1e-5)
    q, k, v = tensors(2, 6)
    options = {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2.0, "rope_theta": 500.0}
    out, _ = single_prefill(q, k, v, causal=True, **options)
    shifted = rotated_llama(q, torch.tensor([14, 15]), 2.0, 500.0)
    keys = rotated_llama(k, torch.arange(10, 16), 2.0, 500.0)
    mask = torch.ones(2, 6, dtype=torch.bool).tril(4)
    close(out, sdpa(shifted, keys, v, mask), 1e-5)


def test_sinks_take_a_share_that_has_no_value():
    q, k, v = tensors(2, 3)
    sinks = torch.tensor([-1.0, 0.0, 2.0, -math.inf])
    out, lse = attention(q, k, v, 0.25, sinks=sinks)
    plain, sums = attention(q, k, v, 0.25)
    share = torch.exp2(sums) / (torch.exp2(sums) + sinks.exp())
    close(out, plain * share.unsqueeze(-1))
    close(lse, torch.log2(torch.exp2(sums) + sinks.exp()))
    nothing, only = attention(q, k[:0], v[:0], 0.25, sinks=sinks)
    assert nothing.eq(0).all()
    close(only[:, :3], (sinks * LOG2E)[:3].expand(2, 3))


def test_very_negative_logits_are_no_empty_row():
    q, k, v = torch.full((1, 1, 16), -1e3), torch.full((2, 1, 16), 1e3), torch.randn(2, 1, 16)
    out, lse = attention(q, k, v, 1.0)
    close(out[0], v.mean(0), 1e-6)
    assert lse.item() == pytest.approx(-1.6e7 * LOG2E + 1, rel=1e-6)


def test_items_see_the_prefix_and_themselves():
    """A prefix of two, then items of 2 and 1 tokens, each behind a delimiter."""
    places = torch.tensor([0, 1, 2, 0, 1, 0])
    seen = visible(torch.arange(8), 8, 8, True, None, -1, (2, places))
    want = [
        "x.......",
        "xx......",
        "xx......",  # a delimiter
        "xx.x....",
        "xx.xx...",
        "xx......",
        "xx....x.",
        "xx......",
    ]
    assert ["".join("x" if s else "." for s in row) for row in seen.tolist()] == want
    last = visible(torch.arange(3), 3, 8, True, None, -1, (2, places))
    assert torch.equal(last, seen[5:])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_scales_of_narrow_keys_and_values(dtype):
    q, k, v = tensors(1, 9)
    narrow_k, narrow_v = (k / 0.5).to(dtype), (v / 0.25).to(dtype)
    out, lse = single_decode(q[0], narrow_k, narrow_v, k_scale=0.5, v_scale=0.25, q_scale=2.0)
    want, sums = single_decode(2 * q[0], narrow_k.float() * 0.5, narrow_v.float() * 0.25)
    close(out, want)
    close(lse, sums)


def test_long_requests_are_done_in_blocks(monkeypatch):
    q, k, v = tensors(9, 20)
    whole = attention(q, k, v, 0.25, causal=True)
    monkeypatch.setattr("precast._ops.attention.formula._BLOCK", 200)
    for part, want in zip(attention(q, k, v, 0.25, causal=True), whole):
        close(part, want)


# -- reference ------------------------------------------------------------------------------------

LENS = [5, 0, 3, 8]
ROWS = [2, 3, 0, 8]


def ragged_batch():
    q, k, v = tensors(sum(ROWS), sum(LENS))
    starts = [torch.tensor([0, *lens]).cumsum(0).int() for lens in (ROWS, LENS)]
    return q, k, v, *starts


@pytest.mark.parametrize("causal", [False, True])
def test_requests_of_a_batch_know_nothing_of_each_other(causal):
    q, k, v, qo, kv = ragged_batch()
    out, lse = batch_prefill_with_ragged_kv_cache_reference(q, k, v, qo, kv, causal=causal)
    for i in range(len(LENS)):
        rows, tokens = slice(qo[i], qo[i + 1]), slice(kv[i], kv[i + 1])
        want = single_prefill(q[rows], k[tokens], v[tokens], causal=causal)
        close(out[rows], want[0])
        close(lse[rows], want[1])
    assert lse[qo[1] : qo[2]].eq(-math.inf).all()


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_pages_are_the_same_tokens(kv_layout, packed, page_size):
    q, k, v, qo, kv = ragged_batch()
    pages = [-(-m // page_size) for m in LENS]
    order = torch.randperm(sum(pages) + 2)
    caches = [torch.full((order.numel(), page_size, 2, 16), math.nan) for _ in range(2)]
    first = 0
    for m, count, start in zip(LENS, pages, kv.tolist()):
        for t in range(m):
            page = order[first + t // page_size]
            for cache, tokens in zip(caches, (k, v)):
                cache[page, t % page_size] = tokens[start + t]
        first += count
    if kv_layout == "HND":
        caches = [cache.transpose(1, 2) for cache in caches]
    table = (
        torch.tensor([0, *pages]).cumsum(0).int(),
        order.int(),
        torch.tensor([(m - 1) % page_size + 1 if m else 0 for m in LENS]),
    )
    cache = torch.stack(caches, 1) if packed else tuple(caches)
    mask = torch.rand(sum(n * m for n, m in zip(ROWS, LENS))) < 0.6
    options = {"custom_mask": mask, "sinks": torch.randn(4), "window_left": 4}
    got = batch_prefill_with_paged_kv_cache_reference(
        q, cache, qo, *table, kv_layout=kv_layout, **options
    )
    want = batch_prefill_with_ragged_kv_cache_reference(q, k, v, qo, kv, **options)
    for a, b in zip(got, want):
        close(a, b)


def test_several_queries_of_a_decode_are_the_newest_tokens():
    k, v = torch.randn(2, 6, 4, 2, 16).unbind(0)
    q = torch.randn(4, 4, 16)
    table = torch.tensor([0, 2, 4]), torch.tensor([3, 0, 1, 5]), torch.tensor([1, 4])
    got = batch_decode_with_paged_kv_cache_reference(q, (k, v), *table, q_len_per_req=2)
    rows = torch.tensor([0, 2, 4])
    want = batch_prefill_with_paged_kv_cache_reference(q, (k, v), rows, *table, causal=True)
    for a, b in zip(got, want):
        close(a, b)
