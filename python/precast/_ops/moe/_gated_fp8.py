# SPDX-License-Identifier: Apache-2.0
"""The first product of a mixture of experts with scales of blocks, SwiGLU and new scales.

Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202; DeepSeek-V3 Technical Report,
arXiv:2412.19437, section 3.5.2.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.export import Export
from precast._op.validation import check_contiguous
from precast._ops.gemm._fp8 import BLOCK, check_product, scaled_product
from precast._ops.gemm._plain import rows_of_groups
from precast._ops.quantize._reference_8bit import group_quant

#: The tile alone, two tiles that share rows, and two that share a weight: `kNumSm90Clusters` of
#: ``choose.cuh`` without those that split the depth.
CHOICES = range(3)


def _check(
    export: str,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    out: torch.Tensor,
    out_scale: torch.Tensor,
    choice: int,
) -> None:
    columns = out.shape[1]
    if columns % BLOCK:
        raise ValueError(
            f"{export}: out must have a multiple of {BLOCK} columns, got shape {[*out.shape]}"
        )
    shape = [len(b), 2 * columns, a.shape[1]]
    if [*b.shape] != shape:
        raise ValueError(f"{export}: b must have shape {shape}, got {[*b.shape]}")
    if choice >= 0 and choice not in CHOICES:
        raise ValueError(
            f"{export}: choice must be -1 or 0, 1 or 2, the tile and how two CTAs share an "
            f"operand, got {choice}"
        )
    shape = [columns // BLOCK, len(a)]
    if [*out_scale.shape] != shape:
        raise ValueError(f"{export}: out_scale must have shape {shape}, got {[*out_scale.shape]}")
    if out_scale.shape[1] > 1 and out_scale.stride(1) != 1:
        raise ValueError(
            f"{export}: out_scale must have stride 1 in its last dimension, got strides "
            f"{[*out_scale.stride()]}; call .contiguous()"
        )
    check_contiguous(export, m_indptr=m_indptr)
    check_product(export, a, b, a_scale, b_scale, out)


def _write(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    out: torch.Tensor,
    out_scale: torch.Tensor,
    eps: float,
) -> None:
    for group, rows in enumerate(rows_of_groups(m_indptr, len(a))):
        sums = scaled_product(a[rows], b[group], a_scale[rows], b_scale[group], 1)
        up, gate = sums.chunk(2, dim=1)
        h = torch.nn.functional.silu(gate) * up
        out[rows], scales = group_quant(h, BLOCK, eps, out.dtype)
        out_scale[:, rows] = scales.mT


#: ``out * out_scale = silu(a b[n:]^T) * (a b[:n]^T)``, the sums not rounded.
GROUPED_SWIGLU_FP8 = Export(
    "fp8_gemm_gated_sm90",
    "grouped_mm_fp8_swiglu",
    "a:e4m3[m,k] b:e4m3[groups,rows,k] a_scale:f32[m,blocks] b_scale:f32[groups,row_blocks,blocks] "
    "m_indptr:i32[groups+1] out!:e4m3[m,n] out_scale!:f32[out_blocks,m] eps:float(1e-30-) "
    "choice:int enable_pdl:pdl_on",
    check=_check,
    write=_write,
    function="cutlass_fused_moe",
    error_name="grouped_mm_fp8_swiglu",
    traced=False,
)
