# SPDX-License-Identifier: Apache-2.0
"""Products of 16-bit and FP8 matrices on the GPU: every tile, exact; layouts, groups, graphs.

Operands are small whole numbers and scales powers of two, so that every sum is exact in float32,
whatever its order: results are compared bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from precast import gemm
from precast._op.export import Export
from precast._ops.gemm._fp8 import MMA_TILES
from precast._ops.gemm.grouped_mm import _GROUPED as GROUPED_BF16
from precast._ops.gemm.mm_bf16 import _BMM as BMM_BF16
from precast._ops.gemm.mm_bf16 import _MM as MM_BF16
from precast._ops.gemm.scaled_mm import _BMM as BMM_FP8
from precast._ops.gemm.scaled_mm import _GROUPED as GROUPED_FP8
from precast._ops.gemm.scaled_mm import _MM as MM_FP8
from precast._ops.gemm.scaled_mm import _SCALED_MM
from precast._ops.gemm.segment_gemm import _SEGMENTS
from precast.testing import Guarded, assert_close

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = "cuda"
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OUTPUTS = [BF16, F16, F32]
PAIRS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)]
TILES = range(MMA_TILES)
#: Rows, columns and depth: parts of tiles in each direction, odd columns, less depth than a step,
#: more steps than stages, several tiles for each multiprocessor.
SHAPES = [(1, 1, 16), (5, 137, 128), (64, 256, 400), (130, 391, 1024), (300, 1160, 2064)]


def whole(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=generator, device=DEVICE).float().to(dtype)


def powers(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=generator, device=DEVICE).float().exp2()


def guarded(dtype: torch.dtype, *shape: int) -> Guarded:
    """An output in which what is not written is found."""
    out = Guarded(shape, dtype, DEVICE)
    out.view.fill_(torch.nan)
    return out


def equal(got: torch.Tensor, want: torch.Tensor) -> None:
    assert_close(got, want.to(got.dtype), rtol=0.0, atol=0.0)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.double()).float()


@pytest.mark.parametrize("dtype", OUTPUTS)
@pytest.mark.parametrize("tile", TILES)
def test_mm_bf16(tile: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    for rows, columns, depth in SHAPES:
        a, weight = whole(generator, BF16, rows, depth), whole(generator, BF16, columns, depth)
        bias = whole(generator, BF16, columns)
        out = guarded(dtype, rows, columns)
        MM_BF16.launch(a, weight.T, None, out.view, tile, True)
        out.check()
        equal(out.view, product(a, weight.T))
        MM_BF16.launch(a, weight.T, bias, out.view, tile, False)
        equal(out.view, product(a, weight.T) + bias.float())


@pytest.mark.parametrize("tile", TILES)
def test_row_major_weights(tile: int, generator: torch.Generator) -> None:
    for rows, columns, depth in ((3, 8, 8), (70, 264, 136), (300, 1160, 2064)):
        a, b = whole(generator, BF16, rows, depth), whole(generator, BF16, depth, columns)
        wide = torch.full((depth, columns + 8), torch.nan, dtype=BF16, device=DEVICE)
        wide[:, :columns] = b
        for weight in (b, wide[:, :columns]):
            out = guarded(F32, rows, columns)
            MM_BF16.launch(a, weight, None, out.view, tile, True)
            out.check()
            equal(out.view, product(a, b))


@pytest.mark.parametrize("tile", TILES)
def test_batches(tile: int, generator: torch.Generator) -> None:
    for batch, (rows, columns, depth) in ((1, SHAPES[1]), (3, SHAPES[2]), (7, (33, 65, 64))):
        a = whole(generator, BF16, batch, rows, depth)
        weights = whole(generator, BF16, batch, columns, depth)
        out = guarded(BF16, batch, rows, columns)
        BMM_BF16.launch(a, weights.mT, out.view, tile)
        out.check()
        equal(out.view, product(a, weights.mT))
        shared = weights[:1].expand(batch, -1, -1).mT
        equal(gemm.bmm_bf16(a, shared), product(a, shared))


@pytest.mark.parametrize("tile", TILES)
def test_strides_and_rows_that_are_not_finite(tile: int, generator: torch.Generator) -> None:
    check_strides(MM_BF16, tile, generator)


def check_strides(export: Export, tile: int, generator: torch.Generator) -> None:
    """A row of NaN, and rows between others that are not finite; outputs of every alignment."""
    a, weight = whole(generator, BF16, 70, 72), whole(generator, BF16, 265, 72)
    want = product(a, weight.T)

    def wide(x: torch.Tensor) -> torch.Tensor:
        room = torch.full((x.shape[0], x.shape[1] + 8), torch.nan, dtype=x.dtype, device=DEVICE)
        room[:, : x.shape[1]] = x
        return room[:, : x.shape[1]]

    a = wide(a)
    a[3] = torch.nan
    rest = [row for row in range(70) if row != 3]
    for dtype in OUTPUTS:
        for columns, all_columns in ((265, 268), (264, 280)):
            room = torch.full((70, all_columns), 7.0, dtype=dtype, device=DEVICE)
            out = room[:, :columns]
            export.launch(a, wide(weight)[:columns].T, None, out, tile, True)
            assert out[3].isnan().all() and (room[:, columns:] == 7).all()
            equal(out[rest], want[rest, :columns])


@pytest.mark.parametrize("dtype", OUTPUTS)
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize("tile", TILES)
def test_scaled_mm(
    tile: int, dtypes: tuple[Any, Any], dtype: torch.dtype, generator: torch.Generator
) -> None:
    for rows, columns, depth in SHAPES:
        a = whole(generator, dtypes[0], rows, depth)
        weight = whole(generator, dtypes[1], columns, depth)
        bias = whole(generator, dtype, columns)
        for of_a, of_b in (((rows, 1), (1, columns)), ((), (1,)), ((1,), (1, columns))):
            scale_a, scale_b = powers(generator, *of_a), powers(generator, *of_b)
            out = guarded(dtype, rows, columns)
            _SCALED_MM.launch(a, weight.T, scale_a, scale_b, out.view, bias, tile)
            out.check()
            equal(out.view, product(a, weight.T) * (scale_a * scale_b) + bias.float())


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize("tile", TILES)
def test_fp8_products_with_one_scale(
    tile: int, dtypes: tuple[Any, Any], generator: torch.Generator
) -> None:
    scales = torch.tensor(0.5, device=DEVICE), torch.tensor([2.0**-3], device=DEVICE)
    for rows, columns, depth in SHAPES:
        a = whole(generator, dtypes[0], 3, rows, depth)
        weights = whole(generator, dtypes[1], 3, columns, depth)
        out = guarded(BF16, 3, rows, columns)
        BMM_FP8.launch(a, weights.mT, *scales, out.view, tile)
        out.check()
        equal(out.view, product(a, weights.mT) * 2.0**-4)
        one = guarded(F32, rows, columns)
        MM_FP8.launch(a[0], weights[0], scales[0], one.view, tile)
        equal(one.view, product(a[0], weights[0].T) / 2)


def test_fp8_products_by_their_public_names(generator: torch.Generator) -> None:
    scales = torch.tensor(0.5, device=DEVICE), torch.tensor([2.0**-3], device=DEVICE)
    a, weights = whole(generator, E4M3, 3, 70, 144), whole(generator, E4M3, 3, 264, 144)
    got = gemm.bmm_fp8(a, weights.mT, *scales, BF16)
    equal(got, product(a, weights.mT) * 2.0**-4)
    got = gemm.mm_fp8(a[0], weights[0], scales[0], BF16)
    equal(got, product(a[0], weights[0].T) / 2)


def test_every_e4m3_number_is_multiplied_exactly() -> None:
    """Also the smallest ones, and NaN, which GPUs without FP8 convert."""
    numbers = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(E4M3)
    a = torch.zeros(256, 16, dtype=torch.uint8, device=DEVICE).view(E4M3)
    a[:, 5] = numbers
    one = torch.tensor(1.0, device=DEVICE)
    weight = torch.zeros(8, 16, device=DEVICE).to(E4M3)
    weight[:, 5] = torch.tensor(1.0).to(E4M3)
    out = gemm.scaled_mm(a, weight.T, one, one, out_dtype=F32)
    want = numbers.float()[:, None].expand(-1, 8)
    assert torch.equal(out.nan_to_num(777.0), want.nan_to_num(777.0))


COUNTS = [[0, 1, 127, 128, 129, 0, 300], [1], [0, 0, 517], [64] * 40, [3, 2, 1, 0]]


def starts_of(counts: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """The first group begins at row 3."""
    return torch.tensor([3, *counts], device=DEVICE).cumsum(0).to(dtype)


def groups_of(
    generator: torch.Generator, dtypes: tuple[Any, Any], counts: list[int], columns: int, depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, with NaN before and behind those of groups, and weights."""
    a = whole(generator, dtypes[0], sum(counts) + 10, depth)
    a[:3] = a[-7:] = torch.tensor(torch.nan).to(dtypes[0])
    return a, whole(generator, dtypes[1], len(counts), columns, depth)


def check_groups(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, counts: list[int], which: list[int]
) -> None:
    parts = zip(a[3:-7].split(counts), which, strict=True)
    want = torch.cat([product(x, b[weight].T) for x, weight in parts])
    equal(out[3:-7], want)
    assert (out[:3] == 7).all() and (out[-7:] == 7).all()


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (F16, F16), *PAIRS], ids=str)
@pytest.mark.parametrize("tile", TILES)
def test_groups(tile: int, dtypes: tuple[Any, Any], generator: torch.Generator) -> None:
    for counts in COUNTS:
        for columns, depth in ((128, 128), (261, 144), (576, 1024)):
            a, b = groups_of(generator, dtypes, counts, columns, depth)
            out = torch.full((len(a), columns), 7.0, device=DEVICE)
            if dtypes[0].itemsize == 2:
                GROUPED_BF16.launch(a, b, starts_of(counts), out, tile)
            else:
                one = torch.ones(1, device=DEVICE)
                GROUPED_FP8.launch(a, b, starts_of(counts), one, out, tile)
            check_groups(out, a, b, counts, [*range(len(counts))])


def test_groups_by_their_public_names(generator: torch.Generator) -> None:
    counts = [100, 0, 210]
    for dtype, multiply in ((BF16, gemm.grouped_mm_bf16), (E4M3, gemm.grouped_mm_fp8)):
        a, b = groups_of(generator, (dtype, dtype), counts, 264, 144)
        out = torch.full((len(a), 264), 7.0, device=DEVICE)
        assert multiply(a, b, starts_of(counts), out=out, out_dtype=torch.float32) is out
        check_groups(out, a, b, counts, [*range(len(counts))])


@pytest.mark.parametrize("column_major", [True, False])
@pytest.mark.parametrize("tile", TILES)
def test_segments(tile: int, column_major: bool, generator: torch.Generator) -> None:
    check_segments(_SEGMENTS, F32, column_major, tile, generator)


def check_segments(
    export: Export,
    out_dtype: torch.dtype,
    column_major: bool,
    tile: int,
    generator: torch.Generator,
) -> None:
    for counts in COUNTS:
        for dtype in (torch.int32, torch.int64):
            x, weights = groups_of(generator, (F16, F16), counts, 264, 144)
            which = torch.randint(len(counts), (len(counts),), generator=generator, device=DEVICE)
            out = torch.full((len(x), 264), 7.0, dtype=out_dtype, device=DEVICE)
            given = weights if column_major else weights.mT.contiguous()
            starts, indices = starts_of(counts, dtype), which.to(dtype)
            export.launch(x, given, starts, indices, out, column_major, tile)
            check_groups(out, x, weights, counts, which.tolist())
            export.launch(x, given, starts, None, out, column_major, tile)
            check_groups(out, x, weights, counts, [*range(len(counts))])


def test_the_wrapper_of_segments(generator: torch.Generator) -> None:
    lens = torch.tensor([10, 0, 22], device=DEVICE)
    x, weights = whole(generator, BF16, 32, 64), whole(generator, BF16, 3, 40, 64)
    wrapper = gemm.SegmentGEMMWrapper(torch.empty(1, device=DEVICE))
    got = wrapper.run(x, weights, 3, True, seg_lens=lens)
    parts = zip(x.split(lens.tolist()), weights, strict=True)
    equal(got, torch.cat([product(rows, weight.T) for rows, weight in parts]))


def test_a_graph_is_replayed_with_other_groups(generator: torch.Generator) -> None:
    check_replays(lambda *args: gemm.grouped_mm_bf16(*args), F32, generator)


def check_replays(
    multiply: Callable[..., object], dtype: torch.dtype, generator: torch.Generator
) -> None:
    a, b = whole(generator, BF16, 310, 144), whole(generator, BF16, 3, 264, 144)
    starts = starts_of([100, 0, 200])
    out = torch.empty(310, 264, dtype=dtype, device=DEVICE)
    multiply(a, b, starts, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        multiply(a, b, starts, out)
    for counts in ([100, 0, 200], [0, 299, 1], [1, 1, 298], [0, 0, 300]):
        starts.copy_(starts_of(counts))
        a[3:-7].copy_(whole(generator, BF16, 300, 144))
        out.fill_(7.0)
        graph.replay()
        check_groups(out, a, b, counts, [0, 1, 2])


def test_random_problems(generator: torch.Generator) -> None:
    """Sizes and tiles at random, with numbers that sums round."""
    host = random.Random(generator.initial_seed())
    for _ in range(150):
        rows, columns = host.randint(1, host.choice((40, 700))), host.randint(1, 1500)
        depth, tile = 16 * host.randint(1, 120), host.randint(-1, MMA_TILES - 1)
        a, weight = (
            torch.randn(n, depth, generator=generator, device=DEVICE) for n in (rows, columns)
        )
        size = a.abs() @ weight.abs().T
        out = guarded(F32, rows, columns)
        half = a.bfloat16(), weight.bfloat16()
        MM_BF16.launch(half[0], half[1].T, None, out.view, tile, True)
        out.check()
        error = (out.view - product(half[0], half[1].T)).abs()
        assert (error <= size * 2.0**-17).all(), (rows, columns, depth, tile)
        fp8 = a.to(E4M3), weight.to(E4M3)
        scales = torch.rand(rows, 1, device=DEVICE), torch.rand(1, columns, device=DEVICE)
        _SCALED_MM.launch(fp8[0], fp8[1].T, *scales, out.view, None, tile)
        want = product(fp8[0], fp8[1].T) * (scales[0] * scales[1])
        # Tensor cores that have FP8 add 32 products with about 14 bits of the largest.
        error = (out.view - want).abs()
        assert (error <= size * (scales[0] * scales[1]) * 2.0**-9).all(), (rows, columns, depth)


def test_the_same_call_gives_the_same_bits(generator: torch.Generator) -> None:
    for rows in (1, 30, 128, 700):
        a, weight = (
            torch.randn(n, 2064, generator=generator, device=DEVICE).to(BF16) for n in (rows, 1160)
        )
        first = gemm.mm_bf16(a, weight.T)
        for _ in range(20):
            assert torch.equal(gemm.mm_bf16(a, weight.T), first)


def test_fp8_blockscale_gemm(generator: torch.Generator) -> None:
    x = torch.randn(70, 512, generator=generator, device=DEVICE).to(BF16)
    weight = torch.randn(192, 512, generator=generator, device=DEVICE).to(BF16)
    got = gemm.fp8_blockscale_gemm_sm90(x, weight)
    want = product(x, weight.T)
    assert ((got.float() - want).abs() <= 0.08 * (x.float().abs() @ weight.float().abs().T)).all()


def test_torch_compile(generator: torch.Generator) -> None:
    compiled = torch.compile(
        lambda a, b: gemm.mm_bf16(a, b) + gemm.bmm_bf16(a[None], b[None])[0],
        fullgraph=True,
        dynamic=True,
    )
    for rows in (3, 64, 200):
        a, weight = whole(generator, BF16, rows, 400), whole(generator, BF16, 264, 400)
        equal(compiled(a, weight.T), 2 * product(a, weight.T).to(BF16).float())


def test_nothing_to_do() -> None:
    for rows, columns in ((0, 256), (3, 0)):
        a, weight = (torch.zeros(n, 128, dtype=BF16, device=DEVICE) for n in (rows, columns))
        assert gemm.mm_bf16(a, weight.T).shape == (rows, columns)
    empty = torch.zeros(3, 0, dtype=BF16, device=DEVICE)
    bias = torch.ones(8, dtype=BF16, device=DEVICE)
    weight = torch.zeros(8, 0, dtype=BF16, device=DEVICE)
    assert (gemm.mm_bf16(empty, weight.T, bias) == 1).all()


def test_offsets_beyond_32_bits(free_memory: None) -> None:
    rows, columns, depth = 2**16 + 8, 2**15 + 17, 2**15 + 64
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of GPU memory")
    a, weight = (torch.zeros(n, depth, dtype=BF16, device=DEVICE) for n in (rows, columns))
    a[-1, -1] = weight[-1, -1] = weight[0, -1] = a[0, 0] = weight[-1, 0] = 2.0
    out = gemm.mm_bf16(a, weight.T)
    assert out[-1, -1] == 4 and out[-1, 0] == 4 and out[0, -1] == 4 and out[0, 0] == 0
    assert out.count_nonzero() == 3


def test_errors_leave_outputs_alone(generator: torch.Generator) -> None:
    a, weight = whole(generator, BF16, 16, 128), whole(generator, BF16, 64, 128)
    out = torch.full((16, 64), 7.0, dtype=BF16, device=DEVICE)
    good: dict[str, Any] = {"a": a, "b": weight.T, "out": out}
    shifted = torch.zeros(16 * 128 + 1, dtype=BF16, device=DEVICE)[1:].view(16, 128)
    for change, words in (
        ({"a": shifted}, "a must start at a multiple of 16 bytes"),
        ({"a": a.half()}, "a must be bfloat16, got float16"),
        ({"b": weight.cpu().T}, "b must be on cuda:0 as a, got cpu"),
        ({"b": weight[:, :120].T}, r"b must have shape \[128, n\], got \[120, 64\]"),
        ({"b": weight[:, :127].T, "a": a[:, :127]}, "a must have a multiple of 8 columns, got"),
        ({"bias": weight[0, :63]}, r"bias must have shape \[64\], got \[63\]"),
        ({"out": out[:, ::2]}, r"out must have shape \[16, 64\], got \[16, 32\]"),
        ({"out": a[:, :64]}, "out must not overlap a's memory"),
    ):
        with pytest.raises(ValueError, match=f"^mm_bf16: {words}"):
            gemm.mm_bf16(**{**good, **change})
    assert (out == 7).all()
