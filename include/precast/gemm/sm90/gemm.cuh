// SPDX-License-Identifier: Apache-2.0
// Block-scaled e4m3 GEMM for sm_90a, of one weight or of one for each group of tokens: the formula
// and the layouts of gemm/fp8_params.cuh, computed by wgmma on tiles that TMA copies.
//
// Threads  A CTA has an SM for itself, or half of one, and computes tiles until none is left. Three
// warps of its
//          producer warpgroup copy the operands and the scales; its one or two consumer warpgroups
//          compute 64 or 128 rows each. They meet at mbarriers alone.
// Clusters Two CTAs may copy an operand for both; up to eight may split the depth of one tile.
// Traffic  Tile by tile, a and b are read from L2 once for each tile of the other.
// Source   DeepSeek-V3, arXiv:2412.19437, section 3.5.2, for scales and accumulation; the choice of
//          tiles, and operands that change places for few tokens: DeepGEMM.
#pragma once

#include "precast/core/launch.cuh"
#include "precast/gemm/sm90/consumer.cuh"
#include "precast/gemm/sm90/producer.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename T, typename Tile>
__global__ __launch_bounds__(Tile::kCtaThreads, Tile::kCtasPerSm) void Fp8GemmKernel(
    const __grid_constant__ Sm90GemmParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Buffers = Fp8GemmBuffers<Tile>;
  extern __shared__ __align__(1024) unsigned char fp8_gemm_smem[];
  const Buffers buffers = {shared_address(fp8_gemm_smem)};
  auto& shared = *reinterpret_cast<Fp8GemmStorage<Tile>*>(fp8_gemm_smem + Buffers::kStorageOffset);
  const bool splits_k = params.use == ClusterUse::splits_k;
  const bool shares = params.use == ClusterUse::shares_a || params.use == ClusterUse::shares_b;
  launch_dependent_grids();
  // Why a shuffle: the compiler knows then that all lanes of a warp take the same branch.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp == 0) {
    shared.stages.init_by_warp(Fp8GemmProducer<Tile>::arrivals(params),
                               Tile::kConsumerWarps * (shares ? params.cluster_ctas : 1));
    fence_mbarrier_init();
  } else if (warp == 1) {
    if (elect_lane()) prefetch_tensor_map(&params.a);
  } else if (warp == 2) {
    if (elect_lane()) prefetch_tensor_map(&params.b);
  }
  // CTAs that share an operand write to each other's shared memory and barriers.
  const auto wait_for_cluster = [] {
    __syncwarp();
    cluster_arrive_relaxed();
    cluster_wait();
  };
  if (shares) {
    wait_for_cluster();
  } else {
    __syncthreads();
  }
  wait_on_dependent_grids();
  if (warp < 4) {
    decrease_registers<Tile::kProducerRegisters>();
    Fp8GemmProducer<Tile>(params, shared, buffers).run(warp);
    if (splits_k) Fp8GemmEpilogue<T, Tile>::join_sums_of_cluster();
  } else {
    increase_registers<Tile::kConsumerRegisters>();
    Fp8GemmConsumer<T, Tile>(params, shared, buffers).run();
  }
  // The other CTA has read what this one has copied to it, and its warps arrive here no more.
  if (shares) wait_for_cluster();
#endif
}

#if !defined(__CUDACC_RTC__)

// The map of an operand, of which a copy takes `box_rows` rows of 128 bytes.
inline cudaError_t encode_fp8_matrix(TensorMap& map, const Fp8Matrix& matrix, int groups, int rows,
                                     int depth, int box_rows) {
  TensorMapShape shape;
  shape.dim(depth, 0, 128)
      .dim(rows, matrix.row_stride, box_rows)
      .dim(groups, matrix.group_stride, 1);
  shape.l2_bytes = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  return encode_tensor_map(map, DType::e4m3, matrix.data, shape);
}

template <typename T, typename Tile>
cudaError_t launch_fp8_gemm_tile(const Fp8GemmParams& p, const Fp8GemmChoice& choice, int sms,
                                 bool enable_pdl, cudaStream_t stream) {
  const Fp8ClusterShape& cluster = choice.clusters();
  const bool shares_a = cluster.use == ClusterUse::shares_a;
  const bool shares_b = cluster.use == ClusterUse::shares_b;
  const bool has_groups_of_a = p.kind == TokenGroups::equal || p.kind == TokenGroups::counted;
  Sm90GemmParams params = {};
  cudaError_t error = encode_fp8_matrix(params.a, p.a, has_groups_of_a ? p.groups : 1, p.tokens,
                                        p.depth, shares_a ? Tile::kTokens / 2 : Tile::kTokens);
  if (error != cudaSuccess) return error;
  error = encode_fp8_matrix(params.b, p.b, p.groups, p.columns, p.depth,
                            shares_b ? Tile::kWeights / 2 : Tile::kWeights);
  if (error != cudaSuccess) return error;
  const Fp8GemmUnits units(choice, p.tokens, p.columns);
  params.p = p;
  params.use = cluster.use;
  const Fp8Scales& scales = p.a_scale;
  params.has_four_scales = !scales.packed && scales.rows_log2 == 0 && scales.block_stride == 1 &&
                           scales.depth_stride % 4 == 0 && scales.group_stride % 4 == 0 &&
                           reinterpret_cast<uint64_t>(scales.data) % 16 == 0;
  params.has_scales_in_row = params.has_four_scales && p.kind != TokenGroups::ranges;
  params.cluster_ctas = cluster.ctas;
  const int blocks = ceil_div(p.depth, kFp8Block);
  const int parts = cluster.use == ClusterUse::splits_k ? cluster.ctas : 1;
  params.blocks = blocks / parts;
  params.ctas_with_more = blocks % parts;
  params.token_units = units.tokens;
  params.column_units = units.columns;
  params.band = sm90_gemm_band(choice, units.tokens, sms);
  // Where the device knows how many tokens a group has, these are the most units that it may have;
  // ranges may also end a tile each.
  const int64_t tiles =
      int64_t(units.columns) * (p.kind == TokenGroups::blocks   ? units.tokens
                                : p.kind == TokenGroups::ranges ? units.tokens + p.groups
                                                                : int64_t(units.tokens) * p.groups);
  if (tiles > kMostFp8Units) return cudaErrorInvalidValue;
  int64_t clusters = tiles;
  if (cluster.use != ClusterUse::splits_k) {
    clusters = std::min<int64_t>(clusters, std::max(1, sms * Tile::kCtasPerSm / cluster.ctas));
  }
  params.clusters = static_cast<int>(clusters);
  constexpr int kBytes = Fp8GemmBuffers<Tile>::kBytes;
  static_assert(kBytes <= Tile::kSharedBytes, "a CTA has this much shared memory");
  const auto kernel = Fp8GemmKernel<T, Tile>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  error =
      launch_clusters(kernel, dim3(static_cast<unsigned>(clusters * cluster.ctas)),
                      dim3(Tile::kCtaThreads), cluster.ctas, kBytes, enable_pdl, stream, params);
  if (cluster.ctas == 1 || !is_cluster_too_large(error)) return error;
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
    constexpr Fp8TileShape kShape = kFp8Tiles[kTile];
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
