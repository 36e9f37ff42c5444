# SPDX-License-Identifier: Apache-2.0
"""Products with weights of 4 bits on the GPU: every tile, exact; scales, groups, graphs, errors.

Operands are small whole numbers and scales have few bits, so that every sum is exact in float32,
whatever its order: results are compared bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from moe_support import int4, mxfp4

from precast import fused_moe, gemm
from precast._ops.gemm._fp8 import MMA_TILES
from precast._ops.gemm._w4 import SM90_TILES
from precast.testing import Guarded, assert_close


def is_sm90() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = "cuda"
BF16 = torch.bfloat16
#: Backends and the numbers of their tiles.
TACTICS = [("mma", tile) for tile in range(-1, MMA_TILES)]
TACTICS += [("auto", tile) for tile in range(-1, SM90_TILES if is_sm90() else 0)]
#: Columns and depth: parts of tiles of columns, fewer steps than stages, more.
SHAPES = [(64, 128), (192, 256), (320, 1024), (1152, 2944)]
#: Rows of groups: none, one, all; parts of tiles and several of them; more groups than a warp has
#: lanes, or looks at together.
COUNTS = [
    [1],
    [0, 1, 0],
    [17, 0, 64, 5],
    [0, 300, 0, 0],
    [129, 255, 16],
    [3, 0, 1, 0, 40, 2, 0, 9] * 5,
    [0, 2, 0, 0, 1, 9, 0] * 40,
]


class Format(NamedTuple):
    """What both formats do differently."""

    name: str
    block: int
    """Numbers of the depth that share a scale."""
    values: tuple[float, ...]
    """Of the sixteen codes."""
    interleave_numbers: Callable[[torch.Tensor], torch.Tensor]
    interleave_scales: Callable[[torch.Tensor], torch.Tensor]
    multiply: Callable[..., torch.Tensor]
    round_weight: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

    def draw_scales(
        self, shape: tuple[int, ...], generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales as they are stored, and in float64: of different size, with few bits."""
        ints = torch.randint(0, 5, shape, generator=generator, device=DEVICE)
        if self is MXFP4:
            return (125 + ints).byte(), (ints - 2.0).double().exp2()
        stored = ((ints.clamp(max=3) + 1) / 4).to(BF16)
        return stored, stored.double()

    def interleaved(
        self, packed: torch.Tensor, scales: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.interleave_numbers(packed), self.interleave_scales(scales)


STEPS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4 = Format(
    "mxfp4",
    32,
    (*STEPS, *(-step for step in STEPS)),
    fused_moe.interleave_moe_weights_for_sm90_mixed_gemm,
    fused_moe.interleave_moe_scales_for_sm90_mixed_gemm,
    gemm.grouped_mm_mxfp4,
    mxfp4,
)
INT4 = Format(
    "int4",
    128,
    (*map(float, range(8)), *map(float, range(-8, 0))),
    lambda packed: fused_moe.interleave_moe_weights_for_sm90_mixed_gemm(packed, "int4"),
    lambda scales: fused_moe.interleave_moe_scales_for_sm90_mixed_gemm(scales, 128),
    gemm.grouped_mm_int4,
    int4,
)
formats = pytest.mark.parametrize("weights", [MXFP4, INT4], ids=["mxfp4", "int4"])
tactics = pytest.mark.parametrize(("backend", "tactic"), TACTICS)
backends = pytest.mark.parametrize("backend", ["auto", "mma"])


def draw(
    weights: Format,
    generator: torch.Generator,
    counts: list[int],
    columns: int,
    depth: int,
    ends: tuple[int, int] = (3, 7),
) -> tuple[torch.Tensor, ...]:
    """Tokens with rows of no group at both ends, the weight, its scales and its values, starts."""
    rows, groups = ends[0] + sum(counts) + ends[1], len(counts)

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device=DEVICE)

    a = ints(-3, 4, rows, depth).to(BF16)
    a[: ends[0]] = a[rows - ends[1] :] = torch.nan
    packed = ints(0, 256, groups, columns, depth // 2).byte()
    shape = groups, columns, depth // weights.block
    scales, factors = weights.draw_scales(shape, generator)
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    values = torch.tensor(weights.values, dtype=torch.float64, device=DEVICE)[codes]
    values = values * factors.repeat_interleave(weights.block, -1)
    return a, *weights.interleaved(packed, scales), values, starts_of(counts, ends[0])


def starts_of(counts: list[int], first: int = 3) -> torch.Tensor:
    return torch.tensor([first, *counts], device=DEVICE).cumsum(0).int()


def check(out: torch.Tensor, a: torch.Tensor, values: torch.Tensor, starts: torch.Tensor) -> None:
    """Rows of groups are products, exactly; the others are still 7."""
    at = starts.tolist()
    want = torch.full(out.shape, 7.0, dtype=torch.float64, device=DEVICE)
    for group, (begin, end) in enumerate(pairwise(at)):
        want[begin:end] = a[begin:end].double() @ values[group].T
    assert_close(out, want.float().to(out.dtype), rtol=0.0, atol=0.0)


@formats
@tactics
@pytest.mark.parametrize("ends", [(3, 7), (0, 0)])
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_every_tile(
    columns: int,
    depth: int,
    ends: tuple[int, int],
    weights: Format,
    backend: str,
    tactic: int,
    generator: torch.Generator,
) -> None:
    for counts in COUNTS:
        a, b, scales, values, starts = draw(weights, generator, counts, columns, depth, ends=ends)
        out = Guarded((len(a), columns), BF16, DEVICE)
        out.view.fill_(7.0)
        weights.multiply(a, b, scales, starts, out.view, BF16, backend=backend, tactic=tactic)
        out.check()
        check(out.view, a, values, starts)


@tactics
def test_exponents_of_every_size(backend: str, tactic: int, generator: torch.Generator) -> None:
    """MXFP4: each of a row of weights alone, so that no sum rounds, from 2^-68 to 2^65."""
    packed = torch.randint(0, 256, (1, 192, 64), generator=generator, device=DEVICE).byte()
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)[0].long()
    numbers = torch.tensor(MXFP4.values, dtype=torch.float64, device=DEVICE)
    b = MXFP4.interleave_numbers(packed)
    a = torch.zeros(128, 128, dtype=BF16, device=DEVICE)
    a.fill_diagonal_(1.0)
    starts = torch.tensor([0, 128], dtype=torch.int32, device=DEVICE)
    for first in (59, 66, 100, 127, 150, 185):
        scales = first + torch.arange(8, device=DEVICE).repeat(96).view(1, 192, 4)
        folded = MXFP4.interleave_scales(scales.byte())
        got = MXFP4.multiply(a, b, folded, starts, backend=backend, tactic=tactic)
        values = numbers[codes] * (scales[0].double() - 127).exp2().repeat_interleave(32, -1)
        assert torch.equal(got.double(), values.T), first


@formats
@tactics
def test_strides(weights: Format, backend: str, tactic: int, generator: torch.Generator) -> None:
    a, b, scales, values, starts = draw(weights, generator, [20, 0, 70], 192, 256)
    wide = torch.full((len(a), 256 + 8), torch.nan, dtype=BF16, device=DEVICE)
    wide[:, :256] = a
    for shift in (0, 1, 5):
        room = torch.full((len(a), 192 + 3 + shift), 7.0, dtype=BF16, device=DEVICE)
        out = room[:, shift : shift + 192]
        weights.multiply(wide[:, :256], b, scales, starts, out, backend=backend, tactic=tactic)
        check(out, a, values, starts)
        assert (room[:, :shift] == 7).all() and (room[:, shift + 192 :] == 7).all()


@formats
@backends
def test_numbers_that_sums_round(weights: Format, backend: str, generator: torch.Generator) -> None:
    host = random.Random(generator.initial_seed())
    for _ in range(60):
        groups, columns = host.randint(1, 40), 64 * host.randint(1, 20)
        depth, most = 128 * host.randint(1, 24), host.choice((2, 20, 200))
        counts = [host.randint(0, most) for _ in range(groups)]
        rows = sum(counts)
        a = torch.randn(rows, depth, generator=generator, device=DEVICE).to(BF16)
        weight = torch.randn(groups, columns, depth, generator=generator, device=DEVICE) / 32
        packed, scales, values = weights.round_weight(weight)
        starts = starts_of(counts, 0)
        got = weights.multiply(a, *weights.interleaved(packed, scales), starts, backend=backend)
        for group, (begin, end) in enumerate(pairwise(starts.tolist())):
            x, w = a[begin:end].double(), values[group].double()
            want, size = x @ w.T, x.abs() @ w.abs().T
            error = (got[begin:end].double() - want).abs()
            assert (error <= want.abs() * 2.0**-8 + size * 2.0**-17).all(), (counts, columns, depth)


@formats
@backends
def test_a_graph_is_replayed_with_other_groups(
    weights: Format, backend: str, generator: torch.Generator
) -> None:
    a, b, scales, values, starts = draw(weights, generator, [100, 0, 200], 256, 384)
    out = torch.empty(len(a), 256, dtype=BF16, device=DEVICE)
    weights.multiply(a, b, scales, starts, out, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights.multiply(a, b, scales, starts, out, backend=backend)
    for counts in ([100, 0, 200], [0, 299, 1], [1, 1, 298], [0, 0, 300]):
        starts.copy_(starts_of(counts))
        out.fill_(7.0)
        graph.replay()
        check(out, a, values, starts)


@formats
@backends
def test_the_same_call_gives_the_same_bits(
    weights: Format, backend: str, generator: torch.Generator
) -> None:
    a, b, scales, _, starts = draw(weights, generator, [5, 90, 0, 400, 33], 1152, 2944)
    a = torch.randn(a.shape, generator=generator, device=DEVICE).to(BF16)
    out = torch.full((len(a), 1152), 7.0, dtype=BF16, device=DEVICE)
    weights.multiply(a, b, scales, starts, out, backend=backend)
    want = out.clone()
    for _ in range(20):
        out.fill_(7.0)
        weights.multiply(a, b, scales, starts, out, backend=backend)
        assert torch.equal(out, want)


@formats
def test_nothing_to_do(weights: Format, generator: torch.Generator) -> None:
    a, b, scales, _, _ = draw(weights, generator, [4, 5], 64, 128)
    starts = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    assert weights.multiply(a[:0], b, scales, starts).shape == (0, 64)
    out = torch.full((len(a), 64), 7.0, dtype=BF16, device=DEVICE)
    weights.multiply(a, b, scales, starts, out)
    assert (out == 7).all()


@formats
def test_torch_compile(weights: Format, generator: torch.Generator) -> None:
    a, b, scales, _, starts = draw(weights, generator, [20, 0, 30], 192, 256)
    a = a.nan_to_num()
    starts[0], starts[-1] = 0, len(a)
    multiply = weights.multiply
    want = multiply(a, b, scales, starts)
    compiled = torch.compile(lambda x: multiply(x, b, scales, starts) * 2, fullgraph=True)
    assert torch.equal(compiled(a), want * 2)


@formats
def test_errors_leave_outputs_alone(weights: Format, generator: torch.Generator) -> None:
    a, b, scales, _, starts = draw(weights, generator, [20, 0, 30], 192, 256)
    out = torch.full((len(a), 192), 7.0, dtype=BF16, device=DEVICE)
    stored, tile = ("uint8", 16) if weights is MXFP4 else ("bfloat16", 8)
    good: dict[str, Any] = {"a": a, "b": b, "b_scale": scales, "m_indptr": starts, "out": out}

    def shifted(t: torch.Tensor) -> torch.Tensor:
        room = torch.empty(t.numel() + 1, dtype=t.dtype, device=DEVICE)
        return room[1:].view(t.shape)

    for change, words in (
        ({"a": shifted(a)}, "a must start at a multiple of 16 bytes"),
        ({"a": a.half()}, "a must be bfloat16, got float16"),
        ({"a": a[:, :192]}, "a must have a positive multiple of 128 columns, got shape"),
        ({"b": b.cpu()}, "b must be on cuda:0 as a, got cpu"),
        ({"b": b.int()}, "b must be uint8, got int32"),
        ({"b": b[:, :, :64]}, r"b must have shape \[groups, n, 128\], got \[3, 192, 64\]"),
        ({"b": b[:, :72].contiguous()}, "b must have a multiple of 64 rows, got shape"),
        ({"b": shifted(b)}, "b must start at a multiple of 16 bytes"),
        ({"b_scale": scales.view(torch.int32)}, f"b_scale must be {stored}, got int32"),
        ({"b_scale": scales[:, :1]}, rf"b_scale must have shape \[3, 3, 2, {tile}, {tile}\]"),
        ({"b_scale": scales.mT}, "b_scale must be contiguous"),
        ({"b_scale": shifted(scales)}, "b_scale must start at a multiple of 16 bytes"),
        ({"m_indptr": starts.long()}, "m_indptr must be int32, got int64"),
        ({"m_indptr": starts[:3]}, r"m_indptr must have shape \[4\], got \[3\]"),
        ({"out": out[:, :64]}, r"out must have shape \[60, 192\], got \[60, 64\]"),
        ({"out": a[:, :192]}, "out must not overlap a's memory"),
        ({"tactic": 999}, "tactic must be -1 or a tile"),
    ):
        with pytest.raises(ValueError, match=f"^grouped_mm_{weights.name}: {words}"):
            weights.multiply(**{**good, **change})
    assert (out == 7).all()
