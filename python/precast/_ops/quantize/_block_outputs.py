# SPDX-License-Identifier: Apache-2.0
"""What the quantisations in blocks share."""

from __future__ import annotations

import math

from precast._base.torch import torch
from precast._op.validation import check_dtype
from precast._ops.quantize._block_validation import check_blocks, check_layout, check_rows
from precast._ops.quantize._reference_blocks import scale_shape


def check_input(export: str, name: str, input: torch.Tensor, block: int, layout: int) -> int:
    check_dtype(export, name, input, torch.float16, torch.bfloat16)
    rows = check_rows(export, name, input)
    check_blocks(export, name, input, block)
    check_layout(export, layout)
    return rows


def write_outputs(
    out: torch.Tensor, out_sf: torch.Tensor, result: tuple[torch.Tensor, torch.Tensor]
) -> None:
    out.copy_(result[0])
    out_sf.copy_(result[1].view(out_sf.shape))


def new_outputs(input: torch.Tensor, block: int, layout: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = input.shape
    rows = shape[0] if len(shape) == 2 else math.prod(shape[:-1])
    columns = shape[-1]
    out = input.new_empty(*shape[:-1], columns // 2, dtype=torch.uint8)
    # Of `out`, whose dtype it has: naming one costs half a microsecond.
    return out, out.new_empty(*scale_shape(rows, columns // block, layout))


def on_device(scale: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """As FlashInfer does: a global scale of another dtype or device is converted first."""
    if scale.dtype is torch.float32 and scale.get_device() == input.get_device():
        return scale
    return scale.to(device=input.device, dtype=torch.float32)


def check_backend(export: str, backend: str, *aliases: str) -> None:
    """``aliases``: names of other libraries' kernels, for which ours stand in."""
    if backend != "cuda" and backend not in aliases:
        raise ValueError(f"{export}: backend must be 'cuda', got {backend!r}")
