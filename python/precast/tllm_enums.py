# SPDX-License-Identifier: Apache-2.0
"""Enums of a mixture of experts, with the values that FlashInfer and TensorRT-LLM give them."""

from __future__ import annotations

from precast._ops.moe.enums import (
    DEFAULT_SWIGLU_ALPHA,
    DEFAULT_SWIGLU_BETA,
    DEFAULT_SWIGLU_LIMIT,
    ActivationType,
    RoutingMethodType,
    is_gated_activation,
)

__all__ = [
    "DEFAULT_SWIGLU_ALPHA",
    "DEFAULT_SWIGLU_BETA",
    "DEFAULT_SWIGLU_LIMIT",
    "ActivationType",
    "RoutingMethodType",
    "is_gated_activation",
]
