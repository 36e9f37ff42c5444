# SPDX-License-Identifier: Apache-2.0
"""What the dequantisations share."""

from __future__ import annotations

import math

from precast._base.torch import torch
from precast._op.validation import check_dtype, check_one_number
from precast._ops.quantize._block_validation import check_layout, check_rows, check_scales
from precast._ops.quantize._reference_blocks import (
    dequantize,
    e2m1_unpack,
    gather_scales,
    ue8m0_values,
)


def e2m1_reference(
    packed: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor | None,
    block: int,
    e4m3_scales: bool,
    layout: int,
) -> torch.Tensor:
    """fp32 from packed e2m1, in the references of all that unpack it."""
    elements = e2m1_unpack(packed)
    rows = math.prod(elements.shape[:-1])
    placed = gather_scales(scales, rows, elements.shape[-1] // block, layout)
    values = placed.view(torch.float8_e4m3fn).float() if e4m3_scales else ue8m0_values(placed)
    return dequantize(elements, values, global_scale, block)


def new_values(packed: torch.Tensor, per_byte: int, dtype: torch.dtype) -> torch.Tensor:
    *leading, columns = packed.shape
    return packed.new_empty(*leading, columns * per_byte, dtype=dtype)


def check_blocks_of(
    export: str,
    names: tuple[str, str, str],
    data: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor | None,
    block: int,
    layout: int,
    dtype: torch.dtype | None = None,
) -> None:
    """What a dequantisation refuses; ``names`` are those of data, scales and global scale."""
    check_dtype(export, names[0], data, dtype or torch.uint8)
    rows = check_rows(export, names[0], data)
    columns = data.shape[-1] * (2 if dtype is None else 1)
    if columns % block:
        raise ValueError(
            f"{export}: {names[0]} must hold whole blocks of {block} numbers a row, got {columns} "
            f"numbers"
        )
    check_layout(export, layout)
    check_dtype(export, names[1], scales, torch.uint8)
    check_scales(export, names[1], scales, rows, columns // block, layout)
    if global_scale is not None:
        check_one_number(export, names[2], global_scale, data, names[0])
