// SPDX-License-Identifier: Apache-2.0
// Encodes the tensor maps of the grouped e4m3 product in CuTe DSL. Why a file for nvcc without a
// kernel: the encoder is part of the headers of kernels, which the host compiler sees less of.
#include "gemm/group_gemm_fp8_maps.h"

namespace precast {

cudaError_t encode_group_gemm_maps(GroupGemmMaps& maps, const Fp8GemmParams& params, int cluster) {
  constexpr uint32_t kBlock = kFp8Block;
  const uint64_t depth = params.depth;
  TensorMapShape a = {}, b = {};
  a.dim(depth, 1, kBlock).dim(params.tokens, params.a.row_stride, kBlock / cluster);
  b.dim(depth, 1, kBlock).dim(params.columns, params.b.row_stride, kBlock);
  b.dim(params.groups, params.b.group_stride, 1);
  b.l2_bytes = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  const cudaError_t status = encode_tensor_map(maps.a, DType::e4m3, params.a.data, a);
  if (status != cudaSuccess) return status;
  return encode_tensor_map(maps.b, DType::e4m3, params.b.data, b);
}

}  // namespace precast
