# SPDX-License-Identifier: Apache-2.0
"""RoPE through FlashInfer with the same arguments: the same numbers."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from rope_case import DEVICE, heads_in, make_cache

import precast
from precast.testing import assert_close
from precast.testing.rotation import clone

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)
DTYPES = [torch.bfloat16, torch.float16]
# Theirs takes positions times frequencies in fp32 and fast sines: more than a rounding apart.
LOOSE = {"rtol": 2.0**-6, "atol": 8e-3}


def theirs(name: str) -> Any:
    import flashinfer.rope

    function = getattr(flashinfer.rope, name, None)
    if function is None:
        pytest.skip(f"flashinfer has no {name}")
    return function


def copies(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [clone(x) for x in tensors]


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "f16"])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 128), (128, 64), (256, 256)])
def test_by_a_cache(
    head_dim: int, rotary_dim: int, is_neox: bool, dtype: torch.dtype, generator: torch.Generator
) -> None:
    cache = make_cache(4096, rotary_dim)
    for tokens in (1, 33, 700):
        q, k = (
            x.flatten(1)
            for x in heads_in(
                "contiguous", tokens, (32, 8), head_dim, dtype=dtype, generator=generator
            )
        )
        ids = torch.randint(4096, (tokens,), device=DEVICE, generator=generator)
        name = "apply_rope_with_cos_sin_cache"
        want = theirs(name)(ids, q, k, head_dim, cache, is_neox)
        got = precast.apply_rope_with_cos_sin_cache(ids, q, k, head_dim, cache, is_neox)
        for mine, other in zip(got, want, strict=True):
            assert_close(mine, other, name=f"{name} against flashinfer")
        mine, other = copies(q, k), copies(q, k)
        precast.apply_rope_with_cos_sin_cache_inplace(ids, *mine, head_dim, cache, is_neox)
        theirs(f"{name}_inplace")(ids, *other, head_dim, cache, is_neox)
        for a, b in zip(mine, other, strict=True):
            assert_close(a, b, name=f"{name}_inplace against flashinfer")


@pytest.mark.parametrize("stem", ["apply_rope", "apply_llama31_rope"])
@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("by_requests", [False, True])
def test_by_frequencies(
    stem: str, interleave: bool, by_requests: bool, generator: torch.Generator
) -> None:
    lengths, starts = [7, 1, 40], [0, 900, 12]
    total = sum(lengths)
    q, k = heads_in("contiguous", total, (8, 2), 128, dtype=torch.float16, generator=generator)
    ids = torch.cat([s + torch.arange(n) for s, n in zip(starts, lengths)]).int().to(DEVICE)
    indptr = torch.tensor([0, 7, 8, 48], dtype=torch.int32, device=DEVICE)
    offsets = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    where = (indptr, offsets) if by_requests else (ids,)
    name = stem if by_requests else f"{stem}_pos_ids"
    want = theirs(name)(q, k, *where, interleave=interleave)
    got = getattr(precast, name)(q, k, *where, interleave=interleave)
    for mine, other in zip(got, want, strict=True):
        assert_close(mine, other, name=f"{name} against flashinfer", **LOOSE)
    mine_qk, other_qk = copies(q, k), copies(q, k)
    getattr(precast, f"{name}_inplace")(*mine_qk, *where, interleave=interleave)
    theirs(f"{name}_inplace")(*other_qk, *where, interleave=interleave)
    for a, b in zip(mine_qk, other_qk, strict=True):
        assert_close(a, b, name=f"{name}_inplace against flashinfer", **LOOSE)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("mla", [True, False], ids=["mla", "heads"])
def test_quantized(is_neox: bool, mla: bool, generator: torch.Generator) -> None:
    tokens, nope = 65, 512 if mla else 64
    q, k = heads_in(
        "contiguous", tokens, (8, 2), 64 + nope, dtype=torch.bfloat16, generator=generator
    )
    k = k[:, 0].contiguous() if mla else k
    parts = [x.contiguous() for x in (q[..., :64], k[..., :64], q[..., 64:], k[..., 64:])]
    cache = make_cache(512, 64)
    ids = torch.randint(512, (tokens,), device=DEVICE, generator=generator)
    keywords = {"quant_scale_q": 3.0, "quant_scale_kv": 0.5}
    for name in ("rope_quantize_fp8", *(["mla_rope_quantize_fp8"] if mla else [])):
        want = theirs(name)(*parts, cache, ids, is_neox, **keywords)
        got = getattr(precast, name)(*parts, cache, ids, is_neox, **keywords)
        for mine, other in zip(got, want, strict=True):
            assert mine.dtype == other.dtype
            assert_close(mine.float(), other.float(), name=name, rtol=2.0**-3, atol=2.0**-9)


@pytest.mark.parametrize("kind", ["NHD", "HND", "mla"])
def test_appended(kind: str, generator: torch.Generator) -> None:
    mla, tokens, page_size, pages = kind == "mla", 50, 16, 8
    nope = 512 if mla else 64
    q, k = heads_in(
        "contiguous", tokens, (8, 2), 64 + nope, dtype=torch.bfloat16, generator=generator
    )
    k = k[:, 0].contiguous() if mla else k
    parts = [x.contiguous() for x in (q[..., :64], k[..., :64], q[..., 64:], k[..., 64:])]
    v = None if mla else torch.randn_like(k)

    def index(values: torch.Tensor) -> torch.Tensor:
        return values.int().to(DEVICE)

    table = {
        "kv_indices": index(torch.randperm(pages)),
        "kv_indptr": index(torch.tensor([0, 3, 8])),
        "batch_indices": index(torch.tensor([0] * 20 + [1] * 30)),
        "positions": index(torch.cat([torch.arange(20), torch.arange(30)])),
    }
    shapes = (
        [(pages, page_size, nope), (pages, page_size, 64)]
        if mla
        else [(pages, *((2, page_size) if kind == "HND" else (page_size, 2)), 128)] * 2
    )

    def caches() -> tuple[torch.Tensor, ...]:
        made = (torch.zeros(s, device=DEVICE, dtype=torch.uint8) for s in shapes)
        return tuple(x.view(torch.float8_e4m3fn) for x in made)

    cache = make_cache(512, 64)
    ids = torch.randint(512, (tokens,), device=DEVICE, generator=generator)
    name = "rope_quantize_fp8_append_paged_kv_cache"
    layout = "HND" if kind == "HND" else "NHD"
    mine, other = caches(), caches()
    got = getattr(precast, name)(
        *parts, v, cache, ids, mine, **table, page_size=page_size, kv_layout=layout
    )
    want = theirs(name)(
        *parts, v, cache, ids, other, **table, page_size=page_size, kv_layout=layout
    )
    for a, b in zip((*got, *mine), (*want, *other), strict=True):
        assert_close(a.float(), b.float(), name=name, rtol=2.0**-3, atol=2.0**-9)
