# SPDX-License-Identifier: Apache-2.0
"""Philox4x32-10, which makes four random words of each key and counter, without a state.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import operator

from precast._base.torch import torch

WORD = 0xFFFFFFFF
BATCH = 1 << 14  # outputs at a time: what lies between two steps stays in a CPU's cache


def philox4x32(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    key: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Run ten rounds on words that are int64 numbers from 0 to 2^32 - 1; returns ``[..., 4]``."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # A product of 64 bits wraps to a signed one; shift and mask take the right words of it.
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) & WORD ^ c1 ^ k0, b & WORD, (a >> 32) & WORD ^ c3 ^ k1, a & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return torch.stack([c0, c1, c2, c3], dim=-1)


def signed(number: int) -> int:
    """Return the low 64 bits of a whole number, also NumPy's, as an int64."""
    if type(number) is not int:
        number = operator.index(number)
    if 0 <= number < 1 << 63:
        return number
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def as_int64(
    number: torch.Tensor | int | None, count: int, device: torch.device
) -> tuple[torch.Tensor, bool]:
    """Return a seed or an offset for each of ``count`` rows, and whether each row has its own."""
    if isinstance(number, torch.Tensor):
        bits = number.view(torch.int64) if number.dtype == torch.uint64 else number.to(torch.int64)
        return bits.expand(count), number.numel() > 1
    return torch.full((count,), signed(number or 0), device=device), False


def uniforms(
    seed: torch.Tensor | int | None,
    offset: torch.Tensor | int | None,
    count: int,
    draw: int | torch.Tensor,
    device: torch.device,
) -> torch.Tensor:
    """Return four uniform numbers in [0, 1) for each row, ``[count, 4]``, multiples of 2^-24.

    The row is part of the counter, unless each row has a seed of its own: then its numbers do not
    depend on where it stands.
    """
    keys, own = as_int64(seed, count, device)
    offsets, _ = as_int64(offset, count, device)
    rows = torch.arange(count, device=device) * (not own)
    draws = torch.zeros_like(rows) + draw
    parts = zip(*(numbers.split(BATCH) for numbers in (keys, offsets, rows, draws)))
    words = [
        philox4x32((b & WORD, (b >> 32) & WORD, c & WORD, d), (a & WORD, (a >> 32) & WORD))
        for a, b, c, d in parts
    ]
    return (torch.cat(words) >> 8).to(torch.float32) * 2.0**-24
