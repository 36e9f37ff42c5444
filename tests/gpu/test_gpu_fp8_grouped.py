# SPDX-License-Identifier: Apache-2.0
"""Block-scaled products of groups of e4m3 tokens on the GPU: every tile, exact on whole numbers.

Padding is not finite, and outputs are full of sevens before a call: what is no token's row must
stay a seven, and no row may be touched by what others hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from test_gpu_fp8_gemm import problem

from precast._ops.gemm import fp8_grouped
from precast._ops.gemm._fp8 import CHOICES, CLUSTERS, scaled_product
from precast.testing import assert_close

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="the kernels are for compute capability 9.0",
)
E4M3, F32 = torch.float8_e4m3fn, torch.float32
#: Columns and depth of the weights.
SHAPES = [(136, 400), (520, 1024)]
#: Tokens of each group: one, none, parts of a tile, more than a tile, more groups than lanes.
SIZES = [
    [1],
    [0, 0],
    [3, 0, 200, 128, 0],
    [0, 17, 64, 1],
    [5] * 40,
    [0] * 33 + [300, 2],
]


class Groups(NamedTuple):
    """Tokens of several groups in one of the layouts."""

    given: dict[str, torch.Tensor]
    want: torch.Tensor
    launch: Callable[[torch.Tensor, int], None]


def weights(generator: torch.Generator, groups: int, columns: int, depth: int) -> dict[str, Any]:
    made = [problem(generator, 1, columns, depth) for _ in range(groups)]
    return {
        "b": torch.stack([x.b.view(torch.uint8) for x in made]).view(E4M3),
        "b_scale": torch.stack([x.b_scale for x in made]),
    }


def fill(
    generator: torch.Generator,
    sizes: list[int],
    shape: tuple[int, int],
    rows: int,
    starts: list[int],
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tokens in ``rows`` rows, of which each group has some; the others are not finite."""
    columns, depth = shape
    given = weights(generator, len(sizes), columns, depth)
    x = problem(generator, rows, columns, depth)
    a = torch.full((rows, depth), torch.nan, device="cuda").to(E4M3)
    a_scale = torch.full_like(x.a_scale, torch.nan)
    want = torch.full((rows, columns), 7.0, device="cuda")
    for group, (begin, size) in enumerate(zip(starts, sizes, strict=True)):
        own = slice(begin, begin + size)
        a[own], a_scale[own] = x.a[own], x.a_scale[own]
        product = x.a[own], given["b"][group], x.a_scale[own], given["b_scale"][group]
        want[own] = scaled_product(*product, 1)
    return {"a": a, "a_scale": a_scale, **given}, want


def numbers(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def indexed(generator: torch.Generator, sizes: list[int], shape: tuple[int, int]) -> Groups:
    starts, rows = [], 0
    for size in sizes:
        starts.append(rows)
        rows += -(-size // 128) * 128
    rows = max(rows, 128)
    given, want = fill(generator, sizes, shape, rows, starts)
    of_rows = torch.full((rows,), -1, dtype=torch.int32, device="cuda")
    for group, (begin, size) in enumerate(zip(starts, sizes, strict=True)):
        of_rows[begin : begin + size] = group
    given["numbers"] = of_rows

    def launch(out: torch.Tensor, choice: int) -> None:
        a, a_scale, b, b_scale, own = given.values()
        fp8_grouped._INDEXED.launch(a, b, a_scale, b_scale, own, out, choice)

    return Groups(given, want, launch)


def counted(generator: torch.Generator, sizes: list[int], shape: tuple[int, int]) -> Groups:
    room = max(sizes) + 9
    starts = [group * room for group in range(len(sizes))]
    given, want = fill(generator, sizes, shape, room * len(sizes), starts)
    for name in ("a", "a_scale"):
        given[name] = given[name].view(len(sizes), room, -1)
    given["numbers"] = numbers(sizes)

    def launch(out: torch.Tensor, choice: int) -> None:
        a, a_scale, b, b_scale, own = given.values()
        fp8_grouped._COUNTED.launch(a, b, a_scale, b_scale, own, out, 8, choice)

    return Groups(given, want.view(len(sizes), room, -1), launch)


def ranges(generator: torch.Generator, sizes: list[int], shape: tuple[int, int]) -> Groups:
    starts = [3]  # Rows before the first group, and behind the last one.
    for size in sizes:
        starts.append(starts[-1] + size)
    given, want = fill(generator, sizes, shape, starts[-1] + 5, starts[:-1])
    given["numbers"] = numbers(starts)

    def launch(out: torch.Tensor, choice: int) -> None:
        a, a_scale, b, b_scale, own = given.values()
        fp8_grouped._RANGES.launch(a, b, a_scale, b_scale, own, out, True, choice)

    return Groups(given, want, launch)


LAYOUTS = {"indexed": indexed, "counted": counted, "ranges": ranges}
CASES = [
    pytest.param(layout, choice, id=f"{layout}-{choice}")
    for layout in LAYOUTS
    for choice in (-1, *range(CHOICES))
    if choice < 0 or choice % CLUSTERS < (2 if layout == "indexed" else 3)
]


def check(groups: Groups, choice: int, dtype: torch.dtype = F32) -> None:
    out = torch.full_like(groups.want, 7.0, dtype=dtype)
    groups.launch(out, choice)
    assert_close(out, groups.want.to(dtype), rtol=0.0, atol=0.0)


@pytest.mark.parametrize(("layout", "choice"), CASES)
def test_every_tile_is_exact(layout: str, choice: int, generator: torch.Generator) -> None:
    for sizes in SIZES:
        for shape in SHAPES:
            check(LAYOUTS[layout](generator, sizes, shape), choice)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_of_16_bits(layout: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    for choice in range(0, CHOICES, CLUSTERS):
        check(LAYOUTS[layout](generator, [3, 0, 200, 40], (520, 640)), choice, dtype)


@pytest.mark.parametrize("layout", ["counted", "ranges"])
def test_a_graph_is_replayed_with_other_groups(layout: str, generator: torch.Generator) -> None:
    all_sizes = [[40, 40, 40], [0, 120, 0], [120, 0, 0], [1, 2, 117], [0, 0, 120]]
    made = [LAYOUTS[layout](generator, sizes, (136, 400)) for sizes in all_sizes]
    if layout == "counted":  # Room for 120 tokens in each group.
        made = [m for m in made if m.want.shape == made[1].want.shape]
    first = made[0]
    out = torch.empty_like(first.want)
    graph = torch.cuda.CUDAGraph()
    first.launch(out, -1)
    with torch.cuda.graph(graph):
        first.launch(out, -1)
    for groups in (*made[1:], made[-1]):
        for name, tensor in groups.given.items():
            first.given[name].copy_(tensor)
        out.fill_(7.0)
        graph.replay()
        assert_close(out, groups.want, rtol=0.0, atol=0.0)


def test_many_groups_of_random_sizes(generator: torch.Generator) -> None:
    host = torch.Generator().manual_seed(int(generator.initial_seed()) % 2**31)
    for _ in range(20):
        count = int(torch.randint(1, 150, (1,), generator=host))
        sizes = torch.randint(0, 90, (count,), generator=host)
        sizes *= torch.randint(0, 2, (count,), generator=host)
        for make in LAYOUTS.values():
            check(make(generator, sizes.tolist(), (136, 272)), -1)
