# SPDX-License-Identifier: Apache-2.0
"""What the block-scaled ops check in reference mode, in the words of their bindings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from precast._base.torch import torch
from precast._ops.quantize._reference_blocks import scale_shape


def check_backend(export: str, backend: str, *aliases: str) -> None:
    """Raise ValueError but for ``cuda`` and ``aliases``, names of other libraries' kernels."""
    if backend != "cuda" and backend not in aliases:
        raise ValueError(f"{export}: backend must be 'cuda', got {backend!r}")


def check_quantized_blocks(
    export: str,
    name: str,
    input: torch.Tensor,
    block: int,
    layout: int,
    global_scale_name: str = "",
    global_scale: torch.Tensor | None = None,
) -> None:
    """Check that rows are whole blocks, with one global scale for all or one for each row."""
    if input.shape[-1] % block:
        raise ValueError(
            f"{export}: {name}'s last dimension must be a multiple of {block}, got "
            f"{input.shape[-1]}"
        )
    _check_layout(export, layout)
    rows = math.prod(input.shape[:-1])
    if global_scale is not None and global_scale.numel() not in (1, rows):
        raise ValueError(
            f"{export}: {global_scale_name} must have 1 element, or {rows}, one a row, got shape "
            f"{[*global_scale.shape]}"
        )


def check_dequantized_blocks(
    export: str,
    name: str,
    data: torch.Tensor,
    scales_name: str,
    scales: torch.Tensor,
    block: int,
    layout: int,
) -> None:
    """Check that rows are whole blocks, two numbers a byte of uint8, with a scale for each."""
    columns = data.shape[-1] * (2 if data.dtype == torch.uint8 else 1)
    if columns % block:
        raise ValueError(
            f"{export}: {name} must hold whole blocks of {block} numbers a row, got {columns} "
            f"numbers"
        )
    _check_layout(export, layout)
    rows, columns = math.prod(data.shape[:-1]), columns // block
    padded = scale_shape(rows, columns, layout)
    if scales.numel() != math.prod(padded):
        raise ValueError(
            f"{export}: {scales_name} must have {math.prod(padded)} elements, for {rows} x "
            f"{columns} blocks padded to {padded[0]} x {padded[1]}, got shape {[*scales.shape]}"
        )


def dequantized_blocks(
    data: str, scales: str, block: int | str, layout: int | str
) -> Callable[..., None]:
    """Make the check of arguments by name; block and layout may also be numbers."""

    def check(export: str, **given: Any) -> None:
        numbers = given.get(str(block), block), given.get(str(layout), layout)
        check_dequantized_blocks(export, data, given[data], scales, given[scales], *numbers)

    return check


def _check_layout(export: str, layout: int) -> None:
    if layout not in (0, 1, 2):
        raise ValueError(
            f"{export}: the scale layout must be 0 (128x4), 1 (8x4) or 2 (linear), got {layout}"
        )
