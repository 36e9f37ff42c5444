# SPDX-License-Identifier: Apache-2.0
"""The block-scaled products of e4m3 by the kernels for every GPU: exact, groups, graphs.

Problems are those of the tests of the kernels for Hopper: every sum is exact in float32.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import test_gpu_fp8_grouped as grouped
import torch
from packed_scales import in_words
from test_gpu_fp8_gemm_sm90 import DTYPES, SHAPES, Problem, equal, problem

from precast._ops.gemm._fp8 import MMA_TILES, scaled_product
from precast._ops.gemm.fp8_gemm import _GEMM
from precast.gemm import gemm_fp8_nt_groupwise
from precast.testing import Guarded

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
E4M3, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
TILES = range(MMA_TILES)
GROUPED = [
    "group_deepgemm_fp8_nt_groupwise",
    "batch_deepgemm_fp8_nt_groupwise",
    "group_gemm_fp8_nt_groupwise",
]


def run(given: Problem, tile: int = -1, dtype: torch.dtype = F32) -> torch.Tensor:
    """The product by one tile; what is not written is found."""
    out = Guarded((given.a.shape[0], given.b.shape[0]), dtype, "cuda")
    out.view.fill_(torch.nan)
    _GEMM.launch(*given[:4], out.view, True, True, given.scale_rows, tile)
    out.check()
    return out.view


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", TILES)
def test_every_tile_is_exact(tile: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    for shape in SHAPES:
        given = problem(generator, *shape)
        equal(run(given, tile, dtype), given.want())


@pytest.mark.parametrize("tile", TILES)
def test_every_tile_has_the_scales_of_blocks_of_rows(tile: int, generator: torch.Generator) -> None:
    given = problem(generator, 300, 392, 400, 128)
    equal(run(given, tile), given.want())


@pytest.mark.parametrize("tile", TILES)
def test_every_tile_has_packed_scales(tile: int, generator: torch.Generator) -> None:
    for shape in ((3, 136, 400), (130, 392, 1808)):
        given = problem(generator, *shape)
        words = given._replace(a_scale=in_words(given.a_scale), b_scale=in_words(given.b_scale))
        equal(run(words, tile), given.want())


@pytest.mark.parametrize("scale_rows", [1, 128])
def test_every_layout_of_scales(scale_rows: int, generator: torch.Generator) -> None:
    options: dict[str, Any] = {"backend": "mma", "scale_granularity_mnk": (scale_rows, 128, 128)}
    for rows in (3, 130, 513):
        given = problem(generator, rows, 392, 1040, scale_rows)
        a, b, a_scale, b_scale, _ = given
        for x, y, mode in (
            (a_scale, b_scale, "K"),
            (a_scale.T, b_scale.T, "MN"),
            (a_scale.T.contiguous(), b_scale.T.contiguous(), "MN"),
        ):
            equal(gemm_fp8_nt_groupwise(a, b, x, y, mode, **options), given.want().to(BF16))


@pytest.mark.parametrize("tile", TILES)
def test_a_row_that_is_not_finite_stays_alone(tile: int, generator: torch.Generator) -> None:
    given = problem(generator, 70, 264, 400)
    want = given.want()
    given.a[3] = torch.tensor(torch.nan).to(E4M3)
    given.a_scale[69, 1] = torch.nan
    got = run(given, tile)
    assert got[3].isnan().all() and got[69].isnan().all()
    rest = [row for row in range(69) if row != 3]
    equal(got[rest], want[rest])


@pytest.mark.parametrize("tile", TILES)
def test_strides_of_operands_and_output(tile: int, generator: torch.Generator) -> None:
    given = problem(generator, 130, 264, 400)

    def wide(x: torch.Tensor) -> torch.Tensor:
        """The same numbers between others, which are not finite."""
        room = torch.full((x.shape[0], x.shape[1] + 16), torch.nan, device="cuda").to(x.dtype)
        room[:, : x.shape[1]] = x
        return room[:, : x.shape[1]]

    strided = Problem(*(wide(x) for x in given[:4]))
    for dtype in DTYPES:
        room = torch.full((130, 280), 7.0, dtype=dtype, device="cuda")
        _GEMM.launch(*strided[:4], room[:, :264], True, True, 1, tile)
        equal(room[:, :264], given.want())
        assert (room[:, 264:] == 7).all()


def test_random_problems(generator: torch.Generator) -> None:
    """Sizes and tiles at random, with scales and numbers as quantisation makes them."""
    host = random.Random(generator.initial_seed())
    for _ in range(100):
        rows, columns = host.randint(1, host.choice((40, 700))), 8 * host.randint(1, 200)
        depth, tile = 16 * host.randint(1, 120), host.randint(-1, MMA_TILES - 1)
        a, b = (
            torch.randn(n, depth, generator=generator, device="cuda").mul_(50).to(E4M3)
            for n in (rows, columns)
        )
        blocks = -(-depth // 128)
        a_scale = torch.rand(rows, blocks, generator=generator, device="cuda").mul_(1e-2)
        b_scale = torch.rand(-(-columns // 128), blocks, generator=generator, device="cuda")
        given = Problem(a, b, a_scale, b_scale)
        size = scaled_product(
            a.float().abs().to(E4M3), b.float().abs().to(E4M3), a_scale, b_scale, 1
        )
        error = (run(given, tile) - given.want()).abs()
        # Tensor cores that have FP8 add 32 products with about 14 bits of the largest.
        assert (error <= size * 2.0**-10).all(), (rows, columns, depth, tile)


def test_sums_are_added_in_float32(generator: torch.Generator) -> None:
    """A large block between two small ones, which 14 bits would lose."""
    a, b = (torch.zeros(n, 384, device="cuda") for n in (3, 8))
    a[:, ::128] = b[:, ::128] = 1.0
    scales = torch.tensor([[1.0, 2.0**20, 1.0]], device="cuda")
    given = Problem(
        a.to(E4M3), b.to(E4M3), scales.expand(3, -1).contiguous(), torch.ones_like(scales)
    )
    for tile in TILES:
        assert (run(given, tile) == 2.0**20 + 2).all(), tile


@pytest.fixture(params=[-1, *TILES])
def by_mma(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of groups by these kernels, with one tile."""
    for name in GROUPED:
        function = functools.partial(getattr(grouped, name), backend="mma", choice=request.param)
        monkeypatch.setattr(grouped, name, function)


@pytest.mark.usefixtures("by_mma")
@pytest.mark.parametrize("run", grouped.RUNS)
@pytest.mark.parametrize("counts", grouped.COUNTS, ids=str)
def test_groups_are_exact_beside_padding_of_nan(
    counts: list[int], run: grouped.Run, generator: torch.Generator
) -> None:
    for sizes in grouped.SIZES:
        grouped.check(run, grouped.Problem(counts, sizes, generator))


@pytest.mark.usefixtures("by_mma")
@pytest.mark.parametrize("run", grouped.RUNS)
def test_random_groups(run: grouped.Run, generator: torch.Generator) -> None:
    numbers = random.Random(generator.initial_seed())
    for _ in range(10):
        counts = [numbers.choice([0, 1, 17, 128, 200]) for _ in range(numbers.randint(1, 70))]
        sizes = 8 * numbers.randint(1, 60), 16 * numbers.randint(1, 60)
        grouped.check(run, grouped.Problem([1, *counts], sizes, generator))


@pytest.mark.usefixtures("by_mma")
@pytest.mark.parametrize("run", grouped.RUNS)
def test_a_graph_is_replayed_with_other_groups(
    run: grouped.Run, generator: torch.Generator
) -> None:
    state: dict[str, Any] = {"graph": None, "rows": 1024}
    for counts in ([100, 0, 200], [0, 333, 1], [1, 1, 1], [0, 0, 500]):
        grouped.check(run, grouped.Problem(counts, (264, 400), generator), state)


def test_torch_compile(generator: torch.Generator) -> None:
    compiled = torch.compile(
        lambda *given: gemm_fp8_nt_groupwise(*given, "K", backend="mma") + 0,
        fullgraph=True,
        dynamic=True,
    )
    for rows in (3, 64, 200):
        given = problem(generator, rows, 264, 400)
        equal(compiled(*given[:4]), given.want().to(BF16))


def test_offsets_beyond_32_bits(free_memory: None) -> None:
    rows, columns, depth = 2**16 + 8, 2**15 + 16, 2**15 + 128
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of GPU memory")
    a, b = (
        torch.zeros(n, depth, dtype=torch.uint8, device="cuda").view(E4M3) for n in (rows, columns)
    )
    a[-1, -1] = b[-1, -1] = b[0, -1] = a[0, 0] = b[-1, 0] = 2.0
    scales = [torch.ones(n, depth // 128, device="cuda") for n in (rows, -(-columns // 128))]
    out = gemm_fp8_nt_groupwise(a, b, *scales, "K", backend="mma")
    assert out[-1, -1] == 4 and out[-1, 0] == 4 and out[0, -1] == 4 and out[0, 0] == 0
    assert out.count_nonzero() == 3


def test_errors_leave_outputs_alone(generator: torch.Generator) -> None:
    given = problem(generator, 16, 64, 128)
    out = torch.full((16, 64), 7.0, dtype=BF16, device="cuda")
    good = dict(zip(("a", "b", "a_scale", "b_scale"), given[:4], strict=True), out=out)
    for change, words in (
        ({"choice": MMA_TILES}, f"choice must be -1 or a tile below {MMA_TILES}, got {MMA_TILES}"),
        ({"a": given.a.view(torch.float8_e5m2)}, "a must be float8_e4m3fn, got float8_e5m2"),
        ({"b": given.b[:60], "out": out[:, :60]}, "b must have a multiple of 8 rows"),
        ({"a_scale": given.a_scale[1:]}, r"a_scale must have shape \[16, 1\], got \[15, 1\]"),
        ({"out": given.a.view(BF16)}, "out must not overlap a's memory"),
    ):
        with pytest.raises(ValueError, match=f"gemm_fp8_nt_groupwise: {words}"):
            gemm_fp8_nt_groupwise(**{**good, **change}, scale_major_mode="K", backend="mma")
    assert (out == 7).all()
