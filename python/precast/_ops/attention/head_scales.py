# SPDX-License-Identifier: Apache-2.0
"""Scales of queries, keys and values of 8 bits: one number each, or one for each head.

Kernels whose queries are of 8 bits read a factor of logits and one of outputs for each query head.
Others read one for all, so the factors of heads go into the converted queries and the outputs.
"""

from __future__ import annotations

from typing import TypeAlias

from precast._base.torch import torch

Scale: TypeAlias = "float | torch.Tensor | None"
#: Factors of logits, a number and those on the device, and those of outputs.
Factors: TypeAlias = "tuple[float, torch.Tensor | None, float, torch.Tensor | None]"


def has_heads(scale: Scale) -> bool:
    """Whether a scale has more than one number."""
    return isinstance(scale, torch.Tensor) and scale.numel() > 1


def of_query_heads(
    option: str, scale: torch.Tensor, heads: int, num_qo_heads: int, device: torch.device
) -> torch.Tensor:
    """Return a number for each query head; ``heads`` are those that the scale has numbers for."""
    if scale.shape != (heads,) or scale.device != device or not scale.is_floating_point():
        raise ValueError(
            f"{option} must be one number or have shape [{heads}], floating-point on "
            f"{device}, got {scale.dtype} of shape {[*scale.shape]} on {scale.device}"
        )
    scale = scale.float()
    if heads == num_qo_heads:
        return scale.contiguous()
    return scale.repeat_interleave(num_qo_heads // heads)


def scale_queries(
    q: torch.Tensor, qk_scale: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return queries of ``dtype`` and what is left of the factor, which holds for all heads."""
    if not has_heads(qk_scale):
        return q.to(dtype), qk_scale  # The values are the same, in 16 bits.
    assert qk_scale is not None
    return (q.float() * qk_scale[:, None]).to(dtype), None
