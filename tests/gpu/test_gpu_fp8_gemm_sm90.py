# SPDX-License-Identifier: Apache-2.0
"""Block-scaled products of e4m3 on the GPU: every tile, exact on whole numbers; layouts, graphs.

Operands are small whole numbers and scales powers of two, so that every sum is exact in float32,
whatever its order: results are compared bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from gemm_calls import in_columns
from packed_scales import in_words

from precast._ops.gemm._fp8 import CHOICES, scaled_product
from precast._ops.gemm.fp8_gemm import _GEMM_SM90
from precast.gemm import gemm_fp8_nt_groupwise
from precast.testing import Guarded, assert_close

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="the kernels are for compute capability 9.0",
)
E4M3, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
DTYPES = [BF16, torch.float16, F32]
#: Rows, columns and depth: parts of tiles in each direction, one block and less of the depth, more
#: blocks than stages, several tiles for each multiprocessor.
SHAPES = [
    (1, 8, 16),
    (5, 136, 128),
    (64, 256, 400),
    (130, 392, 1024),
    (300, 1160, 2064),
    (257, 4104, 640),
]


class Problem(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor
    a_scale: torch.Tensor  # [rows or their blocks, depth blocks]
    b_scale: torch.Tensor  # [column blocks, depth blocks]
    scale_rows: int = 1

    def want(self) -> torch.Tensor:
        return scaled_product(*self)


def problem(
    generator: torch.Generator, rows: int, columns: int, depth: int, scale_rows: int = 1
) -> Problem:
    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=generator, device="cuda").float().to(E4M3)

    def powers(*shape: int) -> torch.Tensor:
        return 2.0 ** torch.randint(-2, 3, shape, generator=generator, device="cuda").float()

    blocks = -(-depth // 128)
    return Problem(
        whole(rows, depth),
        whole(columns, depth),
        powers(-(-rows // scale_rows), blocks),
        powers(-(-columns // 128), blocks),
        scale_rows,
    )


def run(given: Problem, choice: int = -1, dtype: torch.dtype = F32) -> torch.Tensor:
    """The product by one tile and kind of cluster; what is not written is found."""
    out = Guarded((given.a.shape[0], given.b.shape[0]), dtype, "cuda")
    out.view.fill_(torch.nan)
    _GEMM_SM90.launch(*given[:4], out.view, True, True, given.scale_rows, choice)
    out.check()
    return out.view


def equal(got: torch.Tensor, want: torch.Tensor) -> None:
    assert_close(got, want.to(got.dtype), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("choice", range(CHOICES))
def test_every_tile_is_exact(choice: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    for shape in SHAPES:
        given = problem(generator, *shape)
        equal(run(given, choice, dtype), given.want())


@pytest.mark.parametrize("choice", range(CHOICES))
def test_every_tile_has_the_scales_of_blocks_of_rows(
    choice: int, generator: torch.Generator
) -> None:
    given = problem(generator, 300, 392, 400, 128)
    equal(run(given, choice), given.want())


@pytest.mark.parametrize("choice", range(CHOICES))
def test_every_tile_has_scales_in_columns(choice: int, generator: torch.Generator) -> None:
    for shape in ((3, 136, 400), (130, 392, 1024), (518, 264, 400)):
        given = problem(generator, *shape)
        equal(run(given._replace(a_scale=in_columns(given.a_scale)), choice), given.want())
    # More blocks of the depth than a warp has lanes, and several tiles for each multiprocessor.
    for shape in ((70, 264, 4240), (300, 2312, 4240), (518, 9224, 272)):
        given = problem(generator, *shape)
        columns = given._replace(a_scale=in_columns(given.a_scale))
        equal(run(columns, choice, BF16), given.want())


@pytest.mark.parametrize("choice", range(CHOICES))
def test_every_tile_has_packed_scales(choice: int, generator: torch.Generator) -> None:
    for shape in ((3, 136, 400), (130, 392, 1024), (518, 264, 1808)):
        given = problem(generator, *shape)
        a_scale, b_scale = in_words(given.a_scale), in_words(given.b_scale)
        equal(run(given._replace(a_scale=a_scale, b_scale=b_scale), choice), given.want())


@pytest.mark.parametrize("scale_rows", [1, 128])
@pytest.mark.parametrize("backend", ["cutlass", "mma"])
def test_every_layout_of_packed_scales(
    backend: str, scale_rows: int, generator: torch.Generator
) -> None:
    for rows in (3, 130, 513):
        given = problem(generator, rows, 392, 1040, scale_rows)
        x, y = in_words(given.a_scale), in_words(given.b_scale)
        each = y.repeat_interleave(128, 0)[:392]
        options: dict[str, Any] = {
            "scale_granularity_mnk": (scale_rows, 128, 128),
            "backend": backend,
        }
        # As DeepGEMM has them: columns of tokens, and a weight's of each row.
        for of_a, of_b, mode in (
            (x, y, "K"),
            (x, each, "K"),
            (x.T.contiguous().T, each.T.contiguous().T, "K"),
            (x.T, y.T, "MN"),
            (x.T.contiguous(), each.T.contiguous(), "MN"),
        ):
            got = gemm_fp8_nt_groupwise(given.a, given.b, of_a, of_b, mode, **options)
            equal(got, given.want())


@pytest.mark.parametrize("scale_rows", [1, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_layout_of_scales(
    dtype: torch.dtype, scale_rows: int, generator: torch.Generator
) -> None:
    for rows in (3, 130, 513):
        given = problem(generator, rows, 392, 1040, scale_rows)
        a, b, a_scale, b_scale, _ = given
        want = given.want()
        granularity = (scale_rows, 128, 128)
        options: dict[str, Any] = {"scale_granularity_mnk": granularity, "out_dtype": dtype}
        for x, y, mode in (
            (a_scale, b_scale, "K"),
            (a_scale.T, b_scale.T, "MN"),
            (a_scale.T.contiguous(), b_scale.T.contiguous(), "MN"),
            (a_scale.T.contiguous().T, b_scale.T.contiguous().T, "K"),
        ):
            equal(gemm_fp8_nt_groupwise(a, b, x, y, mode, **options), want)


@pytest.mark.parametrize("choice", [-1, *range(0, CHOICES, 7)])
def test_strides_of_operands_and_output(choice: int, generator: torch.Generator) -> None:
    given = problem(generator, 130, 264, 400)

    def wide(x: torch.Tensor, pad: int) -> torch.Tensor:
        """The same numbers between others, which are not finite."""
        room = torch.full((x.shape[0], x.shape[1] + pad), torch.nan, device="cuda").to(x.dtype)
        view = room[:, : x.shape[1]]
        view.copy_(x)
        return view

    strided = Problem(*(wide(x, 16) for x in given[:4]))
    for dtype in DTYPES:
        room = torch.full((130, 280), 7.0, dtype=dtype, device="cuda")
        _GEMM_SM90.launch(*strided[:4], room[:, :264], True, True, 1, choice)
        equal(room[:, :264], given.want())
        assert (room[:, 264:] == 7).all()


@pytest.mark.parametrize("choice", range(CHOICES))
def test_a_row_that_is_not_finite_stays_alone(choice: int, generator: torch.Generator) -> None:
    given = problem(generator, 70, 264, 400)
    want = given.want()
    given.a[3] = torch.tensor(torch.nan).to(E4M3)
    given.a_scale[69, 1] = torch.nan
    given.a_scale[68, 2] = torch.inf
    got = run(given, choice)
    assert got[3].isnan().all() and got[69].isnan().all() and not got[68].isfinite().any()
    rest = [row for row in range(68) if row != 3]
    equal(got[rest], want[rest])


def test_random_problems(generator: torch.Generator) -> None:
    """Sizes and choices at random, with scales and numbers as quantisation makes them."""
    host = torch.Generator().manual_seed(int(generator.initial_seed()) % 2**31)

    def below(n: int) -> int:
        return int(torch.randint(n, (1,), generator=host))

    for _ in range(200):
        rows, columns = 1 + below((40, 700)[below(2)]), 8 * (1 + below(200))
        depth, choice = 16 * (1 + below(120)), below(CHOICES + 1) - 1
        a, b = (
            torch.randn(n, depth, generator=generator, device="cuda")
            .mul_(50)
            .clamp_(-448, 448)
            .to(E4M3)
            for n in (rows, columns)
        )
        blocks = -(-depth // 128)
        a_scale = torch.rand(rows, blocks, generator=generator, device="cuda").mul_(1e-2)
        b_scale = torch.rand(-(-columns // 128), blocks, generator=generator, device="cuda")
        given = Problem(a, b, a_scale, b_scale)
        want = given.want()
        # Tensor cores add 128 products with about 14 bits of the largest.
        size = scaled_product(
            a.float().abs().to(E4M3), b.float().abs().to(E4M3), a_scale, b_scale, 1
        )
        error = (run(given, choice) - want).abs()
        assert (error <= size * 2.0**-10).all(), (rows, columns, depth, choice)


def test_the_same_call_gives_the_same_bits(generator: torch.Generator) -> None:
    for rows in (1, 30, 128, 700):
        given = problem(generator, rows, 1160, 2064)
        a = torch.randn(rows, 2064, generator=generator, device="cuda").to(E4M3)
        given = given._replace(a=a)
        first = run(given, dtype=BF16)
        for _ in range(20):
            assert torch.equal(run(given, dtype=BF16), first)


def test_sums_are_added_in_float32(generator: torch.Generator) -> None:
    """A large block between two small ones, which 14 bits would lose."""
    a, b = (torch.zeros(n, 384, device="cuda") for n in (3, 8))
    a[:, ::128] = b[:, ::128] = 1.0
    scales = torch.tensor([[1.0, 2.0**20, 1.0]], device="cuda")
    given = Problem(
        a.to(E4M3), b.to(E4M3), scales.expand(3, -1).contiguous(), torch.ones_like(scales)
    )
    for choice in range(CHOICES):
        assert (run(given, choice) == 2.0**20 + 2).all(), choice


def test_a_graph_of_several_shapes(generator: torch.Generator) -> None:
    given = [problem(generator, rows, 392, 1024) for rows in (1, 33, 300)]
    outs = [torch.empty(x.a.shape[0], 392, dtype=BF16, device="cuda") for x in given]
    graph = torch.cuda.CUDAGraph()

    def calls() -> None:
        for x, out in zip(given, outs, strict=True):
            gemm_fp8_nt_groupwise(*x[:4], "K", out=out)

    calls()
    with torch.cuda.graph(graph):
        calls()
    for _ in range(3):
        for i, x in enumerate(given):
            fresh = problem(generator, *outs[i].shape, 1024)
            for old, new in zip(x[:4], fresh[:4], strict=True):
                old.copy_(new)
            outs[i].fill_(torch.nan)
        graph.replay()
        for x, out in zip(given, outs, strict=True):
            equal(out, x.want())


def test_torch_compile(generator: torch.Generator) -> None:
    compiled = torch.compile(
        lambda *given: gemm_fp8_nt_groupwise(*given, "K") + 0, fullgraph=True, dynamic=True
    )
    for rows in (3, 64, 200):
        given = problem(generator, rows, 264, 400)
        equal(compiled(*given[:4]), given.want().to(BF16))


def test_nothing_to_do() -> None:
    for rows, columns in ((0, 256), (3, 0)):
        a, b = (torch.zeros(n, 128, device="cuda").to(E4M3) for n in (rows, columns))
        scales = torch.zeros(rows, 1, device="cuda"), torch.zeros(-(-columns // 128), 1).cuda()
        assert gemm_fp8_nt_groupwise(a, b, *scales, "K").shape == (rows, columns)


def test_offsets_beyond_32_bits(generator: torch.Generator, free_memory: None) -> None:
    rows, columns, depth = 2**16 + 8, 2**15 + 16, 2**15 + 128
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of GPU memory")
    a = torch.zeros(rows, depth, dtype=torch.uint8, device="cuda").view(E4M3)
    b = torch.zeros(columns, depth, dtype=torch.uint8, device="cuda").view(E4M3)
    a[-1, -1] = b[-1, -1] = b[0, -1] = a[0, 0] = b[-1, 0] = 2.0
    scales = [torch.ones(n, depth // 128, device="cuda") for n in (rows, -(-columns // 128))]
    out = gemm_fp8_nt_groupwise(a, b, *scales, "K")
    assert out[-1, -1] == 4 and out[-1, 0] == 4 and out[0, -1] == 4 and out[0, 0] == 0
    assert out.count_nonzero() == 3


def test_errors_leave_outputs_alone(generator: torch.Generator) -> None:
    given = problem(generator, 16, 64, 128)
    out = torch.full((16, 64), 7.0, dtype=BF16, device="cuda")
    shifted = torch.empty(16 * 128 + 1, dtype=torch.uint8, device="cuda")[1:].view(E4M3)
    good = dict(zip(("a", "b", "a_scale", "b_scale"), given[:4], strict=True), out=out)
    for change, words in (
        ({"a": given.a.view(torch.float8_e5m2)}, "a must be float8_e4m3fn, got float8_e5m2"),
        ({"a": shifted.view(16, 128)}, "a must start at a multiple of 16 bytes"),
        ({"b": given.b.cpu()}, "b must be on cuda:0 as a, got cpu"),
        ({"b": given.b[:60], "out": out[:, :60]}, "b must have a multiple of 8 rows"),
        ({"a_scale": given.a_scale.half()}, "a_scale must be float32 or int32, got float16"),
        ({"a_scale": given.a_scale[1:]}, r"a_scale must have shape \[16, 1\], got \[15, 1\]"),
        ({"out": out.T.contiguous().T}, "out must have stride 1 in its last dimension"),
        ({"out": given.a.view(BF16)}, "out must not overlap a's memory"),
    ):
        with pytest.raises(ValueError, match=f"gemm_fp8_nt_groupwise: {words}"):
            gemm_fp8_nt_groupwise(**{**good, **change}, scale_major_mode="K")
    assert (out == 7).all()
