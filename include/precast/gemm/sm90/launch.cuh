// SPDX-License-Identifier: Apache-2.0
// What the GEMMs for sm_90a share: the roles of the warps of a CTA, and the launch.
#pragma once

#include "precast/core/launch.cuh"
#include "precast/core/sm90/cluster_memory.cuh"
#include "precast/gemm/sm90/params.cuh"
#include "precast/gemm/sm90/tile.cuh"

namespace precast {

#if defined(__CUDACC__)

// What a CTA does: its first warpgroup copies what the others multiply. `smem` starts at a multiple
// of 1024 bytes.
template <typename Tile, typename Storage, typename Producer, typename Consumer, typename Epilogue,
          typename Params>
__device__ __forceinline__ void run_gemm_cta(const Params& params, unsigned char* smem) {
  using Buffers = Sm90GemmBuffers<Tile, Storage>;
  const Buffers buffers = {shared_address(smem)};
  auto& shared = *reinterpret_cast<Storage*>(smem + Buffers::kStorageOffset);
  const bool splits_k = params.use == ClusterUse::splits_k;
  const bool shares = shares_operand(params.use);
  if (params.blocks_beside_next == 0) launch_dependent_grids();
  // Why a shuffle: the compiler knows then that all lanes of a warp take the same branch.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp == 0) {
    shared.stages.init_by_warp(Producer::arrivals(params),
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
    Producer(params, shared, buffers).run(warp);
    if (splits_k) Epilogue::join_sums_of_cluster();
  } else {
    increase_registers<Tile::kConsumerRegisters>();
    Consumer(params, shared, buffers).run();
  }
  // The other CTA has read what this one has copied to it.
  if (shares) wait_for_cluster();
}

#if !defined(__CUDACC_RTC__)

// The map of an operand, of which a copy takes `box_rows` rows of 128 bytes.
template <typename Matrix>
cudaError_t encode_gemm_matrix(TensorMap& map, DType dtype, const Matrix& matrix, int groups,
                               int rows, int depth, int box_rows) {
  TensorMapShape shape;
  shape.dim(depth, 0, 128 / tensor_map_element_bytes(dtype))
      .dim(rows, matrix.row_stride, box_rows)
      .dim(groups, matrix.group_stride, 1);
  shape.l2_bytes = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  return encode_tensor_map(map, dtype, matrix.data, shape);
}

// The map of a gated weight [groups, 2 * columns, depth], whose second half of the rows are gates
// of the first. A copy takes both rows of `box_columns` columns of the output: `kRun` of the first
// half, then their gates, then the next run; or, of half a run, all rows or all gates. With runs of
// eight, sums of both are in the same thread, whether rows of the weight are rows or columns of
// wgmma.
template <int kRun, typename Matrix>
cudaError_t encode_gated_weight(TensorMap& map, DType dtype, const Matrix& matrix, int groups,
                                int columns, int depth, int box_columns) {
  TensorMapShape shape;
  shape.dim(depth, 0, 128 / tensor_map_element_bytes(dtype))
      .dim(kRun, matrix.row_stride, kRun)
      .dim(2, columns * matrix.row_stride, box_columns < kRun ? 1 : 2)
      .dim(columns / kRun, kRun * matrix.row_stride, std::max(box_columns / kRun, 1))
      .dim(groups, matrix.group_stride, 1);
  shape.l2_bytes = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  return encode_tensor_map(map, dtype, matrix.data, shape);
}

// Fills what all launches have but the maps, from the problem params.p. Returns
// cudaErrorInvalidValue if there are more than kMostGemmUnits units.
template <typename Tile, typename Choice, typename Params>
cudaError_t plan_gemm_units(Params& params, const Choice& choice, int sms) {
  const auto& p = params.p;
  const Sm90ClusterShape& cluster = choice.clusters();
  const Sm90GemmUnits units(choice, p.tokens, p.columns * (Params::kIsGated ? 2 : 1));
  params.use = cluster.use;
  params.cluster_ctas = cluster.ctas;
  const int blocks = ceil_div(p.depth, 128 / Choice::Family::kElementBytes);
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
  if (tiles > kMostGemmUnits) return cudaErrorInvalidValue;
  int64_t clusters = tiles;
  if (cluster.use != ClusterUse::splits_k) {
    clusters = std::min<int64_t>(clusters, std::max(1, sms * Tile::kCtasPerSm / cluster.ctas));
  }
  params.clusters = static_cast<int>(clusters);
  return cudaSuccess;
}

// Whether each CTA has one tile, or its part of one, and the host knows it.
template <typename Params>
bool has_one_tile_per_cta(const Params& params) {
  return params.p.kind == TokenGroups::equal &&
         params.clusters == int64_t(params.token_units) * params.column_units * params.p.groups;
}

// The copies of so many blocks of the depth take about as long as the start of the next grid. Why
// not earlier: its CTAs take the places that are free at that moment, so that SMs would have two or
// three beside others that have none ("The next grid of a GEMM starts late" in docs/decisions.md).
constexpr int kBlocksBesideNext = 8;

// The rows of a box that copies `rows` rows, or of one of two: whole atoms of eight.
constexpr int gemm_edge_rows(int rows, bool is_shared) {
  return ceil_div(rows, is_shared ? 16 : 8) * 8;
}

// The same with the maps, which have so many groups of `a` and of `b`.
template <typename Tile, typename Choice, typename Params>
cudaError_t prepare_gemm(Params& params, const Choice& choice, DType dtype, int a_groups,
                         int b_groups, int sms) {
  const auto& p = params.p;
  const Sm90ClusterShape& cluster = choice.clusters();
  const bool shares_a = cluster.use == ClusterUse::shares_a;
  const bool shares_b = cluster.use == ClusterUse::shares_b;
  cudaError_t error = encode_gemm_matrix(params.a, dtype, p.a, a_groups, p.tokens, p.depth,
                                         shares_a ? Tile::kTokens / 2 : Tile::kTokens);
  if (error != cudaSuccess) return error;
  if constexpr (Params::kIsGated) {
    error =
        encode_gated_weight<Params::kGatedRun>(params.b, dtype, p.b, b_groups, p.columns, p.depth,
                                               shares_b ? Tile::kWeights / 2 : Tile::kWeights);
  } else if (params.has_row_major_b()) {  // of the columns, a stage's depth of 128 bytes
    constexpr int kBlock = 128 / Choice::Family::kElementBytes;
    error = encode_gemm_matrix(params.b, dtype, p.b, b_groups, p.depth, p.columns,
                               shares_b ? kBlock / 2 : kBlock);
  } else {
    error = encode_gemm_matrix(params.b, dtype, p.b, b_groups, p.columns, p.depth,
                               shares_b ? Tile::kWeights / 2 : Tile::kWeights);
  }
  if (error != cudaSuccess) return error;
  // Groups of rows may begin anywhere, so that the last tile has any number of them.
  const bool has_any_end = p.kind == TokenGroups::ranges;
  params.a_edge_rows =
      has_any_end ? Tile::kTokens / 2 : gemm_edge_rows(p.tokens % Tile::kTokens, shares_a);
  if (params.a_edge_rows != 0) {
    error = encode_gemm_matrix(params.a_edge, dtype, p.a, a_groups, p.tokens, p.depth,
                               params.a_edge_rows);
    if (error != cudaSuccess) return error;
  }
  params.b_edge_rows = Params::kIsGated || params.has_row_major_b()
                           ? 0
                           : gemm_edge_rows(p.columns % Tile::kWeights, shares_b);
  if (params.b_edge_rows != 0) {
    error = encode_gemm_matrix(params.b_edge, dtype, p.b, b_groups, p.columns, p.depth,
                               params.b_edge_rows);
    if (error != cudaSuccess) return error;
  }
  error = plan_gemm_units<Tile>(params, choice, sms);
  if (error != cudaSuccess) return error;
  if (has_one_tile_per_cta(params)) {
    params.blocks_beside_next = std::min(kBlocksBesideNext, params.blocks);
  }
  return cudaSuccess;
}

template <typename Tile, typename Params>
cudaError_t launch_gemm_ctas(void (*kernel)(Params), int shared_bytes, bool enable_pdl,
                             cudaStream_t stream, const Params& params) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  return launch_clusters(kernel, dim3(static_cast<unsigned>(params.clusters * params.cluster_ctas)),
                         dim3(Tile::kCtaThreads), params.cluster_ctas, shared_bytes, enable_pdl,
                         stream, params);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
