# SPDX-License-Identifier: Apache-2.0
"""Keys and values of latent attention in e4m3 beside FlashInfer's, which is torch below 10.0."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from flashinfer_modules import compiled

import precast

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)


@pytest.mark.parametrize("heads", [1, 12, 128])
def test_the_same_bytes(heads: int, generator: torch.Generator) -> None:
    import flashinfer

    kv = 300 * torch.randn(77, heads, 256, device="cuda", generator=generator)
    kv[0, 0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf], device="cuda")
    kv, latent = kv.bfloat16(), torch.randn(77, 576, device="cuda", generator=generator).bfloat16()
    pe = latent[:, 512:]
    with compiled():
        theirs = flashinfer.concat_mla_kv_quant_fp8(kv, pe)
    for mine, other in zip(precast.concat_mla_kv_quant_fp8(kv, pe), theirs, strict=True):
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))
