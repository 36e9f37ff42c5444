# SPDX-License-Identifier: Apache-2.0
"""The rounding that every 8-bit floating-point result shares."""

from __future__ import annotations

from precast._base.torch import torch


def saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round fp32 to nearest even. An 8-bit type saturates at its largest number; NaN stays NaN."""
    if dtype.itemsize == 1:
        x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return x.to(dtype)
