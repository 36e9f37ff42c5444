# SPDX-License-Identifier: Apache-2.0
"""How the scales of a block-scaled matrix lie in memory, and what its ops check and say alike.

The checks are those of reference mode, in the words of the bindings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from precast._base.torch import torch
from precast._op.declaration import Kind
from precast._op.dispatch import check_tensors
from precast._ops.quantize._reference_blocks import scale_shape

#: Arguments and errors of several ops.
BLOCKS = """
Parameters
----------
a, input : torch.Tensor
    ``[..., columns]``, at least 2 dimensions, float16 or bfloat16, on a CUDA device; columns are a
    multiple of the block with stride 1, the others merge into at most two strides. 16-byte aligned
    rows are fastest.
a_fp4, e2m1_tensor, fp4_data : torch.Tensor
    ``[..., columns // 2]``, at least 2 dimensions, uint8, contiguous, 16-byte aligned, on a CUDA
    device; columns are a multiple of the block. The first number is in the lower 4 bits.
a_sf, ufp8_scale_tensor, scale_tensor : torch.Tensor
    A scale for each block of each row, with the layout's padding, in any shape, uint8, contiguous,
    on the same device.
sfLayout : SfLayout
    Where the scales lie.
is_sf_swizzled_layout : bool
    Scales in tiles of 128x4, otherwise linear.
is_sf_8x4_layout : bool
    Tiles of 8x4 in place of 128x4; only with ``is_sf_swizzled_layout``.
sf_swizzle_layout : SfLayout, optional
    Where the scales lie, in place of ``is_sf_swizzled_layout``.
backend : str
    Only ``"cuda"``.

Raises
------
ValueError
    A tensor that is not on a CUDA device; a dtype, shape, strides or number other than above.
"""


class SfLayout(IntEnum):
    """Layout of scale factors; the values are FlashInfer's.

    Examples
    --------
    >>> SfLayout.layout_linear.value
    2
    """

    #: Tiles of 128 rows and 4 columns, row-major; in a tile, the scale of row ``r`` and column
    #: ``c`` lies at ``(r % 32) * 16 + (r // 32) * 4 + c``. What the matrix units of compute
    #: capability 10.0 and later read.
    layout_128x4 = 0
    #: Tiles of 8 rows and 4 columns, row-major, each row-major.
    layout_8x4 = 1
    #: Row-major, without padding.
    layout_linear = 2


def layout_of_flags(is_sf_swizzled_layout: bool, is_sf_8x4_layout: bool) -> int:
    """Return the layout that the flags of FlashInfer's older functions say."""
    if not is_sf_swizzled_layout:
        return 2
    return 1 if is_sf_8x4_layout else 0


#: The kind ``layout`` of a declaration: an :class:`SfLayout` or its number.
LAYOUT_KIND = {"layout": Kind("int {name}", "int({name})")}
#: Public flags from the layout that the export gets.
LAYOUT_FLAGS = {
    "is_sf_swizzled_layout": lambda sf_layout: sf_layout != SfLayout.layout_linear,
    "is_sf_8x4_layout": lambda sf_layout: sf_layout == SfLayout.layout_8x4,
}


def check_backend(export: str, backend: str, *aliases: str) -> None:
    """Raise ValueError but for ``cuda`` and ``aliases``, names of other libraries' kernels."""
    if backend != "cuda" and backend not in aliases:
        raise ValueError(f"{export}: backend must be 'cuda', got {backend!r}")


def check_host(export: str, **tensors: torch.Tensor) -> None:
    """Raise a TypeError for what is no tensor, and a ValueError for one that is not on the CPU."""
    check_tensors(export, tensors)
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu":
            raise ValueError(f"{export}: {name} must be a CPU tensor, got {tensor.device}")


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
