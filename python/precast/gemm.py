# SPDX-License-Identifier: Apache-2.0
"""Products of matrices: bfloat16, FP8, e4m3 with scales of blocks; layers of few rows."""

from __future__ import annotations

from precast._ops.gemm.blockscale import fp8_blockscale_gemm_sm90
from precast._ops.gemm.fp8_gemm import (
    gemm_fp8_nt_blockscaled,
    gemm_fp8_nt_groupwise,
    gemm_fp8_nt_groupwise_reference,
)
from precast._ops.gemm.fp8_grouped import (
    batch_deepgemm_fp8_nt_groupwise,
    batch_deepgemm_fp8_nt_groupwise_reference,
    group_deepgemm_fp8_nt_groupwise,
    group_deepgemm_fp8_nt_groupwise_reference,
    group_gemm_fp8_nt_groupwise,
    group_gemm_fp8_nt_groupwise_reference,
)
from precast._ops.gemm.grouped_mm import grouped_mm_bf16, grouped_mm_bf16_reference
from precast._ops.gemm.int4 import grouped_mm_int4, grouped_mm_int4_reference
from precast._ops.gemm.mm_bf16 import (
    bmm_bf16,
    bmm_bf16_reference,
    mm_bf16,
    mm_bf16_reference,
)
from precast._ops.gemm.mxfp4 import grouped_mm_mxfp4, grouped_mm_mxfp4_reference
from precast._ops.gemm.router import (
    mm_M1_16_K7168_N128,
    mm_M1_16_K7168_N128_reference,
    mm_M1_16_K7168_N256,
    mm_M1_16_K7168_N256_reference,
)
from precast._ops.gemm.scaled_mm import (
    bmm_fp8,
    bmm_fp8_reference,
    grouped_mm_fp8,
    grouped_mm_fp8_reference,
    mm_fp8,
    mm_fp8_reference,
    scaled_mm,
    scaled_mm_reference,
)
from precast._ops.gemm.segment_gemm import segment_gemm, segment_gemm_reference
from precast._ops.gemm.segment_wrapper import SegmentGEMMWrapper
from precast._ops.gemm.tinygemm import tinygemm_bf16, tinygemm_bf16_reference

__all__ = [
    "SegmentGEMMWrapper",
    "batch_deepgemm_fp8_nt_groupwise",
    "batch_deepgemm_fp8_nt_groupwise_reference",
    "bmm_bf16",
    "bmm_bf16_reference",
    "bmm_fp8",
    "bmm_fp8_reference",
    "fp8_blockscale_gemm_sm90",
    "gemm_fp8_nt_blockscaled",
    "gemm_fp8_nt_groupwise",
    "gemm_fp8_nt_groupwise_reference",
    "group_deepgemm_fp8_nt_groupwise",
    "group_deepgemm_fp8_nt_groupwise_reference",
    "group_gemm_fp8_nt_groupwise",
    "group_gemm_fp8_nt_groupwise_reference",
    "grouped_mm_bf16",
    "grouped_mm_bf16_reference",
    "grouped_mm_fp8",
    "grouped_mm_fp8_reference",
    "grouped_mm_int4",
    "grouped_mm_int4_reference",
    "grouped_mm_mxfp4",
    "grouped_mm_mxfp4_reference",
    "mm_M1_16_K7168_N128",
    "mm_M1_16_K7168_N128_reference",
    "mm_M1_16_K7168_N256",
    "mm_M1_16_K7168_N256_reference",
    "mm_bf16",
    "mm_bf16_reference",
    "mm_fp8",
    "mm_fp8_reference",
    "scaled_mm",
    "scaled_mm_reference",
    "segment_gemm",
    "segment_gemm_reference",
    "tinygemm_bf16",
    "tinygemm_bf16_reference",
]
