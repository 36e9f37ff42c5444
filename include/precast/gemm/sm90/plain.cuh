// SPDX-License-Identifier: Apache-2.0
// GEMM for sm_90a of operands without scales of blocks, of one weight or of one for each group of
// tokens: the formula and the layouts of gemm/gemm_params.cuh, computed by wgmma on tiles that TMA
// copies. Weights of 8 bits are [columns, depth]. `Types` are those of gemm16.cuh, gated.cuh or
// scaled.cuh:
//
//   Problem                          GemmParams, or what derives from it
//   Operand, Bias, Out               element types; both operands have one
//   Family                           the tiles, and how one is chosen
//   kHasScales                       whether the sums are multiplied by scales of rows
//   TileSums                         how a warpgroup computes its rows of a tile
//   kHasSumsOfBlocks                 whether sums are other registers than accumulators
//   kIsGated                         whether an output is a function of two sums: gated.cuh
//   Epilogue                         how a warp writes its rows of a tile
//
// Threads  A CTA has an SM for itself, or half of one, and computes tiles until none is left. Two
//          warps of its producer warpgroup copy the operands; its one or two consumer warpgroups
//          compute 64 rows each, whose sums stay in registers. They meet at mbarriers alone, so
//          that one writes its rows while the tensor cores multiply those of the other.
// Clusters Two CTAs may copy an operand for both; up to eight may split the depth of one tile.
// Traffic  Tile by tile, a and b are read from L2 once for each tile of the other; the output is
//          written once.
// Source   definition
#pragma once

#include "precast/gemm/sm90/launch.cuh"
#include "precast/gemm/sm90/plain_consumer.cuh"
#include "precast/gemm/sm90/plain_producer.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename Types, typename Tile>
__global__ __launch_bounds__(Tile::kCtaThreads, Tile::kCtasPerSm) void PlainGemmKernel(
    const __grid_constant__ PlainLaunchParams<Types> params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char plain_gemm_smem[];
  run_gemm_cta<Tile, PlainStorage<Tile>, PlainProducer<Types, Tile>, PlainConsumer<Types, Tile>,
               typename Types::template Epilogue<Tile>>(params, plain_gemm_smem);
#endif
}

#if !defined(__CUDACC_RTC__)

// Whether rows of the output are whole vectors of 16 bytes.
template <typename Out>
bool has_vector_rows(const GemmParams& p) {
  constexpr int kVector = 16 / int(sizeof(Out));
  return p.columns % kVector == 0 && p.out_row_stride % kVector == 0 &&
         p.out_group_stride % kVector == 0 && reinterpret_cast<uint64_t>(p.out) % 16 == 0;
}

template <typename Types, typename Tile>
cudaError_t launch_plain_gemm_tile(const typename Types::Problem& p, bool row_major_b,
                                   const Sm90GemmChoice<typename Types::Family>& choice, int sms,
                                   bool enable_pdl, cudaStream_t stream) {
  using T = typename Types::Out;
  PlainLaunchParams<Types> params = {};
  params.p = p;
  params.row_major_b = row_major_b;
  params.a_group_step = p.a.group_stride != 0 ? 1 : 0;
  params.b_group_step = p.b.group_stride != 0 ? 1 : 0;
  params.has_vector_rows = has_vector_rows<T>(p);
  const ClusterUse use = choice.clusters().use;
  params.stores_boxes =
      sizeof(T) == 2 && Tile::kBuffers > 0 && params.has_vector_rows && use != ClusterUse::splits_k;
  cudaError_t error;
  if (params.stores_boxes) {
    TensorMapShape shape;
    shape.dim(p.columns, 0, Tile::Box::kColumns)
        .dim(p.tokens, p.out_row_stride * sizeof(T), Tile::Box::kRows)
        .dim(p.kind == TokenGroups::equal ? p.groups : 1, p.out_group_stride * sizeof(T), 1);
    error = encode_tensor_map(params.out, TypeName<T>::value, p.out, shape);
    if (error != cudaSuccess) return error;
  }
  const bool has_groups_of_a = p.kind == TokenGroups::equal && params.a_group_step != 0;
  error = prepare_gemm<Tile>(params, choice, TypeName<typename Types::Operand>::value,
                             has_groups_of_a ? p.groups : 1,
                             params.b_group_step != 0 ? p.weights : 1, sms);
  if (error != cudaSuccess) return error;
  const int64_t units = int64_t(params.token_units) * params.column_units *
                        (p.kind == TokenGroups::equal ? p.groups : 1);
  params.staggers = use != ClusterUse::splits_k && units > params.clusters;
  constexpr int kBytes = Sm90GemmBuffers<Tile, PlainStorage<Tile>>::kBytes;
  static_assert(kBytes <= Tile::kSharedBytes, "a CTA has this much shared memory");
  error = launch_gemm_ctas<Tile>(PlainGemmKernel<Types, Tile>, kBytes, enable_pdl, stream, params);
  if (params.cluster_ctas == 1 || !is_cluster_too_large(error)) return error;
  // A part of a GPU may have no room for a cluster.
  return launch_plain_gemm_tile<Types, Tile>(p, row_major_b, {choice.tile, 0, 0.0}, sms, enable_pdl,
                                             stream);
}

// The tile that takes the place of one whose columns are no whole panels, if the weight is
// row-major or there is no kernel: the next wider one of as many rows.
template <typename Family>
constexpr int tile_of_panels(int tile) {
  const Sm90TileShape& given = Family::tile(tile);
  int best = tile;
  for (int i = 0; i < Family::kTiles; ++i) {
    const Sm90TileShape& shape = Family::tile(i);
    const bool is_alike = shape.swapped == given.swapped && shape.tokens() == given.tokens();
    if (!is_alike || shape.weights() % kPanelColumns != 0) continue;
    if (shape.weights() < given.weights()) continue;
    if (best == tile || shape.weights() < Family::tile(best).weights()) best = i;
  }
  return best;
}

// Launches the product on `stream` with one of the tiles that are swapped, or are not. The problem
// is not empty, its depth is not 0, and the choice is legal for it.
template <typename Types, bool kSwapped, int kTile = 0>
cudaError_t launch_plain_gemm(const typename Types::Problem& p, bool row_major_b,
                              const Sm90GemmChoice<typename Types::Family>& choice, int sms,
                              bool enable_pdl, cudaStream_t stream) {
  using Family = typename Types::Family;
  if constexpr (kTile == Family::kTiles) {
    return cudaErrorInvalidValue;
  } else {
    constexpr Sm90TileShape kShape = Family::tile(kTile);
    if constexpr (kShape.swapped == kSwapped) {
      if (choice.tile == kTile) {
        if constexpr (Family::kElementBytes == 2 && kShape.weights() % kPanelColumns != 0) {
          constexpr int kOther = tile_of_panels<Family>(kTile);
          static_assert(kOther != kTile && Family::has_kernel(kOther), "a tile in its place");
          if (row_major_b || !Family::has_kernel(kTile)) {
            return launch_plain_gemm<Types, kSwapped>(p, row_major_b, {kOther, choice.cluster, 0.0},
                                                      sms, enable_pdl, stream);
          }
        }
        if constexpr (Family::has_kernel(kTile)) {
          using Tile =
              PlainTile<kShape.rows, kShape.columns, kSwapped, kShape.ctas, Types::kIsGated>;
          return launch_plain_gemm_tile<Types, Tile>(p, row_major_b, choice, sms, enable_pdl,
                                                     stream);
        }
      }
    }
    return launch_plain_gemm<Types, kSwapped, kTile + 1>(p, row_major_b, choice, sms, enable_pdl,
                                                         stream);
  }
}

#endif

#endif  // __CUDACC__

}  // namespace precast
