# SPDX-License-Identifier: Apache-2.0
"""What the 8-bit quantisations check in reference mode, in the words of the bindings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from precast._base.torch import torch
from precast._op.validation import (
    check_dtype,
    check_elements_apart,
    check_half,
    check_memory_apart,
)

LEAST_EPS = 1e-30
GROUP_SIZES = (16, 32, 64, 128)


def check_eps(export: str, eps: float) -> None:
    """Raise ValueError for an ``eps`` whose scale has no finite reciprocal."""
    if not (eps >= LEAST_EPS and math.isfinite(eps)):
        raise ValueError(f"{export}: eps must be a finite number of at least 1e-30, got {eps}")


def check_gated_output(export: str, out: torch.Tensor, input: torch.Tensor) -> None:
    """``out`` has the shape of ``input`` with half of its columns."""
    check_half(export, out, input, out.dtype)


def check_token_scales(
    export: str,
    eps: float,
    out: torch.Tensor,
    out_scale: torch.Tensor,
    **given: Any,
) -> None:
    """Check that there is one scale for each row of ``x``, or of ``input``, which is gated."""
    check_eps(export, eps)
    _check_row_scales(export, out, out_scale, 1, given)


def check_group_scales(
    export: str,
    group_size: int,
    eps: float,
    scale_ue8m0: bool,
    out: torch.Tensor,
    out_scale: torch.Tensor,
    **given: Any,
) -> None:
    """Check that there is one scale for each group of ``x``, or of the gated ``input``."""
    check_eps(export, eps)
    if group_size not in GROUP_SIZES:
        raise ValueError(f"{export}: group_size must be 16, 32, 64 or 128, got {group_size}")
    columns = out.shape[-1]
    if columns % group_size:
        raise ValueError(
            f"{export}: the last dimension must be a multiple of group_size {group_size}, got "
            f"{columns}"
        )
    packed = out_scale.dtype == torch.int32
    if packed and not scale_ue8m0:
        raise ValueError(
            f"{export}: out_scale must be float32 unless scale_ue8m0 is true, got int32"
        )
    groups = columns // group_size
    count = (groups + 3) // 4 if packed else groups
    if not packed:
        check_dtype(export, "out_scale", out_scale, torch.float32)
    _check_row_scales(export, out, out_scale, count, given)


def _check_row_scales(
    export: str, out: torch.Tensor, scales: torch.Tensor, count: int, given: Mapping[str, Any]
) -> None:
    name = "input" if "input" in given else "x"
    source = given[name]
    if name == "input":
        check_gated_output(export, out, source)
    if scales.shape != (*source.shape[:-1], count):
        raise ValueError(
            f"{export}: out_scale must have {name}'s shape with a last dimension of {count}, got "
            f"{[*scales.shape]} for {name} {[*source.shape]}"
        )
    check_elements_apart(export, "out_scale", scales)
    check_memory_apart(export, "out_scale", scales, source, name)
