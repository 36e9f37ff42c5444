# SPDX-License-Identifier: Apache-2.0
"""The product of groups with scales of blocks, SwiGLU and new scales, for Hopper.

Operands are small whole numbers and scales powers of two, so that every sum is exact in float32;
what differs from float64 is the function, and so a code next to a boundary.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from block_calls import FILL, Buffer
from moe_support import draw
from test_gpu_fp8_grouped import COUNTS, DEVICE, E4M3, integers, powers

from precast._ops.moe._gated_fp8 import CHOICES, GROUPED_SWIGLU_FP8
from precast._ops.moe._rows import EPS

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="the kernels are for compute capability 9.0",
)
#: Columns and depth: one and several blocks of columns, an odd number for two CTAs; less depth than
#: a block, parts of blocks, more blocks than the circular buffer has stages.
SHAPES = [(128, 128), (384, 144), (256, 16), (768, 1024)]
BEFORE, BEHIND = 3, 7  # rows of no group

choices = pytest.mark.parametrize("choice", [-1, *CHOICES])


def fill(t: torch.Tensor, number: float) -> None:
    t.copy_(torch.full(t.shape, number, device=t.device))


class Problem:
    """Rows of groups, with NaN before and behind them, and what they make in float64."""

    def __init__(
        self, counts: list[int], columns: int, depth: int, generator: torch.Generator
    ) -> None:
        rows, blocks = sum(counts) + BEFORE + BEHIND, -(-depth // 128)
        self.counts, self.columns = counts, columns
        self.a = integers(generator, rows, depth)
        self.b = integers(generator, len(counts), 2 * columns, depth)
        self.a_scale = powers(generator, rows, blocks)
        self.b_scale = powers(generator, len(counts), columns // 64, blocks) * 2.0**-4
        for part in (slice(BEFORE), slice(rows - BEHIND, rows)):
            fill(self.a[part], torch.nan)
            self.a_scale[part] = torch.nan
        self.starts = torch.tensor([BEFORE, *counts], device=DEVICE).cumsum(0).int()
        self.out = Buffer(rows, columns, dtype=E4M3)
        self.scales = Buffer(columns // 128, rows, dtype=torch.float32)

    @property
    def given(self) -> tuple[torch.Tensor, ...]:
        return self.a, self.b, self.a_scale, self.b_scale, self.starts

    def launch(self, choice: int = -1) -> None:
        GROUPED_SWIGLU_FP8.launch(*self.given, self.out.view, self.scales.view, EPS, choice)

    @property
    def rows(self) -> slice:
        return slice(BEFORE, len(self.a) - BEHIND)

    def want(self) -> torch.Tensor:
        depth = self.a.shape[1]
        a = self.a.double() * self.a_scale.double().repeat_interleave(128, 1)[:, :depth]
        of_b = self.b_scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
        b = self.b.double() * of_b[:, :, :depth]
        parts = zip(a[self.rows].split(self.counts), b, strict=True)
        up, gate = torch.cat([x @ y.T for x, y in parts]).chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up

    def check(self) -> None:
        """Scales are those of the largest numbers, and codes the nearest, or next to a boundary."""
        self.out.check()
        self.scales.check()
        close(self.out.view[self.rows], self.scales.view[:, self.rows], self.want())
        for part in (slice(BEFORE), slice(len(self.a) - BEHIND, None)):
            assert (self.out.view[part].view(torch.uint8) == FILL).all(), "rows of no group"
            scales = self.scales.view[:, part].contiguous().view(torch.uint8)
            assert (scales == FILL).all(), "scales of no group"


def close(codes: torch.Tensor, scales: torch.Tensor, want: torch.Tensor) -> None:
    blocks = want.unflatten(1, (-1, 128))
    most = blocks.abs().amax(2).clamp(min=EPS) / 448  # [rows, blocks]
    assert ((scales.mT.double() - most).abs() <= most * 1e-5).all()
    got = codes.double().unflatten(1, (-1, 128)) * scales.mT.double()[..., None]
    # A half of the distance of two codes, and a little for the function in float32.
    allowed = torch.maximum(blocks.abs() * 2.0**-4, most[..., None] * 2.0**-10) * (1 + 2.0**-9)
    wrong = ~((got - blocks).abs() <= allowed)
    if wrong.any():
        at = wrong.nonzero()[:8]
        rows = [(i.tolist(), got[tuple(i)].item(), blocks[tuple(i)].item()) for i in at]
        raise AssertionError(f"{int(wrong.sum())} of {wrong.numel()} differ: {rows}")


@choices
def test_groups_of_all_sizes(choice: int, generator: torch.Generator) -> None:
    for counts in (*COUNTS, [1] * 70, [400, 0, 250]):
        for columns, depth in SHAPES:
            problem = Problem(counts, columns, depth, generator)
            problem.launch(choice)
            problem.check()


@choices
def test_strides(choice: int, generator: torch.Generator) -> None:
    """Rows with room between them that is not finite; scales in every order and alignment."""
    problem = Problem([130, 0, 67], 256, 272, generator)
    rows, depth = problem.a.shape
    wide = torch.full((rows, depth + 16), torch.nan, device=DEVICE).to(E4M3)
    wide[:, :depth] = problem.a
    weights = torch.full((6, 2 * 256 + 8, depth + 32), torch.nan, device=DEVICE).to(E4M3)
    weights[::2, : 2 * 256, :depth] = problem.b
    problem.a, problem.b = wide[:, :depth], weights[::2, : 2 * 256, :depth]
    problem.b_scale = problem.b_scale.transpose(1, 2).contiguous().transpose(1, 2)
    numbers = problem.a_scale
    for room in (0, 1, 4):
        for begin in (0, room):
            memory = torch.full((3, rows + room), torch.nan, device=DEVICE)
            problem.a_scale = memory[:, begin : begin + rows].mT
            problem.a_scale.copy_(numbers)
            out = Buffer(rows, 256 + 16 * room, dtype=E4M3)
            scales = Buffer(2, rows + room, dtype=torch.float32)
            problem.out.view = out.view[:, :256]
            problem.scales.view = scales.view[:, begin : begin + rows]
            problem.launch(choice)
            problem.check()
            out.check()
            scales.check()


def test_numbers_that_sums_round(generator: torch.Generator) -> None:
    """All choices give the same bits, close to float64."""
    for counts, columns, depth in (([300, 5, 64], 512, 2048), ([40] * 12, 384, 784)):
        problem = Problem(counts, columns, depth, generator)
        problem.a[problem.rows] = torch.randn(
            sum(counts), depth, generator=generator, device=DEVICE
        ).to(E4M3)
        problem.b = torch.randn(problem.b.shape, generator=generator, device=DEVICE).to(E4M3)
        problem.a_scale[problem.rows] *= depth**-0.5
        found = []
        for choice in CHOICES:
            problem.launch(choice)
            codes, scales = problem.out.view[problem.rows], problem.scales.view[:, problem.rows]
            found.append((codes.clone().view(torch.uint8), scales.clone()))
            want = problem.want()
            got = codes.double() * scales.mT.double().repeat_interleave(128, 1)
            assert (got - want).norm() <= 0.03 * want.norm()
        for codes, scales in found[1:]:
            assert torch.equal(codes, found[0][0])
            assert torch.equal(scales, found[0][1])


def test_special_numbers(generator: torch.Generator) -> None:
    """Only zeros have the least scale, and NaN makes those of its row NaN."""
    problem = Problem([5], 256, 128, generator)
    fill(problem.a, 1)
    fill(problem.b, 0)
    problem.a_scale[:], problem.b_scale[:] = 1, 1
    problem.launch()
    assert (problem.out.view[problem.rows].float() == 0).all()
    least = (torch.tensor(EPS) / 448).expand(2, 5)
    assert torch.equal(problem.scales.view[:, problem.rows].cpu(), least)
    fill(problem.b[0, ::256, 0], 1)
    problem.a_scale[BEFORE + 1] = torch.nan
    problem.launch()
    scales = problem.scales.view[:, problem.rows]
    assert scales[:, 1].isnan().all()
    assert problem.out.view[BEFORE + 1].float().isnan().all()
    assert not scales[:, [0, 2, 3, 4]].isnan().any()
    assert (problem.out.view[BEFORE, :1].float() == 448).all()


@choices
def test_a_graph_is_replayed_with_other_groups(choice: int, generator: torch.Generator) -> None:
    problem = Problem([100, 0, 200], 384, 272, generator)
    problem.launch(choice)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        problem.launch(choice)
    for counts in ([100, 0, 200], [0, 299, 1], [1, 1, 298], [0, 0, 300]):
        problem.counts = counts
        problem.starts.copy_(torch.tensor([BEFORE, *counts]).cumsum(0))
        for buffer in (problem.out, problem.scales):
            buffer.bytes.fill_(FILL)
        graph.replay()
        problem.check()


def test_the_same_call_gives_the_same_bits(generator: torch.Generator) -> None:
    problem = Problem([90, 0, 3, 200, 64], 384, 1024, generator)
    for choice in CHOICES:
        found = []
        for _ in range(6):
            problem.launch(choice)
            found.append((problem.out.bytes.clone(), problem.scales.bytes.clone()))
        for pair in found[1:]:
            assert all(torch.equal(x, y) for x, y in zip(pair, found[0], strict=True))


@pytest.mark.parametrize("ep_size", [1, 4])
def test_the_mixture_is_right_with_it_and_without(
    ep_size: int, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    """Both ways are as close to float64, and a call takes the one that its rows are for."""
    module = importlib.import_module("precast._ops.moe.cutlass_fused_moe")
    experts = importlib.import_module("precast._ops.moe._experts")
    launched = []
    launch = GROUPED_SWIGLU_FP8.launch
    monkeypatch.setattr(
        GROUPED_SWIGLU_FP8, "launch", lambda *args: (launched.append(1), launch(*args))[0]
    )
    for tokens in (20, 700):
        for dtype in (torch.bfloat16, torch.float16):
            call = draw(
                *(tokens, 4, 8, 256, 384, generator, dtype, "blocks"), ep_size=ep_size, skew=1.0
            )
            launched.clear()
            usual = call.run()
            assert bool(launched) == (tokens * 4 / (8 * ep_size) >= experts.FUSED_ROWS)
            call.check(usual)
            found: list[Any] = []
            for fused in (True, False):
                with monkeypatch.context() as patch:
                    patch.setattr(module, "is_fused", lambda *args, fused=fused: fused)
                    experts._KNOWN.clear()
                    launched.clear()
                    found.append(call.run())
                    assert bool(launched) == fused
                    call.check(found[-1])
            launched.clear()
            call.run(profile_ids=[0, 0])
            assert not launched, "tactics are those of the product alone"
            experts._KNOWN.clear()
            want, lengths = call.plain()
            here = lengths > 0
            errors = [((x.double() - want).norm(dim=1)[here] / lengths[here]).mean() for x in found]
            assert errors[0] <= errors[1] * 1.1


def test_errors_leave_outputs_alone(generator: torch.Generator) -> None:
    problem = Problem([16], 128, 128, generator)
    a, b, a_scale, b_scale, starts = problem.given
    out, scales = problem.out.view, problem.scales.view
    good = {
        "a": a,
        "b": b,
        "a_scale": a_scale,
        "b_scale": b_scale,
        "m_indptr": starts,
        "out": out,
        "out_scale": scales,
        "eps": EPS,
        "choice": -1,
    }
    for change, words in (
        ({"b": b[:, :120]}, r"b must have shape .*256, 128\], got \[1, 120, 128\]"),
        ({"a": a.bfloat16()}, "a must be float8_e4m3fn, got bfloat16"),
        ({"out": out.bfloat16()}, "out must be float8_e4m3fn, got bfloat16"),
        ({"out": out[:, :64], "b": b[:, :128]}, "out must have a multiple of 128 columns"),
        ({"a": a[:1].expand(len(a), -1)}, "a must have rows that start at different multiples"),
        ({"a": a[:, :0], "b": b[..., :0]}, "a must have a positive multiple of 16 columns"),
        ({"a_scale": a_scale[1:]}, r"a_scale must have shape \[26, 1\]"),
        ({"b_scale": b_scale[:, :1]}, r"b_scale must have shape \[1, 2, 1\]"),
        ({"b_scale": b_scale.double()}, "b_scale must be float32"),
        ({"m_indptr": starts.long()}, "m_indptr must be int32"),
        ({"m_indptr": starts[:1]}, r"m_indptr must have shape \[2\]"),
        ({"out_scale": scales[:, 1:]}, r"out_scale must have shape .*1, 26\]"),
        ({"out_scale": scales.repeat_interleave(2, 1)[:, ::2]}, "out_scale must have stride 1"),
        ({"out": a}, "out must not overlap a's memory"),
        ({"out_scale": a_scale.mT}, "out_scale must not overlap a_scale's memory"),
        ({"eps": 0.0}, "eps must be a finite number of at least 1e-30"),
        ({"choice": 3}, "choice must be -1 or 0, 1 or 2"),
        ({"choice": 6}, "choice must be -1 or 0, 1 or 2"),
    ):
        given = {**good, **change}
        with pytest.raises(ValueError, match=f"^grouped_mm_fp8_swiglu: .*{words}"):
            GROUPED_SWIGLU_FP8.launch(*given.values())
    assert (problem.out.bytes == FILL).all()
    assert (problem.scales.bytes == FILL).all()
