# SPDX-License-Identifier: Apache-2.0
"""Compute RoPE in plain PyTorch: angles in float64, the rotation in float32."""

from __future__ import annotations

import math

from precast._base.torch import torch


def computed_angles(
    positions: torch.Tensor,
    rotary_dim: int,
    rope_scale: float,
    rope_theta: float,
    llama31: tuple[float, float, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute cosines and sines ``[tokens, rotary_dim / 2]`` from frequencies.

    ``llama31`` is the factors of low and high frequencies and the old length of the context, by
    which Llama 3.1 blends two scales. A position beyond 32 bits counts as the nearest of 32 bits,
    as for the kernels.
    """
    positions = positions.clamp(-(2**31), 2**31 - 1)
    pairs = torch.arange(rotary_dim // 2, dtype=torch.float64, device=positions.device)
    inverse = torch.pow(rope_theta, pairs * (-2.0 / rotary_dim))
    smooth = torch.zeros_like(inverse)
    if llama31 is not None:
        low, high, old_context_len = llama31
        waves = inverse * (old_context_len / (2.0 * math.pi * (high - low)))
        smooth = (waves - low / (high - low)).clamp(0.0, 1.0)
    frequencies = inverse * (1.0 / rope_scale + smooth * (1.0 - 1.0 / rope_scale))
    angles = positions.double().unsqueeze(-1) * frequencies
    return angles.cos().float(), angles.sin().float()


def cached_angles(
    positions: torch.Tensor, cos_sin_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read cosines and sines from a cache; a position that it does not have is not rotated."""
    rows, rotary_dim = cos_sin_cache.shape
    none = torch.cat(
        (cos_sin_cache.new_ones(rotary_dim // 2), cos_sin_cache.new_zeros(rotary_dim // 2))
    )
    known = (positions >= 0) & (positions < rows)
    index = torch.where(known, positions.long(), rows)
    cos, sin = torch.cat((cos_sin_cache, none.unsqueeze(0)))[index].chunk(2, dim=-1)
    return cos, sin


def request_positions(indptr: torch.Tensor, offsets: torch.Tensor, tokens: int) -> torch.Tensor:
    """Find the position of each token; it is 0 for a token that no request holds."""
    token = torch.arange(tokens, dtype=torch.int64, device=indptr.device)
    starts, first = indptr.long(), torch.cat((offsets.long(), offsets.new_zeros(1).long()))
    request = torch.searchsorted(starts[1:].contiguous(), token, right=True)
    inside = (request < offsets.shape[0]) & (token >= starts[request])
    return torch.where(inside, first[request] + token - starts[request], 0)


def rotated(
    x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], interleave: bool
) -> torch.Tensor:
    """Rotate the first columns of ``[tokens, heads, dim]``, in float32."""
    cos, sin = (part.unsqueeze(1) for part in angles)
    rotary_dim = 2 * cos.shape[-1]
    head = x[..., :rotary_dim].float()
    if interleave:
        first, second = head[..., ::2], head[..., 1::2]
    else:
        first, second = head.chunk(2, dim=-1)
    parts = first * cos - second * sin, second * cos + first * sin
    columns = torch.stack(parts, dim=-1).flatten(-2) if interleave else torch.cat(parts, dim=-1)
    return torch.cat((columns, x[..., rotary_dim:].float()), dim=-1)


def rotated_pair(
    q: torch.Tensor,
    k: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    interleave: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys, and round each once to its own dtype."""
    return rotated(q, angles, interleave).to(q.dtype), rotated(k, angles, interleave).to(k.dtype)
