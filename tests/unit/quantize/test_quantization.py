# SPDX-License-Identifier: Apache-2.0
"""8-bit quantisation: the references against arithmetic of their own, layouts, round trips."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from typing import Any

import pytest
import torch

import precast
from precast._ops.quantize import _reference_8bit as reference

E4M3, E5M2, I8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
TYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2, I8], ids=["e4m3", "e5m2", "i8"])
LARGEST = {E4M3: torch.finfo(E4M3).max, E5M2: torch.finfo(E5M2).max, I8: torch.iinfo(I8).max}

pytestmark = pytest.mark.usefixtures("reference_mode")


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(shape, generator=generator)).to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def f32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def nearest_code(value: Fraction, dtype: torch.dtype) -> float:
    """The number of an 8-bit type nearest to an exact value, ties to the even code."""
    if dtype == I8:
        return float(min(max(round(value), -128), 127))
    mantissa, least = (3, -6) if dtype == E4M3 else (2, -14)
    magnitude = min(abs(value), Fraction(LARGEST[dtype]))
    exponent = least
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - mantissa)
    rounded = float(min(round(magnitude / unit) * unit, Fraction(LARGEST[dtype])))
    return math.copysign(rounded, value)


@TYPES
def test_codes_are_the_nearest_and_saturate(dtype: torch.dtype) -> None:
    x = torch.cat([draw(500, dtype=torch.float32) * 2.0**k for k in (-14, -6, 0, 6, 14)])
    scale = torch.tensor(0.37)
    got = reference.quantize(x, scale, dtype).float()
    reciprocal = f32(1 / scale.item())  # 1 / float32 in float64, rounded again: innocuous
    for value, code in zip(x.tolist(), got.tolist()):
        assert code == nearest_code(Fraction(f32(value * reciprocal)), dtype), value


def test_ties_go_to_even() -> None:
    x = torch.tensor([1.0625, 1.1875, 2.0**-10, 3 * 2.0**-10, 464.0, 1e9, -1e9, torch.inf])
    got = reference.quantize(x, torch.tensor(1.0), E4M3).float()
    assert got.tolist() == [1.0, 1.25, 0.0, 2.0**-8, 448.0, 448.0, -448.0, 448.0]
    halves = torch.tensor([0.5, 1.5, -2.5, 127.5, -300.0, torch.nan, torch.inf])
    got = reference.quantize(halves, torch.tensor(1.0), I8)
    assert got.tolist() == [0, 2, -2, 127, -128, 0, 127]


@TYPES
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_are_correctly_rounded_quotients(dtype: torch.dtype, source: torch.dtype) -> None:
    x = draw(64, 256, dtype=source)
    for group in (16, 32, 64, 128, 256):
        if group < 256:
            _, scales = precast.per_token_group_quant_8bit(x, group, dst_dtype=dtype)
        else:
            _, scales = precast.per_token_quant_fp8(x, dst_dtype=dtype)
        amax = x.double().unflatten(-1, (-1, group)).abs().amax(-1)
        # The quotient of two float32 in float64 rounds to float32 as the exact one does.
        assert torch.equal(scales, (amax / LARGEST[dtype]).float())


def test_powers_of_two_are_the_next_above() -> None:
    exact = torch.tensor([2.0**k for k in range(-40, 40)])
    for amax in (exact * 448, exact * 448 * (1 + 2**-23), exact * 448 * (1 - 2**-24)):
        scale = reference.dequant_scale(amax, 1e-30, E4M3, power_of_two=True)
        plain = reference.dequant_scale(amax, 1e-30, E4M3)
        assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))
        assert (scale >= plain).all() and (scale / 2 < plain).all()
    assert torch.equal(reference.dequant_scale(exact * 448, 1e-30, E4M3, True), exact)


@pytest.mark.parametrize("ue8m0", [False, True])
def test_nan_infinity_and_zero_groups(ue8m0: bool) -> None:
    x = draw(4, 64)
    x[0, 3] = torch.nan
    x[1, 5] = -torch.inf
    x[2] = 0
    codes, scales = precast.per_token_group_quant_8bit(x, 64, scale_ue8m0=ue8m0)
    assert scales[0].isnan() and codes[0].float().isnan().all()
    assert codes[1, 5].float().isnan()
    if ue8m0:
        assert scales[1].isnan() and codes[1].float().isnan().all()
        packed = precast.per_token_group_quant_8bit(x, 64, scale_ue8m0=True, use_packed_ue8m0=True)[
            1
        ]
        assert packed[:2].tolist() == [[255], [255]]
        assert packed[3].item() == int(scales[3].log2().item()) + 127
    else:
        assert scales[1].isinf() and codes[1].float().nan_to_num().eq(0).all()
        assert scales[2].item() == f32(f32(1e-10) / 448)
    assert codes[2].float().eq(0).all() and scales[2:].isfinite().all()
    whole = precast.per_tensor_quant_fp8(x)
    assert whole[1].isnan() and whole[0].float().isnan().all()


def test_packed_exponents_unpack_to_the_scales() -> None:
    for groups in (1, 3, 4, 5, 8):
        x = draw(5, 32 * groups)
        call: dict[str, Any] = {"group_size": 32, "scale_ue8m0": True}
        codes, scales = precast.per_token_group_quant_8bit(x, **call)
        again, words = precast.per_token_group_quant_8bit(x, **call, use_packed_ue8m0=True)
        assert torch.equal(bits(codes), bits(again))
        assert words.shape == (5, -(-groups // 4)) and words.dtype == torch.int32
        for row in range(5):
            for group in range(4 * words.shape[1]):
                byte = words[row, group // 4].item() >> (8 * (group % 4)) & 255
                want = int(scales[row, group].log2()) + 127 if group < groups else 0
                assert byte == want
        assert torch.equal(reference.unpack_exponents(words)[:, :groups], scales)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 4, 7])
def test_layouts_of_scales(tokens: int, packed: bool) -> None:
    x = draw(tokens, 640)
    form: dict[str, Any] = {"scale_ue8m0": packed, "use_packed_ue8m0": packed}
    codes, want = precast.per_token_group_quant_8bit(x, 128, **form)
    assert want.is_contiguous() and want.shape == (tokens, 2 if packed else 5)
    for aligned in (False, True):
        again, scales = precast.per_token_group_quant_8bit(
            x, 128, column_major_scales=True, scale_tma_aligned=aligned, **form
        )
        assert torch.equal(bits(codes), bits(again)) and torch.equal(scales, want)
        assert scales.stride() == (1, -(-tokens // 4) * 4 if aligned else tokens)
        # The padding of the last column is there, too, for who reads whole columns.
        assert scales.untyped_storage().nbytes() == 4 * scales.stride(1) * scales.shape[1]
    batch, scales = precast.per_token_group_quant_8bit(
        x.expand(2, -1, -1), 128, column_major_scales=True, **form
    )
    assert torch.equal(scales[1], want) and scales.stride()[1] == 1
    assert torch.equal(bits(batch[1]), bits(codes))


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (130, 257), (2, 127, 300), (0, 128), (3, 0)])
@pytest.mark.parametrize("ue8m0", [False, True])
def test_blocks(shape: tuple[int, ...], ue8m0: bool) -> None:
    x = draw(*shape, dtype=torch.float32)
    codes, scales = precast.per_block_cast_to_fp8(x, ue8m0)
    assert codes.shape == x.shape
    assert scales.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    for index in torch.cartesian_prod(*map(torch.arange, scales.shape)).reshape(-1, len(shape)):
        *batch, i, j = index.tolist()
        place = (*batch, slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
        block = x[place].reshape(1, -1)
        want, scale = reference.token_quant(block, 1e-4, E4M3)
        if ue8m0:
            scale = reference.dequant_scale(reference.row_amax(block), 1e-4, E4M3, True)
            want = reference.quantize(block, scale, E4M3)
        assert scales[(*batch, i, j)] == scale
        assert torch.equal(bits(codes[place].reshape(1, -1)), bits(want))


def test_round_trips() -> None:
    x = draw(256, 384, dtype=torch.float32)
    everywhere = {"tile_rows": 128, "tile_columns": 128}
    calls: list[tuple[tuple[torch.Tensor, torch.Tensor], dict[str, Any]]] = [
        (precast.per_token_quant_fp8(x), {}),
        (precast.per_token_group_quant_8bit(x, 128), {}),
        (precast.per_token_group_quant_8bit(x, 128, column_major_scales=True), {}),
        (precast.per_token_group_quant_8bit(x, 128, scale_ue8m0=True, use_packed_ue8m0=True), {}),
        (precast.per_block_cast_to_fp8(x), everywhere),
        (precast.quantize_fp8(x, (3, 256), (1, 128), "MN"), {"scale_major_mode": "MN"}),
        (precast.quantize_fp8(x, (3, 2), (128, 128), "MN"), {"scale_major_mode": "MN"}),
        (precast.quantize_fp8(x, (2, 3), (128, 128), "K"), everywhere),
        (precast.per_token_quant_fp8(x, dst_dtype=I8), {}),
    ]
    for (codes, scales), how in calls:
        back = precast.dequantize_fp8(codes, scales, **how)
        assert back.dtype == torch.float32
        assert (back - x).abs().max() <= x.abs().max() / 16
        assert torch.nn.functional.cosine_similarity(back.flatten(), x.flatten(), dim=0) > 0.999
        half = precast.dequantize_fp8(codes, scales, out_dtype=torch.bfloat16, **how)
        assert torch.equal(half, back.bfloat16())


def test_round_trip_of_a_ragged_weight() -> None:
    x = draw(200, 300, dtype=torch.float32)
    codes, scales = precast.per_block_cast_to_fp8(x, use_ue8m0=False)
    back = precast.dequantize_fp8(codes, scales, tile_rows=128, tile_columns=128)
    want = scales[1, 2] * codes[128:, 256:].float()
    assert torch.equal(back[128:, 256:], want)
    with pytest.raises(ValueError, match=r"300 elements are no whole number .* give tile_columns"):
        precast.dequantize_fp8(codes, scales[:1].repeat(1, 7)[:, :7], tile_rows=200)


def test_names_of_other_libraries_are_the_same_functions() -> None:
    x = draw(4, 256)
    scale = torch.tensor([0.25])
    for got, want in (
        (precast.scaled_fp8_quant(x, scale), (precast.static_quant_fp8(x, scale), scale)),
        (precast.scaled_fp8_quant(x), precast.per_tensor_quant_fp8(x)),
        (
            precast.scaled_fp8_quant(x, use_per_token_if_dynamic=True),
            precast.per_token_quant_fp8(x),
        ),
        (
            precast.per_token_cast_to_fp8(x),
            precast.per_token_group_quant_8bit(x, 128, 1e-4, scale_ue8m0=True),
        ),
    ):
        assert torch.equal(bits(got[0]), bits(want[0])) and torch.equal(got[1], want[1])


def test_fused_quantisations_take_the_unrounded_product() -> None:
    x = draw(6, 512)
    gate, up = x.double().chunk(2, -1)
    y = (gate / (1 + torch.exp(-gate)) * up).float()
    codes, scales = precast.silu_and_mul_per_token_group_quant(x, 128)
    torch.testing.assert_close(
        scales, reference.group_quant(y, 128, 1e-10, E4M3)[1], rtol=1e-6, atol=0
    )
    rounded = reference.group_quant(y.bfloat16().float(), 128, 1e-10, E4M3)[1]
    assert not torch.allclose(scales, rounded, rtol=1e-6, atol=0)
    assert codes.shape == (6, 256)
    one = torch.tensor([0.1])
    assert precast.silu_and_mul_quant(x, one).shape == (6, 256)
    assert precast.silu_and_mul_per_token_quant(x)[1].shape == (6, 1)


def test_calls_that_a_definition_cannot_describe_have_none() -> None:
    x = draw(4, 256)
    with pytest.raises(ValueError, match="only calls with float8_e4m3fn have a definition"):
        precast.fi_trace(precast.per_token_quant_fp8, x, dst_dtype=I8)
    codes = x.to(E4M3)
    with pytest.raises(ValueError, match="only calls from float8_e4m3fn to float32"):
        precast.fi_trace(precast.dequantize_fp8, codes, torch.ones(4, 1), out_dtype=torch.float16)
    packed = precast.fi_trace(
        precast.per_token_group_quant_8bit, x, 128, scale_ue8m0=True, use_packed_ue8m0=True
    )
    assert packed["name"] == "per_token_group_quant_8bit_packed_h256_g128"
    assert packed["outputs"]["x_s"]["dtype"] == "int32"


def test_one_column_of_packed_exponents_is_read_at_its_stride() -> None:
    x = draw(5, 128)
    codes, words = precast.per_token_group_quant_8bit(
        x,
        128,
        column_major_scales=True,
        scale_tma_aligned=True,
        scale_ue8m0=True,
        use_packed_ue8m0=True,
    )
    assert words.stride() == (1, 8)
    _, scales = precast.per_token_group_quant_8bit(x, 128, scale_ue8m0=True)
    back = precast.dequantize_fp8(codes, words)
    assert torch.equal(back, precast.dequantize_fp8(codes, scales))


E4M3_SCALE = torch.tensor([0.25])
COMPILED: dict[str, Any] = {
    "static": lambda x: precast.static_quant_fp8(x, E4M3_SCALE),
    "tensor": precast.per_tensor_quant_fp8,
    "token": precast.per_token_quant_fp8,
    "group": lambda x: precast.per_token_group_quant_8bit(
        x, 128, column_major_scales=True, scale_tma_aligned=True
    ),
    "packed": lambda x: precast.per_token_group_quant_8bit(
        x, 128, column_major_scales=True, scale_ue8m0=True, use_packed_ue8m0=True
    ),
    "int8": lambda x: precast.per_token_quant_fp8(x, dst_dtype=I8),
    "block": precast.per_block_cast_to_fp8,
    "silu static": lambda x: precast.silu_and_mul_quant(x, E4M3_SCALE),
    "silu token": precast.silu_and_mul_per_token_quant,
    "silu group": lambda x: precast.silu_and_mul_per_token_group_quant(x, 128),
    "dequantize": lambda x: precast.dequantize_fp8(x.to(E4M3), x.float().abs()[:, :2]),
}


@pytest.mark.parametrize("name", COMPILED)
def test_torch_compile_without_a_graph_break(name: str) -> None:
    call = COMPILED[name]
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: call(x * 2), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for rows in (5, 64):
        x = draw(rows, 512)
        got, want = compiled(x), call(x * 2)
        pairs = zip(got, want) if isinstance(got, tuple) else [(got, want)]
        for mine, theirs in pairs:
            assert mine.dtype == theirs.dtype and mine.stride() == theirs.stride()
            assert torch.equal(mine.float(), theirs.float())


def test_flashinfers_name_of_a_backend_means_ours() -> None:
    """``backend`` is the eighth argument, as FlashInfer's, whose default engines pass."""
    x = torch.randn(4, 256)
    want = precast.per_token_group_quant_8bit(x, 128)
    for name in ("cuda", "cutile"):
        got = precast.per_token_group_quant_8bit(x, 128, 1e-10, E4M3, False, False, False, name)
        assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
        assert torch.equal(got[1], want[1])
