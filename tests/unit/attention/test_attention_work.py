# SPDX-License-Identifier: Apache-2.0
"""FLOPs and bytes of attention, counted pair by pair."""

from __future__ import annotations

import math

import pytest
import torch

from precast.testing import (
    attention_flops,
    attention_flops_with_actual_seq_lens,
    attention_tb_per_sec,
    attention_tb_per_sec_with_actual_seq_lens,
    attention_tflops_per_sec,
    attention_tflops_per_sec_with_actual_seq_lens,
)


def seen_pairs(queries: int, keys: int, causal: bool) -> float:
    """Pairs of a query and a key that it sees; one on the mask's diagonal counts half."""
    if not causal:
        return queries * keys
    last_seen = [keys - queries + i for i in range(queries)]
    return sum(last + 0.5 for last in last_seen)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (5, 5), (3, 8)])
def test_flops_are_those_of_every_pair(queries: int, keys: int, causal: bool) -> None:
    flops = attention_flops(4, queries, keys, 192, 128, 16, causal)
    assert isinstance(flops, int)
    # Two operations a pair and head dimension, in both products.
    assert flops == 4 * 16 * 2 * (192 + 128) * seen_pairs(queries, keys, causal)


def test_a_square_mask_halves_the_work() -> None:
    full, masked = (attention_flops(2, 64, 64, 128, 128, 8, causal) for causal in (False, True))
    assert masked * 2 == full


@pytest.mark.parametrize("causal", [False, True])
def test_ragged_is_the_sum_of_its_sequences(causal: bool) -> None:
    q, kv = [1, 7, 0, 16], [9, 7, 3, 40]
    want = sum(attention_flops(1, a, b, 128, 64, 8, causal) for a, b in zip(q, kv))
    assert attention_flops_with_actual_seq_lens(q, kv, 128, 64, 8, causal) == want
    as_tensors = torch.tensor(q).view(4, 1, 1), torch.tensor(kv, dtype=torch.int32)
    assert attention_flops_with_actual_seq_lens(*as_tensors, 128, 64, 8, causal) == want


def test_lengths_beyond_single_precision_stay_exact() -> None:
    q = torch.tensor([2**24 + 1], dtype=torch.int32)
    assert attention_flops_with_actual_seq_lens(q, q, 1, 1, 1, False) == 4 * (2**24 + 1) ** 2


def test_more_causal_queries_than_keys_are_rejected() -> None:
    with pytest.raises(ValueError, match="got 3 keys and 4 queries"):
        attention_flops(1, 4, 3, 128, 128, 1, causal=True)
    with pytest.raises(ValueError, match="got 3 keys and 4 queries"):
        attention_flops_with_actual_seq_lens([1, 4], [1, 3], 128, 128, 1, causal=True)
    assert attention_flops(1, 4, 3, 128, 128, 1, causal=False) == 2 * 4 * 3 * 256


def test_as_many_queries_as_keys_lengths() -> None:
    with pytest.raises(ValueError, match=r"actual_seq_lens_q has 2 lengths and .*_kv 1"):
        attention_flops_with_actual_seq_lens([1, 2], [3], 128, 128, 1, causal=False)


def test_rates_take_milliseconds() -> None:
    # 2 * 1000 * 1000 * 1000 * (128 + 128) operations in 2 ms
    assert attention_tflops_per_sec(1, 1000, 1000, 128, 128, 1000, False, 2.0) == pytest.approx(256)
    assert attention_tflops_per_sec_with_actual_seq_lens(
        [1000], [1000], 128, 128, 1000, False, 2.0
    ) == pytest.approx(256)
    assert attention_tflops_per_sec(1, 1, 1, 1, 1, 1, False, math.nan) == 0.0


def test_bytes_are_queries_keys_values_and_outputs_once() -> None:
    dtypes = (torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.float32)
    # q: 2 B x 192, k: 1 B x 192, v: 8 B x 128, o: 4 B x 128
    moved = 3 * 5 * 16 * (2 * 192 + 4 * 128) + 3 * 50 * 4 * (192 + 8 * 128)
    got = attention_tb_per_sec(3, 5, 50, 192, 128, 16, 4, 0.001, *dtypes)
    assert got == pytest.approx(moved / 1e-6 / 1e12)
    ragged = attention_tb_per_sec_with_actual_seq_lens(
        [4, 5, 6], torch.tensor([20, 30, 100]), 192, 128, 16, 4, 0.001, *dtypes
    )
    assert ragged == pytest.approx(got)
    assert attention_tb_per_sec(1, 1, 1, 1, 1, 1, 1, math.nan) == 0.0
