# SPDX-License-Identifier: Apache-2.0
"""Products of matrices: linear layers and routers of few rows, bound by reading the weight."""

from __future__ import annotations

from precast._ops.gemm.router import (
    mm_M1_16_K7168_N128,
    mm_M1_16_K7168_N128_reference,
    mm_M1_16_K7168_N256,
    mm_M1_16_K7168_N256_reference,
)
from precast._ops.gemm.tinygemm import tinygemm_bf16, tinygemm_bf16_reference

__all__ = [
    "mm_M1_16_K7168_N128",
    "mm_M1_16_K7168_N128_reference",
    "mm_M1_16_K7168_N256",
    "mm_M1_16_K7168_N256_reference",
    "tinygemm_bf16",
    "tinygemm_bf16_reference",
]
