# SPDX-License-Identifier: Apache-2.0
"""Draws from probabilities: tokens are the references', bit for bit, at any size and address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sampling_calls import (
    DRAWS,
    DTYPES,
    RANDOM,
    Draw,
    both,
    cells,
    different,
    rows_of_all_kinds,
    same_tokens,
)

import precast

SIZES = [1, 2, 3, 31, 32, 33, 129, 1000, 1023, 1024, 1025, 5001, 32000, 32768, 32769, 128256]
LARGE = [131073, 151936, 262144, 262145, 500003, 1000000, 1 << 20]

every_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "f16", "bf16"])


@cells(SIZES, [3, 1025, 5001, 128256])
def test_any_vocabulary(size: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    x = rows_of_all_kinds(size, dtype, generator)
    for draw in DRAWS.values():
        same_tokens(draw, x, **RANDOM)


@pytest.mark.parametrize("size", LARGE)
def test_large_vocabularies(size: int, generator: torch.Generator) -> None:
    x = rows_of_all_kinds(size, torch.float32, generator, repeat=1)
    for draw in DRAWS.values():
        same_tokens(draw, x, **RANDOM)
    same_tokens(DRAWS["joint"], x.bfloat16(), **RANDOM)


@pytest.mark.parametrize("size", [1, 2, 33, 1024, 5001, 128256, 262144, 1000000])
def test_parameters_at_the_ends_of_their_ranges(size: int, generator: torch.Generator) -> None:
    """About the size of the vocabulary, and where a filter begins to keep all or the likeliest."""
    x = rows_of_all_kinds(size, torch.float32, generator, repeat=1)
    least, most = torch.tensor([1e-45, 1e-7]).tolist(), torch.tensor([1 - 2**-24, 1.5]).tolist()
    for k in (1, size - 1, size, size + 1, -1, 2**31 - 1, 2**40, -(2**40)):
        same_tokens(precast.top_k_sampling_from_probs, x, k, **RANDOM)
        for p in (0.0, 0.4, 1.0):
            same_tokens(precast.top_k_top_p_sampling_from_probs, x, k, p, **RANDOM)
    for share in (-1.0, 0.0, *least, *most, 1.0):
        same_tokens(precast.top_p_sampling_from_probs, x, share, **RANDOM)
        same_tokens(precast.min_p_sampling_from_probs, x, share, **RANDOM)


@pytest.mark.parametrize("size", [1000, 33000, 128256, 262144])
@every_draw
def test_a_token_does_not_depend_on_the_batch(
    draw: Draw, size: int, generator: torch.Generator
) -> None:
    """With seeds of their own, requests have their tokens in any batch, at any place."""
    x = rows_of_all_kinds(size, torch.float32, generator, repeat=1)
    seeds = torch.randint(-(2**62), 2**62, (16,), device=x.device, generator=generator)
    offsets = 4 * torch.arange(16, device=x.device)
    with precast.reference_mode():
        want = draw(x, seed=seeds, offset=offsets)
    for count in (1, 3, 7, 16):
        got = draw(x[:count], seed=seeds[:count], offset=offsets[:count])
        if count > 1:
            assert torch.equal(got, want[:count]), (count, different(got, want[:count]))
    alone = draw(x[2:3], seed=seeds[2:3], offset=offsets[2:3])
    assert torch.equal(alone, want[2:3])
    for count in (300, 1001):
        order = torch.randint(0, 16, (count,), device=x.device, generator=generator)
        got = draw(x, indices=order, seed=seeds[order], offset=offsets[order])
        assert torch.equal(got, want[order].long()), (count, different(got, want[order].long()))
    order = torch.randint(0, 16, (100,), device=x.device, generator=generator)
    got = draw(x[order], seed=seeds[order], offset=offsets[order])
    assert torch.equal(got, want[order])


@every_draw
def test_with_one_seed_the_place_counts_and_nothing_around_it(
    draw: Draw, generator: torch.Generator
) -> None:
    x = torch.rand(300, 40000, device="cuda", generator=generator)
    tokens, want = both(draw, x, **RANDOM)
    assert torch.equal(tokens, want), different(tokens, want)
    for count in (1, 2, 16, 65, 299):
        assert torch.equal(draw(x[:count], **RANDOM), tokens[:count]), count
    other = torch.rand(300, 40000, device="cuda", generator=generator)
    other[250] = x[250]
    assert draw(other, **RANDOM)[250] == tokens[250]
    for _ in range(10):
        assert torch.equal(draw(x, **RANDOM), tokens)


@dtypes
def test_rows_at_any_address_and_pitch(dtype: torch.dtype, generator: torch.Generator) -> None:
    for size in (1, 77, 1030, 40000):
        x = torch.rand(20, size, device="cuda", generator=generator).to(dtype)
        for start, pitch in ((1, size + 1), (3, size + 9), (8, size + 64), (16, 2 * size + 16)):
            wide = torch.full((20, pitch + start), torch.nan, device="cuda", dtype=dtype)
            rows = wide[:, start : start + size]
            rows.copy_(x)
            for name in ("plain", "p.3", "k50", "joint"):
                got = DRAWS[name](rows, **RANDOM)
                with precast.reference_mode():
                    want = DRAWS[name](x, **RANDOM)
                assert torch.equal(got, want), (name, different(got, want))
        same_tokens(DRAWS["p.3"], x[:1].expand(9, -1), **RANDOM)
        same_tokens(DRAWS["k50"], x.flip(0)[::2], **RANDOM)


@every_draw
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices(draw: Draw, dtype: torch.dtype, generator: torch.Generator) -> None:
    x = torch.eye(50, device="cuda")
    indices = torch.randint(0, 50, (333,), device="cuda", generator=generator).to(dtype)
    got = draw(x, indices=indices)
    assert got.dtype == dtype
    assert torch.equal(got, indices)
    x = rows_of_all_kinds(3000, torch.float32, generator)
    indices = torch.randint(0, len(x), (500,), device="cuda", generator=generator).to(dtype)
    same_tokens(draw, x, indices=indices, **RANDOM)
    seeds = torch.arange(500, device="cuda")
    same_tokens(draw, x, indices=indices, seed=seeds, offset=seeds * 4)


@every_draw
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_index_of_no_row_has_no_token(draw: Draw, dtype: torch.dtype) -> None:
    rows = 50
    x = torch.eye(rows, 3000, device="cuda").roll(1, 1)  # of row i the token i + 1
    legal = torch.arange(200, device="cuda") % rows
    for wrong in (-1, rows, -rows, 1 << 20, -(1 << 31), (1 << 31) - 1, 1 << 40, -(1 << 62)):
        if dtype == torch.int32 and abs(wrong) > 1 << 31:
            continue
        indices = legal.to(dtype)
        indices[::7] = wrong
        tokens, valid = draw(x, indices=indices, return_valid=True, **RANDOM)
        assert torch.equal(valid, indices != wrong)
        assert torch.equal(tokens, (legal.to(dtype) + 1) * valid)
        parameters = {"indices": indices, **RANDOM}
        heated = 100 * x
        assert torch.equal(precast.sampling_from_logits(heated, **parameters), tokens)
        filtered = precast.top_k_top_p_sampling_from_logits(heated, 5, 0.9, **parameters)
        assert torch.equal(filtered, tokens)


def test_parameters_by_row(generator: torch.Generator) -> None:
    for size in (900, 50000):
        x = rows_of_all_kinds(size, torch.float32, generator)
        rows = torch.arange(len(x), device="cuda")
        k = torch.tensor([1, 5, 900, 0, 700, 10**6, -1, 64], device="cuda")[rows % 8].int()
        p = torch.tensor([0.0, 0.3, 1.0, 0.9, 2.0], device="cuda")[rows % 5]
        m = torch.tensor([0.0, 0.3, 1.0], device="cuda")[rows % 3]
        indices = torch.randint(0, len(x), (200,), device="cuda", generator=generator)
        for more in ({}, {"indices": indices}):
            given = {**RANDOM, **more}
            same_tokens(precast.top_k_sampling_from_probs, x, k, **given)
            same_tokens(precast.top_k_sampling_from_probs, x, k.long(), **given)
            same_tokens(precast.top_p_sampling_from_probs, x, p, **given)
            same_tokens(precast.top_p_sampling_from_probs, x, p.double(), **given)
            same_tokens(precast.min_p_sampling_from_probs, x, m, **given)
            for order in ("top_k_first", "joint"):
                same_tokens(
                    *(precast.top_k_top_p_sampling_from_probs, x, k, p),
                    filter_apply_order=order,
                    **given,
                )
            same_tokens(precast.top_k_top_p_sampling_from_probs, x, 30, p, **given)
            same_tokens(precast.top_k_top_p_sampling_from_probs, x, k, 0.5, **given)


@every_draw
def test_no_rows(draw: Draw) -> None:
    tokens, valid = draw(torch.empty(0, 1000, device="cuda"), return_valid=True)
    assert tokens.shape == valid.shape == (0,)
    nothing = torch.empty(0, dtype=torch.int64, device="cuda")
    assert draw(torch.ones(2, 10, device="cuda"), indices=nothing).shape == (0,)
    assert draw(torch.empty(0, 10, device="cuda"), indices=nothing).shape == (0,)


@every_draw
def test_the_only_candidate_is_found_anywhere(draw: Draw) -> None:
    for size in (1025, 40000):
        places = torch.arange(0, size, 37, device="cuda")
        x = torch.zeros(len(places), size, device="cuda")
        x[range(len(places)), places] = 0.25
        tokens, valid = draw(x, return_valid=True)
        assert torch.equal(tokens.long(), places)
        assert valid.all()


@every_draw
def test_nan_is_found_anywhere(draw: Draw) -> None:
    for size in (1, 1025, 33000, 262145):
        places = torch.arange(0, size, max(1, size // 40), device="cuda")
        x = torch.ones(len(places) + 1, size, device="cuda")
        x[range(len(places)), places] = torch.nan
        x[:, -1] = x[:, -1] * 2
        tokens, valid = draw(x, return_valid=True)
        assert not valid[:-1].any()
        assert not tokens[:-1].any()
        assert valid[-1]


def test_check_nan_waits_and_raises() -> None:
    x = torch.ones(3, 1000, device="cuda")
    precast.sampling_from_probs(x, check_nan=True)
    x[2, 999] = torch.nan
    for draw in DRAWS.values():
        with pytest.raises(ValueError, match=r"Input probs contains NaN\."):
            draw(x, check_nan=True)
    for call, more in (
        (precast.sampling_from_logits, ()),
        (precast.top_k_top_p_sampling_from_logits, (2, 0.5)),
        (precast.sample, ()),
    ):
        with pytest.raises(ValueError, match=r"Input logits contains NaN\."):
            call(x, *more, check_nan=True)


X = torch.ones(4, 10)
REFUSED: list[tuple[Callable[[torch.Tensor], Any], str]] = [
    (lambda x: precast.sampling_from_probs(x[0]), "probs must have 2 dimensions"),
    (lambda x: precast.sampling_from_probs(x.double()), "float64 is not supported; legal: f32"),
    (lambda x: precast.sampling_from_probs(x.cpu()), "must be a CUDA tensor"),
    (lambda x: precast.sampling_from_probs(x[:, ::2]), "stride"),
    (lambda x: precast.sampling_from_probs(x[:, :0]), "1 to 1048576 columns"),
    (
        lambda x: precast.sampling_from_probs(x.new_ones(1, 1).expand(1, 1048577).contiguous()),
        "1 to 1048576 columns",
    ),
    (lambda x: precast.sampling_from_probs(x, x[0].long().cpu()), "indices must be on cuda:0"),
    (lambda x: precast.sampling_from_probs(x, x[0].short()), "indices must be int32 or int64"),
    (lambda x: precast.sampling_from_probs(x, x.long()), "indices must have 1 dimension"),
    (
        lambda x: precast.top_k_sampling_from_probs(x, x[:3, 0].int()),
        r"Sampling parameter tensor batch size mismatch: top_k must have shape \[4\]",
    ),
    (
        lambda x: precast.top_p_sampling_from_probs(x, x[:, :1]),
        "top_p: Expected a 1D tensor or scalar, got a 2D tensor",
    ),
    (
        lambda x: precast.min_p_sampling_from_probs(x, x[:1, 0]),
        r"Sampling parameter tensor batch size mismatch: min_p must have shape \[4\]",
    ),
    (
        lambda x: precast.top_p_sampling_from_probs(x, x[:, 0].cpu()),
        "top_p must be on cuda:0",
    ),
    (
        lambda x: precast.softmax(x, x[0, 0]),
        r"Expected a 1D tensor of shape \(batch_size,\) or scalar, got a 0-dimensional tensor",
    ),
    (lambda x: precast.softmax(x, -1.0), "softmax: temperature must be 0 or more, got -1.0"),
    (lambda x: precast.sample(x, -0.5), "sample: temperature must be 0 or more, got -0.5"),
    (lambda x: precast.sampling_from_probs(x[:0], x[0].long()), "must have the rows that indices"),
    (lambda x: precast.softmax(x, x[:3, 0]), "Sampling parameter tensor batch size mismatch"),
    (lambda x: precast.top_k_mask_logits(x, x[:3, 0].int()), "batch size mismatch"),
    (lambda x: precast.sample(x, x[:3, 0]), "Sampling parameter tensor batch size mismatch"),
    (
        lambda x: precast.sampling_from_probs(x, seed=x[0].long(), offset=x[0].long()),
        "seed tensor length must be 1 or 4, got 10",
    ),
    (
        lambda x: precast.sampling_from_probs(x, seed=x[:, 0].int(), offset=x[:, 0].long()),
        "seed tensor must be int64/uint64, got int32",
    ),
    (
        lambda x: precast.sampling_from_probs(x, seed=x.long()[:1], offset=x[:, 0].long()),
        "seed tensor must be 1D",
    ),
    (
        lambda x: precast.sampling_from_probs(x, seed=x[:, 0].long(), offset=x[:, 0].long().cpu()),
        "offset tensor must be on cuda:0 as probs, got cpu",
    ),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_what_is_rejected(call: Callable[[torch.Tensor], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(X.cuda())


def test_a_generator_of_the_cpu_draws_the_seed(generator: torch.Generator) -> None:
    x = torch.rand(64, 2000, device="cuda", generator=generator)
    own = torch.Generator().manual_seed(3)
    first, again = (precast.sampling_from_probs(x, generator=own) for _ in range(2))
    assert not torch.equal(first, again)
    own.manual_seed(3)
    got, want = both(lambda: precast.sampling_from_probs(x, generator=own.manual_seed(3)))
    assert torch.equal(got, want)
    assert torch.equal(got, first)
