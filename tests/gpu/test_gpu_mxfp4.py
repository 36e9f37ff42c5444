# SPDX-License-Identifier: Apache-2.0
"""Products with weights of MXFP4 on the GPU: every tile, exact; scales, groups, graphs, errors.

Operands are small whole numbers and scales powers of two, so that every sum is exact in float32,
whatever its order: results are compared bit for bit.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from moe_support import mxfp4

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

tactics = pytest.mark.parametrize(("backend", "tactic"), TACTICS)


def draw(
    generator: torch.Generator,
    counts: list[int],
    columns: int,
    depth: int,
    lowest: int = 125,
    highest: int = 129,
    ends: tuple[int, int] = (3, 7),
) -> tuple[torch.Tensor, ...]:
    """Tokens with rows of no group at both ends, the weight, its scales and its values, starts."""
    rows, groups = ends[0] + sum(counts) + ends[1], len(counts)

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device=DEVICE)

    a = ints(-3, 4, rows, depth).to(BF16)
    a[: ends[0]] = a[rows - ends[1] :] = torch.nan
    packed = ints(0, 256, groups, columns, depth // 2).byte()
    scales = ints(lowest, highest + 1, groups, columns, depth // 32).byte()
    steps = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device=DEVICE)
    numbers = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    values = torch.cat([steps, -steps])[numbers]
    values = values * (scales.double() - 127).exp2().repeat_interleave(32, -1)
    return (
        a,
        fused_moe.interleave_moe_weights_for_sm90_mixed_gemm(packed),
        fused_moe.interleave_moe_scales_for_sm90_mixed_gemm(scales),
        values,
        starts_of(counts, ends[0]),
    )


def starts_of(counts: list[int], first: int = 3) -> torch.Tensor:
    return torch.tensor([first, *counts], device=DEVICE).cumsum(0).int()


def check(out: torch.Tensor, a: torch.Tensor, values: torch.Tensor, starts: torch.Tensor) -> None:
    """Rows of groups are products, exactly; the others are still 7."""
    at = starts.tolist()
    want = torch.full(out.shape, 7.0, dtype=torch.float64, device=DEVICE)
    for group, (begin, end) in enumerate(pairwise(at)):
        want[begin:end] = a[begin:end].double() @ values[group].T
    assert_close(out, want.float().to(out.dtype), rtol=0.0, atol=0.0)


@tactics
@pytest.mark.parametrize("ends", [(3, 7), (0, 0)])
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_every_tile(
    columns: int,
    depth: int,
    ends: tuple[int, int],
    backend: str,
    tactic: int,
    generator: torch.Generator,
) -> None:
    for counts in COUNTS:
        a, b, scales, values, starts = draw(generator, counts, columns, depth, ends=ends)
        out = Guarded((len(a), columns), BF16, DEVICE)
        out.view.fill_(7.0)
        gemm.grouped_mm_mxfp4(a, b, scales, starts, out.view, BF16, backend=backend, tactic=tactic)
        out.check()
        check(out.view, a, values, starts)


@tactics
def test_scales_of_every_size(backend: str, tactic: int, generator: torch.Generator) -> None:
    """Each of a row of weights alone, so that no sum rounds, from 2^-68 to 2^65."""
    packed = torch.randint(0, 256, (1, 192, 64), generator=generator, device=DEVICE).byte()
    numbers = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)[0].long()
    steps = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device=DEVICE)
    magnitudes = torch.cat([steps, -steps])[numbers]
    b = fused_moe.interleave_moe_weights_for_sm90_mixed_gemm(packed)
    a = torch.zeros(128, 128, dtype=BF16, device=DEVICE)
    a.fill_diagonal_(1.0)
    starts = torch.tensor([0, 128], dtype=torch.int32, device=DEVICE)
    for first in (59, 66, 100, 127, 150, 185):
        scales = first + torch.arange(8, device=DEVICE).repeat(96).view(1, 192, 4)
        folded = fused_moe.interleave_moe_scales_for_sm90_mixed_gemm(scales.byte())
        got = gemm.grouped_mm_mxfp4(a, b, folded, starts, backend=backend, tactic=tactic)
        values = magnitudes * (scales[0].double() - 127).exp2().repeat_interleave(32, -1)
        assert torch.equal(got.double(), values.T), first


@tactics
def test_strides(backend: str, tactic: int, generator: torch.Generator) -> None:
    a, b, scales, values, starts = draw(generator, [20, 0, 70], 192, 256)
    wide = torch.full((len(a), 256 + 8), torch.nan, dtype=BF16, device=DEVICE)
    wide[:, :256] = a
    for shift in (0, 1, 5):
        room = torch.full((len(a), 192 + 3 + shift), 7.0, dtype=BF16, device=DEVICE)
        out = room[:, shift : shift + 192]
        gemm.grouped_mm_mxfp4(wide[:, :256], b, scales, starts, out, backend=backend, tactic=tactic)
        check(out, a, values, starts)
        assert (room[:, :shift] == 7).all() and (room[:, shift + 192 :] == 7).all()


@pytest.mark.parametrize("backend", ["auto", "mma"])
def test_numbers_that_sums_round(backend: str, generator: torch.Generator) -> None:
    host = random.Random(generator.initial_seed())
    for _ in range(60):
        groups, columns = host.randint(1, 40), 64 * host.randint(1, 20)
        depth, most = 128 * host.randint(1, 24), host.choice((2, 20, 200))
        counts = [host.randint(0, most) for _ in range(groups)]
        rows = sum(counts)
        a = torch.randn(rows, depth, generator=generator, device=DEVICE).to(BF16)
        weight = torch.randn(groups, columns, depth, generator=generator, device=DEVICE) / 32
        packed, scales, values = mxfp4(weight)
        starts = torch.tensor([0, *counts], device=DEVICE).cumsum(0).int()
        got = gemm.grouped_mm_mxfp4(
            a,
            fused_moe.interleave_moe_weights_for_sm90_mixed_gemm(packed),
            fused_moe.interleave_moe_scales_for_sm90_mixed_gemm(scales),
            starts,
            backend=backend,
        )
        at = starts.tolist()
        for group, (begin, end) in enumerate(pairwise(at)):
            x, w = a[begin:end].double(), values[group].double()
            want, size = x @ w.T, x.abs() @ w.abs().T
            error = (got[begin:end].double() - want).abs()
            assert (error <= want.abs() * 2.0**-8 + size * 2.0**-17).all(), (counts, columns, depth)


@pytest.mark.parametrize("backend", ["auto", "mma"])
def test_a_graph_is_replayed_with_other_groups(backend: str, generator: torch.Generator) -> None:
    a, b, scales, values, starts = draw(generator, [100, 0, 200], 256, 384)
    out = torch.empty(len(a), 256, dtype=BF16, device=DEVICE)
    gemm.grouped_mm_mxfp4(a, b, scales, starts, out, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemm.grouped_mm_mxfp4(a, b, scales, starts, out, backend=backend)
    for counts in ([100, 0, 200], [0, 299, 1], [1, 1, 298], [0, 0, 300]):
        starts.copy_(starts_of(counts))
        out.fill_(7.0)
        graph.replay()
        check(out, a, values, starts)


@pytest.mark.parametrize("backend", ["auto", "mma"])
def test_the_same_call_gives_the_same_bits(backend: str, generator: torch.Generator) -> None:
    a, b, scales, _, starts = draw(generator, [5, 90, 0, 400, 33], 1152, 2944)
    a = torch.randn(a.shape, generator=generator, device=DEVICE).to(BF16)
    out = torch.full((len(a), 1152), 7.0, dtype=BF16, device=DEVICE)
    gemm.grouped_mm_mxfp4(a, b, scales, starts, out, backend=backend)
    want = out.clone()
    for _ in range(20):
        out.fill_(7.0)
        gemm.grouped_mm_mxfp4(a, b, scales, starts, out, backend=backend)
        assert torch.equal(out, want)


def test_nothing_to_do(generator: torch.Generator) -> None:
    a, b, scales, _, _ = draw(generator, [4, 5], 64, 128)
    starts = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    assert gemm.grouped_mm_mxfp4(a[:0], b, scales, starts).shape == (0, 64)
    out = torch.full((len(a), 64), 7.0, dtype=BF16, device=DEVICE)
    gemm.grouped_mm_mxfp4(a, b, scales, starts, out)
    assert (out == 7).all()


def test_torch_compile(generator: torch.Generator) -> None:
    a, b, scales, _, starts = draw(generator, [20, 0, 30], 192, 256)
    a = a.nan_to_num()
    starts[0], starts[-1] = 0, len(a)
    want = gemm.grouped_mm_mxfp4(a, b, scales, starts)
    compiled = torch.compile(
        lambda x: gemm.grouped_mm_mxfp4(x, b, scales, starts) * 2, fullgraph=True
    )
    assert torch.equal(compiled(a), want * 2)


def test_errors_leave_outputs_alone(generator: torch.Generator) -> None:
    a, b, scales, _, starts = draw(generator, [20, 0, 30], 192, 256)
    out = torch.full((len(a), 192), 7.0, dtype=BF16, device=DEVICE)
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
        ({"b_scale": scales.view(torch.int32)}, "b_scale must be uint8, got int32"),
        ({"b_scale": scales[:, :1]}, r"b_scale must have shape \[3, 3, 2, 16, 16\]"),
        ({"b_scale": scales.mT}, "b_scale must be contiguous"),
        ({"b_scale": shifted(scales)}, "b_scale must start at a multiple of 16 bytes"),
        ({"m_indptr": starts.long()}, "m_indptr must be int32, got int64"),
        ({"m_indptr": starts[:3]}, r"m_indptr must have shape \[4\], got \[3\]"),
        ({"out": out[:, :64]}, r"out must have shape \[60, 192\], got \[60, 64\]"),
        ({"out": a[:, :192]}, "out must not overlap a's memory"),
        ({"tactic": 999}, "tactic must be -1 or a tile"),
    ):
        with pytest.raises(ValueError, match=f"^grouped_mm_mxfp4: {words}"):
            gemm.grouped_mm_mxfp4(**{**good, **change})
    assert (out == 7).all()
