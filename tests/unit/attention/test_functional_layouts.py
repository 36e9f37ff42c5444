# SPDX-License-Identifier: Apache-2.0
"""Prefill over queries, keys and values in five layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import precast

BF16, I32, DIM = torch.bfloat16, torch.int32, 64
FMHA_V2 = precast.trtllm_fmha_v2_prefill


def packed() -> torch.Tensor:
    return torch.randn(8, 3, 2, DIM, generator=torch.Generator().manual_seed(1)).to(BF16)


def prefill(qkv: Any = None, layout: str = "PACKED_QKV", **options: Any) -> Any:
    """Two requests of 3 and 5 tokens."""
    bounds = torch.tensor([0, 3, 8], dtype=I32)
    qkv = packed() if qkv is None else qkv
    workspace = torch.full((1 << 18,), 0xA5, dtype=torch.uint8)
    given = {"mask_mode": "causal", **options}
    return FMHA_V2(
        qkv, layout, workspace, bounds.diff(), 5, 5, 0.125, 1.0, 2, bounds, bounds, **given
    )


def test_layouts_of_the_same_numbers(reference_mode):
    qkv = packed()
    q, k, v = qkv.unbind(1)
    want = prefill(qkv)
    assert torch.equal(prefill((q, qkv[:, 1:]), "CONTIGUOUS_Q_KV"), want)
    assert torch.equal(prefill((q, k, v), "SEPARATE_Q_K_V"), want)
    # A page of 5 tokens for each request.
    pages = torch.stack([torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 0, 0, n)) for x, n in (
        (qkv[:3, 1:], 2), (qkv[3:, 1:], 0)
    )])  # fmt: skip
    cache = pages.transpose(1, 2)
    table = torch.tensor([[0], [1]], dtype=I32)
    both = torch.stack((table, table + 2), 1)  # As of one buffer with values behind keys.
    for layout, nhd in (("Q_PAGED_KV_NHD", True), ("Q_PAGED_KV_HND", False)):
        entries = cache if nhd else cache.transpose(2, 3)
        assert torch.equal(prefill((q, entries), layout, block_tables=table), want)
        pair = entries[:, 0], entries[:, 1]
        with pytest.raises(ValueError, match="block_tables must have 2 dimensions, got shape"):
            prefill((q, entries), layout, block_tables=both)
        for tables in (table, both):
            assert torch.equal(prefill((q, pair), layout, block_tables=tables), want)


@pytest.mark.parametrize(
    ("layout", "qkv", "words"),
    [
        ("PACKED", None, "input_layout must be PACKED_QKV, CONTIGUOUS_Q_KV, Q_PAGED_KV_NHD, "),
        (3, None, "input_layout must be PACKED_QKV"),
        ("PACKED_QKV", torch.zeros(8, 2, 2, DIM), "qkv must be a tensor [tokens, 3, num_heads, "),
        ("CONTIGUOUS_Q_KV", (torch.zeros(8, 2, DIM),) * 2, "qkv must be a tuple of queries and of"),
        ("SEPARATE_Q_K_V", (torch.zeros(8, 2, DIM),) * 2, "qkv must be a tuple of queries, keys "),
        ("Q_PAGED_KV_NHD", torch.zeros(8, 2, DIM), "qkv must be a tuple of queries and of a "),
    ],
)
def test_what_is_not_of_the_layout(layout, qkv, words, reference_mode):
    with pytest.raises(precast.errors.CacheLayoutError) as error:
        prefill(qkv, layout)
    assert f"trtllm_fmha_v2_prefill: {words}" in str(error.value)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"chunked_attention_size": 128}, NotImplementedError, "chunked_attention_size must be 0"),
        ({"mask_mode": "chunked"}, NotImplementedError, "mask_mode must not be chunked"),
        ({"mask_mode": "custom"}, ValueError, "mask_mode must be causal, sliding_window, padding"),
        ({"mask_mode": "padding", "window_left": 3}, ValueError, "window_left must be -1 with"),
        ({"skip_softmax_threshold_scale_factor": 0.1}, NotImplementedError, "must be 0, got 0.1"),
        ({"pos_encoding_mode": "rope"}, ValueError, "pos_encoding_mode must be alibi or None"),
        ({"max_q_len": None}, TypeError, "multiple values"),
    ],
)
def test_options_of_prefill(options, kind, words, reference_mode):
    with pytest.raises(kind, match=words):
        prefill(**options)


def test_statistics_are_a_log_sum_exp(reference_mode):
    out, statistics = prefill(save_softmax_stats=True)
    assert torch.equal(out, prefill())
    assert statistics.shape == (8, 2, 2)
    q, k, _ = (
        torch.randn(8, 3, 2, DIM, generator=torch.Generator().manual_seed(1)).to(BF16).unbind(1)
    )
    logits = 0.125 * torch.einsum("hd,mhd->hm", q[2].float(), k[:3].float())
    sums = statistics[..., 0] + statistics[..., 1].log()
    torch.testing.assert_close(sums[2], logits.logsumexp(1))


def test_a_window_is_one_in_both_modes(reference_mode):
    window = prefill(window_left=1)
    assert torch.equal(prefill(window_left=1, mask_mode="sliding_window"), window)
    assert not torch.equal(prefill(), window)


def test_errors_say_which_part_of_qkv(reference_mode):
    q, k = torch.zeros(8, 3, DIM, dtype=BF16), torch.zeros(8, 2, DIM, dtype=BF16)
    with pytest.raises(ValueError, match="the queries of qkv must have a positive multiple of the"):
        prefill((q, k, k), "SEPARATE_Q_K_V")
    with pytest.raises(ValueError, match=r"the values of qkv must have shape \[8, 2, "):
        prefill((q[:, :2], k, k[:, :1]), "SEPARATE_Q_K_V")
