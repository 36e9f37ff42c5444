# SPDX-License-Identifier: Apache-2.0
"""The k largest of rows: the same elements as the reference's at any size, address and k."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import precast

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = [1, 2, 31, 32, 33, 1000, 1023, 1024, 1025, 4096, 8193, 20001, 32000, 65536]
SIZES += [128256, 151936, 262144, 262145, 1000000, 1 << 20]
HELD_OR_NOT = [(14, 128256), (15, 131072), (28, 131069), (33, 131072), (66, 65536), (132, 32768)]
COUNTS = [1, 2, 50, 64, 65, 511, 2048, 3000, 8191, 8192]

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "f16", "bf16"])


def _random(rows: int, size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, size, device="cuda", generator=generator)


def _sprinkled(value: float) -> Callable[[int, int, torch.Generator], torch.Tensor]:
    def make(rows: int, size: int, generator: torch.Generator) -> torch.Tensor:
        x = _random(rows, size, generator)
        return x.where(torch.rand(x.shape, device="cuda", generator=generator) > 0.3, value)

    return make


def _zeros(rows: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """Of both signs, among numbers below."""
    x = torch.randint(-2, 2, (rows, size), device="cuda", generator=generator).float().clamp(max=0)
    return x * _random(rows, size, generator).abs()


def _one(rows: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """A number among minus infinities."""
    x = torch.full((rows, size), -torch.inf, device="cuda")
    places = torch.randint(0, size, (rows,), device="cuda", generator=generator)
    x[range(rows), places] = -3.0
    return x


KINDS: dict[str, Callable[[int, int, torch.Generator], torch.Tensor]] = {
    "normal": _random,
    "far": lambda *a: _random(*a) + 300,
    "narrow": lambda *a: 1 + _random(*a) * 1e-5,
    "probs": lambda *a: (9 * _random(*a)).softmax(1),
    "equal": lambda rows, size, _: torch.full((rows, size), -2.5, device="cuda"),
    "few": lambda *a: _random(*a).round(),
    "ascending": lambda *a: _random(*a).sort(dim=1).values,
    "descending": lambda *a: _random(*a).sort(dim=1, descending=True).values,
    "nan": _sprinkled(torch.nan),
    "inf": _sprinkled(torch.inf),
    "-inf": _sprinkled(-torch.inf),
    "zeros": _zeros,
    "all nan": lambda rows, size, _: torch.full((rows, size), torch.nan, device="cuda"),
    "all -inf": lambda rows, size, _: torch.full((rows, size), -torch.inf, device="cuda"),
    "one": _one,
    "outliers": lambda *a: _random(*a).tanh() * 10 ** (2 * _random(*a) - 4).clamp(min=0),
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def check(x: torch.Tensor, k: int, **options: Any) -> None:
    """Values and positions are the reference's; where the order is open, as sets."""
    values, indices = precast.top_k(x, k, **options)
    assert values.dtype == x.dtype
    assert indices.dtype == torch.int64
    chosen = {name: v for name, v in options.items() if name in ("sorted", "tie_break")}
    want, places = precast.topk.top_k_reference(x, k, **chosen)
    if not (options.get("sorted") or options.get("deterministic")):
        indices, order = indices.sort(dim=1)
        values = values.gather(1, order)
    wrong = (indices != places).sum().item()
    assert wrong == 0, f"{wrong} of {indices.numel()} for {tuple(x.shape)}, {k}, {options}"
    assert _equal(values, want)


def check_all(x: torch.Tensor, k: int) -> None:
    for options in (
        {},
        {"sorted": True, "tie_break": 2},
        {"deterministic": True},
        {"deterministic": True, "tie_break": precast.topk.TopKTieBreak.LARGE},
        {"sorted": True, "deterministic": True, "tie_break": 1},
    ):
        check(x, k, **options)


@dtypes
@pytest.mark.parametrize("size", SIZES)
def test_any_size(size: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    for rows in (1, 3) if size > 1 << 18 else (1, 40, 150):
        x = _random(rows, size, generator).to(dtype)
        for k in {1, 50, 2048, min(size, 8192), min(size, 8192) - 1}:
            if 1 <= k <= size:
                check_all(x, k)


@dtypes
@kinds
def test_any_values(
    kind: Callable[..., torch.Tensor], dtype: torch.dtype, generator: torch.Generator
) -> None:
    for rows, size, k in ((2, 128256, 2048), (17, 40000, 50), (140, 9000, 1000)):
        check_all(kind(rows, size, generator).to(dtype), k)


@dtypes
@pytest.mark.parametrize(("rows", "size"), HELD_OR_NOT)
def test_rows_that_shared_memory_holds_or_just_not(
    rows: int, size: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    for kind in ("normal", "ascending", "few", "outliers"):
        x = KINDS[kind](rows, size, generator).to(dtype)
        for k in (1, 300, 2048, 5000):
            for options in ({}, {"sorted": True}, {"deterministic": True, "tie_break": 2}):
                check(x, k, **options)
        check(x[:, 1:], 300)


@dtypes
@pytest.mark.parametrize("k", COUNTS)
def test_any_k(k: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    for rows, size in ((1, 128256), (5, 8192), (133, 20000)):
        x = _random(rows, size, generator).to(dtype)
        check_all(x, k)
        check_all(x[:, :k], k)


@dtypes
@pytest.mark.parametrize("kind", ["normal", "few", "nan", "equal", "all -inf"])
def test_a_k_that_one_cta_cannot_sort(
    kind: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    for rows, size, k in ((3, 8200, 8193), (2, 40001, 16384), (33, 20000, 16385), (2, 9001, 9001)):
        check_all(KINDS[kind](rows, size, generator).to(dtype), k)
        check_all(KINDS[kind](rows, size + 3, generator).to(dtype)[:, 3:], k)


@dtypes
def test_all_of_the_longest_row(dtype: torch.dtype, generator: torch.Generator) -> None:
    x = _random(2, 1 << 20, generator).to(dtype)
    for k in (500_000, 1 << 20):
        check(x, k, sorted=True)
        check(x, k, deterministic=True, tie_break=2)


def test_deterministic_on_two_streams_in_any_order(generator: torch.Generator) -> None:
    """The same call gives the same bits, whatever runs beside it and in whichever order."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    cases = [
        (KINDS[kind](rows, size, generator).to(dtype), k)
        for kind in ("few", "equal", "normal")
        for rows, size, k, dtype in (
            (1, 128256, 2048, torch.float32),
            (64, 32000, 50, torch.bfloat16),
            (300, 20000, 300, torch.float16),
            (4, 30000, 9000, torch.float32),
        )
    ]
    options = {"deterministic": True}
    want = [precast.top_k(x, k, **options) for x, k in cases]
    torch.cuda.synchronize()
    for turn in range(6):
        found: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        for i in torch.randperm(2 * len(cases)).tolist():
            case, stream = i // 2, (i + turn) % 2
            with torch.cuda.stream(streams[stream]):
                found[case, stream] = precast.top_k(*cases[case], **options)
        torch.cuda.synchronize()
        for (case, _), (values, indices) in found.items():
            assert torch.equal(indices, want[case][1])
            assert _equal(values, want[case][0])


def test_against_torch(generator: torch.Generator) -> None:
    x = _random(64, 128256, generator)
    for k in (1, 50, 2048):
        values, indices = precast.top_k(x, k, sorted=True)
        assert torch.equal(values, x.topk(k).values)
        assert torch.equal(x.gather(1, indices), values)


@dtypes
def test_rows_at_any_address_and_pitch(dtype: torch.dtype, generator: torch.Generator) -> None:
    for size in (1, 9, 77, 1030, 40000):
        x = _random(20, size, generator).to(dtype)
        for start, pitch in ((1, size + 1), (3, size + 9), (8, size + 64), (5, 2 * size + 16)):
            wide = torch.full((20, pitch + start), torch.nan, device="cuda", dtype=dtype)
            rows = wide[:, start : start + size]
            rows.copy_(x)
            check_all(rows, min(size, 60))
        check_all(x[:1].expand(9, -1), min(size, 60))
        check_all(x.flip(0)[::2], min(size, 60))


def test_no_rows() -> None:
    values, indices = precast.top_k(torch.empty(0, 50, device="cuda"), 7)
    assert values.shape == indices.shape == (0, 7)


def test_the_same_set_whatever_the_batch(generator: torch.Generator) -> None:
    x = _random(1, 100000, generator).round(decimals=1)
    for tie_break in (0, 1, 2):
        want = precast.top_k(x, 777, deterministic=True, tie_break=tie_break)
        for rows in (2, 9, 40, 100, 200):
            got = precast.top_k(x.expand(rows, -1), 777, deterministic=True, tie_break=tie_break)
            assert all(torch.equal(a, b.expand(rows, -1)) for a, b in zip(got, want))


@dtypes
def test_replays_of_a_graph(dtype: torch.dtype, generator: torch.Generator) -> None:
    x = _random(40, 50000, generator).to(dtype)
    precast.top_k(x, 300)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, indices = precast.top_k(x, 300, sorted=True)
    for _ in range(3):
        x.copy_(_random(40, 50000, generator))
        graph.replay()
        want, places = precast.topk.top_k_reference(x, 300, sorted=True)
        assert torch.equal(values, want)
        assert torch.equal(indices, places)


def test_no_synchronisation_and_no_other_allocation(generator: torch.Generator) -> None:
    x = _random(40, 30000, generator)
    precast.top_k(x, 50)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = precast.top_k(x, 50)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == len(results)


def test_torch_compile(generator: torch.Generator) -> None:
    x = _random(8, 5000, generator)

    def block(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return precast.top_k(2 * x, 40, sorted=True)

    torch._dynamo.reset()
    for got, want in zip(torch.compile(block, fullgraph=True)(x), block(x), strict=True):
        assert torch.equal(got, want)


def test_a_kernel_that_starts_early_sees_its_input_complete(generator: torch.Generator) -> None:
    x = _random(33, 128256, generator)
    work = torch.empty_like(x)
    want = precast.top_k(x, 500, sorted=True)
    for _ in range(100):
        work.zero_()
        work.copy_(x)
        values, indices = precast.top_k(work, 500, sorted=True)
        again = precast.top_k(values, 500, sorted=True)[0]
        assert torch.equal(values, want[0])
        assert torch.equal(indices, want[1])
        assert torch.equal(again, values)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
def test_second_device(generator: torch.Generator) -> None:
    x = _random(5, 40000, generator)
    want = precast.top_k(x, 3000, sorted=True)
    got = precast.top_k(x.to("cuda:1"), 3000, sorted=True)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(got, want))
    assert torch.cuda.current_device() == 0


def test_more_than_2_to_31_elements(free_memory: None, generator: torch.Generator) -> None:
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of GPU memory")
    size, count = 1 << 18, (1 << 13) + 9
    x = torch.zeros(count, size, device="cuda", dtype=torch.bfloat16)
    x[-3:] = _random(3, size, generator)
    values, indices = precast.top_k(x, 50, sorted=True)
    want, places = precast.topk.top_k_reference(x[-3:], 50, sorted=True)
    assert torch.equal(values[-3:], want)
    assert torch.equal(indices[-3:], places)
    assert torch.equal(indices[5], torch.arange(50, device="cuda"))


REFUSED: list[tuple[Callable[[torch.Tensor], Any], str]] = [
    (lambda x: precast.top_k(x[0], 3), "top_k: input must have 2 dimensions"),
    (
        lambda x: precast.top_k(x.double(), 3),
        "dtype=torch.float64 is not supported; legal: f32, f16, bf16",
    ),
    (lambda x: precast.top_k(x.cpu(), 3), "top_k: input must be a CUDA tensor"),
    (lambda x: precast.top_k(x[:, ::2], 3), "stride 1 in its last dimension"),
    (lambda x: precast.top_k(x, 0), "top_k: k must be at least 1, got 0"),
    (lambda x: precast.top_k(x, -1), "top_k: k must be at least 1, got -1"),
    (lambda x: precast.top_k(x, 11), "top_k: k must be at most input's 10 columns, got 11"),
    (lambda x: precast.top_k(x, (1 << 20) + 1), "k must be at most 1048576, got 1048577"),
    (lambda x: precast.top_k(x.new_ones(1, 1).expand(1, 1 << 21), 1), "stride 1"),
    (lambda x: precast.top_k(x.new_ones(1, 1048577), 1), "at most 1048576 columns"),
    (lambda x: precast.top_k(x, 3, tie_break=3), "tie_break must be 0, 1 or 2, got 3"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_what_is_rejected(call: Callable[[torch.Tensor], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(torch.ones(4, 10, device="cuda"))
