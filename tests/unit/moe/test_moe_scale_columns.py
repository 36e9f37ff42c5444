# SPDX-License-Identifier: Apache-2.0
"""Rows of experts rounded to e4m3 in reference mode: numbers, rows that exist, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from precast import fused_moe

pytestmark = pytest.mark.usefixtures("reference_mode")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(29)


def test_numbers(generator: torch.Generator) -> None:
    x = (torch.randn(9, 16, generator=generator) * 200).bfloat16()
    by = torch.rand(16, generator=generator).bfloat16() * 3
    x[0, 0], x[0, 1] = torch.nan, torch.inf
    got = fused_moe.moe_scale_columns(x, by)
    want = (x.double() * by.double()).clamp(-448, 448).float().to(torch.float8_e4m3fn)
    assert got.dtype is torch.bfloat16
    assert torch.equal(got.nan_to_num(), want.bfloat16().nan_to_num())
    assert got[0, 0].isnan()
    assert got[0, 1] == 448
    assert torch.equal(fused_moe.moe_scale_columns(got)[1:], got[1:])


def test_rows_that_do_not_exist_are_left(generator: torch.Generator) -> None:
    x = torch.randn(6, 8, generator=generator).bfloat16()
    want = fused_moe.moe_scale_columns(x)
    for end in (0, 4, 6, 9):
        out = torch.full((6, 8), 3.0).bfloat16()
        starts = torch.tensor([0, end], dtype=torch.int32)
        assert fused_moe.moe_scale_columns(x, None, starts, out) is out
        assert torch.equal(out[:end], want[:end])
        assert (out[end:] == 3).all()
    assert torch.equal(fused_moe.moe_scale_columns(x, out=x), want)
    assert torch.equal(x, want)


def test_what_is_refused(generator: torch.Generator) -> None:
    x = torch.randn(6, 16, generator=generator).bfloat16()
    out = torch.full((6, 16), 7.0).bfloat16()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"input": x.half()}, "input must be bfloat16, got float16"),
        ({"input": x[:, :4], "out": None}, "input must have a multiple of 8 columns"),
        ({"scale": torch.ones(8).bfloat16()}, r"scale must have shape \[16\]"),
        ({"scale": torch.ones(16)}, "scale must be bfloat16, got float32"),
        ({"expert_offsets": torch.zeros(0, dtype=torch.int32)}, r"shape \[experts \+ 1\], got \[0"),
        ({"out": out[:4]}, r"out must have input's shape \[6, 16\]"),
        ({"out": out.mT.contiguous().mT}, "out must have stride 1 in its last dimension"),
    ]
    for change, words in wrong:
        with pytest.raises(ValueError, match=words) as error:
            fused_moe.moe_scale_columns(**{"input": x, "out": out, **change})
        assert str(error.value).startswith("moe_scale_columns: ")
    assert (out == 7).all()
