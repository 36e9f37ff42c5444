# SPDX-License-Identifier: Apache-2.0
"""Gated activations: ``act(gate) * up``, with the gate in the first half of the last dimension.

Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.
"""

from __future__ import annotations

from precast._ops.activation.activation import (
    gelu_and_mul,
    gelu_and_mul_reference,
    gelu_tanh_and_mul,
    gelu_tanh_and_mul_reference,
    silu_and_mul,
    silu_and_mul_reference,
)

__all__ = [
    "gelu_and_mul",
    "gelu_and_mul_reference",
    "gelu_tanh_and_mul",
    "gelu_tanh_and_mul_reference",
    "silu_and_mul",
    "silu_and_mul_reference",
]
