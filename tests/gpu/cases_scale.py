# SPDX-License-Identifier: Apache-2.0
"""What scale must compute."""

from __future__ import annotations

import torch
from op_case import OpCase, Tensors

FACTOR = 1.7


def _factor(x: torch.Tensor, generator: torch.Generator) -> tuple[float]:
    return (FACTOR,)


def _scale(x: torch.Tensor, factor: float) -> Tensors:
    return (x.double() * torch.tensor(factor, dtype=torch.float32).item(),)


CASES = (OpCase("scale", "scale", ("f32", "f16", "bf16"), _factor, _scale, ranks=(1, 2, 3)),)
