# SPDX-License-Identifier: Apache-2.0
"""Groups of e4m3 tokens times a weight each, with scales of blocks.

::

    out[t, n] = round(sum_i a_scale[t, i] * b_scale[g, n / 128, i] *
                      sum_{k in block i} a[t, k] * b[g, n, k])             fp32, in the order of i
    for the tokens t from m_indptr[g] to m_indptr[g + 1] - 1; others are not written

Layouts  a [tokens, depth], b [groups, columns, depth]: e4m3 codes as bytes, read by TMA through the
         maps that the binding encodes, in boxes of 128 of the depth with swizzle; what lies outside
         reads as zeros. Scales fp32 at any strides, out 16-bit with rows at 16 bytes.
Traffic  reads the weight of each group once from memory, and from L2 for each 128 tokens; tokens
         from L2 for each 128 columns, or each 256 in clusters of two
Source   DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.3 (the sum of each
         128 of the depth in fp32)
Measured 2026-11-27 on an H200, 8 groups of 64, 128, 256, 512 and 64 to 512 tokens: 4096 columns of
         depth 7168 74, 80, 129, 226 and 149 us, 0.90, 0.89, 0.88, 0.97 and 1.14 of the speed of the
         kernels in CUDA; 7168 of depth 2048 43, 48, 70, 125 and 86 us, 0.92, 0.99, 0.93, 0.96, 0.96

The kernels of Hopper and of Blackwell are in ``group_gemm_sm90.py`` and ``group_gemm_sm100.py``.
"""

from __future__ import annotations

from cutlass import Float32, Int32, Int64

from precast.cute_dsl.common import DTYPES, pointer
from precast.cute_dsl.group_gemm_sm90 import GroupGemmSm90
from precast.cute_dsl.group_gemm_sm100 import GroupGemmSm100
from precast.cute_dsl.group_tiles import CODES


def kernels(dtype_o: str, arch: str) -> dict[str, tuple[object, ...]]:
    """What a module is compiled from: kernels by name, arguments, attributes of the launch."""
    arguments = (
        pointer(CODES, 16),
        pointer(CODES, 16),
        pointer(Int32, 4),
        pointer(Float32, 4),
        pointer(Float32, 4),
        pointer(DTYPES[dtype_o], 16),
        *(Int64(0) for _ in range(6)),
        *(Int32(0) for _ in range(5)),
    )
    made: dict[str, tuple[object, ...]] = {}
    for cluster in (1, 2):
        kernel = (GroupGemmSm90 if arch == "sm_90a" else GroupGemmSm100)(dtype_o, cluster)
        launch = {"shared_bytes": kernel.shared_bytes, "cluster": cluster}
        made[f"group_gemm_fp8_of_{cluster}"] = kernel, arguments, launch
    return made
