# SPDX-License-Identifier: Apache-2.0
"""Numbers from blocks, and scales into tiles: bit for bit what the references make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from block_calls import LAYOUTS, Buffer, global_scale, numbers, same_bits

import precast
from precast import SfLayout
from precast._op.dispatch import kernels
from precast._ops.quantize._reference_blocks import scale_shape
from precast.quantization import (
    block_scale_interleave_reference,
    e2m1_and_ufp8sf_scale_to_float_reference,
    mxfp4_dequantize_reference,
    mxfp8_dequantize_reference,
    nvfp4_kv_dequantize_reference,
)

BF16 = torch.bfloat16
LINEAR = SfLayout.layout_linear
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
SIZES = [(1, 32), (7, 96), (129, 160), (300, 1024), (64, 7168), (601, 7200)]


def data(*shape: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=generator)


def calls(
    rows: int, columns: int, layout: SfLayout, generator: torch.Generator
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What each function makes, and its reference, of the same random bytes, NaN among them."""
    tiled, small = layout != LINEAR, layout == SfLayout.layout_8x4
    packed = data(rows, columns // 2, generator=generator)
    of_16 = data(*scale_shape(rows, columns // 16, layout), generator=generator)
    of_32 = data(*scale_shape(rows, columns // 32, layout), generator=generator)
    eights = data(rows, columns, generator=generator).view(torch.float8_e4m3fn)
    g = torch.rand(1, device="cuda", generator=generator) + 0.01
    host = [t.cpu() for t in (packed, of_16, of_32, eights.view(torch.uint8), g)]
    host[3] = host[3].view(torch.float8_e4m3fn)
    found = []
    for block, kind, scales, its in ((16, 1, of_16, host[1]), (32, 1, of_32, host[2])):
        got = precast.e2m1_and_ufp8sf_scale_to_float(packed, scales, g, block, kind, tiled, small)
        want = e2m1_and_ufp8sf_scale_to_float_reference(
            host[0], its, host[4], block, kind, tiled, small
        )
        found.append((got, want))
    got = precast.e2m1_and_ufp8sf_scale_to_float(packed, of_32, None, 32, 0, tiled, small)
    found.append((got, mxfp4_dequantize_reference(host[0], host[2], int(layout))))
    found.append((precast.mxfp4_dequantize(packed, of_32, layout), found[-1][1]))
    for dtype in (torch.float32, torch.float16, BF16):
        got = precast.mxfp8_dequantize(eights, of_32, layout, dtype)
        found.append((got, mxfp8_dequantize_reference(host[3], host[2], int(layout), dtype)))
        if layout == LINEAR:
            got = precast.nvfp4_kv_dequantize(packed, of_16, g, dtype)
            want = nvfp4_kv_dequantize_reference(host[0], host[1], host[4], dtype)
            found.append((got, want))
    return found


def same_numbers(got: torch.Tensor, want: torch.Tensor) -> None:
    """The same bits; any NaN is one."""
    want = want.to(got.device)
    assert got.dtype == want.dtype
    assert torch.equal(got.isnan(), want.isnan())
    same_bits(got.masked_fill(got.isnan(), 0.0), want.masked_fill(want.isnan(), 0.0))


@layouts
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_numbers(rows: int, columns: int, layout: SfLayout, generator: torch.Generator) -> None:
    for got, want in calls(rows, columns, layout, generator):
        same_numbers(got, want)


@layouts
def test_every_number_with_every_scale(layout: SfLayout) -> None:
    """256 rows, each with a scale of its own, hold every byte."""
    every = torch.arange(256, dtype=torch.uint8, device="cuda")
    scales = every[:, None].expand(256, 16).contiguous()
    e4m3 = every.expand(256, 256).contiguous().view(torch.float8_e4m3fn)
    packed = every.expand(256, 256).contiguous()  # 512 numbers a row
    for block, count in ((32, 8), (16, 16)):
        its = scales[:, :1].expand(256, 512 // block).contiguous()
        placed = its.flatten() if layout == LINEAR else _placed(its, layout)
        for kind in (0, 1):
            g = torch.tensor([0.7], device="cuda")
            tiled, small = layout != LINEAR, layout == SfLayout.layout_8x4
            got = precast.e2m1_and_ufp8sf_scale_to_float(
                packed, placed, g, block, kind, tiled, small
            )
            want = e2m1_and_ufp8sf_scale_to_float_reference(
                packed.cpu(), its.cpu(), g.cpu(), block, kind, False
            )
            same_numbers(got, want)
        if block == 32:
            eight = its[:, :count].contiguous()
            placed = eight if layout == LINEAR else _placed(eight, layout)
            for dtype in (torch.float32, torch.float16, BF16):
                got = precast.mxfp8_dequantize(e4m3, placed, layout, dtype)
                want = mxfp8_dequantize_reference(e4m3.cpu(), eight.cpu(), 2, dtype)
                same_numbers(got, want)


def _placed(scales: torch.Tensor, layout: SfLayout) -> torch.Tensor:
    from precast._ops.quantize._reference_blocks import place_scales

    return place_scales(scales.cpu(), int(layout)).cuda()


def test_nothing_is_written_outside(generator: torch.Generator) -> None:
    packed = data(13, 48, generator=generator)
    scales = data(13, 6, generator=generator)
    g = torch.ones(1, device="cuda")
    out = Buffer(13, 96, dtype=BF16)
    kernels()["nvfp4_kv_dequantize"][BF16, 0](packed, scales, g, out.view, True)
    same_numbers(out.view, nvfp4_kv_dequantize_reference(packed.cpu(), scales.cpu(), g.cpu()))
    out.check()


@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (0, 3, 32)])
def test_empty(shape: tuple[int, ...]) -> None:
    packed = torch.empty(shape, dtype=torch.uint8, device="cuda")
    scales = torch.empty(0, dtype=torch.uint8, device="cuda")
    assert precast.mxfp4_dequantize(packed, scales, LINEAR).numel() == 0


def test_leading_dimensions_are_rows(generator: torch.Generator) -> None:
    packed, scales = data(2, 5, 32, generator=generator), data(10, 2, generator=generator)
    got = precast.mxfp4_dequantize(packed, scales, LINEAR)
    same_numbers(got.view(10, 64), precast.mxfp4_dequantize(packed.view(10, 32), scales, LINEAR))


def test_more_than_2_to_31_elements(free_memory: None) -> None:
    rows, columns = (1 << 16) + 3, 1 << 15
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of GPU memory")
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(40, 80, (rows, columns // 16), dtype=torch.uint8, device="cuda")
    g = torch.ones(1, device="cuda")
    out = precast.nvfp4_kv_dequantize(packed, scales, g)
    want = nvfp4_kv_dequantize_reference(packed[-2:].cpu(), scales[-2:].cpu(), g.cpu())
    same_numbers(out[-2:], want)


G = torch.ones(1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda q, s: precast.mxfp4_dequantize(q[:, 1:], s), "a_fp4 must be contiguous"),
        (
            lambda q, s: precast.mxfp4_dequantize(q.flatten()[1:33].view(1, 32), s[:1], LINEAR),
            "a_fp4 must start at a multiple of 16 bytes",
        ),
        (lambda q, s: precast.mxfp4_dequantize(q, s[:1], LINEAR), "a_sf must have 8 elements"),
        (lambda q, s: precast.mxfp4_dequantize(q, s.float(), LINEAR), "a_sf must be uint8"),
        (lambda q, s: precast.mxfp4_dequantize(q, s, 5), "sfLayout must be 0 "),
        (lambda q, s: precast.mxfp8_dequantize(q, s, LINEAR), "must be float8_e4m3fn, got uint8"),
        (lambda q, s: precast.nvfp4_kv_dequantize(q, s, G), "global_scale must be on cuda:0"),
        (
            lambda q, s: precast.nvfp4_kv_dequantize(q, s, G.cuda(), torch.int32),
            "dtype=i32 is not supported",
        ),
    ],
)
def test_invalid_arguments(call: Callable[..., Any], words: str) -> None:
    q = torch.zeros((4, 32), dtype=torch.uint8, device="cuda")
    s = torch.zeros((4, 4), dtype=torch.uint8, device="cuda")
    scales = s[:, :2].contiguous() if "global" not in words else s
    with pytest.raises(ValueError, match=words):
        call(q, scales)


def test_graph_and_compile(generator: torch.Generator) -> None:
    x = numbers(33, 512, dtype=BF16, generator=generator)
    g = global_scale(x)

    def there_and_back(x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, scales = precast.nvfp4_quantize(x, g, LINEAR)
        eights, of_32 = precast.mxfp8_quantize(x)
        return (
            precast.nvfp4_kv_dequantize(q, scales, 1 / g, torch.float16) * 2,
            precast.e2m1_and_ufp8sf_scale_to_float(q, scales, 1 / g, is_sf_swizzled_layout=False),
            precast.mxfp4_dequantize(*precast.mxfp4_quantize(x)) + 1,
            precast.mxfp8_dequantize(eights, of_32, output_dtype=BF16),
            precast.block_scale_interleave(scales),
        )

    want = there_and_back(x, g)
    torch._dynamo.reset()
    for mine, theirs in zip(torch.compile(there_and_back, fullgraph=True)(x, g), want, strict=True):
        same_bits(mine, theirs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = there_and_back(x, g)
    for output in outputs:
        output.zero_()
    graph.replay()
    for mine, theirs in zip(outputs, want, strict=True):
        same_bits(mine, theirs)


# -- scales into tiles ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, BF16], ids=["u8", "bf16"])
@pytest.mark.parametrize("columns", [1, 3, 4, 16, 30, 32, 33, 64, 448, 449])
@pytest.mark.parametrize("rows", [1, 31, 128, 129, 1000])
def test_interleave(
    rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    scales = data(rows, columns, generator=generator).to(dtype)
    want = block_scale_interleave_reference(scales.cpu())
    same_bits(precast.block_scale_interleave(scales), want)
    out = Buffer(want.numel(), dtype=dtype)
    precast.block_scale_interleave(scales, out=out.view)
    same_bits(out.view, want)
    out.check()
    shifted = torch.empty(scales.numel() + 1, dtype=dtype, device="cuda")[1:].view(rows, columns)
    same_bits(precast.block_scale_interleave(shifted.copy_(scales)), want)
    experts = data(3, rows, columns, generator=generator).to(dtype)
    same_bits(
        precast.block_scale_interleave(experts), block_scale_interleave_reference(experts.cpu())
    )


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 40001, 304), torch.uint8), ((250_001, 144), torch.uint8), ((70001, 264), BF16)],
)
def test_interleave_of_much(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Rows that eight lanes share: more than 128 bytes, the last part of them partial."""
    scales = data(*shape, generator=generator).to(dtype)
    want = block_scale_interleave_reference(scales.cpu())
    out = Buffer(want.numel(), dtype=dtype)
    kernels()["block_scale_interleave"][dtype, 0](scales, out.view, True)
    same_bits(out.view, want)
    out.check()


def test_interleaved_scales_are_those_of_the_tiled_layout(generator: torch.Generator) -> None:
    x = numbers(300, 1024, dtype=BF16, generator=generator)
    g = global_scale(x)
    linear = precast.nvfp4_quantize(x, g, LINEAR)[1]
    tiled = precast.nvfp4_quantize(x, g)[1]
    same_bits(precast.block_scale_interleave(linear), tiled.flatten())
    assert precast.block_scale_interleave(linear[:0]).numel() == 0


def test_more_than_2_to_31_scales(free_memory: None) -> None:
    rows, columns = (1 << 20) + 5, 2048 + 4
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of GPU memory")
    scales = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, device="cuda")
    out = precast.block_scale_interleave(scales)
    first = rows // 128 * 128
    same_bits(out[first * columns :], precast.block_scale_interleave(scales[first:]))


def test_more_than_2_to_31_numbers_of_every_format(free_memory: None) -> None:
    """The last rows of each op but the one above, in tiles where it has them."""
    rows, columns = (1 << 16) + 128, 1 << 15
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of GPU memory")
    last = slice(rows - 128, rows)  # A row of tiles.
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(40, 80, (rows, columns // 32), dtype=torch.uint8, device="cuda")
    for layout in (SfLayout.layout_128x4, LINEAR):
        out = precast.mxfp4_dequantize(packed, scales, layout)
        want = mxfp4_dequantize_reference(packed[last].cpu(), scales[last].cpu(), int(layout))
        same_numbers(out[last], want)
        del out
    g = torch.full((1,), 0.5, device="cuda")
    out = precast.e2m1_and_ufp8sf_scale_to_float(packed, scales, g, 32)
    want = e2m1_and_ufp8sf_scale_to_float_reference(
        packed[last].cpu(), scales[last].cpu(), g.cpu(), 32
    )
    same_numbers(out[last], want)
    del out, packed
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, device="cuda")
    eights = codes.view(torch.float8_e4m3fn)
    out = precast.mxfp8_dequantize(eights, scales, LINEAR, BF16)
    want = mxfp8_dequantize_reference(eights[last].cpu(), scales[last].cpu(), 2, BF16)
    same_numbers(out[last], want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
@layouts
def test_second_device(layout: SfLayout, generator: torch.Generator) -> None:
    rows, columns = 129, 160
    packed = data(rows, columns // 2, generator=generator)
    of_16 = data(*scale_shape(rows, columns // 16, layout), generator=generator)
    of_32 = data(*scale_shape(rows, columns // 32, layout), generator=generator)
    linear = data(rows, columns // 16, generator=generator)
    eights = data(rows, columns, generator=generator).view(torch.float8_e4m3fn)
    g = torch.full((1,), 0.5, device="cuda")
    flags = (layout != LINEAR, layout == SfLayout.layout_8x4)
    scales = data(3, 130, 6, generator=generator)
    made: list[tuple[Callable[..., torch.Tensor], tuple[Any, ...]]] = [
        (precast.mxfp4_dequantize, (packed, of_32, layout)),
        (precast.mxfp8_dequantize, (eights, of_32, layout, BF16)),
        (precast.nvfp4_kv_dequantize, (packed, linear, g)),
        (precast.e2m1_and_ufp8sf_scale_to_float, (packed, of_16, g, 16, 1, *flags)),
        (precast.block_scale_interleave, (scales,)),
        (precast.block_scale_interleave, (scales.to(BF16),)),
    ]
    for function, args in made:
        want = function(*args)
        there = [a.to("cuda:1") if isinstance(a, torch.Tensor) else a for a in args]
        got = function(*there)
        assert torch.cuda.current_device() == 0
        assert got.device == torch.device("cuda:1")
        same_numbers(got.cpu().float(), want.cpu().float())
