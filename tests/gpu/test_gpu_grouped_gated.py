# SPDX-License-Identifier: Apache-2.0
"""The product of groups with a gated function in its epilogue: every tile, groups, graphs.

Operands are small whole numbers times a power of two, so that every sum is exact in float32; what
differs from float64 is the function, and its rounding to 16 bits.
"""

from __future__ import annotations

import importlib
import random

import pytest
import torch
from moe_support import _gated, draw
from test_gpu_gemm import BF16, COUNTS, DEVICE, F16, guarded, starts_of, whole

from precast import gemm
from precast._ops.gemm._plain import CHOICES, UNSPLIT
from precast._ops.moe._gated import GROUPED_GATED
from precast._plan.gemm_model import Choice, choices
from precast.tllm_enums import ActivationType

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="the kernels are for compute capability 9.0",
)
#: Columns and depth: a half of the smallest tile, parts of tiles, an odd number of tiles, whole
#: ones; less depth than a stage, parts of stages, more stages than the circular buffer has.
SHAPES = [(8, 8), (72, 144), (264, 136), (384, 1024)]
GATED = (
    *(ActivationType.Swiglu, ActivationType.Geglu, ActivationType.GegluTanh),
    ActivationType.SwigluBias,
)


def operands(
    generator: torch.Generator, dtype: torch.dtype, counts: list[int], columns: int, depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, with NaN before and behind those of groups, and weights."""
    a = whole(generator, dtype, sum(counts) + 10, depth)
    a[:3] = a[-7:] = torch.nan
    return a, whole(generator, dtype, len(counts), 2 * columns, depth) * 2.0**-5


def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    starts: torch.Tensor,
    out: torch.Tensor,
    choice: int,
    act: ActivationType = ActivationType.Swiglu,
    *more: torch.Tensor | None,
) -> None:
    """``more`` are the bias, and the numbers of SwigluBias."""
    given = *more, *[None] * (4 - len(more))
    GROUPED_GATED.launch(a, b, starts, int(act), *given, out, choice)


def swiglu(sums: torch.Tensor) -> torch.Tensor:
    up, gate = sums.double().chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def check(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, counts: list[int]) -> None:
    """Compare with float64 rounded once; rows of no group must be as ``guarded`` leaves them."""
    parts = zip(a[3:-7].split(counts), b, strict=True)
    close(out[3:-7], torch.cat([swiglu(x.double() @ weight.double().T) for x, weight in parts]))
    assert out[:3].isnan().all() and out[-7:].isnan().all()


def close(got: torch.Tensor, want: torch.Tensor, slack: float = 2.0**-6) -> None:
    """Within one rounding to the dtype; ``slack`` of it is for the function in float32."""
    kind = torch.finfo(got.dtype)
    allowed = (want.abs() * kind.eps / 2).clamp(min=kind.smallest_normal * kind.eps / 2)
    wrong = ~((got.double() - want).abs() <= allowed * (1 + slack))
    if wrong.any():
        at = wrong.nonzero()[:8]
        rows = [(i.tolist(), got[tuple(i)].item(), want[tuple(i)].item()) for i in at]
        raise AssertionError(f"{int(wrong.sum())} of {wrong.numel()} differ: {rows}")


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("choice", UNSPLIT)
def test_every_tile(choice: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    for counts in COUNTS:
        for columns, depth in SHAPES:
            a, b = operands(generator, dtype, counts, columns, depth)
            out = guarded(dtype, len(a), columns)
            launch(a, b, starts_of(counts), out.view, choice)
            out.check()
            check(out.view, a, b, counts)


@pytest.mark.parametrize("choice", UNSPLIT)
def test_every_function(choice: int, generator: torch.Generator) -> None:
    """With biases and without, of groups of which each has its own, in every tile."""
    for counts, columns, depth in (([130, 0, 67, 3], 264, 144), ([20, 1] * 8, 72, 72)):
        groups = len(counts)
        for dtype in (BF16, F16):
            a, b = operands(generator, dtype, counts, columns, depth)
            bias = whole(generator, dtype, groups, 2 * columns) * 2.0**-3
            numbers = torch.rand(3, groups, generator=generator, device=DEVICE) + 0.5
            for act in GATED:
                for has_bias in (False, True):
                    of_act = numbers if act is ActivationType.SwigluBias else []
                    more = bias if has_bias else None, *of_act
                    out = guarded(dtype, len(a), columns)
                    launch(a, b, starts_of(counts), out.view, choice, act, *more)
                    out.check()
                    parts = []
                    for group, x in enumerate(a[3:-7].split(counts)):
                        y = x.double() @ b[group].double().T
                        y = y + bias[group].double() if has_bias else y
                        up, gate = y.chunk(2, dim=1)
                        each = [n[group].double() for n in of_act] or [None] * 3
                        parts.append(_gated(act, up, gate, *each))
                    near(out.view[3:-7], torch.cat(parts))
                    assert out.view[:3].isnan().all()
                    assert out.view[-7:].isnan().all()
    few = numbers[1:2]  # Of numbers, any may be missing.
    launch(a, b, starts_of(counts), out.view, choice, ActivationType.SwigluBias, None, None, few[0])
    sums = torch.cat([x.double() @ w.double().T for x, w in zip(a[3:-7].split(counts), b)])
    up, gate = sums.chunk(2, dim=1)
    beta = few[0].repeat_interleave(torch.tensor(counts, device=DEVICE))[:, None].double()
    near(out.view[3:-7], torch.nn.functional.silu(gate) * (up + beta))


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Within a rounding to the dtype, and what functions in float32 lose of small numbers."""
    error = (got.double() - want).abs()
    allowed = want.abs() * torch.finfo(got.dtype).eps * 0.51 + want.abs().max() * 1e-5
    wrong = ~(error <= allowed)
    if wrong.any():
        at = wrong.nonzero()[:8]
        rows = [(i.tolist(), got[tuple(i)].item(), want[tuple(i)].item()) for i in at]
        raise AssertionError(f"{int(wrong.sum())} of {wrong.numel()} differ: {rows}")


def test_the_next_wider_tile_takes_the_place_of_one_without_a_kernel(
    generator: torch.Generator,
) -> None:
    counts = [130, 0, 67, 3]
    a, b = operands(generator, BF16, counts, 264, 1024)
    by_name = {choice.name: choice for choice in choices("bf16")}

    def product(choice: Choice) -> torch.Tensor:
        out = torch.full((len(a), 264), torch.nan, dtype=BF16, device=DEVICE)
        launch(a, b, starts_of(counts), out, choice.number)
        check(out, a, b, counts)
        return out[3:-7]

    for narrow, wide in (("64x48@2", "64x64"), ("64x80", "64x128"), ("128x176", "128x192")):
        for cluster in ("", "+shares_a", "+shares_b"):
            assert torch.equal(*(product(by_name[tile + cluster]) for tile in (narrow, wide)))


@pytest.mark.parametrize("choice", UNSPLIT)
def test_strides(choice: int, generator: torch.Generator) -> None:
    """Rows and groups with room between them that is not finite; outputs of every alignment."""
    counts, columns, depth = [130, 0, 67], 136, 72
    a, b = operands(generator, BF16, counts, columns, depth)
    wide = torch.full((len(a), depth + 8), torch.nan, dtype=BF16, device=DEVICE)
    wide[:, :depth] = a
    weights = torch.full(
        (len(b) * 2, 2 * columns + 8, depth + 16), torch.nan, dtype=BF16, device=DEVICE
    )
    weights[::2, : 2 * columns, :depth] = b
    a, b = wide[:, :depth], weights[::2, : 2 * columns, :depth]
    for room in (8, 3, 1):
        for begin in (0, 1):
            memory = guarded(BF16, len(a), columns + room)
            out = memory.view[:, begin : begin + columns]
            launch(a, b, starts_of(counts), out, choice)
            memory.check()
            check(out, a, b, counts)
            assert memory.view[:, :begin].isnan().all()
            assert memory.view[:, begin + columns :].isnan().all()


def test_it_is_the_product_and_the_function(generator: torch.Generator) -> None:
    """With numbers that sums round: of the product's float32, by the same tile."""
    host = random.Random(generator.initial_seed())
    for dtype in (BF16, F16):
        for _ in range(60):
            columns, depth = 8 * host.randint(1, 130), 8 * host.randint(1, 300)
            counts = [host.choice((0, 1, 7, 30, 200)) for _ in range(host.randint(1, 40))]
            choice = host.choice((-1, *UNSPLIT))
            a, b = (
                torch.randn(shape, generator=generator, device=DEVICE)
                for shape in ((sum(counts), depth), (len(counts), 2 * columns, depth))
            )
            a, b = a.to(dtype), (b * depth**-0.5 * 2).to(dtype)
            starts = torch.tensor([0, *counts], device=DEVICE).cumsum(0).int()
            sums = gemm.grouped_mm_bf16(a, b, starts, out_dtype=torch.float32, tactic=choice)
            out = guarded(dtype, len(a), columns)
            launch(a, b, starts, out.view, choice)
            out.check()
            close(out.view, swiglu(sums), 2.0**-5)


def test_special_numbers(generator: torch.Generator) -> None:
    """Gates whose exponential is infinite, infinite sums, and NaN."""
    for choice in UNSPLIT:
        a = torch.ones(3, 8, dtype=BF16, device=DEVICE)
        b = torch.zeros(1, 32, 8, dtype=BF16, device=DEVICE)
        ups = torch.tensor([1.0, -2, 3, torch.inf, 0, torch.nan, 1, -1.0])
        gates = torch.tensor([-1e30, -100, 2.0**100, 1, 0, 1, torch.nan, torch.inf])
        b[0, :8, 0], b[0, 16:24, 0] = ups.to(BF16).cuda(), gates.to(BF16).cuda()
        out = torch.empty(3, 16, dtype=BF16, device=DEVICE)
        starts = torch.tensor([0, 3], dtype=torch.int32, device=DEVICE)
        launch(a, b, starts, out, choice)
        want = torch.tensor([0, 0, 3 * 2.0**100, torch.inf, 0, torch.nan, torch.nan, -torch.inf])
        got = out[:, :8].cpu()
        assert torch.equal(got.nan_to_num(7), want.to(BF16).expand(3, 8).nan_to_num(7)), choice


@pytest.mark.parametrize("choice", UNSPLIT)
def test_a_graph_is_replayed_with_other_groups(choice: int, generator: torch.Generator) -> None:
    a, b = operands(generator, BF16, [300, 0, 0], 264, 144)
    starts = starts_of([100, 0, 200])
    out = torch.full((310, 264), torch.nan, dtype=BF16, device=DEVICE)
    launch(a, b, starts, out, choice)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(a, b, starts, out, choice)
    for counts in ([100, 0, 200], [0, 299, 1], [1, 1, 298], [0, 0, 300]):
        starts.copy_(starts_of(counts))
        a[3:-7].copy_(whole(generator, BF16, 300, 144))
        out.fill_(torch.nan)
        graph.replay()
        check(out, a, b, counts)


def test_the_same_call_gives_the_same_bits(generator: torch.Generator) -> None:
    for choice in (-1, *UNSPLIT):
        counts = [90, 0, 3, 200, 64]
        a, b = operands(generator, BF16, counts, 384, 1024)
        outs = [torch.zeros(len(a), 384, dtype=BF16, device=DEVICE) for _ in range(6)]
        for out in outs:
            launch(a, b, starts_of(counts), out, choice)
        assert all(torch.equal(out[3:-7], outs[0][3:-7]) for out in outs), choice


@pytest.mark.parametrize("biases", [False, True], ids=["", "biases"])
@pytest.mark.parametrize("act", GATED, ids=lambda act: act.name)
def test_the_mixture_is_right_with_it_and_without(
    act: ActivationType,
    biases: bool,
    monkeypatch: pytest.MonkeyPatch,
    generator: torch.Generator,
) -> None:
    """Both ways are as close to float64, and the one with it is what a call takes."""
    module = importlib.import_module("precast._ops.moe.cutlass_fused_moe")
    experts = importlib.import_module("precast._ops.moe._experts")
    launched = []
    product = GROUPED_GATED.launch
    monkeypatch.setattr(
        GROUPED_GATED, "launch", lambda *args: (launched.append(1), product(*args))[0]
    )
    for tokens in (1, 5, 64, 700):
        for dtype in (BF16, F16):
            call = draw(
                *(tokens, 4, 16, 256, 136, generator, dtype), act=act, biases=biases, skew=1.0
            )
            launched.clear()
            fused = call.run()
            assert launched
            call.check(fused)
            with monkeypatch.context() as patch:
                patch.setattr(module, "is_fused", lambda *args: False)
                experts._KNOWN.clear()
                launched.clear()
                chain = call.run()
                assert not launched
                call.check(chain)
            experts._KNOWN.clear()
            want, lengths = call.plain()
            errors = [((x.double() - want).norm(dim=1) / lengths).mean() for x in (fused, chain)]
            assert errors[0] <= errors[1] * 1.1


def test_errors_leave_outputs_alone(generator: torch.Generator) -> None:
    a, b = whole(generator, BF16, 16, 128), whole(generator, BF16, 1, 128, 128)
    out = torch.full((16, 64), 7.0, dtype=BF16, device=DEVICE)
    starts = torch.tensor([0, 16], dtype=torch.int32, device=DEVICE)
    good = {
        "a": a,
        "b": b,
        "m_indptr": starts,
        "activation_type": 3,
        "bias": None,
        **dict.fromkeys(("swiglu_alpha", "swiglu_beta", "swiglu_limit")),
        "out": out,
        "tactic": -1,
    }
    bias, ones = a.new_ones(1, 128), torch.ones(1, device=DEVICE)
    for change, words in (
        ({"b": b[:, :120]}, r"b must have shape .*128, 128\], got \[1, 120, 128\]"),
        ({"b": b.half()}, "b must be bfloat16, got float16"),
        ({"activation_type": 2}, "activation_type must be 3, 4, 5 or 8, got 2"),
        ({"bias": bias[:, :64]}, r"bias must have shape \[1, 128\], got \[1, 64\]"),
        ({"bias": bias.half()}, "bias must be bfloat16, got float16"),
        ({"swiglu_beta": ones.repeat(2)}, r"swiglu_beta must have shape \[1\]"),
        ({"swiglu_limit": ones.double()}, "swiglu_limit must be float32"),
        ({"out": out.float()}, "out must be bfloat16, got float32"),
        ({"out": out[:, :60], "b": b[:, :120]}, "out must have a multiple of 8 columns"),
        ({"a": a[:1].expand(16, -1)}, "a must have rows at different addresses"),
        ({"a": a[:, :0], "b": b[..., :0]}, "a must have columns"),
        ({"m_indptr": starts.long()}, "m_indptr must be int32"),
        ({"m_indptr": starts[:1]}, r"m_indptr must have shape \[2\]"),
        ({"out": a[:, :64]}, "out must not overlap a's memory"),
        ({"tactic": 3}, "tactic must be -1 or a tile and cluster for this kind"),
        ({"tactic": CHOICES}, f"tactic must be -1 or a tile and cluster .* below {CHOICES}"),
    ):
        given = {**good, **change}
        with pytest.raises(ValueError, match=f"^grouped_mm_gated: .*{words}"):
            GROUPED_GATED.launch(*given.values())
    assert (out == 7).all()
