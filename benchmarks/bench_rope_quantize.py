# SPDX-License-Identifier: Apache-2.0
"""RoPE with quantisation to fp8: 16 bits read and 8 written of every element."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache as cached
from typing import Any

import torch
from _harness import Case, Parts
from _script import script

import precast

Function = Callable[..., Any]
Tensors = tuple[torch.Tensor, ...]

ROPE_DIM, MAX_POSITION, PAGE_SIZE = 64, 8192, 64
# DeepSeek's latent attention: 128 query heads, one key, 512 columns that do not turn.
MLA_HEADS, MLA_NOPE = 128, 512
# Heads of 128, half of which turns.
HEADS, NOPE = (32, 8), 64
TOKENS = (1, 64, 4096)
SCALE_Q, SCALE_KV = 0.5, 2.0
E4M3 = torch.float8_e4m3fn


def _randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32, device="cuda").to(dtype)


def _cache(like: torch.Tensor) -> torch.Tensor:
    pairs = torch.arange(ROPE_DIM // 2, dtype=torch.float64, device=like.device)
    position = torch.arange(MAX_POSITION, dtype=torch.float64, device=like.device)
    angle = position.unsqueeze(-1) * 1e4 ** (-2 * pairs / ROPE_DIM)
    return torch.cat([angle.cos(), angle.sin()], dim=-1).float()


def _parts(
    tokens: int, heads: tuple[int, int], nope: int, mla: bool, dtype: torch.dtype
) -> Tensors:
    """q_rope, k_rope, q_nope, k_nope, the cache, positions."""
    q = _randn(tokens, heads[0], ROPE_DIM, dtype=dtype)
    q_nope = _randn(tokens, heads[0], nope, dtype=dtype)
    keys = (tokens,) if mla else (tokens, heads[1])
    k, k_nope = _randn(*keys, ROPE_DIM, dtype=dtype), _randn(*keys, nope, dtype=dtype)
    ids = torch.arange(tokens, dtype=torch.int64, device=q.device)
    return q, k, q_nope, k_nope, _cache(q), ids


def _quantized(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x.float() * scale).clamp(-448, 448).to(E4M3)


def _turned(x: torch.Tensor, cache: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    cos, sin = cache[ids].chunk(2, dim=-1)
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _eager(
    q: torch.Tensor,
    k: torch.Tensor,
    q_nope: torch.Tensor,
    k_nope: torch.Tensor,
    cache: torch.Tensor,
    ids: torch.Tensor,
) -> Tensors:
    return (
        _quantized(_turned(q, cache, ids), SCALE_Q),
        _quantized(_turned(k, cache, ids), SCALE_KV),
        _quantized(q_nope, SCALE_Q),
        _quantized(k_nope, SCALE_KV),
    )


def _eager_append(
    q: torch.Tensor,
    k: torch.Tensor,
    q_nope: torch.Tensor,
    k_nope: torch.Tensor,
    cache: torch.Tensor,
    ids: torch.Tensor,
    ckv: torch.Tensor,
    kpe: torch.Tensor,
    *table: torch.Tensor,
) -> Tensors:
    turned, k_turned, rest, k_rest = _eager(q, k, q_nope, k_nope, cache, ids)
    page, entry = table[0].long()[ids // PAGE_SIZE], ids % PAGE_SIZE
    ckv.view(torch.uint8)[page, entry] = k_rest.view(torch.uint8)
    kpe.view(torch.uint8)[page, entry] = k_turned.view(torch.uint8)
    return turned, rest


@cached
def _scales(device: torch.device) -> Tensors:
    """What dequantises queries, and keys."""
    return tuple(torch.tensor([1 / scale], device=device) for scale in (SCALE_Q, SCALE_KV))


def _separate(
    q: torch.Tensor,
    k: torch.Tensor,
    q_nope: torch.Tensor,
    k_nope: torch.Tensor,
    cache: torch.Tensor,
    ids: torch.Tensor,
) -> Tensors:
    """The rotation into new tensors, then each part to fp8."""
    of_q, of_k = _scales(q.device)
    q, k = precast.apply_rope_with_cos_sin_cache(ids, q, k, ROPE_DIM, cache)
    parts = ((q, of_q), (k, of_k), (q_nope, of_q), (k_nope, of_k))
    return tuple(precast.static_quant_fp8(x, scale, E4M3) for x, scale in parts)


def _separate_append(*args: torch.Tensor) -> Tensors:
    """Everything to fp8 in new tensors, then the keys to their pages, bit for bit."""
    parts, (ckv, kpe, indices, indptr, batch, positions) = args[:6], args[6:]
    q, k, q_nope, k_nope = precast.mla_rope_quantize_fp8(
        *parts, quant_scale_q=SCALE_Q, quant_scale_kv=SCALE_KV, enable_pdl=True
    )
    last = positions[:1]  # The lengths of last pages, which the op does not read.
    precast.append_paged_mla_kv_cache(k_nope, k, batch, positions, ckv, kpe, indices, indptr, last)
    return q, q_nope


def cases(dtype: torch.dtype) -> Iterator[Case]:
    def moved(tokens: int, elements: int) -> int:
        return tokens * (elements * (dtype.itemsize + 1) + ROPE_DIM * 4)

    def separate(tokens: int, heads: int, nope: int) -> Parts:
        """The columns that turn are written and read once more."""
        again = tokens * heads * ROPE_DIM * 2 * dtype.itemsize
        return Parts(_separate, moved(tokens, heads * (ROPE_DIM + nope)) + again)

    def bind(fn: Function) -> Function:
        return lambda *parts: fn(
            *parts, quant_scale_q=SCALE_Q, quant_scale_kv=SCALE_KV, enable_pdl=True
        )

    def bind_append(fn: Function) -> Function:
        return lambda q, k, q_nope, k_nope, cache, ids, ckv, kpe, *table: fn(
            q,
            k,
            q_nope,
            k_nope,
            None,
            cache,
            ids,
            (ckv, kpe),
            *table,
            quant_scale_q=SCALE_Q,
            quant_scale_kv=SCALE_KV,
            page_size=PAGE_SIZE,
            enable_pdl=True,
        )

    def paged(tokens: int) -> Tensors:
        """One request of all tokens."""
        parts = _parts(tokens, (MLA_HEADS, 1), MLA_NOPE, True, dtype)
        pages = -(-tokens // PAGE_SIZE)
        caches = (
            _randn(pages, PAGE_SIZE, dim, dtype=torch.float32).to(E4M3)
            for dim in (MLA_NOPE, ROPE_DIM)
        )
        device = parts[0].device
        indices = torch.arange(pages, dtype=torch.int32, device=device)
        indptr = torch.arange(2, dtype=torch.int32, device=device) * pages
        batch = torch.arange(tokens, dtype=torch.int32, device=device) * 0
        return *parts, *caches, indices, indptr, batch, parts[5].int()

    mla = MLA_HEADS + 1, ROPE_DIM + MLA_NOPE
    for tokens in TOKENS:
        yield Case(
            "mla_rope_quantize_fp8",
            f"{tokens} tokens, 128 heads x (64 + 512)",
            moved(tokens, mla[0] * mla[1]),
            lambda tokens=tokens: _parts(tokens, (MLA_HEADS, 1), MLA_NOPE, True, dtype),
            bind,
            _eager,
            parts=separate(tokens, mla[0], MLA_NOPE),
        )
        yield Case(
            "rope_quantize_fp8",
            f"{tokens} tokens, 32/8 heads x (64 + 64)",
            moved(tokens, sum(HEADS) * (ROPE_DIM + NOPE)),
            lambda tokens=tokens: _parts(tokens, HEADS, NOPE, False, dtype),
            bind,
            _eager,
            parts=separate(tokens, sum(HEADS), NOPE),
        )
        yield Case(
            "rope_quantize_fp8_append_paged_kv_cache",
            f"{tokens} tokens, 128 heads x (64 + 512), pages of 64",
            moved(tokens, mla[0] * mla[1]),
            lambda tokens=tokens: paged(tokens),
            bind_append,
            _eager_append,
            # Keys in fp8 are read and written once more.
            parts=Parts(_separate_append, moved(tokens, mla[0] * mla[1]) + 2 * tokens * mla[1]),
        )


if __name__ == "__main__":
    script(__file__)
