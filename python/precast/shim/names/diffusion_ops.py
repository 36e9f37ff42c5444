# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's second place for ops that video models use."""

from __future__ import annotations

from precast._ops.rope.fused_qk_rmsnorm_rope import fused_qk_rmsnorm_rope

__all__ = ["fused_qk_rmsnorm_rope"]
