# SPDX-License-Identifier: Apache-2.0
"""Draws from logits, and rows that stay rows: softmax, renormalisation, masked logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sampling_calls import DTYPES, RANDOM, both, cells, rows_of_all_kinds, share

import precast
from precast._op.dispatch import kernels

INF = torch.inf
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "f16", "bf16"])
SIZES = [1, 2, 31, 32, 33, 100, 1023, 1024, 1025, 5001, 32000, 32768, 32769, 128256, 151936]
SIZES += [262144, 262145, 1000000, 1 << 20]
any_size = cells(SIZES, [2, 1025, 5001, 128256, 262145])

#: Filters of draws from logits.
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 1 << 30, "top_p": 1.0},
    {"top_p": 0.0},
    {"top_p": 0.8},
    {"top_k": 500, "top_p": 0.9},
    {"top_k": 500, "top_p": 0.9, "filter_apply_order": "joint"},
]


def logits_of_all_kinds(
    size: int, dtype: torch.dtype, generator: torch.Generator, rows: int = 32
) -> torch.Tensor:
    """Random rows; the last ones are equal, peaked, masked, or no distribution."""
    x = 3 * torch.randn(rows, size, device="cuda", generator=generator)
    x[-8] = 0.5
    x[-7, size // 2] = 60
    x[-6, : size - 1] = -INF
    x[-5] = x[-5].masked_fill(x[-5] > -1, -INF)
    x[-5, 0] = 1.0
    x[-4] -= 1e4
    x[-3] = -INF
    x[-2, -1] = torch.nan
    x[-1, size - 1] = INF
    return x.to(dtype)


def draw_from(x: torch.Tensor, filters: dict[str, Any], **more: Any) -> torch.Tensor:
    if not filters:
        return precast.sampling_from_logits(x, **more)
    k, p = filters.get("top_k", 1 << 20), filters.get("top_p", 1.0)
    order = filters.get("filter_apply_order", "top_k_first")
    return precast.top_k_top_p_sampling_from_logits(x, k, p, filter_apply_order=order, **more)


@any_size
def test_tokens_of_logits(size: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Those of the reference and of the softmax, but where the exponential rounds otherwise."""
    rows = 32 if size > 1 << 18 else 300
    x = logits_of_all_kinds(size, dtype, generator, rows)
    probs = precast.softmax(x)
    for filters in FILTERS:
        got, want = both(draw_from, x, filters, **RANDOM)
        assert share(got, want) >= 0.96, (filters, share(got, want))
        assert got[-6] == size - 1
        assert got[-3:].tolist() == [0, 0, 0]
        if size > 1:
            assert x[-5, got[-5]] > -INF
        if filters.get("top_k") == 1 or filters.get("top_p") == 0:
            best = x[:-3].amax(dim=1)
            assert torch.equal(x[:-3].gather(1, got[:-3, None].long())[:, 0], best)
        if filters:
            k, p = filters.get("top_k", 1 << 20), filters.get("top_p", 1.0)
            order = filters.get("filter_apply_order", "top_k_first")
            of_probs = precast.top_k_top_p_sampling_from_probs(
                probs, k, p, filter_apply_order=order, **RANDOM
            )
        else:
            of_probs = precast.sampling_from_probs(probs, **RANDOM)
        assert share(got[:-3], of_probs[:-3]) >= 0.95, filters


def test_no_rows_of_logits() -> None:
    x, none = torch.empty(0, 1000, device="cuda"), torch.empty(0, device="cuda").long()
    for filters in FILTERS:
        assert draw_from(x, filters).shape == (0,)
        assert draw_from(torch.ones(2, 9, device="cuda"), filters, indices=none).shape == (0,)


def test_tokens_of_logits_do_not_depend_on_the_batch(generator: torch.Generator) -> None:
    for size in (3000, 128256, 262144):
        x = logits_of_all_kinds(size, torch.float32, generator, 200)
        for filters in FILTERS:
            tokens = draw_from(x, filters, **RANDOM)
            for count in (1, 16, 100):
                assert torch.equal(draw_from(x[:count], filters, **RANDOM), tokens[:count])
            order = torch.randperm(200, device="cuda", generator=generator)
            seeds = torch.arange(200, device="cuda")
            own = draw_from(x, filters, seed=seeds, offset=seeds)
            moved = draw_from(x, filters, indices=order, seed=seeds[order], offset=seeds[order])
            assert torch.equal(moved, own[order].long())


# -- rows that stay rows --------------------------------------------------------------------------

#: One step of a rounded result; small float16 numbers are multiples of 2^-24.
ROUNDING: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"rtol": 4e-6, "atol": 1e-37},
    torch.float16: {"rtol": 2**-10, "atol": 2**-24},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-37},
}


@any_size
def test_softmax(size: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    x = logits_of_all_kinds(size, dtype, generator)
    by_row = torch.rand(32, device="cuda", generator=generator) + 0.2
    for temperature in (None, 0.7, 2, by_row, by_row.double()):
        got = precast.softmax(x, temperature)
        assert got.dtype == torch.float32
        heat: Any = 1.0 if temperature is None else temperature
        if isinstance(heat, torch.Tensor):
            heat = heat[:-3, None].float().double()
        exact = (x[:-3].double() / heat).softmax(1)
        # An exponent of -y rounds by a share of y.
        torch.testing.assert_close(got[:-3].double(), exact, rtol=3e-5, atol=1e-12)
        if size > 1:
            assert got[-3:].isnan().all()
        sums = got[:-3].double().sum(1)
        torch.testing.assert_close(sums, torch.ones_like(sums), rtol=1e-5, atol=0)
    assert torch.equal(precast.softmax(x[:5], 0.7), precast.softmax(x, 0.7)[:5])
    greedy = precast.softmax(x[:-3], 0.0)
    maxima = x[:-3] == x[:-3].amax(1, keepdim=True)
    torch.testing.assert_close(greedy, maxima / maxima.sum(1, keepdim=True), rtol=1e-6, atol=0)


@any_size
def test_renormalised_rows(size: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Exactly what the filter keeps; shares but for the last rounding."""
    x = rows_of_all_kinds(size, dtype, generator, repeat=1)
    rows = torch.arange(16, device="cuda")
    top_ks = (1, 7, 40, 3000, 1 << 30, 0, (rows * 3 + 1).int())
    top_ps = (0.0, 0.3, 0.9, 0.999, 1.0, (rows / 16).float())
    calls: list[tuple[Callable[..., torch.Tensor], Any]] = [
        *((precast.top_k_renorm_probs, k) for k in top_ks),
        *((precast.top_p_renorm_probs, p) for p in top_ps),
    ]
    for call, value in calls:
        got, want = both(call, x, value)
        assert got.dtype == dtype
        assert torch.equal(got[:11] > 0, want[:11] > 0), (call, value)
        torch.testing.assert_close(got, want, **ROUNDING[dtype], equal_nan=True)
        if dtype == torch.float32:
            assert (got[:7].double().sum(1) - 1).abs().max() < 1e-5
        few = value if isinstance(value, (int, float)) else value[:3]
        assert torch.equal(call(x[:3], few), got[:3])


@any_size
def test_masked_logits(size: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    x = logits_of_all_kinds(size, dtype, generator)[:-2]
    x[0] = x[0].abs().neg()
    rows = torch.arange(30, device="cuda")
    for k in (1, 5, 50, 2000, 1 << 30, 0, (rows * 7 + 1).int(), (rows * 100 + 1).int()):
        got, want = both(precast.top_k_mask_logits, x, k)
        assert got.dtype == dtype
        assert torch.equal(got, want), k
        kept = (got > -INF).sum(1)
        number = k if isinstance(k, int) else k.long()
        wanted = torch.as_tensor(number, device="cuda").expand(30)
        there = (x > -INF).sum(1)
        assert (kept >= torch.minimum(wanted, there)).all()


@dtypes
@pytest.mark.parametrize("size", [1, 33, 1025, 5001, 40000, 262145])
def test_nan_and_infinity_in_masked_logits(
    size: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """NaN stays and does not count, wherever and however many; plus infinity is the largest."""
    x = (3 * torch.randn(12, size, device="cuda", generator=generator)).to(dtype)
    share = torch.linspace(0, 1, 12, device="cuda")[:, None]
    holes = torch.rand(12, size, device="cuda", generator=generator) < share
    x[:8] = x[:8].masked_fill(holes[:8], torch.nan)
    x[6] = x[6].abs().neg()
    x[7] = -x[7]  # NaN of the other sign, too
    x[8] = x[8].masked_fill(holes[8], INF)
    x[9, size // 2] = torch.nan
    x[10] = torch.nan
    x[11] = -INF
    x[11, 0] = torch.nan
    rows = torch.arange(12, device="cuda")
    for k in (1, 7, 900, size - 1, size, size // 2, (rows * size // 12 + 1).int()):
        got, want = both(precast.top_k_mask_logits, x, k)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got.isnan(), x.isnan()), k


@dtypes
@pytest.mark.parametrize("size", [1, 33, 1025, 40000, 262145])
def test_renormalised_rows_with_nan_are_nan_throughout(
    size: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    x = torch.rand(9, size, device="cuda", generator=generator).to(dtype)
    clean = x.clone()
    places = torch.randint(0, size, (4,), device="cuda", generator=generator)
    x[range(0, 8, 2), places] = torch.nan
    x[8] = torch.nan
    broken = [0, 2, 4, 6, 8]
    whole = [1, 3, 5, 7]
    calls: list[tuple[Callable[..., torch.Tensor], Any]] = [
        *((precast.top_k_renorm_probs, k) for k in (1, 30, size, 0)),
        *((precast.top_p_renorm_probs, p) for p in (0.0, 0.5, 1.0)),
    ]
    for call, value in calls:
        got = call(x, value)
        assert got[broken].isnan().all(), (call, value)
        assert torch.equal(got[whole], call(clean, value)[whole]), (call, value)


ROW_OPS: list[tuple[Callable[..., torch.Tensor], Any]] = [
    (precast.softmax, 0.7),
    (precast.top_k_renorm_probs, 30),
    (precast.top_p_renorm_probs, 0.6),
    (precast.top_k_mask_logits, 30),
]


@pytest.mark.parametrize(("call", "value"), ROW_OPS)
@dtypes
def test_rows_at_any_address_and_of_any_number(
    call: Callable[..., torch.Tensor], value: Any, dtype: torch.dtype, generator: torch.Generator
) -> None:
    assert call(torch.empty(0, 100, device="cuda", dtype=dtype), value).shape == (0, 100)
    for size in (1, 77, 1030, 33001):
        x = torch.rand(40, size, device="cuda", generator=generator).to(dtype)
        want = call(x, value)
        for start, pitch in ((1, size + 1), (8, size + 64)):
            rows = torch.full((40, pitch + start), torch.nan, device="cuda", dtype=dtype)
            rows = rows[:, start : start + size]
            rows.copy_(x)
            assert torch.equal(call(rows, value), want)
        assert torch.equal(call(x[:1], value), want[:1])
        for _ in range(5):
            assert torch.equal(call(x, value), want)


@pytest.mark.parametrize(
    "name", ["softmax", "top_k_renorm_probs", "top_p_renorm_probs", "top_k_mask_logits"]
)
def test_results_are_written_and_nothing_beside_them(name: str, generator: torch.Generator) -> None:
    """Through the export: a result with a pitch, at an odd address, and in place."""
    kernel = kernels()[name][torch.float32, 0]
    value = 30 if name.startswith("top_k") else 0.5
    for size in (1, 1023, 5001, 40004):
        for start, pitch in ((0, size), (1, size + 3), (4, size + 8)):
            x = torch.rand(9, size, device="cuda", generator=generator)
            got, want = both(getattr(precast, name), x, value)
            torch.testing.assert_close(got, want, rtol=3e-5, atol=1e-12)
            want = got
            memory = torch.full((9 * pitch + start + 100,), 7.0, device="cuda")
            out = memory[start:].as_strided((9, size), (pitch, 1))
            kernel(x, None, value, out, True)
            assert torch.equal(out, want)
            out.fill_(7.0)
            assert (memory == 7).all()
            kernel(x, None, value, x, True)
            assert torch.equal(x, want)
