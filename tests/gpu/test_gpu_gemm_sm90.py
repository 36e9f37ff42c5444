# SPDX-License-Identifier: Apache-2.0
"""Products of 16-bit matrices by the kernels for Hopper: every tile, exact; groups, graphs.

Operands are small whole numbers, so that every sum is exact in float32, whatever its order: results
are compared bit for bit. What the kernels for every GPU share with these is in test_gpu_gemm.py.
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
    F16,
    F32,
    OUTPUTS,
    check_groups,
    check_replays,
    check_segments,
    check_strides,
    equal,
    groups_of,
    guarded,
    product,
    starts_of,
    whole,
)

from precast import gemm
from precast._ops.gemm._plain import CHOICES, UNSPLIT, chosen
from precast._ops.gemm.grouped_mm import _GROUPED_SM90
from precast._ops.gemm.mm_bf16 import _BMM_SM90, _MM_BOTH, _MM_SM90
from precast._ops.gemm.segment_gemm import _SEGMENTS_SM90

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="the kernels are for compute capability 9.0",
)
#: Rows, columns and depth: parts of tiles in each direction, odd columns, less depth than a stage,
#: fewer stages than CTAs that split the depth, more than the circular buffer has, several tiles for
#: each multiprocessor.
SHAPES = [
    (1, 1, 8),
    (5, 137, 128),
    (64, 256, 400),
    (130, 391, 1024),
    (300, 1160, 2064),
    (257, 8200, 328),
]


def run(
    a: torch.Tensor,
    weight: torch.Tensor,
    choice: int = -1,
    dtype: torch.dtype = F32,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product by one tile and kind of cluster; what is not written is found."""
    out = guarded(dtype, len(a), len(weight))
    _MM_SM90.launch(a, weight.T, bias, out.view, choice, True)
    out.check()
    return out.view


@pytest.mark.parametrize("dtype", OUTPUTS)
@pytest.mark.parametrize("choice", range(CHOICES))
def test_every_tile_is_exact(choice: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    for rows, columns, depth in SHAPES:
        a, weight = whole(generator, BF16, rows, depth), whole(generator, BF16, columns, depth)
        bias = whole(generator, BF16, columns)
        want = product(a, weight.T)
        equal(run(a, weight, choice, dtype), want)
        equal(run(a, weight, choice, dtype, bias), want + bias.float())


@pytest.mark.parametrize("choice", range(CHOICES))
def test_row_major_weights(choice: int, generator: torch.Generator) -> None:
    """In whole rows and in parts of rows, alone and in batches; parts of panels of 64 columns."""
    for rows, columns, depth in ((3, 8, 8), (70, 264, 136), (300, 1160, 2064), (257, 8200, 328)):
        a, b = whole(generator, BF16, rows, depth), whole(generator, BF16, depth, columns)
        wide = torch.full((depth, columns + 8), torch.nan, dtype=BF16, device=DEVICE)
        wide[:, :columns] = b
        bias, want = whole(generator, BF16, columns), product(a, b)
        for weight in (b, wide[:, :columns]):
            for dtype in (BF16, F32):
                out = guarded(dtype, rows, columns)
                _MM_SM90.launch(a, weight, bias, out.view, choice, True)
                out.check()
                equal(out.view, want + bias.float())
    a, b = whole(generator, BF16, 3, 70, 136), whole(generator, BF16, 3, 136, 264)
    for x, y in ((a, b), (a, b[:1].expand_as(b))):
        out = guarded(BF16, 3, 70, 264)
        _BMM_SM90.launch(x, y, out.view, choice)
        out.check()
        equal(out.view, product(x, y))


@pytest.mark.parametrize("choice", range(CHOICES))
def test_batches(choice: int, generator: torch.Generator) -> None:
    for batch, (rows, columns, depth) in ((1, SHAPES[1]), (3, SHAPES[2]), (7, (33, 65, 64))):
        a = whole(generator, BF16, batch, rows, depth)
        weights = whole(generator, BF16, batch, columns, depth)
        for x, y in (
            (a, weights),
            (a[:1].expand_as(a), weights),
            (a, weights[:1].expand_as(weights)),
        ):
            out = guarded(BF16, batch, rows, columns)
            _BMM_SM90.launch(x, y.mT, out.view, choice)
            out.check()
            equal(out.view, product(x, y.mT))


@pytest.mark.parametrize("choice", range(CHOICES))
def test_strides_and_rows_that_are_not_finite(choice: int, generator: torch.Generator) -> None:
    check_strides(_MM_SM90, choice, generator)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("choice", UNSPLIT)
def test_groups(choice: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    for counts in COUNTS:
        for columns, depth in ((128, 128), (261, 144), (576, 1024)):
            a, b = groups_of(generator, (dtype, dtype), counts, columns, depth)
            out = torch.full((len(a), columns), 7.0, dtype=dtype, device=DEVICE)
            _GROUPED_SM90.launch(a, b, starts_of(counts), out, choice)
            check_groups(out, a, b, counts, [*range(len(counts))])


@pytest.mark.parametrize("column_major", [True, False])
@pytest.mark.parametrize("choice", UNSPLIT)
def test_segments(choice: int, column_major: bool, generator: torch.Generator) -> None:
    check_segments(_SEGMENTS_SM90, F16, column_major, choice, generator)


@pytest.mark.parametrize("choice", UNSPLIT)
def test_segments_that_are_padding_are_not_written(choice: int, generator: torch.Generator) -> None:
    x, weights = whole(generator, BF16, 400, 144), whole(generator, BF16, 2, 264, 144)
    starts = torch.tensor([0, 130, 200, 400], device=DEVICE)
    for number in (-1, 2):
        which = torch.tensor([1, number, 0], device=DEVICE)
        out = torch.full((400, 264), 7.0, dtype=BF16, device=DEVICE)
        _SEGMENTS_SM90.launch(x, weights, starts, which, out, True, choice)
        assert (out[130:200] == 7).all()
        equal(out[:130], product(x[:130], weights[1].T))
        equal(out[200:], product(x[200:], weights[0].T))


@pytest.mark.parametrize("choice", UNSPLIT)
def test_a_graph_is_replayed_with_other_groups(choice: int, generator: torch.Generator) -> None:
    check_replays(lambda *args: _GROUPED_SM90.launch(*args, choice), BF16, generator)


def test_a_graph_of_several_shapes(generator: torch.Generator) -> None:
    """Launches that follow each other at once, with programmatic dependent launch."""
    a = [whole(generator, BF16, rows, 1024) for rows in (1, 33, 300, 600)]
    weight = whole(generator, BF16, 392, 1024)
    outs = [torch.empty(len(x), 392, dtype=BF16, device=DEVICE) for x in a]

    def calls() -> None:
        for x, out in zip(a, outs, strict=True):
            gemm.mm_bf16(x, weight.T, out=out, pdl=True)

    calls()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    for _ in range(3):
        weight.copy_(whole(generator, BF16, 392, 1024))
        for x, out in zip(a, outs, strict=True):
            x.copy_(whole(generator, BF16, *x.shape))
            out.fill_(torch.nan)
        graph.replay()
        for x, out in zip(a, outs, strict=True):
            equal(out, product(x, weight.T))


@pytest.mark.parametrize("rows", [5, 100, 300])
def test_products_of_products(rows: int, generator: torch.Generator) -> None:
    """Each launch reads what the one before writes, which lets it start early; by every choice."""
    x, size = whole(generator, BF16, rows, 1280), CHOICES + 1
    order = [torch.randperm(1280, generator=generator, device=DEVICE) for _ in range(3)]
    weights = [torch.eye(1280, dtype=BF16, device=DEVICE)[at].contiguous() for at in order]
    outs = torch.empty(size, rows, 1280, dtype=BF16, device=DEVICE)

    def calls() -> None:
        outs[0].copy_(x)
        for choice in range(CHOICES):
            weight = weights[choice % len(weights)]
            _MM_SM90.launch(outs[choice], weight.T, None, outs[choice + 1], choice, True)

    calls()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    for _ in range(3):
        x.copy_(whole(generator, BF16, *x.shape))
        outs.fill_(torch.nan)
        graph.replay()
        want = x
        for choice in range(CHOICES):
            want = want[:, order[choice % len(order)]]
            assert torch.equal(outs[choice + 1], want), choice


def test_random_problems(generator: torch.Generator) -> None:
    """Sizes and choices at random, with numbers that sums round."""
    host = random.Random(generator.initial_seed())
    for _ in range(200):
        rows, columns = host.randint(1, host.choice((40, 700))), host.randint(1, 1500)
        depth, choice = 8 * host.randint(1, 240), host.randint(-1, CHOICES - 1)
        a, weight = (
            torch.randn(n, depth, generator=generator, device=DEVICE).to(BF16)
            for n in (rows, columns)
        )
        size = a.float().abs() @ weight.float().abs().T
        error = (run(a, weight, choice) - product(a, weight.T)).abs()
        assert (error <= size * 2.0**-17).all(), (rows, columns, depth, choice)


def test_the_same_call_gives_the_same_bits(generator: torch.Generator) -> None:
    for choice in range(-1, CHOICES):
        a, weight = (
            torch.randn(n, 2064, generator=generator, device=DEVICE).to(BF16) for n in (200, 1160)
        )
        first = run(a, weight, choice)
        for _ in range(5):
            assert torch.equal(run(a, weight, choice), first), choice


def test_both_kinds_of_kernels_agree(generator: torch.Generator) -> None:
    """Where the kernels for Hopper cannot copy an operand, the others compute the call."""
    a, weight = whole(generator, BF16, 70, 136), whole(generator, BF16, 264, 136)
    want = product(a, weight.T)
    rows = a[:1].expand(70, -1)
    for x, b, kernel in (
        (a, weight.T, _MM_BOTH[1]),
        (a, weight.T.contiguous(), _MM_BOTH[1]),
        (rows, weight.T, _MM_BOTH[0]),
        (a, weight[:1].expand(264, -1).T, _MM_BOTH[0]),
    ):
        assert chosen(_MM_BOTH, x, b) is kernel
        assert chosen(_MM_BOTH, x, b, backend="mma") is _MM_BOTH[0]
        equal(gemm.mm_bf16(x, b, out_dtype=F32), product(x, b))
    equal(gemm.mm_bf16(a, weight.T, out_dtype=F32, backend="mma"), want)


def test_offsets_beyond_32_bits(free_memory: None) -> None:
    rows, columns, depth = 2**16 + 8, 2**15 + 17, 2**15 + 64
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of GPU memory")
    a, weight = (torch.zeros(n, depth, dtype=BF16, device=DEVICE) for n in (rows, columns))
    a[-1, -1] = weight[-1, -1] = weight[0, -1] = a[0, 0] = weight[-1, 0] = 2.0
    for choice in (-1, 0, 1, 2):
        out = torch.empty(rows, columns, dtype=BF16, device=DEVICE)
        _MM_SM90.launch(a, weight.T, None, out, choice, True)
        assert out[-1, -1] == 4 and out[-1, 0] == 4 and out[0, -1] == 4 and out[0, 0] == 0
        assert out.count_nonzero() == 3
        del out


def test_errors_leave_outputs_alone(generator: torch.Generator) -> None:
    """What only these kernels refuse; public functions take others there."""
    a, weight = whole(generator, BF16, 16, 128), whole(generator, BF16, 64, 128)
    out = torch.full((16, 64), 7.0, dtype=BF16, device=DEVICE)
    good: dict[str, Any] = {"a": a, "b": weight.T, "choice": -1}
    for change, words in (
        ({"b": weight.T.contiguous()[:1].expand(128, -1)}, "b must have rows at different"),
        ({"a": a[:1].expand(16, -1)}, "a must have rows at different addresses"),
        ({"b": weight[:1].expand(64, -1).T}, "b must have rows at different addresses"),
        ({"a": a[:, :0], "b": weight[:, :0].T}, "a must have columns"),
        ({"choice": CHOICES}, f"tactic must be -1 or a tile and cluster .* below {CHOICES}"),
    ):
        given = {**good, **change}
        with pytest.raises(ValueError, match=f"^mm_bf16: {words}"):
            _MM_SM90.launch(given["a"], given["b"], None, out, given["choice"], True)
    groups = torch.tensor([0, 16], dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"tactic must be -1 or a tile and cluster for this kind"):
        _GROUPED_SM90.launch(a, weight[None], groups, out, 3)
    assert (out == 7).all()
