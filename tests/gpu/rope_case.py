# SPDX-License-Identifier: Apache-2.0
"""RoPE as the tests see it: inputs of every layout, and the formula in float64 by complex numbers.

Independent of the library's references, which rotate by sines and cosines and blend frequencies
without branches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from precast.testing import Guarded, random_tensor

DEVICE = "cuda"
DTYPES = [torch.bfloat16, torch.float16]
LAYOUTS = ["contiguous", "packed", "unaligned", "head_major"]


class Llama31(NamedTuple):
    low: float = 1.0
    high: float = 4.0
    old_context_len: int = 8192


def frequencies(
    rotary_dim: int, scale: float, theta: float, llama31: Llama31 | None = None
) -> torch.Tensor:
    """Radians a position, float64, pair by pair."""
    values = []
    for pair in range(rotary_dim // 2):
        f = theta ** (-2 * pair / rotary_dim)
        if llama31 is None:
            values.append(f / scale)
            continue
        wavelength = 2 * math.pi / f
        if wavelength < llama31.old_context_len / llama31.high:
            values.append(f)
        elif wavelength > llama31.old_context_len / llama31.low:
            values.append(f / scale)
        else:
            smooth = (llama31.old_context_len / wavelength - llama31.low) / (
                llama31.high - llama31.low
            )
            values.append((1 - smooth) * f / scale + smooth * f)
    return torch.tensor(values, dtype=torch.float64)


def phases(positions: torch.Tensor, frequency: torch.Tensor) -> torch.Tensor:
    """Complex numbers of modulus 1, ``[tokens, pairs]``."""
    angle = positions.double().unsqueeze(-1) * frequency.to(positions.device)
    return torch.polar(torch.ones_like(angle), angle)


def make_cache(rows: int, rotary_dim: int, theta: float = 1e4) -> torch.Tensor:
    """A cache of cosines and sines as engines make it."""
    phase = phases(torch.arange(rows), frequencies(rotary_dim, 1.0, theta))
    return torch.cat([phase.real, phase.imag], dim=-1).float().to(DEVICE)


def phases_of_cache(positions: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """The phases of its rows; 1 where it has none."""
    known = (positions >= 0) & (positions < cache.shape[0])
    rows = cache.double()[torch.where(known, positions, 0).long()]
    real, imag = rows.chunk(2, dim=-1)
    return torch.where(known.unsqueeze(-1), torch.complex(real, imag), 1.0 + 0.0j)


def exact_rope(x: torch.Tensor, phase: torch.Tensor, interleave: bool) -> torch.Tensor:
    """``[tokens, heads, dim]`` in float64, its first columns rotated."""
    rotary_dim = 2 * phase.shape[-1]
    wide = x.double()
    head = wide[..., :rotary_dim]
    pairs = (
        head.unflatten(-1, (-1, 2)) if interleave else head.unflatten(-1, (2, -1)).transpose(-1, -2)
    )
    numbers = torch.complex(pairs[..., 0], pairs[..., 1]) * phase.unsqueeze(1)
    rotated = torch.stack([numbers.real, numbers.imag], dim=-1)
    rotated = rotated.flatten(-2) if interleave else rotated.transpose(-1, -2).flatten(-2)
    return torch.cat([rotated, wide[..., rotary_dim:]], dim=-1)


def heads_in(
    layout: str,
    tokens: int,
    heads: Sequence[int],
    dim: int,
    *,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> list[torch.Tensor]:
    """Random ``[tokens, heads[i], dim]`` in a layout; the others of ``heads`` share the memory."""
    total = sum(heads)
    x = random_tensor(tokens, total, dim, dtype=dtype, device=DEVICE, generator=generator)
    if layout == "contiguous":
        return [part.contiguous() for part in x.split(list(heads), dim=1)]
    if layout == "head_major":
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "unaligned":
        shape = (tokens, total * dim)
        guard = Guarded(shape, dtype, torch.device(DEVICE), gap=3, offset=1)
        guard.view.copy_(x.flatten(1))
        x = guard.view.unflatten(1, (total, dim))
    return list(x.split(list(heads), dim=1))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assert_fp8_close(actual: torch.Tensor, exact: torch.Tensor, name: str) -> None:
    """Saturating nearest even of the exact value; a tie may fall to the other side, rarely."""
    largest = torch.finfo(actual.dtype).max
    expected = exact.clamp(-largest, largest).float().to(actual.dtype)
    if same_bits(actual, expected):
        return
    got, want = (_order(x) for x in (actual, expected))
    distance = (got - want).abs()
    assert distance.max() <= 1, f"{name}: {int((distance > 1).sum())} are more than a place away"
    wrong = distance.ne(0).double().mean().item()
    assert wrong < 2e-3 or int(distance.ne(0).sum()) <= 2, f"{name}: {wrong:.2%} differ"


def _order(x: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the numbers."""
    code = x.contiguous().view(torch.uint8).int()
    return torch.where(code >= 128, 128 - code, code)
