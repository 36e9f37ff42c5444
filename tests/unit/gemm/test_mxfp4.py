# SPDX-License-Identifier: Apache-2.0
"""Weights of MXFP4 in reference mode: their order, its instructions, products, errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_support import mxfp4

from precast import fused_moe, gemm
from precast._ops.gemm import _w4
from precast.errors import BackendSupportedError
from precast.shim import look_up

ROOT = Path(__file__).parents[3]
BF16 = torch.bfloat16
STARTS = [3, 10, 10, 30]
GROUPS, ROWS, COLUMNS, DEPTH = 3, 32, 128, 256
WEIGHTS = fused_moe.interleave_moe_weights_for_sm90_mixed_gemm
SCALES = fused_moe.interleave_moe_scales_for_sm90_mixed_gemm


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(29)


def codes(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def values_of(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers of a weight that is not interleaved, float64."""
    numbers = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    steps = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    signed = torch.cat([steps, -steps])[numbers]
    return signed * (scales.double() - 127).exp2().repeat_interleave(32, -1)


def halves(words: torch.Tensor) -> torch.Tensor:
    """Both bf16 numbers of words of 32 bits, in a last dimension, float64."""
    return words.int().view(torch.int16).view(BF16).view(*words.shape, 2).double()


def low(words: torch.Tensor) -> torch.Tensor:
    """The lower 32 bits as int32."""
    words = words & 0xFFFFFFFF
    return torch.where(words >= 2**31, words - 2**32, words).int()


def test_a_lane_unpacks_its_words(generator: torch.Generator) -> None:
    """What the instructions of the kernels do, in whole numbers: include/.../mxfp4_weight.cuh."""
    packed = codes(generator, 2, 64, 128)
    scales = torch.randint(59, 193, (2, 64, 8), generator=generator, dtype=torch.uint8)
    word = WEIGHTS(packed).view(2, 4, 4, 8, 4, 16).view(torch.int32).long()
    word = word & 0xFFFFFFFF  # [expert, band, step, column g, lane's q, part]
    bits = 0x81C081C0
    pairs = (
        word & bits,
        word << 4 & bits,
        (word >> 6 | word << 26) & bits,
        (word << 6 & 0x80C080C0) | (word >> 2 & 0x01000100),
    )
    blocks = SCALES(scales).view(2, 1, 2, 16, 4, 4)  # [.., depth / 128, column, band, group]
    want = values_of(packed, scales)
    for pair, found in enumerate(pairs):
        numbers = halves(low(found))  # [.., i]
        for part in range(4):
            factor = blocks[:, 0, :, 8 * (pair % 2) : 8 * (pair % 2) + 8].long()
            # By step of 64: two groups each, of which a part has the first or the second.
            of_step = factor.unflatten(4, (2, 2))[..., part // 2].permute(0, 3, 1, 4, 2)
            of_step = of_step.reshape(2, 4, 4, 8, 1, 1)
            power = halves(low((of_step + 62 << 7) * 0x00010001))[..., 0]
            got = numbers[:, :, :, :, :, part] * power * 2.0**64
            # [expert, band, step, g, q, i]
            whole = want.view(2, 4, 2, 8, 4, 4, 2, 4, 2)[:, :, pair % 2, :, :, part, pair // 2]
            assert torch.equal(got, whole.permute(0, 1, 3, 2, 4, 5))


def test_constants_are_those_of_the_kernels() -> None:
    text = (ROOT / "include/precast/gemm/w4_weight.cuh").read_text()
    found = dict(re.findall(r"(kW4\w+) = (\d+)\b", text))
    assert int(found["kW4Columns"]) == _w4.COLUMNS
    assert int(found["kW4Depth"]) == _w4.DEPTH
    tiles = (ROOT / "include/precast/gemm/sm90/w4_tile.cuh").read_text()
    body = tiles.partition("kW4Tiles[] = {")[2].partition("};")[0]
    assert len(re.findall(r"\{\d+, \d+, true, \d\}", body)) == _w4.SM90_TILES


def test_interleaving_can_be_undone(generator: torch.Generator) -> None:
    packed, scales = codes(generator, 3, 80, 96), codes(generator, 3, 128, 12)
    before = packed.clone()
    assert torch.equal(_w4.separate_weight(WEIGHTS(packed), _w4.MXFP4), packed)
    assert torch.equal(packed, before)
    assert torch.equal(_w4.unfold_scales(SCALES(scales), 32), scales)
    assert torch.equal(WEIGHTS(packed.mT.contiguous().mT), WEIGHTS(packed))


def test_scales_of_other_sizes() -> None:
    """As FlashInfer's shapes: 16 bytes of a row have scales of columns that are far apart."""
    scales = torch.arange(128 * 2).view(1, 128, 2).short()
    got = SCALES(scales, 128)
    assert got.shape == (1, 2, 2, 8, 8)
    assert torch.equal(got[0, 1, 1, 3], scales[0, 64 + 3 :: 8, 1])


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: WEIGHTS(torch.zeros(1, 16, 32)), ValueError, "weight must be uint8, got"),
        (lambda: WEIGHTS(torch.zeros(16, 32).byte()), ValueError, "weight must have shape"),
        (lambda: WEIGHTS(torch.zeros(1, 24, 32).byte()), ValueError, "n a multiple of 16"),
        (lambda: WEIGHTS(torch.zeros(1, 16, 48).byte()), ValueError, "k of 64, got"),
        (lambda: WEIGHTS(torch.zeros(1, 16, 32).byte(), "fp8"), ValueError, "must be 'fp4' or"),
        (lambda: WEIGHTS(torch.zeros(1, 16, 32).byte(), "fp4_fp8"), BackendSupportedError, "'fp4'"),
        (lambda: SCALES(torch.zeros(64, 4).byte()), ValueError, "scales must have shape"),
        (lambda: SCALES(torch.zeros(1, 32, 4).byte()), ValueError, "n a multiple of 64"),
        (lambda: SCALES(torch.zeros(1, 64, 6).byte()), ValueError, "k of 128, got"),
        (lambda: SCALES(torch.zeros(1, 64, 4).byte(), 48), ValueError, "must divide 128, got 48"),
        (lambda: SCALES(torch.zeros(1, 64, 128).byte(), 1), ValueError, "must divide 16 bytes"),
    ],
)
def test_what_interleaving_refuses(call: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=f"^interleave_moe_.*{words}"):
        call()


def operands(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Tokens, both tensors of the weight, and its values."""
    a = torch.randint(-3, 4, (ROWS, DEPTH), generator=generator).to(BF16)
    weight = torch.randn(GROUPS, COLUMNS, DEPTH, generator=generator)
    packed, scales, values = mxfp4(weight)
    assert torch.equal(values.double(), values_of(packed, scales))
    return a, WEIGHTS(packed), SCALES(scales), values


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.usefixtures("reference_mode")
class TestProducts:
    @pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
    def test_groups(self, dtype: torch.dtype, generator: torch.Generator) -> None:
        a, b, scales, values = operands(generator)
        a[:3] = torch.nan
        starts = ints(*STARTS)
        out = torch.full((ROWS, COLUMNS), 7.0, dtype=dtype)
        assert gemm.grouped_mm_mxfp4(a, b, scales, starts, out) is out
        want = gemm.grouped_mm_bf16_reference(a, values, starts, dtype)
        assert torch.equal(out[3:30], want[3:30])
        assert (out[:3] == 7).all() and (out[30:] == 7).all()
        new = gemm.grouped_mm_mxfp4(a, b, scales, starts, out_dtype=dtype, backend="mma")
        assert new.dtype == dtype and torch.equal(new[3:30], out[3:30])

    def test_what_is_refused(self, generator: torch.Generator) -> None:
        a, b, scales, _ = operands(generator)
        out = torch.full((ROWS, COLUMNS), 7.0, dtype=BF16)
        good: dict[str, Any] = {"a": a, "b": b, "b_scale": scales, "m_indptr": ints(*STARTS)}
        for change, words in (
            ({"a": a.half()}, "a must be bfloat16, got float16"),
            ({"b": b.mT.contiguous().mT}, "b must be contiguous"),
            (
                {
                    "a": a[:, :192].contiguous(),
                    "b": b[:, :, :96].contiguous(),
                    "b_scale": scales[:, :, :1].contiguous(),
                },
                "a must have a positive multiple of 128 columns",
            ),
            ({"b": b.int()}, "b must be uint8, got int32"),
            ({"b": b[:, :, :64]}, r"b must have shape \[3, 128, 128\], got \[3, 128, 64\]"),
            ({"b_scale": scales.view(torch.int32)}, "b_scale must be uint8, got int32"),
            ({"b_scale": scales[:, :1]}, r"b_scale must have shape \[3, 2, 2, 16, 16\]"),
            ({"b_scale": scales.mT}, "b_scale must be contiguous"),
            ({"m_indptr": ints(0, 3)}, r"m_indptr must have shape \[4\]"),
            ({"backend": "cudnn"}, "backend must be one of 'auto', 'mma'"),
            ({"tactic": -2}, "tactic must be -1 or a tile below 4"),
            ({"out_dtype": torch.int8}, "out_dtype must be one of"),
        ):
            with pytest.raises(ValueError, match=f"^grouped_mm_mxfp4: {words}"):
                gemm.grouped_mm_mxfp4(**{**good, "out": out, **change})
        assert (out == 7).all()

    def test_torch_compile_without_a_graph_break(self, generator: torch.Generator) -> None:
        a, b, scales, _ = operands(generator)
        starts = ints(0, 10, 20, 32)
        want = gemm.grouped_mm_mxfp4(a, b, scales, starts)
        torch._dynamo.reset()
        compiled = torch.compile(gemm.grouped_mm_mxfp4, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(a, b, scales, starts), want)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_names_are_where_flashinfer_has_them(engine: str) -> None:
    assert look_up("fused_moe", "interleave_moe_weights_for_sm90_mixed_gemm", engine) is WEIGHTS
    assert look_up("fused_moe", "interleave_moe_scales_for_sm90_mixed_gemm", engine) is SCALES
