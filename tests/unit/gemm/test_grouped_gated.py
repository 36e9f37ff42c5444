# SPDX-License-Identifier: Apache-2.0
"""The product of groups with a gated function, for Hopper: numbers, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_mm_bf16 import whole

from precast._ops.gemm.grouped_mm import grouped_mm_bf16_reference
from precast._ops.moe._activation_reference import moe_activation_reference
from precast._ops.moe._gated import GROUPED_GATED

pytestmark = pytest.mark.usefixtures("reference_mode")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
STARTS = torch.tensor([3, 10, 10, 30], dtype=torch.int32)
GROUPS, ROWS, COLUMNS, DEPTH = 3, 32, 24, 64


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    a, b = whole(generator, ROWS, DEPTH), whole(generator, GROUPS, 2 * COLUMNS, DEPTH) / 16
    return a.to(dtype), b.to(dtype)


@pytest.mark.parametrize("act", [3, 4, 5, 8])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_it_is_the_product_and_the_function(dtype: torch.dtype, act: int) -> None:
    """Of the product in float32: what is between them is not rounded."""
    a, b = operands(dtype)
    a[:3] = torch.nan
    generator = torch.Generator().manual_seed(8)
    bias = torch.randn(GROUPS, 2 * COLUMNS, generator=generator).to(dtype) if act != 3 else None
    numbers = [torch.rand(GROUPS, generator=generator) if act == 5 else None for _ in range(3)]
    out = torch.full((ROWS, COLUMNS), 7.0, dtype=dtype)
    GROUPED_GATED.launch(a, b, STARTS, act, bias, *numbers, out, -1)
    sums = grouped_mm_bf16_reference(a, b, STARTS, F32)
    of = torch.full((ROWS,), -1, dtype=torch.int32)
    for group in range(GROUPS):
        of[STARTS[group] : STARTS[group + 1]] = group
    want = moe_activation_reference(
        *(sums, of, STARTS, act, bias, *numbers), gate_first=False, out_dtype=dtype
    )
    assert torch.equal(out[3:30], want[3:30])
    assert (out[:3] == 7).all() and (out[30:] == 7).all()


def test_errors() -> None:
    a, b = operands(BF16)
    out = torch.full((ROWS, COLUMNS), 7.0, dtype=BF16)
    good: dict[str, Any] = {
        "a": a,
        "b": b,
        "m_indptr": STARTS,
        "activation_type": 3,
        "bias": None,
        **dict.fromkeys(("swiglu_alpha", "swiglu_beta", "swiglu_limit")),
        "out": out,
        "tactic": -1,
    }
    bias, ones = torch.ones(GROUPS, 2 * COLUMNS, dtype=BF16), torch.ones(GROUPS)
    for change, words in (
        ({"b": b[:, 2:]}, r"b must have shape \[3, 48, 64\], got \[3, 46, 64\]"),
        ({"b": b.half()}, "b must be bfloat16, got float16"),
        ({"out": out[:, :20]}, "out must have a multiple of 8 columns"),
        ({"activation_type": 2}, "activation_type must be 3, 4, 5 or 8, got 2"),
        ({"bias": bias[:, :24]}, r"bias must have shape \[3, 48\], got \[3, 24\]"),
        ({"bias": bias.half()}, "bias must be bfloat16, got float16"),
        ({"swiglu_beta": ones[:2]}, r"swiglu_beta must have shape \[3\]"),
        ({"swiglu_limit": ones.double()}, "swiglu_limit must be float32"),
        ({"out": out.float()}, "out must be bfloat16, got float32"),
        ({"m_indptr": STARTS[:3]}, r"m_indptr must have shape \[4\]"),
        ({"a": a[:1].expand(ROWS, -1)}, "a must have rows at different addresses"),
        ({"tactic": 3}, "tactic must be -1 or a tile and cluster for this kind of tokens"),
        ({"out": a[:, :COLUMNS]}, "out must not overlap a's memory"),
    ):
        given = {**good, **change}
        with pytest.raises(ValueError, match=f"^grouped_mm_gated: {words}"):
            GROUPED_GATED.launch(*given.values())
    assert (out == 7).all()
