# SPDX-License-Identifier: Apache-2.0
"""Products of few rows on the GPU against float64: sizes, rows that do not depend on others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import precast
from precast.testing import Guarded, assert_close

DEVICE = "cuda"
BF16, F32 = torch.bfloat16, torch.float32
ROUTERS = {"mm_M1_16_K7168_N128": (128, BF16), "mm_M1_16_K7168_N256": (256, F32)}
#: Columns and depth: routers, one step or less, steps that warps and CTAs share unevenly, layers.
SHAPES = [
    (32, 2880),
    (128, 2880),
    (256, 7168),
    (16, 0),
    (16, 8),
    (16, 56),
    (48, 64),
    (80, 72),
    (16, 520),
    (112, 1032),
    (16, 16384),
    (1024, 4104),
    (5120, 640),
]
ROWS = [1, 2, 7, 8, 9, 16, 17, 31, 33, 64, 65, 130]


def randn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, generator=generator).to(BF16)


def near(got: torch.Tensor, want: torch.Tensor, depth: int) -> None:
    """Sums of products of normal numbers have the size of sqrt(depth), and errors in proportion."""
    assert_close(got, want, atol=2e-6 * max(depth, 1) ** 0.5 + 1e-4)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_numbers(columns: int, depth: int, has_bias: bool, generator: torch.Generator) -> None:
    weight = randn(generator, columns, depth)
    bias = randn(generator, columns) if has_bias else None
    for rows in ROWS:
        x = randn(generator, rows, depth)
        want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        out = Guarded((rows, columns), BF16, DEVICE)
        for pdl in (False, True):
            out.view.fill_(torch.nan)
            assert precast.tinygemm_bf16(x, weight, out.view, bias, use_pdl=pdl) is None
            near(out.view, want, depth)
        out.check()


@pytest.mark.parametrize("name", ROUTERS)
def test_routers(name: str, generator: torch.Generator) -> None:
    columns, dtype = ROUTERS[name]
    weight = randn(generator, columns, 7168)
    for rows in range(1, 17):
        x = randn(generator, rows, 7168)
        out = Guarded((rows, columns), dtype, DEVICE)
        assert getattr(precast, name)(x, weight.T, out.view) is None
        # Tensor cores add with fewer bits than float32 has.
        want = x.double() @ weight.double().T
        if dtype == F32:
            assert_close(out.view, want, rtol=1e-4, atol=2e-3)
        else:
            near(out.view, want, 7168)
        out.check()


@pytest.mark.parametrize(("columns", "depth"), [(32, 2880), (256, 7168), (1024, 4104), (16, 520)])
def test_the_bits_of_a_row_do_not_depend_on_the_others(
    columns: int, depth: int, generator: torch.Generator
) -> None:
    weight, x = randn(generator, columns, depth), randn(generator, 130, depth)
    whole = torch.empty(130, columns, dtype=BF16, device=DEVICE)
    precast.tinygemm_bf16(x, weight, whole)
    for rows in ROWS:
        for _ in range(3):
            out = torch.empty(rows, columns, dtype=BF16, device=DEVICE)
            precast.tinygemm_bf16(x[-rows:].contiguous(), weight, out)
            assert torch.equal(out, whole[-rows:])


def test_a_row_that_is_not_finite_stays_alone(generator: torch.Generator) -> None:
    weight, x = randn(generator, 32, 2880), randn(generator, 13, 2880)
    clean, out = (torch.empty(13, 32, dtype=BF16, device=DEVICE) for _ in range(2))
    precast.tinygemm_bf16(x, weight, clean)
    x[4, 7], x[9, 2879] = torch.nan, torch.inf
    precast.tinygemm_bf16(x, weight, out)
    assert out[4].isnan().all() and not out[9].isfinite().any()
    rest = [row for row in range(13) if row not in (4, 9)]
    assert torch.equal(out[rest], clean[rest])


def test_nothing_to_do(generator: torch.Generator) -> None:
    for rows, columns in ((0, 32), (3, 0)):
        out = torch.empty(rows, columns, dtype=BF16, device=DEVICE)
        x, weight = randn(generator, rows, 64), randn(generator, columns, 64)
        assert precast.tinygemm_bf16(x, weight, out) is None


def test_offsets_beyond_32_bits(generator: torch.Generator) -> None:
    columns, depth = 2**15 + 16, 2**16 + 8
    if torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GiB of GPU memory")
    weight = torch.zeros(columns, depth, dtype=BF16, device=DEVICE)
    x = randn(generator, 3, depth)
    weight[-1] = x[1]
    weight[-16, -1] = 2.0
    out = torch.empty(3, columns, dtype=BF16, device=DEVICE)
    precast.tinygemm_bf16(x, weight, out)
    near(out[:, -1], (x.double() * x[1].double()).sum(1), depth)
    assert torch.equal(out[:, -16], 2 * x[:, -1])
    assert not out[:, :-16].any()


def test_errors_leave_outputs_alone(generator: torch.Generator) -> None:
    x, weight = randn(generator, 4, 64), randn(generator, 32, 64)
    out, bias = torch.full((4, 32), 7.0, dtype=BF16, device=DEVICE), randn(generator, 32)
    shifted = torch.empty(4 * 64 + 1, dtype=BF16, device=DEVICE)[1:].view(4, 64)
    good = {"input": x, "weight": weight, "out": out, "bias": bias}
    for change, words in (
        ({"input": x.cpu()}, "input must be a CUDA tensor"),
        ({"input": x.half()}, "input must be bfloat16, got float16"),
        ({"input": x.T.contiguous().T}, "input must be contiguous"),
        ({"input": shifted}, "input must start at a multiple of 16 bytes"),
        ({"weight": weight[:, :56].contiguous()}, r"weight must have shape \[32, 64\], got"),
        ({"weight": weight.cpu()}, "weight must be on cuda:0 as input, got cpu"),
        ({"weight": weight[:24], "out": out[:, :24]}, "weight must have a multiple of 16 rows"),
        ({"out": out[1:]}, r"out must have shape \[4, 32\], got \[3, 32\]"),
        ({"out": out.float()}, "out must be bfloat16, got float32"),
        ({"out": weight.view(-1)[:128].view(4, 32)}, "out must not overlap weight's memory"),
        ({"bias": bias[1:]}, r"bias must have shape \[32\], got \[31\]"),
        ({"bias": bias.float()}, "bias must be bfloat16, got float32"),
    ):
        with pytest.raises(ValueError, match=f"tinygemm_bf16: {words}"):
            precast.tinygemm_bf16(**{**good, **change})
    assert (out == 7).all()
    narrow = randn(generator, 4, 60), randn(generator, 32, 60)
    with pytest.raises(ValueError, match="input must have a multiple of 8 columns"):
        precast.tinygemm_bf16(*narrow, out)
    assert (out == 7).all()


@pytest.mark.parametrize("name", ROUTERS)
def test_errors_of_routers(name: str, generator: torch.Generator) -> None:
    columns, dtype = ROUTERS[name]
    x, weight = randn(generator, 4, 7168), randn(generator, columns, 7168)
    out = torch.full((4, columns), 7.0, dtype=dtype, device=DEVICE)
    route: Any = getattr(precast, name)
    for arguments, words in (
        ((x.cpu(), weight.T, out), "mat_a must be a CUDA tensor"),
        ((x[:0], weight.T, out[:0]), "mat_a must have 1 to 16 rows"),
        ((x.repeat(5, 1), weight.T, out), "mat_a must have 1 to 16 rows"),
        ((x[:, :7160].contiguous(), weight.T, out), r"mat_a must have shape \[4, 7168\]"),
        ((x, weight.T.contiguous(), out), r"mat_b must have strides \[1, 7168\]"),
        ((x, weight, out), rf"mat_b must have shape \[7168, {columns}\]"),
        ((x, weight.T, out.half()), f"out must be {str(dtype)[6:]}, got float16"),
        ((x, weight.T, out[:3]), rf"out must have shape \[4, {columns}\]"),
    ):
        with pytest.raises(ValueError, match=f"{name}: {words}"):
            route(*arguments)
    assert (out == 7).all()


def test_graph_and_compile(generator: torch.Generator) -> None:
    x, weight = randn(generator, 9, 2880), randn(generator, 128, 2880)
    states, router = randn(generator, 9, 7168), randn(generator, 256, 7168)
    out = torch.empty(9, 128, dtype=BF16, device=DEVICE)
    logits, fewer = torch.empty(9, 256, device=DEVICE), torch.empty_like(out)

    bias = randn(generator, 128)

    def run() -> None:
        precast.tinygemm_bf16(x, weight, out, bias, use_pdl=True)
        precast.mm_M1_16_K7168_N256(states, router.T, logits)
        precast.mm_M1_16_K7168_N128(states, router[:128].T, fewer)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    torch._dynamo.reset()
    for again in (graph.replay, torch.compile(run, fullgraph=True)):
        x.copy_(x.flip(0))
        states.copy_(states.flip(0))
        run()
        results = (out, logits, fewer)
        want = [result.clone() for result in results]
        for result in results:
            result.fill_(7.0)
        again()
        assert all(map(torch.equal, results, want))


@pytest.mark.parametrize("rows", [1, 12, 40])
def test_a_chain_is_the_same_with_and_without_pdl(rows: int, generator: torch.Generator) -> None:
    """Each product reads what the one before wrote; a missing wait shows as a rare difference."""
    weights = [randn(generator, 512, 512) / 16 for _ in range(2)]
    start = randn(generator, rows, 512)

    def chain(pdl: bool) -> torch.Tensor:
        x, out = start.clone(), torch.empty_like(start)
        for turn in range(8):
            precast.tinygemm_bf16(x, weights[turn % 2], out, use_pdl=pdl)
            x, out = out, x
        return x

    want = chain(False)
    assert want.isfinite().all() and want.abs().amax() > 1e-3
    assert all(torch.equal(chain(True), want) for _ in range(50))
