# SPDX-License-Identifier: Apache-2.0
"""The same calls on the paged KV cache through FlashInfer: the same bits."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from code_params import E4M3_PARAM
from page_cases import FORMS, LAYOUTS, as_bits, kv_cache, mla_cache, random_bits, tokens_for

import precast

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)
DTYPES = [torch.float16, torch.bfloat16, torch.float8_e4m3fn]


def compare(name: str, cache: Any, *before: Any, after: tuple[Any, ...] = (), **named: Any) -> None:
    """Theirs, then ours from the same start; ``cache`` stands between ``before`` and ``after``."""
    import flashinfer

    start = cache.before()
    arguments = cache.argument if "mla" in name else (cache.argument,)
    getattr(flashinfer.page, name)(*before, *arguments, *after, **named)
    theirs = cache.before()
    for buffer, old in zip(cache.buffers, start, strict=True):
        as_bits(buffer).copy_(old)
    getattr(precast, name)(*before, *arguments, *after, **named)
    for mine, other in zip(cache.before(), theirs, strict=True):
        assert torch.equal(mine, other), name


def normal_rows(
    shape: tuple[int, ...], count: int, generator: torch.Generator
) -> list[torch.Tensor]:
    made = (torch.randn(shape, device=generator.device, generator=generator) for _ in range(count))
    return [(rows * 5).bfloat16() for rows in made]


def quantised(rows: torch.Tensor, scale: float, kv: torch.dtype) -> torch.Tensor:
    """Codes of ``kv`` as e4m3, an element type that FlashInfer copies."""
    most = torch.finfo(kv).max
    quotients = rows.float() / torch.tensor(scale, device=rows.device)
    return quotients.clamp(-most, most).to(kv).contiguous().view(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_append_paged_kv_cache(
    head_dim: int, layout: str, form: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    for page_size, count in ((1, 20), (16, 200), (64, 500)):
        cache = kv_cache(form, layout, (29, page_size, 8, head_dim), dtype, generator)
        tokens = tokens_for(count, 29, page_size, generator, lost=False)
        rows = [random_bits(count, 8, head_dim, dtype=dtype, generator=generator) for _ in range(2)]
        compare(
            "append_paged_kv_cache",
            cache,
            *rows,
            *tokens.places,
            after=tokens.table,
            kv_layout=layout,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("one_buffer", [False, True])
def test_append_paged_mla_kv_cache(
    one_buffer: bool, dtype: torch.dtype, generator: torch.Generator
) -> None:
    cache = mla_cache(one_buffer, (29, 64), (512, 64), dtype, generator)
    tokens = tokens_for(300, 29, 64, generator, lost=False)
    rows = [random_bits(300, d, dtype=dtype, generator=generator) for d in (512, 64)]
    compare("append_paged_mla_kv_cache", cache, *rows, *tokens.places, after=tokens.table)


@pytest.mark.parametrize("kv", [E4M3_PARAM])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantised_keys_and_values(
    layout: str, kv: torch.dtype, generator: torch.Generator
) -> None:
    """FlashInfer appends no rows of another type: quantised ones, then, as bytes of e4m3."""
    import flashinfer

    cache = kv_cache("packed", layout, (29, 16, 8, 128), kv, generator)
    tokens = tokens_for(200, 29, 16, generator, lost=False)
    rows, scales = normal_rows((200, 8, 128), 2, generator), (0.03, 0.4)
    start = cache.before()
    flashinfer.page.append_paged_kv_cache(
        *(quantised(row, scale, kv) for row, scale in zip(rows, scales, strict=True)),
        *tokens.places,
        cache.argument.view(torch.float8_e4m3fn),
        *tokens.table,
        kv_layout=layout,
    )
    theirs = cache.before()
    as_bits(cache.buffers[0]).copy_(start[0])
    precast.fp8_quantize_append_paged_kv_cache_with_slot_mapping(
        *rows, tokens.slots, cache.argument, *scales, layout
    )
    assert torch.equal(cache.before()[0], theirs[0])
    assert not torch.equal(theirs[0], start[0])


@pytest.mark.parametrize("kv", [E4M3_PARAM])
@pytest.mark.parametrize("one_buffer", [False, True])
def test_quantised_mla_entries(
    one_buffer: bool, kv: torch.dtype, generator: torch.Generator
) -> None:
    import flashinfer

    cache = mla_cache(one_buffer, (29, 64), (512, 64), kv, generator)
    tokens = tokens_for(300, 29, 64, generator, lost=False)
    both, scale = normal_rows((300, 576), 1, generator)[0], 0.03
    rows = both.split((512, 64), -1)
    start = cache.before()
    flashinfer.page.append_paged_mla_kv_cache(
        *(quantised(row, scale, kv) for row in rows),
        *tokens.places,
        *(part.view(torch.float8_e4m3fn) for part in cache.argument),
        *tokens.table,
    )
    theirs = cache.before()
    for buffer, old in zip(cache.buffers, start, strict=True):
        as_bits(buffer).copy_(old)
    precast.fp8_quantize_append_paged_mla_kv_cache_with_slot_mapping(
        *rows, tokens.slots, *cache.argument, scale
    )
    for mine, other, old in zip(cache.before(), theirs, start, strict=True):
        assert torch.equal(mine, other)
        assert not torch.equal(other, old)


def clear_nvfp4(*caches: Any) -> None:
    for cache in caches:
        for buffer in cache.buffers:
            as_bits(buffer).zero_()


@pytest.mark.parametrize("by_slots", [False, True])
@pytest.mark.parametrize("form", ["pair", "packed"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_nvfp4_keys_and_values(
    head_dim: int, layout: str, form: str, by_slots: bool, generator: torch.Generator
) -> None:
    """It divides by approximations: a few numbers on ties may differ by a step."""
    import flashinfer

    codes = kv_cache(form, layout, (29, 16, 8, head_dim // 2), torch.uint8, generator)
    factors = kv_cache(form, layout, (29, 16, 8, head_dim // 16), torch.float8_e4m3fn, generator)
    tokens = tokens_for(200, 29, 16, generator, lost=False)
    rows, scales = normal_rows((200, 8, head_dim), 2, generator), (0.011, 0.013)
    results = []
    for library in (flashinfer, precast):
        clear_nvfp4(codes, factors)
        if by_slots:
            library.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
                *rows, tokens.slots, codes.argument, factors.argument, *scales, layout
            )
        else:
            library.nvfp4_quantize_append_paged_kv_cache(
                *rows,
                *tokens.places,
                codes.argument,
                factors.argument,
                *tokens.table,
                *scales,
                layout,
            )
        results.append([*codes.before(), *factors.before()])
    for theirs, mine in zip(*results, strict=True):
        assert mine.any()
        assert (mine != theirs).float().mean() < 2e-3


@pytest.mark.parametrize("pad", [0, 9])
def test_index_arithmetic(pad: int, generator: torch.Generator) -> None:
    import flashinfer

    lengths = torch.randint(0, 50, (37,), device="cuda", generator=generator).int()
    indptr = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    pages = torch.randint(0, 5, (37,), device="cuda", generator=generator)
    kv_indptr = torch.cat([pages.new_zeros(1), pages.cumsum(0)]).int()
    last = torch.randint(1, 17, (37,), device="cuda", generator=generator).int() * (pages > 0)
    lens = precast.get_seq_lens(kv_indptr, last, 16)
    assert torch.equal(lens, flashinfer.get_seq_lens(kv_indptr, last, 16))
    nnz = int(indptr[-1]) + pad
    mine = precast.get_batch_indices_positions(indptr, lens + lengths, nnz)
    theirs = flashinfer.get_batch_indices_positions(indptr, lens + lengths, nnz)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e5m2])
def test_concat_mla_k(dtype: torch.dtype, generator: torch.Generator) -> None:
    import flashinfer.concat_ops

    k = [random_bits(65, 128, 192, dtype=dtype, generator=generator) for _ in range(2)]
    up = random_bits(65, 128, 256, dtype=dtype, generator=generator)
    rope = random_bits(65, 1, 64, dtype=dtype, generator=generator)
    precast.concat_mla_k(k[0], up[..., :128], rope)
    flashinfer.concat_ops.concat_mla_k(k[1], up[..., :128], rope)
    assert torch.equal(as_bits(k[0]), as_bits(k[1]))


def test_errors_have_their_types() -> None:
    import flashinfer

    rows, index = torch.zeros(1, 8, 64, device="cuda"), torch.zeros(2, device="cuda").int()
    cache = torch.zeros(2, 2, 16, 8, 64, device="cuda")
    bad: list[dict[str, Any]] = [
        {"paged_kv_cache": cache, "kv_layout": "NDH"},
        {"paged_kv_cache": [cache[:, 0], cache[:, 1]]},
    ]
    for library in (precast, flashinfer):
        for arguments in bad:
            with pytest.raises(KeyError):
                library.append_paged_kv_cache(
                    rows,
                    rows,
                    index[:1],
                    index[:1],
                    kv_indices=index[:1],
                    kv_indptr=index,
                    kv_last_page_len=index[:1],
                    **arguments,
                )
