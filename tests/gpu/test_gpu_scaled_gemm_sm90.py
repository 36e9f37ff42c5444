# SPDX-License-Identifier: Apache-2.0
"""Products of e4m3 matrices by the kernels for Hopper: every tile, exact; scales, groups, graphs.

Operands are small whole numbers and scales powers of two, so that every sum is exact, whatever its
order: results are compared bit for bit. What the kernels for every GPU share with these is in
test_gpu_gemm.py.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from test_gpu_gemm import (
    BF16,
    COUNTS,
    DEVICE,
    E4M3,
    E5M2,
    F32,
    OUTPUTS,
    check_groups,
    equal,
    groups_of,
    guarded,
    powers,
    product,
    starts_of,
    whole,
)

from precast import gemm
from precast._ops.gemm import scaled_mm
from precast._ops.gemm._plain import CHOICES, CLUSTERS, UNSPLIT
from precast._ops.gemm.scaled_mm import _BMM_SM90, _GROUPED_SM90, _MM_SM90, _SCALED_MM_SM90

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="the kernels are for compute capability 9.0",
)
#: Rows, columns and depth: parts of tiles in each direction, odd columns, less depth than a stage,
#: fewer stages than CTAs that split the depth, more than the circular buffer has, several tiles for
#: each multiprocessor.
SHAPES = [
    (1, 1, 16),
    (5, 137, 128),
    (64, 256, 400),
    (130, 391, 1024),
    (300, 1160, 2064),
    (257, 8200, 656),
]
TILES = range(0, CHOICES, CLUSTERS)


def number(value: float, *shape: int) -> torch.Tensor:
    return torch.full(shape, value, device=DEVICE)


def run(
    a: torch.Tensor,
    weight: torch.Tensor,
    choice: int = -1,
    dtype: torch.dtype = F32,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product by one tile and kind of cluster; what is not written is found."""
    out = guarded(dtype, len(a), len(weight))
    scales = scales or (number(1.0), number(1.0))
    _SCALED_MM_SM90.launch(a, weight.T, *scales, out.view, bias, choice)
    out.check()
    return out.view


@pytest.mark.parametrize("dtype", OUTPUTS)
@pytest.mark.parametrize("choice", range(CHOICES))
def test_every_tile_is_exact(choice: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    """With a number or a vector of scales on each side, in any memory, and with a bias."""
    for rows, columns, depth in SHAPES:
        a, weight = whole(generator, E4M3, rows, depth), whole(generator, E4M3, columns, depth)
        bias, want = whole(generator, dtype, columns), product(a, weight.T)
        for of_a, of_b in (((), (1,)), ((rows, 1), (1, columns)), ((1,), (1, columns))):
            scales = powers(generator, *of_a), powers(generator, *of_b)
            scaled = want * (scales[0] * scales[1])
            equal(run(a, weight, choice, dtype, scales), scaled)
            equal(run(a, weight, choice, dtype, scales, bias), scaled + bias.float())
        apart = powers(generator, rows, 3)[:, 1:2], powers(generator, columns, 2)[:, 1:].T
        equal(run(a, weight, choice, dtype, apart), want * (apart[0] * apart[1]))


@pytest.mark.parametrize("choice", range(CHOICES))
def test_batches(choice: int, generator: torch.Generator) -> None:
    scales = number(0.5), number(2.0**-3, 1)
    for batch, (rows, columns, depth) in ((1, SHAPES[1]), (3, SHAPES[2]), (7, (33, 65, 64))):
        a = whole(generator, E4M3, batch, rows, depth)
        weights = whole(generator, E4M3, batch, columns, depth)
        for x, y in (
            (a, weights),
            (a[:1].expand_as(a), weights),
            (a, weights[:1].expand_as(weights)),
        ):
            out = guarded(BF16, batch, rows, columns)
            _BMM_SM90.launch(x, y.mT, *scales, out.view, choice)
            out.check()
            equal(out.view, product(x, y.mT) * 2.0**-4)


@pytest.mark.parametrize("choice", range(CHOICES))
def test_a_factor_of_the_result(choice: int, generator: torch.Generator) -> None:
    for rows, columns, depth in SHAPES:
        a, weight = whole(generator, E4M3, rows, depth), whole(generator, E4M3, columns, depth)
        for alpha in (None, number(0.25)):
            out = guarded(BF16, rows, columns)
            _MM_SM90.launch(a, weight, alpha, out.view, choice)
            out.check()
            equal(out.view, product(a, weight.T) * (1.0 if alpha is None else 0.25))


@pytest.mark.parametrize("choice", range(CHOICES))
def test_strides_and_rows_that_are_not_finite(choice: int, generator: torch.Generator) -> None:
    """A row and a scale of NaN, rows between others that are not finite, any alignment of out."""
    nan = torch.tensor(torch.nan).to(E4M3)

    def wide(x: torch.Tensor) -> torch.Tensor:
        room = torch.full((x.shape[0], x.shape[1] + 16), torch.nan, device=DEVICE).to(E4M3)
        room[:, : x.shape[1]] = x
        return room[:, : x.shape[1]]

    a, weight = whole(generator, E4M3, 70, 80), whole(generator, E4M3, 265, 80)
    scales = powers(generator, 70, 1), powers(generator, 1, 265)
    want = product(a, weight.T) * (scales[0] * scales[1])
    a = wide(a)
    a[3] = nan
    scales[0][7] = torch.nan
    rest = [row for row in range(70) if row not in (3, 7)]
    for dtype in OUTPUTS:
        for columns, all_columns in ((265, 268), (264, 280)):
            room = torch.full((70, all_columns), 7.0, dtype=dtype, device=DEVICE)
            out, of_b = room[:, :columns], scales[1][:, :columns]
            _SCALED_MM_SM90.launch(a, wide(weight)[:columns].T, scales[0], of_b, out, None, choice)
            assert out[[3, 7]].isnan().all() and (room[:, columns:] == 7).all()
            equal(out[rest], want[rest, :columns])


@pytest.mark.parametrize("dtype", OUTPUTS)
@pytest.mark.parametrize("choice", UNSPLIT)
def test_groups(choice: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    for counts in COUNTS:
        for columns, depth in ((128, 128), (261, 144), (576, 1024)):
            a, b = groups_of(generator, (E4M3, E4M3), counts, columns, depth)
            out = torch.full((len(a), columns), 7.0, dtype=dtype, device=DEVICE)
            alpha = None if depth == 144 else number(1.0, 1)
            _GROUPED_SM90.launch(a, b, starts_of(counts), alpha, out, choice)
            check_groups(out, a, b, counts, [*range(len(counts))])


@pytest.mark.parametrize("choice", UNSPLIT)
def test_a_graph_is_replayed_with_other_groups(choice: int, generator: torch.Generator) -> None:
    a, b = whole(generator, E4M3, 310, 144), whole(generator, E4M3, 3, 264, 144)
    starts, alpha = starts_of([100, 0, 200]), number(1.0)
    out = torch.empty(310, 264, dtype=BF16, device=DEVICE)
    _GROUPED_SM90.launch(a, b, starts, alpha, out, choice)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _GROUPED_SM90.launch(a, b, starts, alpha, out, choice)
    for counts in ([100, 0, 200], [0, 299, 1], [1, 1, 298], [0, 0, 300]):
        starts.copy_(starts_of(counts))
        a[3:-7].copy_(whole(generator, E4M3, 300, 144))
        out.fill_(7.0)
        graph.replay()
        check_groups(out, a, b, counts, [0, 1, 2])


def test_a_graph_of_several_shapes(generator: torch.Generator) -> None:
    """Launches that follow each other at once; each reads the scales that the one before wrote."""
    a = [whole(generator, E4M3, rows, 1024) for rows in (1, 33, 300, 600)]
    weight = whole(generator, E4M3, 1, 1024)
    weight[:] = torch.tensor(0.0).to(E4M3)
    weight[0, 5] = torch.tensor(1.0).to(E4M3)
    other = whole(generator, E4M3, 392, 1024)
    scale = number(0.0, 600, 1)
    outs = [torch.empty(len(x), 392, dtype=BF16, device=DEVICE) for x in a]

    def calls() -> None:
        for x, out in zip(a, outs, strict=True):
            rows = scale[: len(x)]
            gemm.scaled_mm(x, weight.T, number_one, number_one, out=rows)
            gemm.scaled_mm(x, other.T, rows, number_one, out=out)

    number_one = number(1.0)
    calls()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    for _ in range(3):
        for x, out in zip(a, outs, strict=True):
            x.copy_(whole(generator, E4M3, *x.shape))
            out.fill_(torch.nan)
        graph.replay()
        for x, out in zip(a, outs, strict=True):
            equal(out, product(x, other.T) * x[:, 5:6].float())


@pytest.mark.parametrize("choice", TILES)
def test_long_sums_keep_their_last_bits(choice: int) -> None:
    """31 of each 32 products are 1: sums of 2^15 have more bits than a tensor core keeps."""
    depth = 2**15
    a = torch.ones(70, depth, device=DEVICE).to(E4M3)
    weight = (torch.arange(depth, device=DEVICE) % 32 != 7).float().expand(140, -1).to(E4M3)
    for rows in (1, 70):
        equal(run(a[:rows], weight, choice), number(31.0 * depth / 32, rows, 140))


def test_the_error_of_sums_that_do_not_cancel(generator: torch.Generator) -> None:
    """Tensor cores cut off bits of each sum of 128; without new sums, errors would add up."""
    for depth in (512, 4096, 16384):
        a, weight = (
            torch.rand(n, depth, generator=generator, device=DEVICE).to(E4M3) for n in (64, 256)
        )
        want = a.double() @ weight.double().T
        for choice in TILES:
            error = (run(a, weight, choice).double() - want).abs() / want
            assert error.max() <= 2.0**-10, (depth, choice, error.max().item())


def test_random_problems(generator: torch.Generator) -> None:
    """Sizes and choices at random, with numbers that sums round."""
    host = random.Random(generator.initial_seed())
    for _ in range(200):
        rows, columns = host.randint(1, host.choice((40, 700))), host.randint(1, 1500)
        depth, choice = 16 * host.randint(1, 240), host.randint(-1, CHOICES - 1)
        a, weight = (
            torch.randn(n, depth, generator=generator, device=DEVICE).to(E4M3)
            for n in (rows, columns)
        )
        scales = torch.rand(rows, 1, device=DEVICE), torch.rand(1, columns, device=DEVICE)
        factor = scales[0] * scales[1]
        size = (a.float().abs() @ weight.float().abs().T) * factor
        error = (run(a, weight, choice, F32, scales) - product(a, weight.T) * factor).abs()
        assert (error <= size * 2.0**-10).all(), (rows, columns, depth, choice)


def test_the_same_call_gives_the_same_bits(generator: torch.Generator) -> None:
    for choice in range(-1, CHOICES):
        a, weight = (
            torch.randn(n, 2064, generator=generator, device=DEVICE).to(E4M3) for n in (200, 1160)
        )
        first = run(a, weight, choice)
        for _ in range(5):
            assert torch.equal(run(a, weight, choice), first), choice


def test_both_kinds_of_kernels_agree(generator: torch.Generator) -> None:
    """Where the kernels for Hopper cannot copy an operand, the others compute the call."""
    a, weight = whole(generator, E4M3, 70, 144), whole(generator, E4M3, 264, 144)
    one, both = number(1.0), scaled_mm._SCALED_MM_BOTH
    for x, b, hopper in (
        (a, weight.T, True),
        (a[:1].expand(70, -1), weight.T, False),
        (a, weight[:1].expand(264, -1).T, False),
        (a.float().to(E5M2), weight.T, False),
        (a, weight.float().to(E5M2).T, False),
    ):
        assert scaled_mm._chosen(both, x, b) is both[1 if hopper else 0]
        assert scaled_mm._chosen(both, x, b, backend="mma") is both[0]
        equal(gemm.scaled_mm(x, b, one, one, out_dtype=F32), product(x, b))
    want = product(a, weight.T)
    for backend in ("mma", "cublas"):
        equal(gemm.mm_fp8(a, weight, out_dtype=F32, backend=backend), want)
        equal(gemm.bmm_fp8(a[None], weight.T[None], one, one, BF16, backend=backend)[0], want)
    starts = torch.tensor([0, 70], dtype=torch.int32, device=DEVICE)
    for backend in ("mma", "cudnn"):
        equal(gemm.grouped_mm_fp8(a, weight[None], starts, backend=backend), want)


def test_torch_compile(generator: torch.Generator) -> None:
    one = number(0.5)
    compiled = torch.compile(
        lambda a, b: (
            gemm.scaled_mm(a, b, one, one) + gemm.bmm_fp8(a[None], b[None], one, one, BF16)
        ),
        fullgraph=True,
        dynamic=True,
    )
    for rows in (3, 64, 200):
        a, weight = whole(generator, E4M3, rows, 400), whole(generator, E4M3, 264, 400)
        want = (product(a, weight.T) / 4).to(BF16).float()
        equal(compiled(a, weight.T)[0], 2 * want)


def test_nothing_to_do() -> None:
    one = number(1.0)
    for rows, columns in ((0, 256), (3, 0)):
        a, weight = (torch.zeros(n, 128, device=DEVICE).to(E4M3) for n in (rows, columns))
        assert gemm.scaled_mm(a, weight.T, one, one).shape == (rows, columns)
    empty, weight = (torch.zeros(n, 0, device=DEVICE).to(E4M3) for n in (3, 8))
    assert (gemm.scaled_mm(empty, weight.T, one, one, number(1.0, 8).bfloat16()) == 1).all()


def test_offsets_beyond_32_bits(free_memory: None) -> None:
    rows, columns, depth = 2**16 + 8, 2**15 + 17, 2**16 + 64
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of GPU memory")
    a, weight = (torch.zeros(n, depth, dtype=torch.uint8, device=DEVICE) for n in (rows, columns))
    two = int(torch.tensor(2.0).to(E4M3).view(torch.uint8))
    a[-1, -1] = weight[-1, -1] = weight[0, -1] = a[0, 0] = weight[-1, 0] = two
    one = number(1.0)
    for choice in (-1, 0, 1, 2):
        out = torch.empty(rows, columns, dtype=BF16, device=DEVICE)
        _SCALED_MM_SM90.launch(a.view(E4M3), weight.view(E4M3).T, one, one, out, None, choice)
        assert out[-1, -1] == 4 and out[-1, 0] == 4 and out[0, -1] == 4 and out[0, 0] == 0
        assert out.count_nonzero() == 3
        del out


def test_errors_leave_outputs_alone(generator: torch.Generator) -> None:
    """What only these kernels refuse; public functions take others there."""
    a, weight = whole(generator, E4M3, 16, 128), whole(generator, E4M3, 64, 128)
    out = torch.full((16, 64), 7.0, dtype=BF16, device=DEVICE)
    good: dict[str, Any] = {"a": a, "b": weight.T, "scale_a": number(1.0), "choice": -1}
    for change, words in (
        ({"a": a.float().to(E5M2)}, "a must be float8_e4m3fn, got float8_e5m2"),
        ({"b": weight.float().to(E5M2).T}, "b must be float8_e4m3fn, got float8_e5m2"),
        ({"b": weight.T.contiguous()}, "b must be column-major"),
        ({"a": a[:1].expand(16, -1)}, "a must have rows at different addresses"),
        ({"b": weight[:1].expand(64, -1).T}, "b must have rows at different addresses"),
        ({"a": a[:, :0], "b": weight[:, :0].T}, "a must have columns"),
        ({"scale_a": number(1.0, 16)}, r"scale_a must be one number or have shape \[16, 1\]"),
        ({"choice": CHOICES}, f"tactic must be -1 or a tile and cluster .* below {CHOICES}"),
    ):
        given = {**good, **change}
        with pytest.raises(ValueError, match=f"^scaled_mm: {words}"):
            _SCALED_MM_SM90.launch(
                given["a"], given["b"], given["scale_a"], number(1.0), out, None, given["choice"]
            )
    groups = torch.tensor([0, 16], dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"tactic must be -1 or a tile and cluster for this kind"):
        _GROUPED_SM90.launch(a, weight[None], groups, None, out, 3)
    assert (out == 7).all()
