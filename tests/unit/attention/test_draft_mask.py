# SPDX-License-Identifier: Apache-2.0
"""Custom masks of draft masks, bit by bit."""

from __future__ import annotations

import random

import pytest
import torch

from precast._ops.attention.formula import drafts_seen
from precast._ops.attention.functional.draft_mask import (
    CustomMask,
    words_of_row,
    write_custom_mask,
)

I32 = torch.int32


def packed(sees: torch.Tensor, words: int) -> torch.Tensor:
    """Rows of bits, 16 in each word."""
    bits = torch.nn.functional.pad(sees, (0, 16 * words - sees.shape[1])).unflatten(1, (words, 16))
    return (bits.int() << torch.arange(16, dtype=I32)).sum(-1).to(torch.uint16)


@pytest.mark.parametrize("seed", range(120))
def test_every_bit(seed):
    r = random.Random(seed)
    batch, is_ragged = r.randint(1, 5), r.random() < 0.5
    most = r.choice((1, 2, 3, 4, 7, 31, 32, 33, 40, 70))
    capacity = r.choice((most, most + 5, 64, 100))
    kv_lens = [r.randint(0, capacity + 3) for _ in range(batch)]  # Some are longer than the table.
    q_lens = [r.randint(0, most) if is_ragged else most for _ in range(batch)]
    tokens = sum(q_lens) + (r.randint(0, 2) if is_ragged else 0)
    generator = torch.Generator().manual_seed(seed)
    # Bits behind the drafts of a request mean nothing.
    sees = torch.rand(tokens, 32 * words_of_row(most), generator=generator) < 0.5
    mask = packed(sees, 2 * words_of_row(most))
    form = CustomMask(batch, most, capacity)
    bits = torch.randint(0, 255, (form.nbytes,), dtype=torch.uint8, generator=generator)
    bounds = torch.tensor([0, *q_lens]).cumsum(0).int() if is_ragged else None
    write_custom_mask(bits, form, mask, torch.tensor(kv_lens, dtype=I32), bounds)
    row = 0
    for number, (n, m) in enumerate(zip(q_lens, kv_lens)):
        m = min(m, capacity)
        own = bits[number * form.request_bytes :][: form.request_bytes]
        flat = (own.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)).bitwise_and(1).flatten()
        got = flat[: n * m].view(n, m).bool()
        want = torch.ones(n, m, dtype=torch.bool)
        for draft in range(max(0, n - m), n):
            want[:, m - n + draft] = sees[row : row + n, draft]
        assert torch.equal(got, want), number
        assert torch.equal(drafts_seen(mask[row : row + n], m), want)
        assert tokens == 0 or flat[n * m :].all(), "a bit behind the request was cleared"
        row += n
