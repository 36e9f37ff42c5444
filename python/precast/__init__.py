# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's operators as finished parts: CUDA kernels that are compiled ahead of time."""

from __future__ import annotations

from precast import loader as loader  # Reads the manifests and binds the plan to them.
from precast._mode import reference_mode
from precast._version import __version__
from precast.activation import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from precast.jit.policy import freeze
from precast.norm import (
    fused_add_rmsnorm,
    gemma_fused_add_rmsnorm,
    gemma_rmsnorm,
    layernorm,
    rmsnorm,
)
from precast.preload import preload
from precast.scale import scale

__all__ = [
    "__version__",
    "freeze",
    "fused_add_rmsnorm",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "layernorm",
    "preload",
    "reference_mode",
    "rmsnorm",
    "scale",
    "silu_and_mul",
]
