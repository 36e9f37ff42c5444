# SPDX-License-Identifier: Apache-2.0
"""The norm and 3-D rotation of video models beside FlashInfer's."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import pytest
import torch
from flashinfer_modules import compiled

import precast

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)
FORMS: list[dict[str, Any]] = [
    {},
    {"interleave": False},
    {"is_qk_norm": False},
    {"factor": 4.0, "low": 2.0, "high": 9.5, "attention_factor": 1.25},
    {"output_fp8": True, "output_quant_scale": 20.0, "v_quant_scale": 30.0},
]


def test_arguments_stand_where_theirs_do() -> None:
    import flashinfer.norm

    mine = inspect.signature(precast.fused_qk_rmsnorm_rope).parameters.values()
    theirs = inspect.signature(flashinfer.norm.fused_qk_rmsnorm_rope).parameters.values()
    for own, other in zip(mine, theirs):
        assert (own.name, own.kind, own.default) == (other.name, other.kind, other.default)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form) or "plain")
@pytest.mark.parametrize(("heads", "dim"), [(12, 128), (3, 64), (32, 256)])
def test_the_same_numbers(
    heads: int, dim: int, form: dict[str, Any], generator: torch.Generator
) -> None:
    import flashinfer.norm

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16)

    third = dim // 6 * 2
    given: dict[str, Any] = {
        "qkv": randn(2, 3 * 5 * 7, 3 * heads * dim),
        "q_weight": randn(heads * dim),
        "k_weight": randn(heads * dim),
        "ppf": 3,
        "pph": 5,
        "ppw": 7,
        "head_dim": dim,
        "num_height_channels": third,
        "num_width_channels": third,
        "num_frame_channels": dim - 2 * third,
        **{f"num_heads_{letter}": heads for letter in "qkv"},
        **form,
    }
    with compiled():
        theirs = flashinfer.norm.fused_qk_rmsnorm_rope(**given)
    mine = precast.fused_qk_rmsnorm_rope(**given)
    # One rounding of the norm and one of the result may go to the other neighbour.
    step = 2.0**-3 if form.get("output_fp8") else 2.0**-7
    for got, want in zip(mine[:2], theirs[:2]):
        assert got.shape == want.shape and got.dtype == want.dtype
        a, b = got.double(), want.double()
        interleave = form.get("interleave", True)
        x, y = (b[..., ::2], b[..., 1::2]) if interleave else b.chunk(2, dim=-1)
        length = (x.square() + y.square()).sqrt()
        pair = (length, length)
        joined = torch.stack(pair, -1).flatten(-2) if interleave else torch.cat(pair, -1)
        assert ((a - b).abs() <= step * (b.abs() + 0.1 * joined) + 2.0**-7 * joined + 2e-3).all()
    assert torch.equal(mine[2].view(torch.uint8), theirs[2].view(torch.uint8))
