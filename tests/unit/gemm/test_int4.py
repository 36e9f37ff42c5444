# SPDX-License-Identifier: Apache-2.0
"""Weights of int4 in reference mode: their order, its instructions, products, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_support import int4

from precast import fused_moe, gemm
from precast._ops.gemm import _w4

BF16 = torch.bfloat16
STARTS = [3, 10, 10, 30]
GROUPS, ROWS, COLUMNS, DEPTH = 3, 32, 128, 256
SCALES = fused_moe.interleave_moe_scales_for_sm90_mixed_gemm


def weights(packed: torch.Tensor) -> torch.Tensor:
    return fused_moe.interleave_moe_weights_for_sm90_mixed_gemm(packed, "int4")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(31)


def codes(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def numbers_of(packed: torch.Tensor) -> torch.Tensor:
    """The numbers of packed int4, float64."""
    nibbles = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).double()
    return torch.where(nibbles >= 8, nibbles - 16, nibbles)


def test_a_lane_unpacks_its_words(generator: torch.Generator) -> None:
    """What the instructions of the kernels do, in whole numbers: include/.../int4_weight.cuh."""
    packed = codes(generator, 2, 64, 128)
    word = weights(packed).view(2, 4, 4, 8, 4, 16).view(torch.int32)
    want = numbers_of(packed).view(2, 4, 2, 8, 4, 4, 2, 4, 2)
    for pair in range(4):
        bits = (word >> 4 * pair & 0x000F000F) | 0x43004300
        halves = bits.view(torch.int16).view(BF16).view(*word.shape, 2)
        for part in range(4):
            # [expert, band, step, column g, lane's q, i]
            got = halves[:, :, :, :, :, part].double() - 136
            whole = want[:, :, pair % 2, :, :, part, pair // 2]
            assert torch.equal(got, whole.permute(0, 1, 3, 2, 4, 5))


def test_interleaving_can_be_undone(generator: torch.Generator) -> None:
    packed = codes(generator, 3, 80, 96)
    scales = torch.randn(3, 128, 3, generator=generator).to(BF16)
    assert torch.equal(_w4.separate_weight(weights(packed), _w4.INT4), packed)
    assert torch.equal(_w4.unfold_scales(SCALES(scales, 128), 128), scales)
    assert torch.equal(_w4.int4_unpack(packed).double(), numbers_of(packed))


def operands(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Tokens, both tensors of the weight, and its values."""
    a = torch.randint(-3, 4, (ROWS, DEPTH), generator=generator).to(BF16)
    packed, scales, values = int4(torch.randn(GROUPS, COLUMNS, DEPTH, generator=generator))
    each = scales.double().repeat_interleave(128, -1)
    assert torch.equal(values.double(), numbers_of(packed) * each)
    return a, weights(packed), SCALES(scales, 128), values


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
        assert gemm.grouped_mm_int4(a, b, scales, starts, out) is out
        want = gemm.grouped_mm_bf16_reference(a, values, starts, dtype)
        assert torch.equal(out[3:30], want[3:30])
        assert (out[:3] == 7).all() and (out[30:] == 7).all()
        new = gemm.grouped_mm_int4(a, b, scales, starts, out_dtype=dtype, backend="mma")
        assert new.dtype == dtype and torch.equal(new[3:30], out[3:30])

    def test_what_is_refused(self, generator: torch.Generator) -> None:
        a, b, scales, _ = operands(generator)
        out = torch.full((ROWS, COLUMNS), 7.0, dtype=BF16)
        good: dict[str, Any] = {"a": a, "b": b, "b_scale": scales, "m_indptr": ints(*STARTS)}
        for change, words in (
            ({"a": a.half()}, "a must be bfloat16, got float16"),
            ({"b": b.mT.contiguous().mT}, "b must be contiguous"),
            ({"b": b.int()}, "b must be uint8, got int32"),
            ({"b": b[:, :, :64]}, r"b must have shape \[3, 128, 128\], got \[3, 128, 64\]"),
            ({"b_scale": scales.float()}, "b_scale must be bfloat16, got float32"),
            ({"b_scale": scales[:, :1]}, r"b_scale must have shape \[3, 2, 2, 8, 8\]"),
            ({"b_scale": scales.mT}, "b_scale must be contiguous"),
            ({"m_indptr": ints(0, 3)}, r"m_indptr must have shape \[4\]"),
            ({"backend": "cudnn"}, "backend must be one of 'auto', 'mma'"),
            ({"tactic": -2}, "tactic must be -1 or a tile below 4"),
            ({"out_dtype": torch.int8}, "out_dtype must be one of"),
        ):
            with pytest.raises(ValueError, match=f"^grouped_mm_int4: {words}"):
                gemm.grouped_mm_int4(**{**good, "out": out, **change})
        assert (out == 7).all()

    def test_torch_compile_without_a_graph_break(self, generator: torch.Generator) -> None:
        a, b, scales, _ = operands(generator)
        starts = ints(0, 10, 20, 32)
        want = gemm.grouped_mm_int4(a, b, scales, starts)
        torch._dynamo.reset()
        compiled = torch.compile(gemm.grouped_mm_int4, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(a, b, scales, starts), want)
