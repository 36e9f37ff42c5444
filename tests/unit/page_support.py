# SPDX-License-Identifier: Apache-2.0
"""What tests of the paged KV cache share."""

from __future__ import annotations

import torch

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: copies must not touch NaNs."""
    return tensor.contiguous().view(BITS[tensor.element_size()])
