# SPDX-License-Identifier: Apache-2.0
"""Draft masks in the reference, bit by bit, and how calls pass them to kernels."""

from __future__ import annotations

import random

import pytest
import torch
from functional_calls import decode_arguments

import precast
from precast._ops.attention.formula import drafts_seen

XQA = precast.xqa_batch_decode_with_kv_cache


@pytest.mark.parametrize("seed", range(60))
def test_every_bit(seed):
    r = random.Random(seed)
    n = r.choice((0, 1, 2, 3, 4, 7, 15, 16, 17, 31, 32, 33, 40, 70))
    m = r.choice((0, r.randint(0, n), n, n + 1, n + 70))
    words = 2 * -(-max(n, 1) // 32)
    # Bits behind the drafts of a request mean nothing.
    mask = [[r.getrandbits(16) for _ in range(words)] for _ in range(n)]
    packed = torch.tensor(mask, dtype=torch.int32).view(n, words).to(torch.uint16)
    seen = drafts_seen(packed, m)
    assert seen.shape == (n, m)
    for row in range(n):
        for token in range(m):
            draft = token - (m - n)
            want = draft < 0 or mask[row][draft // 16] >> draft % 16 & 1
            assert seen[row, token] == bool(want), (row, token)


def test_a_mask_may_start_at_any_word(reference_mode):
    mask = torch.tensor([[1, 0], [3, 0], [5, 0]] * 2, dtype=torch.int32).to(torch.uint16)
    shifted = torch.zeros(13, dtype=torch.uint16)[1:].view(6, 2).copy_(mask)
    given = decode_arguments(q_len=3)
    assert torch.equal(XQA(**given, mask=shifted), XQA(**given, mask=mask))
    assert not torch.equal(XQA(**given, mask=mask), XQA(**given))


def test_a_mask_with_gaps_is_refused(reference_mode):
    given = decode_arguments(q_len=3)
    mask = torch.ones(6, 4, dtype=torch.uint16)[:, :2]
    with pytest.raises(ValueError, match=r"mask must be contiguous, got strides \[4, 1\]"):
        XQA(**given, mask=mask)


def test_a_mask_in_the_workspace_is_refused(reference_mode):
    given = decode_arguments(q_len=3)
    mask = given["workspace_buffer"][512:536].view(torch.uint16).view(6, 2)
    with pytest.raises(ValueError, match="workspace_buffer must not overlap mask's memory"):
        XQA(**given, mask=mask)
