# SPDX-License-Identifier: Apache-2.0
"""RoPE: queries and keys read and written once, and the cache's row of each token read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from _harness import Case, Parts
from _script import script

import precast

Function = Callable[..., Any]
Tensors = tuple[torch.Tensor, ...]

# Llama's heads, one token to a long prefill.
HEADS, HEAD_DIM, MAX_POSITION = (32, 8), 128, 32768
TOKENS = (1, 64, 1024, 16384)
# Qwen3 8B and Gemma 3 27B (weights around zero): query, key and value heads, head size.
QWEN3, GEMMA3 = (32, 8, 8, 128), (32, 16, 16, 128)
EPS = 1e-6
THETA, LLAMA31_THETA = 1e4, 5e5


def _randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32, device="cuda").to(dtype)


def _positions(tokens: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(tokens, dtype=torch.int64, device=like.device)


def _cache(rows: int, rotary_dim: int, like: torch.Tensor) -> torch.Tensor:
    pairs = torch.arange(rotary_dim // 2, dtype=torch.float64, device=like.device)
    position = torch.arange(rows, dtype=torch.float64, device=like.device)
    angle = position.unsqueeze(-1) * THETA ** (-2 * pairs / rotary_dim)
    return torch.cat([angle.cos(), angle.sin()], dim=-1).float()


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _angles(positions: torch.Tensor, theta: float, llama31: bool) -> Tensors:
    pairs = torch.arange(HEAD_DIM // 2, dtype=torch.float64, device=positions.device)
    frequency = theta ** (-2 * pairs / HEAD_DIM)
    if llama31:
        smooth = ((8192 * frequency / (2 * torch.pi) - 1) / 3).clamp(0, 1)
        frequency = frequency * ((1 - smooth) / 8 + smooth)
    angle = positions.double().unsqueeze(-1) * frequency
    return angle.cos().float(), angle.sin().float()


def _eager_cached(in_place: bool) -> Function:
    def rope(q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor, cache: torch.Tensor) -> Any:
        cos, sin = cache[ids].chunk(2, dim=-1)
        turned = tuple(_turn(x.unflatten(-1, (-1, HEAD_DIM)), cos, sin).flatten(1) for x in (q, k))
        if not in_place:
            return turned
        q.copy_(turned[0])
        k.copy_(turned[1])
        return None

    return rope


def _eager_computed(llama31: bool, in_place: bool, by_requests: bool) -> Function:
    def rope(q: torch.Tensor, k: torch.Tensor, *where: torch.Tensor) -> Any:
        ids = where[0]
        if by_requests:
            ids = torch.arange(q.shape[0], device=q.device) + where[1]
        angles = _angles(ids, LLAMA31_THETA if llama31 else THETA, llama31)
        turned = _turn(q, *angles), _turn(k, *angles)
        if not in_place:
            return turned
        q.copy_(turned[0])
        k.copy_(turned[1])
        return None

    return rope


def _eager_qk(heads: tuple[int, int, int, int], bias: float) -> Function:
    def qk_norm_rope(
        qkv: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        ids: torch.Tensor,
        cache: torch.Tensor,
    ) -> None:
        dim = heads[3]
        parts = qkv.unflatten(-1, (-1, dim))
        cos, sin = cache[ids].chunk(2, dim=-1)
        for start, count, weight in ((0, heads[0], q_weight), (heads[0], heads[1], k_weight)):
            part = parts[:, start : start + count]
            x = part.float()
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (weight.float() + bias)
            part.copy_(_turn(x, cos, sin).to(qkv.dtype))

    return qk_norm_rope


def _parts_qk(heads: tuple[int, int, int, int], bias: float) -> Function:
    """The norm of the queries' and of the keys' heads, then the rotation, all in place."""
    norm = precast.gemma_rmsnorm if bias else precast.rmsnorm

    def separate(
        qkv: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        ids: torch.Tensor,
        cache: torch.Tensor,
    ) -> None:
        view = qkv.unflatten(-1, (-1, heads[3]))
        q, k = view[:, : heads[0]], view[:, heads[0] : heads[0] + heads[1]]
        norm(q, q_weight, EPS, q)
        norm(k, k_weight, EPS, k)
        precast.apply_rope_with_cos_sin_cache_inplace(ids, q, k, heads[3], cache)

    return separate


def cases(dtype: torch.dtype) -> Iterator[Case]:
    def moved(tokens: int, heads: int, dim: int) -> int:
        return 2 * tokens * heads * dim * dtype.itemsize

    def packed(tokens: int) -> Tensors:
        """Queries and keys of two dimensions, positions, a cache."""
        q, k = (_randn(tokens, heads * HEAD_DIM, dtype=dtype) for heads in HEADS)
        return q, k, _positions(tokens, q), _cache(max(tokens, MAX_POSITION), HEAD_DIM, q)

    def by_ids(tokens: int) -> Tensors:
        q, k = (_randn(tokens, heads, HEAD_DIM, dtype=dtype) for heads in HEADS)
        return q, k, _positions(tokens, q)

    def by_requests(tokens: int) -> Tensors:
        q, k, _ = by_ids(tokens)
        indptr = torch.arange(2, dtype=torch.int32, device=q.device) * tokens
        return q, k, indptr, torch.arange(1, dtype=torch.int32, device=q.device)

    def projection(tokens: int, heads: tuple[int, int, int, int]) -> Tensors:
        qkv = _randn(tokens, sum(heads[:3]) * heads[3], dtype=dtype)
        weights = (_randn(heads[3], dtype=dtype) for _ in range(2))
        ids = _positions(tokens, qkv)
        return qkv, *weights, ids, _cache(max(tokens, MAX_POSITION), heads[3], qkv)

    def cached(fn: Function) -> Function:
        return lambda q, k, ids, cache: fn(ids, q, k, HEAD_DIM, cache)

    def plain(fn: Function) -> Function:
        return lambda *args: fn(*args)

    for suffix in ("_inplace", ""):
        for tokens in TOKENS:
            yield Case(
                f"apply_rope_with_cos_sin_cache{suffix}",
                f"{tokens} tokens, 32/8 heads x 128",
                # The cache's rows are moved, too.
                moved(tokens, sum(HEADS), HEAD_DIM) + tokens * HEAD_DIM * 4,
                lambda tokens=tokens: packed(tokens),
                cached,
                _eager_cached(in_place=bool(suffix)),
            )
    for llama31 in (False, True):
        for requests in (False, True):
            for suffix in ("_inplace", ""):
                stem = "apply_llama31_rope" if llama31 else "apply_rope"
                make = by_requests if requests else by_ids
                for tokens in (64, 16384):
                    yield Case(
                        stem + ("" if requests else "_pos_ids") + suffix,
                        f"{tokens} tokens, 32/8 heads x 128",
                        moved(tokens, sum(HEADS), HEAD_DIM),
                        lambda make=make, tokens=tokens: make(tokens),
                        plain,
                        _eager_computed(llama31, bool(suffix), requests),
                    )
    for heads, bias in ((QWEN3, 0.0), (GEMMA3, 1.0)):

        def fused(fn: Function, heads: tuple[int, ...] = heads, bias: float = bias) -> Function:
            return lambda *args: fn(*args, heads[0], heads[1], EPS, bias)

        for tokens in (1, 64, 16384):
            once = moved(tokens, heads[0] + heads[1], heads[3])
            rows = tokens * heads[3] * 4
            yield Case(
                "qk_rmsnorm_rope",
                f"{tokens} tokens, {heads[0]}/{heads[1]} heads x {heads[3]}",
                once + rows,
                lambda tokens=tokens, heads=heads: projection(tokens, heads),
                fused,
                _eager_qk(heads, bias),
                parts=Parts(_parts_qk(heads, bias), 2 * once + rows),
            )


if __name__ == "__main__":
    script(__file__)
