# SPDX-License-Identifier: Apache-2.0
"""Products of e4m3 matrices in reference mode: numbers, layouts of scales, errors, graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_scales import in_words

import precast
from precast._ops.gemm import _fp8, fp8_gemm
from precast.gemm import gemm_fp8_nt_groupwise, gemm_fp8_nt_groupwise_reference
from precast.shim import look_up
from precast.testing import assert_close

pytestmark = pytest.mark.usefixtures("reference_mode")

E4M3, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
#: Rows, columns and depth: whole blocks, parts of them, less than one.
SHAPES = [(4, 256, 512), (37, 264, 400), (1, 8, 16), (130, 136, 128)]


def blocks(size: int, block: int = 128) -> int:
    return -(-size // block)


def whole(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Small whole numbers, whose products and sums float32 holds exactly."""
    return torch.randint(-4, 5, shape, generator=generator).float().to(E4M3)


def powers(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return 2.0 ** torch.randint(-3, 4, shape, generator=generator).float()


def problem(rows: int, columns: int, depth: int, scale_rows: int = 1) -> dict[str, Any]:
    """Operands and the scales of mode "K"."""
    generator = torch.Generator().manual_seed(rows + columns + depth)
    return {
        "a": whole(generator, rows, depth),
        "b": whole(generator, columns, depth),
        "a_scale": powers(generator, blocks(rows, scale_rows), blocks(depth)),
        "b_scale": powers(generator, blocks(columns), blocks(depth)),
    }


def spread(scales: torch.Tensor, rows: int, scale_rows: int, depth: int) -> torch.Tensor:
    """A scale for each element."""
    each = scales.double().repeat_interleave(scale_rows, 0)[:rows]
    return each.repeat_interleave(128, 1)[:, :depth]


def expected(given: dict[str, Any], scale_rows: int = 1) -> torch.Tensor:
    a, b = given["a"].double(), given["b"].double()
    a = a * spread(given["a_scale"], a.shape[0], scale_rows, a.shape[1])
    return a @ (b * spread(given["b_scale"], b.shape[0], 128, b.shape[1])).T


@pytest.mark.parametrize("dtype", [BF16, torch.float16, F32])
@pytest.mark.parametrize("scale_rows", [1, 128])
@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
def test_every_layout_of_scales(
    rows: int, columns: int, depth: int, scale_rows: int, dtype: torch.dtype
) -> None:
    given = problem(rows, columns, depth, scale_rows)
    want = expected(given, scale_rows).to(dtype)
    granularity = (scale_rows, 128, 128)
    got = gemm_fp8_nt_groupwise(
        **given, scale_major_mode="K", out_dtype=dtype, scale_granularity_mnk=granularity
    )
    assert got.dtype == dtype and torch.equal(got, want)
    transposed = {**given, "a_scale": given["a_scale"].T, "b_scale": given["b_scale"].T}
    out = torch.full_like(got, torch.nan)
    assert (
        gemm_fp8_nt_groupwise(
            **transposed, scale_major_mode="MN", out=out, scale_granularity_mnk=granularity
        )
        is out
    )
    assert torch.equal(out, want)


@pytest.mark.parametrize("scale_rows", [1, 128])
@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
def test_packed_scales(rows: int, columns: int, depth: int, scale_rows: int) -> None:
    given = problem(rows, columns, depth, scale_rows)
    want = expected(given, scale_rows).to(BF16)
    granularity = (scale_rows, 128, 128)
    x, y = in_words(given["a_scale"]), in_words(given["b_scale"])
    each = y.repeat_interleave(128, 0)[:columns]  # Of each row, as DeepGEMM has them.
    for of_a, of_b, mode in ((x, y, "K"), (x, each, "K"), (x.T, y.T, "MN"), (x.T, each.T, "MN")):
        packed = {**given, "a_scale": of_a, "b_scale": of_b}
        got = gemm_fp8_nt_groupwise(
            **packed, scale_major_mode=mode, scale_granularity_mnk=granularity
        )
        assert torch.equal(got, want)


def test_packed_scales_are_those_that_the_quantisation_makes() -> None:
    x, weight = torch.randn(5, 512).bfloat16(), torch.randn(128, 512).bfloat16()
    scale = {"scale_ue8m0": True}
    a, words = precast.per_token_group_quant_8bit(x, 128, **scale, use_packed_ue8m0=True)
    assert words.dtype == torch.int32
    b, b_scale = precast.quantization.per_block_cast_to_fp8(weight, use_ue8m0=True)
    got = gemm_fp8_nt_groupwise(a, b, words, in_words(b_scale), "K")
    _, a_scale = precast.per_token_group_quant_8bit(x, 128, **scale)
    assert torch.equal(got, gemm_fp8_nt_groupwise(a, b, a_scale, b_scale, "K"))


def test_scales_are_both_packed_or_none_is() -> None:
    given = problem(5, 264, 400)
    packed = {**given, "a_scale": in_words(given["a_scale"])}
    with pytest.raises(ValueError, match="b_scale must be int32, as a_scale is, got float32"):
        gemm_fp8_nt_groupwise(**packed, scale_major_mode="K")
    wrong = {**packed, "b_scale": in_words(given["b_scale"])[:, :0]}
    with pytest.raises(ValueError, match=r"b_scale must have shape \[3, 1\], got \[3, 0\]"):
        gemm_fp8_nt_groupwise(**wrong, scale_major_mode="K")


def test_scales_of_other_backends() -> None:
    given = problem(5, 264, 400)
    want = expected(given).to(BF16)
    assert torch.equal(gemm_fp8_nt_groupwise(**given, backend="cutile"), want)
    mixed = {**given, "b_scale": given["b_scale"].T}
    assert torch.equal(gemm_fp8_nt_groupwise(**mixed, backend="trtllm"), want)


def test_each_block_of_the_depth_is_scaled_and_then_added_in_float32() -> None:
    # 2^24 + 1 is no float32: the 1 of the second block is lost, and the -2^24 of the third one
    # leaves 0. A sum over the whole depth before the scales are applied would be 1.
    a, b = torch.zeros(1, 384), torch.zeros(8, 384)
    a[0, ::128] = b[:, ::128] = 1.0
    scales = torch.tensor([[2.0**24, 1.0, -(2.0**24)]])
    got = gemm_fp8_nt_groupwise(
        a.to(E4M3), b.to(E4M3), scales, torch.ones(1, 3), "K", out_dtype=F32
    )
    assert (got == 0).all()


def test_it_takes_what_the_quantisation_makes() -> None:
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(n, 512, generator=generator) for n in (6, 256))
    a, a_scale = precast.per_token_group_quant_8bit(x, 128, column_major_scales=True)
    b, b_scale = precast.quantization.per_block_cast_to_fp8(weight, use_ue8m0=False)
    got = gemm_fp8_nt_groupwise(a, b, a_scale, b_scale, "K", out_dtype=F32)
    assert_close(got, x.double() @ weight.double().T, atol=4.0, rtol=0.1)


def test_the_reference_function() -> None:
    given = problem(5, 264, 400)
    got = gemm_fp8_nt_groupwise_reference(**given, scale_major_mode="K", out_dtype=F32)
    assert torch.equal(got.double(), expected(given))


def test_nothing_to_do() -> None:
    for rows, columns in ((0, 256), (3, 0)):
        given = problem(rows, columns, 128)
        assert gemm_fp8_nt_groupwise(**given, scale_major_mode="K").shape == (rows, columns)


def strided(tensor: torch.Tensor, pad: int) -> torch.Tensor:
    """The same numbers in rows that are ``pad`` elements farther from each other."""
    wide = torch.zeros(tensor.shape[0], tensor.shape[1] + pad).to(tensor.dtype)
    view = wide[:, : tensor.shape[1]]
    view.copy_(tensor)
    return view


def test_strides() -> None:
    given = problem(37, 264, 400)
    want = expected(given).to(BF16)
    given = {name: strided(x, 16) for name, x in given.items()}
    out = torch.zeros(37, 272, dtype=BF16)[:, :264]
    assert torch.equal(gemm_fp8_nt_groupwise(**given, scale_major_mode="K", out=out), want)


def change(**changes: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (change(a=lambda x: x.float()), "a must be float8_e4m3fn, got float32"),
        (change(a=lambda x: x.view(torch.float8_e5m2)), "a must be float8_e4m3fn, got float8_e5m2"),
        (change(a=lambda x: x[0]), r"a must have 2 dimensions, got shape \[400\]"),
        (change(b=lambda x: x[:, :384]), r"b must have shape \[264, 400\], got \[264, 384\]"),
        (change(b=lambda x: x[:260]), r"b must have a multiple of 8 rows, got shape \[260, 400\]"),
        (change(a_scale=lambda x: x.half()), "a_scale must be float32 or int32, got float16"),
        (change(a_scale=lambda x: x.T), r"a_scale must have shape \[37, 4\], got \[4, 37\]"),
        (change(a_scale=lambda x: x[:, :3]), r"a_scale must have shape \[37, 4\], got \[37, 3\]"),
        (change(b_scale=lambda x: x[:2]), r"b_scale must have shape \[3, 4\], got \[2, 4\]"),
        (change(out=lambda x: x[1:]), r"out must have shape \[37, 264\], got \[36, 264\]"),
        (change(out=lambda x: x.to(torch.int16)), "out must be bfloat16 or float16 or float32"),
        (
            change(a=lambda x: x.T.contiguous().T),
            "a must have stride 1 in its last dimension, got strides",
        ),
        (
            change(a=lambda x: strided(x, 8)),
            r"a must have rows that start at different multiples of 16 bytes, got strides \[408",
        ),
        (change(b=lambda x: x[:1].expand(264, -1)), "b must have rows that start at different"),
        (
            change(out=lambda x: strided(x, 4)),
            r"out must have rows that start at different multiples of 16 bytes, got",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: str) -> None:
    out = torch.full((37, 264), -7.0, dtype=BF16)
    given = {**problem(37, 264, 400), "out": out}
    for name, make in changes.items():
        given[name] = make(given[name])
    if "b" in changes and given["b"].shape[0] == 260:
        given["out"] = out[:, :260]
    with pytest.raises(ValueError, match=f"^gemm_fp8_nt_groupwise: {words}"):
        gemm_fp8_nt_groupwise(**given, scale_major_mode="K")
    assert (out == -7).all()


@pytest.mark.parametrize("depth", [0, 40])
def test_a_depth_that_is_no_multiple(depth: int) -> None:
    a, b = (torch.zeros(n, depth).to(E4M3) for n in (3, 8))
    scales = torch.zeros(1, blocks(depth))
    with pytest.raises(
        ValueError, match="a must have a positive multiple of 16 columns, got shape"
    ):
        gemm_fp8_nt_groupwise(a, b, scales.expand(3, -1), scales, "K")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"scale_major_mode": "N"}, "scale_major_mode must be 'MN' or 'K', got 'N'"),
        ({"scale_major_mode": None}, "scale_major_mode must be 'MN' or 'K' with backend='cutlass'"),
        ({"mma_sm": 4}, "mma_sm must be 1 or 2, got 4"),
        (
            {"scale_granularity_mnk": (1, 1, 128)},
            r"scale_granularity_mnk must be \(1, 128, 128\) or",
        ),
        (
            {"backend": "cudnn"},
            "backend must be one of 'cutlass', 'trtllm', 'cutile', 'mma', got 'cudnn'",
        ),
    ],
)
def test_options_that_are_refused(wrong: dict[str, Any], words: str) -> None:
    out = torch.full((37, 264), -7.0, dtype=BF16)
    given = {**problem(37, 264, 400), "scale_major_mode": "K", "out": out, **wrong}
    with pytest.raises(ValueError, match=f"^gemm_fp8_nt_groupwise: {words}"):
        gemm_fp8_nt_groupwise(**given)
    assert (out == -7).all()


def test_an_output_that_overlaps_is_refused() -> None:
    given = problem(16, 64, 128)
    out = given["a"].view(torch.bfloat16)
    with pytest.raises(ValueError, match="gemm_fp8_nt_groupwise: out must not overlap a's memory"):
        gemm_fp8_nt_groupwise(**given, scale_major_mode="K", out=out)


def test_limits_are_those_of_the_kernel() -> None:
    root = Path(__file__).resolve().parents[3]
    text = (root / "csrc" / "gemm" / "gemm_checks.h").read_text()
    assert (_fp8.MAX_DEPTH, _fp8.MAX_ROWS) == (2**31 - 129, 2**31 - 513)
    assert "constexpr int64_t kMostDepth = kMostInt - kFp8Block;" in text
    assert "constexpr int64_t kMostRows = kMostInt - 512;" in text


def test_tiles_of_the_kernels_for_every_gpu() -> None:
    given = {**problem(5, 264, 400), "scale_major_mode": "K"}
    want = gemm_fp8_nt_groupwise(**given)
    for tile in range(_fp8.MMA_TILES):
        got = gemm_fp8_nt_groupwise(**given, backend="mma", choice=tile)
        assert torch.equal(got, want)
    with pytest.raises(ValueError, match="choice must be -1 or a tile below 4, got 4"):
        gemm_fp8_nt_groupwise(**given, backend="mma", choice=_fp8.MMA_TILES)
    root = Path(__file__).resolve().parents[3]
    text = (root / "include" / "precast" / "gemm" / "gemm_tiles.cuh").read_text()
    table = text.partition("kGemmTiles[] = {")[2].partition("};")[0]
    assert table.count("},") == _fp8.MMA_TILES


@pytest.mark.parametrize("backend", ["cutlass", "mma"])
@pytest.mark.parametrize("hopper", [False, True])
def test_which_kernels_run(backend: str, hopper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fp8, "is_hopper", lambda device: hopper)
    both = fp8_gemm._GEMM, fp8_gemm._GEMM_SM90
    a = problem(1, 8, 16)["a"]
    assert _fp8.chosen(both, a, backend).op == (
        "fp8_gemm_sm90" if hopper and backend == "cutlass" else "fp8_gemm"
    )


def test_torch_compile_without_a_graph_break() -> None:
    given = problem(5, 264, 400)
    want = gemm_fp8_nt_groupwise(**given, scale_major_mode="K")

    def call(given: dict[str, Any]) -> torch.Tensor:
        return gemm_fp8_nt_groupwise(**given, scale_major_mode="K") + 0

    torch._dynamo.reset()
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(given), want)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_name_is_where_flashinfer_has_it(engine: str) -> None:
    assert look_up("gemm", "gemm_fp8_nt_groupwise", engine) is gemm_fp8_nt_groupwise
