# SPDX-License-Identifier: Apache-2.0
"""Keys and values of latent attention in e4m3, in reference mode: parts, rounding, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import precast

pytestmark = pytest.mark.usefixtures("reference_mode")

E4M3 = torch.float8_e4m3fn


def call(tokens: int = 5, heads: int = 3, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(heads)
    kv = 100 * torch.randn(tokens, heads, 40, generator=generator)
    return {
        "kv_nope": kv.to(dtype),
        "k_pe": torch.randn(tokens, 8, generator=generator).to(dtype),
        "nope_dim": 24,
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parts_and_rounding(dtype: torch.dtype) -> None:
    given = call(dtype=dtype)
    given["kv_nope"][0, 0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    key, value = precast.concat_mla_kv_quant_fp8(**given)
    assert (key.dtype, key.shape) == (E4M3, (5, 3, 32))
    assert (value.dtype, value.shape) == (E4M3, (5, 3, 16))
    rounded = given["kv_nope"].float().clamp(-448, 448).to(E4M3).float()
    torch.testing.assert_close(
        key[..., :24].float(), rounded[..., :24], rtol=0, atol=0, equal_nan=True
    )
    torch.testing.assert_close(value.float(), rounded[..., 24:], rtol=0, atol=0)
    shared = given["k_pe"].float().to(E4M3).float()[:, None].expand(-1, 3, -1)
    assert torch.equal(key[..., 24:].float(), shared)
    assert key[0, 0, :2].float().tolist() == [448, -448]


def test_outputs_and_forms() -> None:
    given = call()
    want = precast.concat_mla_kv_quant_fp8(**given)
    key, value = torch.empty(5, 3, 32, dtype=E4M3), torch.empty(5, 3, 16, dtype=E4M3)
    given["k_pe"] = given["k_pe"][:, None]
    got = precast.concat_mla_kv_quant_fp8(**given, key=key, value=value, backend="cake")
    assert got[0] is key and got[1] is value
    for mine, other in zip(got, want):
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))
    assert precast.concat_mla_kv_quant_fp8(**given, key=key)[0] is key


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_nope": torch.zeros(5, 3, 40)}, "kv_nope must be float16 or bfloat16, got float32"),
        ({"kv_nope": torch.zeros(5, 40).half()}, "kv_nope must have 3 dimensions, got shape"),
        ({"k_pe": torch.zeros(5, 8).half()}, "k_pe must be bfloat16, got float16"),
        ({"k_pe": torch.zeros(4, 8).bfloat16()}, r"k_pe must have shape \[5, rope_dim\] or"),
        ({"k_pe": torch.zeros(5, 2, 8).bfloat16()}, r"k_pe must have shape \[5, rope_dim\] or"),
        ({"nope_dim": 40}, "nope_dim must be from 1 to below kv_nope's last dimension, 40, got 40"),
        ({"nope_dim": 0}, "nope_dim must be from 1 to below"),
        ({"key": torch.zeros(5, 3, 31).to(E4M3)}, r"key must have shape \[5, 3, 32\], got"),
        ({"key": torch.zeros(5, 3, 32)}, "key must be float8_e4m3fn, got float32"),
        ({"value": torch.zeros(5, 3, 15).to(E4M3)}, r"value must have shape \[5, 3, 16\], got"),
        ({"backend": "torch"}, "backend must be one of auto, specialized, cake, got 'torch'"),
    ],
)
def test_what_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^concat_mla_kv_quant_fp8: {words}"):
        precast.concat_mla_kv_quant_fp8(**{**call(), **change})
