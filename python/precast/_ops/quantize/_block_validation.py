# SPDX-License-Identifier: Apache-2.0
"""What the block-scaled ops refuse in reference mode, in the words of their bindings."""

from __future__ import annotations

import math

from precast._base.torch import torch
from precast._op.validation import check_device_and_dtype
from precast._ops.quantize._reference_blocks import scale_shape


def check_rows(export: str, name: str, tensor: torch.Tensor) -> int:
    """Return the number of rows, all dimensions but the last."""
    if tensor.dim() < 2:
        raise ValueError(
            f"{export}: {name} must have at least 2 dimensions, got shape {[*tensor.shape]}"
        )
    return math.prod(tensor.shape[:-1])


def check_blocks(export: str, name: str, tensor: torch.Tensor, block: int) -> None:
    if tensor.shape[-1] % block:
        raise ValueError(
            f"{export}: {name}'s last dimension must be a multiple of {block}, got "
            f"{tensor.shape[-1]}"
        )


def check_layout(export: str, layout: int) -> None:
    if layout not in (0, 1, 2):
        raise ValueError(
            f"{export}: the scale layout must be 0 (128x4), 1 (8x4) or 2 (linear), got {layout}"
        )


def check_scales(
    export: str, name: str, scales: torch.Tensor, rows: int, columns: int, layout: int
) -> None:
    padded = scale_shape(rows, columns, layout)
    if scales.numel() != math.prod(padded):
        raise ValueError(
            f"{export}: {name} must have {math.prod(padded)} elements, for {rows} x {columns} "
            f"blocks padded to {padded[0]} x {padded[1]}, got shape {[*scales.shape]}"
        )


def check_global(
    export: str, name: str, scale: torch.Tensor, input: torch.Tensor, input_name: str, rows: int
) -> None:
    """One fp32 number, or one a row."""
    check_device_and_dtype(export, name, scale, input, torch.float32, input_name)
    if scale.numel() not in (1, rows):
        raise ValueError(
            f"{export}: {name} must have 1 element, or {rows}, one a row, got shape "
            f"{[*scale.shape]}"
        )
