# SPDX-License-Identifier: Apache-2.0
"""What the ops share that work on the rows of experts: checks in the words of their bindings."""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.validation import check_elements_apart

#: Columns with one scale, and the least amax: ``expert_rows.cuh``.
GROUP, EPS = 128, 1e-10
#: Columns that a thread has, and bytes at whose multiples rows start.
VECTOR, ROW_BYTES = 8, 16
MAX_ROWS = 2**31 - 1

#: What all of these ops say besides their arguments.
ROWS = """
Raises
------
ValueError
    A tensor that is not on a CUDA device; a dtype, shape, device, strides or alignment other than
    above; outputs that overlap another argument or each other.
"""


def check_matrix(export: str, name: str, t: torch.Tensor, multiple: int) -> None:
    """Raise unless rows have a multiple of columns and start at multiples of 16 bytes."""
    if t.dim() != 2:
        raise ValueError(f"{export}: {name} must have 2 dimensions, got shape {[*t.shape]}")
    if t.shape[1] % multiple:
        raise ValueError(
            f"{export}: {name} must have a multiple of {multiple} columns, got shape {[*t.shape]}"
        )
    rows_apart, columns_apart = t.stride()
    if t.shape[1] > 1 and columns_apart != 1:
        raise ValueError(
            f"{export}: {name} must have stride 1 in its last dimension, got strides "
            f"{[*t.stride()]}; call .contiguous()"
        )
    if t.shape[0] > 1 and t.numel() and rows_apart * t.element_size() % ROW_BYTES:
        raise ValueError(
            f"{export}: {name} must have rows that start at multiples of {ROW_BYTES} bytes, got "
            f"strides {[*t.stride()]}; pad the rows"
        )


def check_scales(export: str, scales: torch.Tensor, rows: int, columns: int) -> None:
    """Raise unless each group of the columns of a row has a scale."""
    shape = [rows, columns // GROUP]
    if list(scales.shape) != shape:
        raise ValueError(f"{export}: out_scale must have shape {shape}, got {[*scales.shape]}")
    check_elements_apart(export, "out_scale", scales)


def new_scales(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Scales ``[rows, columns / 128]`` with stride 1 along the rows, which begin at 16 bytes."""
    padded = -(-rows // 4) * 4
    return x.new_empty(columns // GROUP, padded, dtype=torch.float32)[:, :rows].mT


def is_row(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Whether numbers are those of one of ``count`` rows."""
    return (rows >= 0) & (rows < count)
