# SPDX-License-Identifier: Apache-2.0
"""Concatenations that attention needs.

Source: DeepSeek-AI, DeepSeek-V2, arXiv:2405.04434.
"""

from __future__ import annotations

from precast._ops.elementwise.concat_mla_kv_quant_fp8 import (
    concat_mla_kv_quant_fp8,
    concat_mla_kv_quant_fp8_reference,
)
from precast._ops.elementwise.concat_ops import (
    concat_mla_k,
    concat_mla_k_reference,
)

__all__ = [
    "concat_mla_k",
    "concat_mla_k_reference",
    "concat_mla_kv_quant_fp8",
    "concat_mla_kv_quant_fp8_reference",
]
