# SPDX-License-Identifier: Apache-2.0
"""The product of groups with scales of blocks and SwiGLU: numbers, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from precast._ops.gemm.fp8_grouped import group_gemm_fp8_nt_groupwise_reference
from precast._ops.moe._activation_reference import moe_activation_reference
from precast._ops.moe._gated_fp8 import GROUPED_SWIGLU_FP8
from precast._ops.moe._rows import EPS

pytestmark = pytest.mark.usefixtures("reference_mode")

E4M3 = torch.float8_e4m3fn
STARTS = torch.tensor([3, 10, 10, 30], dtype=torch.int32)
GROUPS, ROWS, COLUMNS, DEPTH = 3, 32, 256, 144


def arguments() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "a": drawn(ROWS, DEPTH).to(E4M3),
        "b": drawn(GROUPS, 2 * COLUMNS, DEPTH).to(E4M3),
        "a_scale": drawn(ROWS, 2).exp2() * 0.1,
        "b_scale": drawn(GROUPS, 4, 2).exp2(),
        "m_indptr": STARTS,
        "out": torch.full((ROWS, COLUMNS), 7.0).to(E4M3),
        "out_scale": torch.full((2, ROWS), 7.0),
        "eps": EPS,
        "choice": -1,
    }


def test_it_is_the_product_and_the_function() -> None:
    """Of the product in float32: what is between them is not rounded."""
    given = arguments()
    GROUPED_SWIGLU_FP8.launch(*given.values())
    operands = (given[name] for name in ("a", "b", "a_scale", "b_scale", "m_indptr"))
    sums = group_gemm_fp8_nt_groupwise_reference(
        *operands, scale_major_mode="K", out_dtype=torch.float32
    )
    codes, scales = moe_activation_reference(sums, None, STARTS, gate_first=False)
    out, out_scale = given["out"].float(), given["out_scale"]
    assert torch.equal(out[3:30], codes[3:30].float())
    assert torch.equal(out_scale[:, 3:30], scales[:, 3:30])
    for rest in (out[:3], out[30:], out_scale[:, :3], out_scale[:, 30:]):
        assert (rest == 7).all()


def test_errors() -> None:
    good = arguments()
    a, out = good["a"], good["out"]
    for change, words in (
        ({"b": good["b"][:, 2:]}, r"b must have shape \[3, 512, 144\], got \[3, 510, 144\]"),
        ({"a": a.bfloat16()}, "a must be float8_e4m3fn, got bfloat16"),
        ({"out": out[:, :64]}, "out must have a multiple of 128 columns"),
        ({"a_scale": good["a_scale"][1:]}, "a_scale must have shape"),
        ({"b_scale": good["b_scale"][:, :2]}, r"b_scale must have shape \[3, 4, 2\]"),
        ({"out_scale": good["out_scale"][:1]}, r"out_scale must have shape \[2, 32\]"),
        (
            {"out_scale": torch.full((32, 2), 7.0).mT},
            r"out_scale must have stride 1 in its last dimension, got strides \[1, 2\]",
        ),
        ({"m_indptr": STARTS[:3]}, r"m_indptr must have shape \[4\]"),
        ({"eps": 0.0}, "eps must be a finite number of at least 1e-30"),
        ({"choice": 3}, "choice must be -1 or 0, 1 or 2"),
    ):
        given = {**good, **change}
        with pytest.raises(ValueError, match=f"^grouped_mm_fp8_swiglu: {words}"):
            GROUPED_SWIGLU_FP8.launch(*given.values())
    assert (out.float() == 7).all()
    assert (good["out_scale"] == 7).all()
