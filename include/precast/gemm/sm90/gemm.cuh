// SPDX-License-Identifier: Apache-2.0
// Block-scaled e4m3 GEMM for sm_90a, of one weight or of one for each group of tokens: the formula
// and the layouts of gemm/fp8_params.cuh, computed by wgmma on tiles that TMA copies.
//
// Threads  A CTA has an SM for itself, or half of one, and computes tiles until none is left. The
//          warps of its producer warpgroup copy the operands and the scales; its one or two
//          consumer warpgroups compute 64 or 128 rows each. They meet at mbarriers alone.
// Clusters Two CTAs may copy an operand for both; up to eight may split the depth of one tile.
// Traffic  Tile by tile, a and b are read from L2 once for each tile of the other.
// Source   DeepSeek-V3, arXiv:2412.19437, section 3.5.2, for scales and accumulation; the choice of
//          tiles, and operands that change places for few tokens: DeepGEMM.
#pragma once

#include "precast/gemm/sm90/consumer.cuh"
#include "precast/gemm/sm90/launch.cuh"
#include "precast/gemm/sm90/producer.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename T, typename Tile>
__global__ __launch_bounds__(Tile::kCtaThreads, Tile::kCtasPerSm) void Fp8GemmKernel(
    const __grid_constant__ Sm90GemmParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char fp8_gemm_smem[];
  run_gemm_cta<Tile, Fp8GemmStorage<Tile>, Fp8GemmProducer<Tile>, Fp8GemmConsumer<T, Tile>,
               Fp8BoxEpilogue<T, Tile>>(params, fp8_gemm_smem);
#endif
}

#if !defined(__CUDACC_RTC__)

template <typename T, typename Tile>
cudaError_t launch_fp8_gemm_tile(const Fp8GemmParams& p, const Fp8GemmChoice& choice, int sms,
                                 bool enable_pdl, cudaStream_t stream) {
  Sm90GemmParams params = {};
  params.p = p;
  const Fp8Scales& scales = p.a_scale;
  params.has_four_scales = !scales.packed && scales.rows_log2 == 0 && scales.block_stride == 1 &&
                           scales.depth_stride % 4 == 0 && scales.group_stride % 4 == 0 &&
                           reinterpret_cast<uint64_t>(scales.data) % 16 == 0;
  params.has_scales_in_row = params.has_four_scales && p.kind != TokenGroups::ranges;
  const bool has_groups_of_a = p.kind == TokenGroups::equal || p.kind == TokenGroups::counted;
  cudaError_t error = cudaSuccess;
  if constexpr (Fp8BoxEpilogue<T, Tile>::kStoresBoxes) {
    TensorMapShape shape;
    shape.dim(p.columns, 0, Tile::Box::kColumns)
        .dim(p.tokens, p.out_row_stride * sizeof(T), Tile::Box::kRows)
        .dim(has_groups_of_a ? p.groups : 1, p.out_group_stride * sizeof(T), 1);
    error = encode_tensor_map(params.out, TypeName<T>::value, p.out, shape);
    if (error != cudaSuccess) return error;
  }
  error = prepare_gemm<Tile>(params, choice, DType::e4m3, has_groups_of_a ? p.groups : 1, p.groups,
                             sms);
  if (error != cudaSuccess) return error;
  constexpr int kBytes = Sm90GemmBuffers<Tile>::kBytes;
  static_assert(kBytes <= Tile::kSharedBytes, "a CTA has this much shared memory");
  error = launch_gemm_ctas<Tile>(Fp8GemmKernel<T, Tile>, kBytes, enable_pdl, stream, params);
  if (params.cluster_ctas == 1 || !is_cluster_too_large(error)) return error;
  // A part of a GPU may have no room for a cluster.
  return launch_fp8_gemm_tile<T, Tile>(p, {choice.tile, 0, 0.0}, sms, enable_pdl, stream);
}

// Launches the product on `stream` with one of the tiles that are swapped, or are not. The problem
// is not empty, and the choice is legal for it.
template <typename T, bool kSwapped, int kTile = 0>
cudaError_t launch_fp8_gemm(const Fp8GemmParams& p, const Fp8GemmChoice& choice, int sms,
                            bool enable_pdl, cudaStream_t stream) {
  if constexpr (kTile == kNumFp8Tiles) {
    return cudaErrorInvalidValue;
  } else {
    constexpr Sm90TileShape kShape = kFp8Tiles[kTile];
    if constexpr (kShape.swapped == kSwapped) {
      if (choice.tile == kTile) {
        using Tile = Fp8GemmTile<kShape.rows, kShape.columns, kSwapped>;
        return launch_fp8_gemm_tile<T, Tile>(p, choice, sms, enable_pdl, stream);
      }
    }
    return launch_fp8_gemm<T, kSwapped, kTile + 1>(p, choice, sms, enable_pdl, stream);
  }
}

#endif

#endif  // __CUDACC__

}  // namespace precast
