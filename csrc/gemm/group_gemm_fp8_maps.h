// SPDX-License-Identifier: Apache-2.0
// The tensor maps of the grouped e4m3 product in CuTe DSL.
#pragma once

#include "precast/core/sm90/tensor_map.cuh"
#include "precast/gemm/fp8_params.cuh"

namespace precast {

// The layout that python/precast/cute_dsl/group_gemm_fp8.py expects: boxes of 128 of the depth in
// shared memory swizzled by 128 bytes, with the depth as the first coordinate.
struct GroupGemmMaps {
  TensorMap a;  // [tokens, depth], boxes of 128 / cluster tokens
  TensorMap b;  // [groups, columns, depth], boxes of 128 columns of one group
};

cudaError_t encode_group_gemm_maps(GroupGemmMaps& maps, const Fp8GemmParams& params, int cluster);

}  // namespace precast
