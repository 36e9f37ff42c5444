# SPDX-License-Identifier: Apache-2.0
"""The tensors of the block-scaled ops that callers do not bring."""

from __future__ import annotations

import math

from precast._base.torch import torch
from precast._ops.quantize._reference_blocks import scale_shape


def packed_outputs(
    input: torch.Tensor, block: int, layout: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """New tensors for packed e2m1 and its scales, both uint8."""
    shape = input.shape
    rows = shape[0] if len(shape) == 2 else math.prod(shape[:-1])
    columns = shape[-1]
    out = input.new_empty(*shape[:-1], columns // 2, dtype=torch.uint8)
    # Made from `out`, which has its dtype: naming one costs half a microsecond.
    return out, out.new_empty(*scale_shape(rows, columns // block, layout))


def unpacked_output(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A new tensor for twice as many numbers in the last dimension."""
    *leading, columns = packed.shape
    return packed.new_empty(*leading, columns * 2, dtype=dtype)


def float32_on_device(scale: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """``scale``, converted if it has another dtype or device, as FlashInfer does."""
    if scale.dtype is torch.float32 and scale.get_device() == input.get_device():
        return scale
    return scale.to(device=input.device, dtype=torch.float32)
