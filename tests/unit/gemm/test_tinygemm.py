# SPDX-License-Identifier: Apache-2.0
"""Products of few rows in reference mode: numbers, errors, graphs, FlashInfer's module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import precast
from precast._ops.gemm.tinygemm import COLUMNS, MAX_DEPTH, MAX_TILES
from precast.shim import look_up
from precast.testing import assert_close

pytestmark = pytest.mark.usefixtures("reference_mode")

BF16, F32 = torch.bfloat16, torch.float32
ROUTERS = {"mm_M1_16_K7168_N128": (128, BF16), "mm_M1_16_K7168_N256": (256, F32)}
routers = pytest.mark.parametrize("name", ROUTERS)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(BF16)


def linear(rows: int, columns: int, depth: int) -> dict[str, torch.Tensor]:
    return {
        "input": randn(rows, depth),
        "weight": randn(columns, depth),
        "out": torch.full((rows, columns), -7.0, dtype=BF16),
        "bias": randn(columns),
    }


def routed(name: str, rows: int) -> dict[str, torch.Tensor]:
    columns, dtype = ROUTERS[name]
    return {
        "mat_a": randn(rows, 7168),
        "mat_b": randn(columns, 7168).T,
        "out": torch.full((rows, columns), -7.0, dtype=dtype),
    }


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 16, 8), (5, 48, 2880), (70, 32, 0)])
def test_a_linear_layer(rows: int, columns: int, depth: int, has_bias: bool) -> None:
    given: dict[str, Any] = linear(rows, columns, depth)
    want = given["input"].double() @ given["weight"].double().T
    if has_bias:
        want += given["bias"].double()
    else:
        given["bias"] = None
    assert precast.tinygemm_bf16(**given) is None
    assert_close(given["out"], want, atol=1e-3)


def test_the_bias_is_added_before_the_sum_is_rounded() -> None:
    given = linear(1, 16, 8)
    given["input"].fill_(1.0)
    given["weight"].zero_()
    given["weight"][:, 0], given["weight"][:, 1], given["bias"][:] = 256.0, 1.0, 1.0
    precast.tinygemm_bf16(**given)
    assert (given["out"] == 258).all()  # 257 has no bfloat16: it would become 256, and stay.


@routers
def test_a_router(name: str) -> None:
    for rows in (1, 16):
        given = routed(name, rows)
        want = given["mat_a"].double() @ given["mat_b"].double()
        assert getattr(precast, name)(**given) is None
        assert_close(given["out"], want, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input": torch.zeros(3, 64)}, "input must be bfloat16, got float32"),
        ({"input": torch.zeros(64).to(BF16)}, r"input must have 2 dimensions, got shape \[64\]"),
        ({"input": randn(64, 3).T}, "input must be contiguous, got strides"),
        ({"weight": torch.zeros(32, 64)}, "weight must be bfloat16, got float32"),
        ({"weight": randn(32, 72)}, r"weight must have shape \[32, 64\], got \[32, 72\]"),
        ({"weight": randn(64, 32).T}, "weight must be contiguous, got strides"),
        ({"out": randn(2, 32)}, r"out must have shape \[3, 32\], got \[2, 32\]"),
        ({"out": torch.zeros(3, 32)}, "out must be bfloat16, got float32"),
        ({"out": randn(32, 3).T}, "out must be contiguous, got strides"),
        ({"bias": randn(31)}, r"bias must have shape \[32\], got \[31\]"),
        ({"bias": torch.zeros(32)}, "bias must be bfloat16, got float32"),
        ({"bias": randn(64)[::2]}, "bias must be contiguous, got strides"),
        (
            {"weight": randn(24, 64), "out": randn(3, 24), "bias": None},
            r"weight must have a multiple of 16 rows, got shape \[24, 64\]",
        ),
        (
            {"input": randn(3, 60), "weight": randn(32, 60)},
            r"input must have a multiple of 8 columns up to 16777216, got shape \[3, 60\]",
        ),
    ],
)
def test_what_is_refused(change: dict[str, Any], words: str) -> None:
    given = linear(3, 32, 64)
    with pytest.raises(ValueError, match=f"^tinygemm_bf16: {words}"):
        precast.tinygemm_bf16(**{**given, **change})
    assert (given["out"] == -7).all()


def test_an_output_that_overlaps_is_refused() -> None:
    buffer = torch.full((3, 64), 7.0, dtype=BF16)
    weight = randn(64, 64)
    for out, other in ((buffer, "input"), (weight[:3], "weight")):
        with pytest.raises(ValueError, match=f"tinygemm_bf16: out must not overlap {other}'s"):
            precast.tinygemm_bf16(buffer, weight, out)
    assert (buffer == 7).all()


@routers
def test_what_a_router_refuses(name: str) -> None:
    given, (columns, dtype) = routed(name, 4), ROUTERS[name]
    other = F32 if dtype == BF16 else BF16
    legal = "bfloat16" if dtype == BF16 else "float32"
    changes: list[tuple[dict[str, torch.Tensor], str]] = [
        ({"mat_a": given["mat_a"].float()}, "mat_a must be bfloat16, got float32"),
        ({"mat_a": randn(4, 7169)}, r"mat_a must have shape \[4, 7168\], got \[4, 7169\]"),
        ({"mat_a": randn(7168, 4).T}, "mat_a must be contiguous"),
        (
            {"mat_a": randn(17, 7168), "out": torch.zeros(17, columns, dtype=dtype)},
            r"mat_a must have 1 to 16 rows, got shape \[17, 7168\]",
        ),
        (
            {"mat_a": randn(0, 7168), "out": torch.zeros(0, columns, dtype=dtype)},
            r"mat_a must have 1 to 16 rows, got shape \[0, 7168\]",
        ),
        (
            {"mat_b": given["mat_b"].contiguous()},
            rf"mat_b must have strides \[1, 7168\], got \[{columns}, 1\]; pass the transpose",
        ),
        ({"mat_b": randn(columns + 1, 7168).T}, rf"mat_b must have shape \[7168, {columns}\]"),
        ({"out": given["out"].to(other)}, f"out must be {legal}, got"),
        ({"out": given["out"][:3]}, rf"out must have shape \[4, {columns}\], got \[3, "),
        ({"out": torch.zeros(columns, 4, dtype=dtype).T}, "out must be contiguous"),
    ]
    for change, words in changes:
        with pytest.raises(ValueError, match=f"^{name}: {words}"):
            getattr(precast, name)(**{**given, **change})
    assert (given["out"] == -7).all()


def test_limits_are_those_of_the_kernel() -> None:
    headers = Path(__file__).resolve().parents[3] / "include" / "precast"
    text = (headers / "gemm" / "tinygemm.cuh").read_text()
    assert (COLUMNS, MAX_DEPTH, MAX_TILES) == (16, 2**24, 2**27)
    assert "constexpr int kTinyColumns = 16;" in text
    assert "constexpr int64_t kMaxTinyDepth = int64_t(1) << 24;" in text
    assert "constexpr int64_t kMaxTinyTiles = int64_t(1) << 27;" in text


def test_torch_compile_without_a_graph_break() -> None:
    name = "mm_M1_16_K7168_N256"
    calls = linear(5, 32, 64), routed(name, 3)
    wanted = linear(5, 32, 64), routed(name, 3)

    def both(a: Any, b: Any) -> None:
        precast.tinygemm_bf16(**a)
        precast.mm_M1_16_K7168_N256(**b)

    both(*wanted)
    torch._dynamo.reset()
    torch.compile(both, fullgraph=True, backend="aot_eager")(*calls)
    for got, want in zip(calls, wanted, strict=True):
        assert torch.equal(got["out"], want["out"])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_names_are_where_flashinfer_has_them(engine: str) -> None:
    for path in ("gemm", "gemm.routergemm"):
        assert look_up(path, "tinygemm_bf16", engine) is precast.tinygemm_bf16
    for path in ("gemm", "gemm.routergemm", "dsv3_ops"):
        for name in ROUTERS:
            assert look_up(path, name, engine) is getattr(precast, name)


def test_the_module_that_vllm_loads() -> None:
    module = look_up("jit", "gen_tinygemm2_module", "vllm")().build_and_load()
    given = linear(3, 32, 64)
    x, weight, out, bias = given.values()
    module.tinygemm2_op(x, weight, bias, out, True)
    assert_close(out, x.double() @ weight.double().T + bias.double(), atol=1e-3)
    module.tinygemm2_nobias_op(x, weight, out, False)
    assert_close(out, x.double() @ weight.double().T, atol=1e-3)
