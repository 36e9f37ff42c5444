# SPDX-License-Identifier: Apache-2.0
"""What the root mean square norms share."""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.validation import check_peer, check_rank, check_vector


def normalized(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The root mean square norm of fp32 rows."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def check_norm(
    export: str, input: torch.Tensor, weight: torch.Tensor, name: str, peer: torch.Tensor
) -> None:
    """What all root mean square norms refuse in reference mode."""
    check_rank(export, "input", input, 2, 3)
    check_vector(export, "weight", weight, input, input.dtype)
    check_peer(export, name, peer, input, may_be_input=name == "out")
