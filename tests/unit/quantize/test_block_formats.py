# SPDX-License-Identifier: Apache-2.0
"""The references of packed bits and block-scaled formats against independent words for the same.

The kernels' own arithmetic is repeated here where it is not the reference's: rounding by additions,
scales by exponent bits, places by shifts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import precast
from precast import SfLayout, quantization
from precast._ops.quantize import _reference_blocks as formats

MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
LAYOUTS = list(SfLayout)
LINEAR = SfLayout.layout_linear
ONE = torch.ones(1)
#: What does not fill tiles, fills one, and a little more.
SIZES = [(1, 1), (3, 5), (8, 4), (127, 3), (128, 4), (129, 9), (300, 20)]
BF16 = torch.bfloat16

pytestmark = pytest.mark.usefixtures("reference_mode")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = BF16, spread: float = 4.0) -> Any:
    """Normal numbers times powers of two that differ from row to row."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    powers = torch.randn((*shape[:-1], 1), generator=generator) * spread
    return (x * torch.exp2(powers.round())).to(dtype)


# -- e2m1 -----------------------------------------------------------------------------------------


def nearest_code(x: float) -> int:
    """By distances in exact arithmetic; of two as near the even code."""
    distances = [abs(min(abs(x), 8.0) - m) for m in MAGNITUDES.tolist()]
    least = min(distances)
    best = [code for code, distance in enumerate(distances) if distance == least]
    code = best[0] if len(best) == 1 else next(c for c in best if c % 2 == 0)
    return code | (8 if math.copysign(1.0, x) < 0 else 0)


def edges() -> torch.Tensor:
    """All ties and codes, and the float32 numbers beside them."""
    at = torch.cat([MAGNITUDES, (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2, torch.tensor([7.0, 1e30])])
    beside = [torch.nextafter(at, torch.tensor(to)) for to in (0.0, math.inf)]
    near = torch.cat([at, *beside, torch.linspace(0, 8, 4001)])
    return torch.cat([near, -near])


def test_e2m1_is_nearest_with_ties_to_even() -> None:
    x = edges()
    x = x[: len(x) // 8 * 8]
    want = torch.tensor([nearest_code(v) for v in x.tolist()], dtype=torch.uint8)
    assert torch.equal(formats.e2m1_codes(x), want)
    special = torch.tensor([math.inf, -math.inf, math.nan, -math.nan, -0.0])
    assert formats.e2m1_codes(special).tolist() == [7, 15, 7, 7, 8]


def test_the_kernels_rounding_by_additions() -> None:
    """include/precast/core/fp4.cuh: the lowest of three lines, each rounded by an addition."""
    a = edges().abs().clamp(max=6).numpy().astype(np.float32)
    exact = a.astype(np.float64)
    lines = [
        (exact * scale + base).astype(np.float32)  # one rounding, as a fused multiply-add
        for scale, base in ((2.0, 8388608.0), (1.0, 8388610.0), (0.5, 8388612.0))
    ]
    codes = np.minimum.reduce(lines).view(np.uint32) - np.uint32(0x4B000000)
    assert (codes == formats.e2m1_codes(torch.from_numpy(a)).numpy()).all()


def test_all_bytes_of_e2m1_come_back() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    values = formats.e2m1_unpack(packed)
    assert torch.equal(formats.e2m1_pack(formats.e2m1_codes(values)), packed)
    assert values[1, 2:4].tolist() == [0.5, 0.5]  # byte 0x11
    assert values[15, 30:].tolist() == [-6.0, -6.0]


# -- ue8m0 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("exponent", "mantissa"), [(2, 1.5), (8, 1.75)])
def test_ue8m0_is_the_least_scale_that_is_enough(exponent: int, mantissa: float) -> None:
    largest = mantissa * 2.0**exponent
    powers = torch.exp2(torch.arange(-149.0, 128.0, dtype=torch.float64)).float()
    factors = torch.tensor([1.0, 1.5, 1.75, 1.9999])
    amax = (powers[:, None] * factors).flatten()
    amax = torch.cat([amax, torch.nextafter(amax, torch.tensor(math.inf))])
    amax = amax[amax.isfinite()]
    scale = formats.ue8m0_round_up(amax, exponent, mantissa)
    value = torch.exp2(scale.double() - 127)
    assert (amax.double() <= value * largest).all()
    assert ((amax.double() > value / 2 * largest) | (scale == 0)).all()
    # As the kernel has it, from the bits.
    bits = amax.numpy().view(np.int32).astype(np.int64)
    carry = 0x7FFFFF - round((mantissa - 1) * 2**23)
    of_bits = np.maximum(((bits + carry) >> 23) - exponent, 0)
    assert (scale.numpy() == of_bits).all()
    assert formats.ue8m0_round_up(torch.tensor([0.0, math.inf]), exponent, mantissa).tolist() == [
        0,
        254,
    ]


def test_ue8m0_values() -> None:
    values = formats.ue8m0_values(torch.arange(256, dtype=torch.uint8))
    assert values[[0, 1, 127, 254]].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert values[255].isnan()


# -- layouts --------------------------------------------------------------------------------------


def place_of_shifts(number: int, per_row: int, layout: SfLayout) -> tuple[int, int]:
    """ScalePosition of include/precast/quantize/scale_layout.cuh: row and column of a place."""
    if layout is SfLayout.layout_linear:
        return divmod(number, per_row)
    high = layout is SfLayout.layout_128x4
    tile = number >> 9 if high else number >> 5
    tile_row, tile_column = divmod(tile, per_row)
    word = number >> 2
    inside = (word & 3) * 32 + (word >> 2 & 31) if high else word & 7
    return tile_row * (128 if high else 8) + inside, tile_column * 4 + (number & 3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_places_of_scales(rows: int, columns: int, layout: SfLayout) -> None:
    scales = (torch.arange(rows * columns) % 255 + 1).to(torch.uint8).view(rows, columns)
    placed = formats.place_scales(scales, layout)
    assert torch.equal(formats.gather_scales(placed, rows, columns, layout), scales)
    assert (placed != 0).sum() == rows * columns, "padding is zero, and nothing is overwritten"
    tile = {SfLayout.layout_128x4: (128, 4), SfLayout.layout_8x4: (8, 4)}.get(layout, (1, 1))
    assert placed.shape == tuple(-(-n // t) * t for n, t in zip((rows, columns), tile))
    per_row = columns if layout is SfLayout.layout_linear else -(-columns // 4)
    for number, value in enumerate(placed.flatten().tolist()):
        row, column = place_of_shifts(number, per_row, layout)
        inside = row < rows and column < columns
        assert value == (scales[row, column] if inside else 0)


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_tiles_of_128x4_as_cublas_describes_them(rows: int, columns: int) -> None:
    scales = torch.randint(1, 255, (rows, columns), dtype=torch.uint8)
    padded = torch.nn.functional.pad(scales, (0, -columns % 4, 0, -rows % 128))
    tiles = padded.view(-(-rows // 128), 4, 32, -(-columns // 4), 4).permute(0, 3, 2, 1, 4)
    assert torch.equal(precast.block_scale_interleave(scales), tiles.flatten())
    both = torch.stack([scales, scales.flip(0)])
    parts = precast.block_scale_interleave(both).view(2, -1)
    assert torch.equal(parts[0], tiles.flatten())
    wide = precast.block_scale_interleave(scales.to(BF16))
    assert wide.dtype == BF16
    assert torch.equal(wide, tiles.flatten().to(BF16))
    assert precast.nvfp4_block_scale_interleave is precast.block_scale_interleave


# -- quantisation ---------------------------------------------------------------------------------


def global_scale(x: torch.Tensor) -> torch.Tensor:
    return (448 * 6 / x.abs().amax().float()).reshape(1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("shape", [(1, 32), (7, 96), (130, 160), (2, 3, 64)])
def test_there_and_back(shape: tuple[int, ...], dtype: torch.dtype, layout: SfLayout) -> None:
    """Each number comes back within half a step of its block's scale."""
    x = draw(*shape, dtype=dtype, spread=2.0)
    g = global_scale(x)
    tiled, small = layout != SfLayout.layout_linear, layout == SfLayout.layout_8x4
    results = {
        16: precast.nvfp4_quantize(x, g, layout),
        32: precast.mxfp4_quantize(x, sfLayout=layout),
    }
    for block, (q, scales) in results.items():
        assert q.dtype == scales.dtype == torch.uint8
        assert q.shape == (*shape[:-1], shape[-1] // 2)
        back = precast.e2m1_and_ufp8sf_scale_to_float(
            q, scales, 1 / g, block, int(block == 16), tiled, small
        )
        biggest = x.float().unflatten(-1, (-1, block)).abs().amax(-1).repeat_interleave(block, -1)
        # Half of the widest step, 1 of 6, and a sixteenth for the rounding of an e4m3 scale; one
        # that is a power of two may be twice as large as needed.
        assert ((back - x.float()).abs() <= biggest * (17 / 96 if block == 16 else 1 / 3)).all()
    assert torch.equal(precast.mxfp4_dequantize(*results[32], layout), back)
    q, scales = precast.mxfp8_quantize(x, sf_swizzle_layout=layout)
    assert q.dtype == torch.float8_e4m3fn
    assert q.shape == x.shape
    assert scales.dim() == 1
    back = precast.mxfp8_dequantize(q, scales, layout)
    torch.testing.assert_close(back, x.float(), rtol=2**-4, atol=1e-6)
    assert torch.equal(precast.mxfp8_dequantize_host(q, scales, tiled, layout), back.view(x.shape))


def test_nvfp4_by_hand() -> None:
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([12.0, -6.0, 1.0, -0.0])
    q, scales = precast.nvfp4_quantize(x.half(), torch.tensor([4.0]), SfLayout.layout_linear)
    # 4 * 12 / 6 = 8; 12, -6 and 1 times 4 / 8 are 6, -3 and 0.5.
    assert scales.view(torch.float8_e4m3fn).float().tolist() == [[8.0, 0.0]]
    assert q[0, :2].tolist() == [0xD7, 0x81]
    assert not q[0, 2:].any()
    by_fp4, scales_too = precast.fp4_quantize(
        x.half(), torch.tensor([0.25]), is_sf_swizzled_layout=False, is_global_scale_inversed=True
    )
    assert torch.equal(by_fp4, q)
    assert torch.equal(scales_too, scales)


@pytest.mark.parametrize("shape", [(1, 16), (7, 96), (2, 3, 64), (0, 32), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_key_value_caches_there_and_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The scale is that of dequantisation, and scales have the leading dimensions of the input."""
    x = draw(*shape, dtype=dtype, spread=2.0)
    g = 1 / global_scale(x) if x.numel() else ONE
    q, scales = precast.nvfp4_kv_quantize(x, g)
    assert q.dtype == scales.dtype == torch.uint8
    assert q.shape == (*shape[:-1], shape[-1] // 2)
    assert scales.shape == (*shape[:-1], shape[-1] // 16)
    back = precast.nvfp4_kv_dequantize(q, scales, g, torch.float32)
    biggest = x.float().unflatten(-1, (-1, 16)).abs().amax(-1).repeat_interleave(16, -1)
    assert ((back - x.float()).abs() <= biggest * 17 / 96).all()


def test_key_value_caches_by_hand() -> None:
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([12.0, -6.0, 1.0, -0.0])
    q, scales = precast.nvfp4_kv_quantize(x.half(), torch.tensor(0.25))
    # 12 / 6 / 0.25 = 8; 12, -6 and 1 by 8 * 0.25 are 6, -3 and 0.5.
    assert scales.view(torch.float8_e4m3fn).float().tolist() == [[8.0, 0.0]]
    assert q[0, :2].tolist() == [0xD7, 0x81]
    assert not q[0, 2:].any()


def test_a_global_scale_of_each_row() -> None:
    x = draw(5, 64)
    g = torch.tensor([1.0, 3.0, 0.25, 100.0, 7.0])
    q, scales = precast.nvfp4_quantize(x, g, SfLayout.layout_linear)
    for row in range(5):
        one, its = precast.nvfp4_quantize(x[row : row + 1], g[row], SfLayout.layout_linear)
        assert torch.equal(q[row], one[0])
        assert torch.equal(scales[row], its[0])


def test_nan_infinity_and_zero() -> None:
    x = torch.ones(5, 32)
    x[0, 3], x[1, 3], x[2, 3], x[3] = math.inf, math.nan, -math.nan, 0.0
    x[4] = -0.0
    x = x.half()
    q, scales = precast.mxfp4_quantize(x, sfLayout=SfLayout.layout_linear)
    assert scales.flatten().tolist() == [254, 125, 125, 0, 0]
    assert q[:, 1].tolist() == [0x70, 0x76, 0x76, 0x00, 0x88]  # elements 2 and 3
    q8, scales8 = precast.mxfp8_quantize(x, False)
    assert scales8.tolist() == [254, 119, 119, 0, 0]
    assert q8.view(torch.uint8)[:, 3].tolist() == [0x7E, 0x7F, 0x7F, 0x00, 0x80]
    g = torch.ones(1)
    q4, scales4 = precast.nvfp4_quantize(x, g, SfLayout.layout_linear)
    assert scales4.view(torch.float8_e4m3fn).float()[:, 0].tolist() == pytest.approx(
        [448.0, 0.171875, 0.171875, 0.0, 0.0]
    )
    assert q4[:, 1].tolist() == [0x70, 0x77, 0x77, 0x00, 0x88]


def test_a_scale_that_rounds_to_zero_makes_zeros() -> None:
    x = torch.full((1, 16), -(2.0**-12)).half()
    q, scales = precast.nvfp4_quantize(x, torch.ones(1), SfLayout.layout_linear)
    assert scales.item() == 0
    assert set(q.flatten().tolist()) == {0x88}


def test_mxfp8_pads_columns() -> None:
    x = draw(3, 96)
    q, scales = precast.mxfp8_quantize(x, False, alignment=128)
    assert q.shape == (3, 128)
    assert not q[:, 96:].view(torch.uint8).any()
    assert not scales.view(3, 4)[:, 3].any()
    short, its = precast.mxfp8_quantize(x, False)
    assert torch.equal(q[:, :96].view(torch.uint8), short.view(torch.uint8))
    assert torch.equal(scales.view(3, 4)[:, :3].flatten(), its)


def test_column_major_input_of_fp4_quantize() -> None:
    x = draw(64, 48)
    g = global_scale(x)
    q, scales = precast.fp4_quantize(x.T, g)
    want, wanted_scales = precast.fp4_quantize(x, g)
    assert torch.equal(q, want.T)
    assert torch.equal(scales, wanted_scales.T)


def test_the_host_functions() -> None:
    q, scales = precast.mxfp4_quantize(draw(6, 64), sfLayout=SfLayout.layout_linear)
    want = precast.mxfp4_dequantize(q, scales, SfLayout.layout_linear)
    assert torch.equal(precast.mxfp4_dequantize_host(q, scales), want)
    eights, their = precast.mxfp8_quantize(draw(6, 64))
    as_bytes = precast.mxfp8_dequantize_host(eights.view(torch.uint8), their)
    assert torch.equal(as_bytes, precast.mxfp8_dequantize(eights, their))
    with pytest.raises(ValueError, match=r"^mxfp4_dequantize_host: weight must be a CPU tensor"):
        precast.mxfp4_dequantize_host(q.to("meta"), scales)
    with pytest.raises(TypeError, match=r"^mxfp8_dequantize_host: input must be a torch.Tensor"):
        precast.mxfp8_dequantize_host([1], scales)  # type: ignore[arg-type]


def test_key_value_cache_dtypes() -> None:
    x = draw(4, 32)
    q, scales = precast.nvfp4_quantize(x, global_scale(x), SfLayout.layout_linear)
    for dtype in (BF16, torch.float16, torch.float32):
        out = precast.nvfp4_kv_dequantize(q, scales, 1 / global_scale(x), dtype)
        assert out.dtype == dtype
    assert precast.nvfp4_kv_dequantize(q, scales, 1 / global_scale(x)).dtype == BF16
    exact = precast.e2m1_and_ufp8sf_scale_to_float(
        q, scales, 1 / global_scale(x), is_sf_swizzled_layout=False
    )
    assert torch.equal(out, exact)


# -- bits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["big", "little"])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 16, 1001])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float32])
def test_packbits_is_numpys(count: int, order: str, dtype: torch.dtype) -> None:
    x = (torch.rand(count) < 0.5).to(dtype) * (1 if dtype == torch.bool else 3)
    want = np.packbits(x.bool().numpy(), bitorder=order)
    got = precast.packbits(x, order)
    assert got.dtype == torch.uint8
    assert got.tolist() == want.tolist()


@pytest.mark.parametrize("order", ["big", "little"])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_segments_are_packed_alone(order: str, kind: torch.dtype) -> None:
    bounds = [0, 0, 5, 13, 13, 29, 64, 65]
    x = torch.rand(70) < 0.5
    indptr = torch.tensor(bounds, dtype=kind)
    y, starts = precast.segment_packbits(x, indptr, order)
    parts = [np.packbits(x[a:b].numpy(), bitorder=order) for a, b in itertools.pairwise(bounds)]
    assert starts.dtype == torch.int32
    assert starts.tolist() == [0, *itertools.accumulate(len(part) for part in parts)]
    assert y.tolist() == np.concatenate(parts).tolist()
    out = torch.full((40,), 77, dtype=torch.uint8)
    same, again = precast.segment_packbits(x, indptr, order, out=out)
    assert same is out
    assert torch.equal(again, starts)
    assert out[: len(y)].tolist() == y.tolist()
    assert (out[len(y) :] == 77).all()
    short = torch.zeros(3, dtype=torch.uint8)
    precast.segment_packbits(x, indptr, order, out=short)
    assert torch.equal(short, y[:3])


def test_the_kernels_packing_by_a_multiplication() -> None:
    """include/precast/quantize/packbits.cuh: four truth values of a word."""
    words = torch.randint(0, 256, (4096, 4), dtype=torch.uint8) * (torch.rand(4096, 4) < 0.5)
    for row in words.tolist():
        word = sum(byte << 8 * i for i, byte in enumerate(row))
        truth = (((word & 0x7F7F7F7F) + 0x7F7F7F7F) | word) >> 7 & 0x01010101
        little = truth * 0x01020408 >> 24 & 15
        big = truth * 0x08040201 >> 24 & 15
        assert little == sum((byte != 0) << i for i, byte in enumerate(row))
        assert big == sum((byte != 0) << 3 - i for i, byte in enumerate(row))


# -- torch.compile --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda x: precast.nvfp4_quantize(x, ONE),
        lambda x: precast.fp4_quantize(x, ONE, is_sf_8x4_layout=True),
        lambda x: precast.fp4_quantize(x, None, 32, True),
        lambda x: precast.mxfp4_quantize(x, sfLayout=LINEAR),
        lambda x: precast.mxfp8_quantize(x, alignment=128),
        lambda x: precast.mxfp4_dequantize(*precast.mxfp4_quantize(x)),
        lambda x: precast.mxfp8_dequantize(*precast.mxfp8_quantize(x), output_dtype=BF16),
        lambda x: precast.nvfp4_kv_dequantize(
            *precast.nvfp4_quantize(x, ONE, LINEAR), ONE, torch.float16
        ),
        lambda x: precast.block_scale_interleave((x * 8).to(torch.uint8)),
        lambda x: precast.packbits(x.flatten() > 0),
        lambda x: precast.segment_packbits(
            x.flatten() > 0,
            torch.tensor([0, 5, 30], dtype=torch.int32),
            out=torch.zeros(8, dtype=torch.uint8),
        ),
    ],
)
def test_torch_compile_without_a_graph_break(call: Callable[[torch.Tensor], Any]) -> None:
    x = draw(6, 64, spread=1.0)
    torch._dynamo.reset()
    want = call(x)
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(x)
    for left, right in zip(_tuple(got), _tuple(want), strict=True):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert torch.equal(left.view(-1).view(torch.uint8), right.view(-1).view(torch.uint8))


def _tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def test_the_package_exports_what_precast_exports() -> None:
    for name in ("packbits", "fp4_quantize", "SfLayout", "nvfp4_block_scale_interleave"):
        assert getattr(quantization, name) is getattr(precast, name)
