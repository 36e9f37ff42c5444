# SPDX-License-Identifier: Apache-2.0
"""The product of groups with SwiGLU, which cutlass_fused_moe calls on Hopper: numbers, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_mm_bf16 import whole

from precast._ops.gemm._gated import GROUPED_SWIGLU
from precast._ops.gemm.grouped_mm import grouped_mm_bf16_reference
from precast._ops.moe._activation_reference import moe_activation_reference

pytestmark = pytest.mark.usefixtures("reference_mode")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
STARTS = torch.tensor([3, 10, 10, 30], dtype=torch.int32)
GROUPS, ROWS, COLUMNS, DEPTH = 3, 32, 24, 64


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    a, b = whole(generator, ROWS, DEPTH), whole(generator, GROUPS, 2 * COLUMNS, DEPTH) / 16
    return a.to(dtype), b.to(dtype)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_it_is_the_product_and_the_function(dtype: torch.dtype) -> None:
    """Of the product in float32: what is between them is not rounded."""
    a, b = operands(dtype)
    a[:3] = torch.nan
    out = torch.full((ROWS, COLUMNS), 7.0, dtype=dtype)
    GROUPED_SWIGLU.launch(a, b, STARTS, out, -1)
    sums = grouped_mm_bf16_reference(a, b, STARTS, F32)
    want = moe_activation_reference(sums, None, STARTS, gate_first=False, out_dtype=dtype)
    assert torch.equal(out[3:30], want[3:30])
    assert (out[:3] == 7).all() and (out[30:] == 7).all()


def test_errors() -> None:
    a, b = operands(BF16)
    out = torch.full((ROWS, COLUMNS), 7.0, dtype=BF16)
    good: dict[str, Any] = {"a": a, "b": b, "m_indptr": STARTS, "out": out, "tactic": -1}
    for change, words in (
        ({"b": b[:, 2:]}, r"b must have shape \[3, 48, 64\], got \[3, 46, 64\]"),
        ({"b": b.half()}, "b must be bfloat16, got float16"),
        ({"out": out[:, :20]}, "out must have a multiple of 8 columns"),
        ({"out": out.float()}, "out must be bfloat16, got float32"),
        ({"m_indptr": STARTS[:3]}, r"m_indptr must have shape \[4\]"),
        ({"a": a[:1].expand(ROWS, -1)}, "a must have rows at different addresses"),
        ({"tactic": 3}, "tactic must be -1 or a tile and cluster for this kind of tokens"),
        ({"out": a[:, :COLUMNS]}, "out must not overlap a's memory"),
    ):
        given = {**good, **change}
        with pytest.raises(ValueError, match=f"^grouped_mm_swiglu: {words}"):
            GROUPED_SWIGLU.launch(*given.values())
    assert (out == 7).all()
