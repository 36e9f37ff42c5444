# SPDX-License-Identifier: Apache-2.0
"""The rounding that every 8-bit floating-point result shares."""

from __future__ import annotations

from precast._base.torch import torch


def saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 rounded to nearest even; beyond the largest number of 8 bits that number; NaN stays."""
    if dtype.itemsize == 1:
        x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return x.to(dtype)
