# SPDX-License-Identifier: Apache-2.0
"""Products of e4m3 tokens with the weights of their groups: exact, whatever padding holds."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gemm_calls import in_columns
from packed_scales import in_words

from precast._ops.gemm.fp8_grouped import _OF_EACH, _OF_GROUPS
from precast.gemm import (
    batch_deepgemm_fp8_nt_groupwise,
    group_deepgemm_fp8_nt_groupwise,
    group_gemm_fp8_nt_groupwise,
)

DEVICE = "cuda"
E4M3, F32 = torch.float8_e4m3fn, torch.float32
BLOCK = 128
#: Tokens of each group: none, one, fewer and more than a tile has, and all in one group.
COUNTS = [[0, 1, 127, 128, 129, 0, 300], [1], [0, 0, 517], [64] * 9, [3, 2, 1, 0]]
#: Columns and depth: whole blocks, and less.
SIZES = [(128, 128), (264, 144), (576, 1024)]

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs compute capability 9.0",
)


def integers(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Small ones, so that every sum is exact in float32."""
    return torch.randint(-2, 3, shape, generator=generator, device=DEVICE).to(E4M3)


def powers(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(-1, 2, shape, generator=generator, device=DEVICE).exp2()


class Problem:
    """Tokens of groups, their weights and both scales; `want` has the exact products."""

    def __init__(self, counts: list[int], sizes: tuple[int, int], generator: torch.Generator):
        self.counts, (columns, depth) = counts, sizes
        groups, tokens, blocks = len(counts), sum(counts), -(-depth // BLOCK)
        self.a, self.b = (
            integers(generator, tokens, depth),
            integers(generator, groups, columns, depth),
        )
        self.a_scale = powers(generator, tokens, blocks)
        self.b_scale = powers(generator, groups, -(-columns // BLOCK), blocks)
        of_a = self.a.double() * self.a_scale.double().repeat_interleave(BLOCK, 1)[:, :depth]
        of_b = self.b_scale.double().repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
        of_b = self.b.double() * of_b[:, :columns, :depth]
        parts = zip(of_a.split(counts), of_b, strict=True)
        self.want = torch.cat([x @ y.T for x, y in parts]).float()

    def spread(self, places: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and their scales at these rows, with NaN in all others."""
        a = torch.full((rows, self.a.shape[1]), 0x7F, dtype=torch.uint8, device=DEVICE)
        a[places] = self.a.view(torch.uint8)
        a_scale = torch.full((rows, self.a_scale.shape[1]), torch.nan, device=DEVICE)
        a_scale[places] = self.a_scale
        return a.view(E4M3), a_scale


Run = Callable[[Problem, dict[str, Any]], tuple[torch.Tensor, torch.Tensor]]


def by_index(problem: Problem, state: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups begin at multiples of 128 rows; between them, and in a block behind, is padding."""
    indices, places, row = [], [], 0
    for group, count in enumerate(problem.counts):
        padded = -(-count // BLOCK) * BLOCK
        indices += [group] * count + [-1] * (padded - count)
        places += range(row, row + count)
        row += padded
    rows = state.get("rows", row + BLOCK)
    indices += [-1] * (rows - row)
    at = torch.tensor(places, dtype=torch.int64, device=DEVICE)
    a, a_scale = problem.spread(at, rows)
    given = [a, problem.b, a_scale, problem.b_scale, torch.tensor(indices, device=DEVICE).int()]
    out = untouched(state, rows, problem.b.shape[1])
    return launch(group_deepgemm_fp8_nt_groupwise, given, out, state), at


def by_count(problem: Problem, state: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Each group has room for as many rows as the largest, and some more."""
    room = state.get("rows", max(problem.counts) + 5)
    groups = len(problem.counts)
    places = [g * room + i for g, count in enumerate(problem.counts) for i in range(count)]
    at = torch.tensor(places, dtype=torch.int64, device=DEVICE)
    a, a_scale = (x.view(groups, room, -1) for x in problem.spread(at, groups * room))
    counts = torch.tensor(problem.counts, device=DEVICE).int()
    given = [a, problem.b, a_scale, problem.b_scale, counts]
    out = untouched(state, groups, room, problem.b.shape[1])
    result = launch(batch_deepgemm_fp8_nt_groupwise, given, out, state, expected_m=64)
    return result.view(groups * room, -1), at


def by_start(problem: Problem, state: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The first group begins at row 3, and rows behind the last one belong to none."""
    rows = state.get("rows", sum(problem.counts) + 10)
    at = torch.arange(3, 3 + sum(problem.counts), device=DEVICE)
    a, a_scale = problem.spread(at, rows)
    starts = torch.tensor([0, *problem.counts], device=DEVICE).cumsum(0).int() + 3
    scales = a_scale.T.contiguous(), problem.b_scale.mT.contiguous()
    out = untouched(state, rows, problem.b.shape[1])
    given = [a, problem.b, *scales, starts]
    return launch(group_gemm_fp8_nt_groupwise, given, out, state), at


def untouched(state: dict[str, Any], *shape: int) -> torch.Tensor:
    return torch.full(shape, -7.0, dtype=state.get("dtype", F32), device=DEVICE)


def launch(
    function: Callable[..., Any],
    given: list[torch.Tensor],
    out: torch.Tensor,
    state: dict[str, Any],
    **options: Any,
) -> torch.Tensor:
    """A call; where `state` has a graph, a replay of it with these tensors copied in."""
    if state.get("in_columns"):
        given[2] = in_columns(given[2])
    if state.get("in_words"):
        k_major = function is not group_gemm_fp8_nt_groupwise
        for i in (2, 3):
            given[i] = in_words(given[i]) if k_major else in_words(given[i].mT).mT
    options.update({key: state[key] for key in ("choice", "backend") if key in state})
    if "graph" not in state:
        assert function(*given, out=out, **options) is out
        return out
    if state["graph"] is None:
        function(*given, out=out, **options)
        state["graph"], state["given"], state["out"] = torch.cuda.CUDAGraph(), given, out
        with torch.cuda.graph(state["graph"]):
            function(*given, out=out, **options)
    for kept, new in zip(state["given"], given, strict=True):
        kept.view(torch.uint8).copy_(new.view(torch.uint8))
    state["out"].fill_(-7.0)
    state["graph"].replay()
    return state["out"]


def check(run: Run, problem: Problem, state: dict[str, Any] | None = None) -> None:
    """Tokens have the exact products, and nothing else is written."""
    out, places = run(problem, {} if state is None else state)
    assert torch.equal(out[places], problem.want.to(out.dtype))
    others = torch.ones(len(out), dtype=torch.bool, device=DEVICE)
    others[places] = False
    assert bool((out[others] == -7.0).all())


RUNS = [by_index, by_count, by_start]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_products_are_exact_beside_padding_of_nan(
    counts: list[int], sizes: tuple[int, int], run: Run, generator: torch.Generator
) -> None:
    check(run, Problem(counts, sizes, generator))


@pytest.mark.parametrize("run", [by_index, by_count])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_scales_in_columns(counts: list[int], run: Run, generator: torch.Generator) -> None:
    check(run, Problem(counts, (264, 400), generator), {"in_columns": True})


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_packed_scales(counts: list[int], run: Run, generator: torch.Generator) -> None:
    for sizes in ((264, 400), (128, 1168)):
        check(run, Problem(counts, sizes, generator), {"in_words": True})


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_outputs_of_16_bits(
    dtype: torch.dtype, counts: list[int], run: Run, generator: torch.Generator
) -> None:
    """TMA writes 16 rows at once, of which some may belong to nobody or to the next group."""
    for in_columns_ in (False, run is not by_start):
        state = {"dtype": dtype, "in_columns": in_columns_}
        check(run, Problem(counts, (264, 400), generator), state)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("counts", [[0, 1, 127, 128, 129, 0, 300], [20] * 70], ids=str)
def test_every_tile(counts: list[int], run: Run, generator: torch.Generator) -> None:
    """More blocks of the depth than a warp has lanes, and several tiles for each multiprocessor."""
    problems = [Problem(counts, sizes, generator) for sizes in ((264, 4240), (1160, 272))]
    for choice in _OF_EACH if run is by_index else _OF_GROUPS:
        for problem in problems:
            state = {
                "choice": choice,
                "dtype": torch.bfloat16,
                "in_columns": run is not by_start,
            }
            check(run, problem, state)


@pytest.mark.parametrize("run", RUNS)
def test_random_groups(run: Run, generator: torch.Generator) -> None:
    numbers = random.Random(generator.initial_seed())
    for _ in range(60):
        counts = [numbers.choice([0, 1, 17, 128, 200]) for _ in range(numbers.randint(1, 40))]
        sizes = 8 * numbers.randint(1, 60), 16 * numbers.randint(1, 60)
        check(run, Problem(counts if sum(counts) else [1, *counts], sizes, generator))


@pytest.mark.parametrize("run", RUNS)
def test_a_graph_is_replayed_with_other_groups(run: Run, generator: torch.Generator) -> None:
    state: dict[str, Any] = {"graph": None, "rows": 1024}
    for counts in ([100, 0, 200], [0, 333, 1], [1, 1, 1], [0, 0, 500]):
        check(run, Problem(counts, (264, 400), generator), state)
