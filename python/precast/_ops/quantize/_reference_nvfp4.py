# SPDX-License-Identifier: Apache-2.0
"""Rows and paged caches in NVFP4 in plain PyTorch, for references."""

from __future__ import annotations

from precast._base.torch import torch
from precast._ops.paged._cache import Cache, halves
from precast._ops.quantize._reference_blocks import e2m1_unpack, quantize_e2m1


def nvfp4_quantized(
    rows: torch.Tensor, scale: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed e2m1 and the scales of its blocks of 16; both hold bytes."""
    number = torch.as_tensor(scale, dtype=torch.float32, device=rows.device)
    packed, scales = quantize_e2m1(rows, 2, number, True)
    return packed, scales.reshape(*rows.shape[:-1], rows.shape[-1] // 16)


def nvfp4_dequantized(
    paged_kv_cache: Cache, kv_cache_sf: Cache
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of a cache in NVFP4 as float16, which holds them exactly."""
    keys, values = (
        (
            e2m1_unpack(codes)
            * scales.view(torch.uint8).view(torch.float8_e4m3fn).float().repeat_interleave(16, -1)
        ).half()
        for codes, scales in zip(halves(paged_kv_cache), halves(kv_cache_sf))
    )
    return keys, values
