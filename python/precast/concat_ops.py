# SPDX-License-Identifier: Apache-2.0
"""Concatenations that attention needs.

Source: DeepSeek-AI, DeepSeek-V2, arXiv:2405.04434.
"""

from __future__ import annotations

from precast._ops.elementwise.concat_ops import (
    concat_mla_k,
    concat_mla_k_reference,
)

__all__ = [
    "concat_mla_k",
    "concat_mla_k_reference",
]
