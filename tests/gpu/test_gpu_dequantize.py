# SPDX-License-Identifier: Apache-2.0
"""Dequantisation: the same bits as the formula, for every tile, type, stride and layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from code_params import CODES

import precast
from precast.testing import Guarded

OUT = [torch.float32, torch.float16, torch.bfloat16]
codes_of = pytest.mark.parametrize("kind", CODES)
into = pytest.mark.parametrize("dtype", OUT, ids=["f32", "f16", "bf16"])


def draw(*shape: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Codes of every kind: all bytes occur."""
    raw = torch.randint(0, 256, shape, generator=generator, device="cuda").to(torch.uint8)
    return raw.view(dtype)


def scales_of(*shape: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device="cuda") * 0.01


def expected(
    codes: torch.Tensor, scales: torch.Tensor, tile: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    codes, scales = codes.cpu(), scales.cpu()
    wide = scales.repeat_interleave(tile[0], -2).repeat_interleave(tile[1], -1)
    return (codes.float() * wide[..., : codes.shape[-2], : codes.shape[-1]]).to(dtype)


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)


def tiles(shape: tuple[int, ...], tile: tuple[int, int]) -> tuple[int, ...]:
    return (*shape[:-2], -(-shape[-2] // tile[0]), -(-shape[-1] // tile[1]))


@codes_of
@into
@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ((37, 1152), (37, 1152)),  # a tensor
        ((37, 1152), (1, 1152)),  # tokens
        ((37, 1152), (1, 128)),  # groups
        ((300, 200), (128, 128)),  # ragged blocks
        ((3, 257, 384), (128, 128)),
        ((5, 129), (1, 3)),  # several scales a vector
        ((7, 1000), (2, 20)),
        ((1, 1), (1, 1)),
        ((70000, 16), (1, 16)),
    ],
)
def test_tiles(
    kind: torch.dtype,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    tile: tuple[int, int],
    generator: torch.Generator,
) -> None:
    codes = draw(*shape, dtype=kind, generator=generator)
    scales = scales_of(*tiles(shape, tile), generator=generator)
    want = expected(codes, scales, tile, dtype)
    guard = Guarded(shape, dtype)
    how: dict[str, Any] = {"tile_rows": tile[0], "tile_columns": tile[1], "out": guard.view}
    same(precast.dequantize_fp8(codes, scales, **how), want)
    guard.check("dequantize_fp8")
    transposed = scales.transpose(-1, -2).contiguous()
    same(precast.dequantize_fp8(codes, transposed, "MN", **how), want)


@into
@pytest.mark.parametrize(("gap", "offset"), [(16, 0), (1, 0), (0, 1), (7, 3)])
def test_strides(dtype: torch.dtype, gap: int, offset: int, generator: torch.Generator) -> None:
    memory = draw(64 + 37 * (1152 + gap), dtype=torch.float8_e4m3fn, generator=generator)
    codes = memory.as_strided((37, 1152), (1152 + gap, 1), offset)
    scales = scales_of(37, 9, generator=generator)
    guard = Guarded((37, 1152), dtype, gap=gap, offset=offset)
    got = precast.dequantize_fp8(codes, scales, out=guard.view)
    same(got, expected(codes, scales, (1, 128), dtype))
    guard.check("dequantize_fp8")


@pytest.mark.parametrize("columns", [128, 640, 1024])
def test_packed_exponents(columns: int, generator: torch.Generator) -> None:
    x = torch.randn(33, columns, generator=generator, device="cuda").bfloat16()
    x[4] = torch.nan
    form: dict[str, Any] = {"scale_ue8m0": True, "column_major_scales": True}
    codes, scales = precast.per_token_group_quant_8bit(x, 128, **form)
    words = precast.per_token_group_quant_8bit(
        x, 128, **form, scale_tma_aligned=True, use_packed_ue8m0=True
    )[1]
    want = precast.dequantize_fp8(codes, scales)
    same(precast.dequantize_fp8(codes, words), want.cpu())
    assert want[4].isnan().all() and want[:4].isfinite().all()


def test_empty_and_invalid_arguments() -> None:
    codes = torch.zeros(4, 256, device="cuda").to(torch.float8_e4m3fn)
    assert precast.dequantize_fp8(codes[:0], torch.ones(0, 2, device="cuda")).shape == (0, 256)
    ones = torch.ones(4, 2, device="cuda")
    for words, call in (
        ("x must be a CUDA tensor", lambda: precast.dequantize_fp8(codes.cpu(), ones)),
        ("x_scale must be on cuda", lambda: precast.dequantize_fp8(codes, ones.cpu())),
        ("x_scale must be float32", lambda: precast.dequantize_fp8(codes, ones.half())),
        (
            r"x_scale must hold \[4, 4\] scales",
            lambda: precast.dequantize_fp8(codes, ones, tile_columns=64),
        ),
        (
            "out must have x's shape",
            lambda: precast.dequantize_fp8(codes, ones, out=ones),
        ),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_graph_and_compile(generator: torch.Generator) -> None:
    codes = draw(65, 1024, dtype=torch.int8, generator=generator)
    scales = scales_of(65, 8, generator=generator)
    out = precast.dequantize_fp8(codes, scales)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        precast.dequantize_fp8(codes, scales, out=out)
    codes.copy_(draw(65, 1024, dtype=torch.int8, generator=generator))
    out.fill_(torch.nan)
    graph.replay()
    same(out, expected(codes, scales, (1, 128), torch.float32))
    torch._dynamo.reset()
    compiled = torch.compile(lambda c, s: precast.dequantize_fp8(c, s) + 1, fullgraph=True)
    same(compiled(codes, scales), out.cpu() + 1)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 20 << 30,
    reason="needs 20 GiB of free GPU memory",
)
def test_more_than_2_to_31_elements(generator: torch.Generator, free_memory: None) -> None:
    rows, columns = 2**31 // 4096 + 9, 4096
    codes = torch.zeros(rows, columns, dtype=torch.int8, device="cuda")
    codes.random_(-128, 128, generator=generator)
    scales = scales_of(rows, 32, generator=generator)
    out = precast.dequantize_fp8(codes, scales, out_dtype=torch.bfloat16)
    for row in (0, 2**30 // columns, 2**31 // columns - 1, 2**31 // columns, rows - 1):
        part = slice(row, row + 1)
        same(out[part], expected(codes[part], scales[part], (1, 128), torch.bfloat16))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
def test_second_device(generator: torch.Generator) -> None:
    codes = draw(37, 1152, dtype=torch.float8_e4m3fn, generator=generator)
    scales = scales_of(37, 9, generator=generator)
    want = precast.dequantize_fp8(codes, scales)
    got = precast.dequantize_fp8(codes.to("cuda:1"), scales.to("cuda:1"))
    assert torch.cuda.current_device() == 0
    assert got.device == torch.device("cuda:1")
    same(got, want.cpu())
