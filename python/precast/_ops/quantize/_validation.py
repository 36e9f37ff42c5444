# SPDX-License-Identifier: Apache-2.0
"""What quantisation refuses in reference mode, in the words of the bindings."""

from __future__ import annotations

import math

from precast._base.torch import torch
from precast._op.validation import (
    check_device_and_dtype,
    check_dtype,
    check_elements_apart,
    check_half,
    check_memory_apart,
    check_same_device,
)

LEAST_EPS = 1e-30


def check_eps(export: str, eps: float) -> None:
    if not (eps >= LEAST_EPS and math.isfinite(eps)):
        raise ValueError(f"{export}: eps must be a finite number of at least 1e-30, got {eps}")


def check_codes(export: str, out: torch.Tensor, x: torch.Tensor, gated: bool = False) -> None:
    """``out`` holds 8-bit codes in the shape of ``x``."""
    types = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
    name = "input" if gated else "x"
    check_same_device(export, "out", out, x, name)
    check_dtype(export, "out", out, *types)
    if gated:
        check_half(export, out, x, out.dtype)
    elif out.shape != x.shape:
        raise ValueError(f"{export}: out must have x's shape {[*x.shape]}, got {[*out.shape]}")
    check_elements_apart(export, "out", out)
    check_memory_apart(export, "out", out, x, name)


def check_row_scales(
    export: str,
    scales: torch.Tensor,
    x: torch.Tensor,
    count: int,
    dtype: torch.dtype,
    other_name: str = "x",
) -> None:
    """``count`` scales for each row of ``x``."""
    check_device_and_dtype(export, "out_scale", scales, x, dtype, other_name)
    if scales.shape != (*x.shape[:-1], count):
        raise ValueError(
            f"{export}: out_scale must have {other_name}'s shape with a last dimension of {count}, "
            f"got {[*scales.shape]} for {other_name} {[*x.shape]}"
        )
    check_elements_apart(export, "out_scale", scales)
    check_memory_apart(export, "out_scale", scales, x, other_name)


def check_groups(
    export: str,
    out: torch.Tensor,
    scales: torch.Tensor,
    group_size: int,
    scale_ue8m0: bool,
    x: torch.Tensor,
    other_name: str = "x",
) -> bool:
    """Group size and scales fit ``out``; whether the scales are words of exponents."""
    if group_size not in (16, 32, 64, 128):
        raise ValueError(f"{export}: group_size must be 16, 32, 64 or 128, got {group_size}")
    columns = out.shape[-1]
    if columns % group_size:
        raise ValueError(
            f"{export}: the last dimension must be a multiple of group_size {group_size}, got "
            f"{columns}"
        )
    packed: bool = scales.dtype == torch.int32
    if packed and not scale_ue8m0:
        raise ValueError(
            f"{export}: out_scale must be float32 unless scale_ue8m0 is true, got int32"
        )
    groups = columns // group_size
    count = (groups + 3) // 4 if packed else groups
    dtype = torch.int32 if packed else torch.float32
    check_row_scales(export, scales, x, count, dtype, other_name)
    return packed
