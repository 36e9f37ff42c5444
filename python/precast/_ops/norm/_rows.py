# SPDX-License-Identifier: Apache-2.0
"""What the root mean square norms share."""

from __future__ import annotations

from precast._base.torch import torch


def normalized(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The root mean square norm of fp32 rows."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight
