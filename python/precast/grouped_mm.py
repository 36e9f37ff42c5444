# SPDX-License-Identifier: Apache-2.0
"""Products of groups of rows with a weight for each group."""

from __future__ import annotations

from precast._ops.gemm.grouped_mm import grouped_mm_bf16, grouped_mm_bf16_reference
from precast._ops.gemm.int4 import grouped_mm_int4, grouped_mm_int4_reference
from precast._ops.gemm.mxfp4 import grouped_mm_mxfp4, grouped_mm_mxfp4_reference
from precast._ops.gemm.scaled_mm import grouped_mm_fp8, grouped_mm_fp8_reference

__all__ = [
    "grouped_mm_bf16",
    "grouped_mm_bf16_reference",
    "grouped_mm_fp8",
    "grouped_mm_fp8_reference",
    "grouped_mm_int4",
    "grouped_mm_int4_reference",
    "grouped_mm_mxfp4",
    "grouped_mm_mxfp4_reference",
]
