// SPDX-License-Identifier: Apache-2.0
// GEMM for every GPU, of one weight or of one for each group of tokens: the formulas and layouts of
// gemm/gemm_params.cuh and, with scales of blocks, of gemm/fp8_params.cuh.
//
// Threads  A CTA computes a tile of the output. Each warp has a part of it, whose sums stay in its
//          registers; all threads copy the operands, some steps ahead, to stages of shared memory
//          that the warps load fragments from (gemm/gemm_operands.cuh).
// Traffic  Tile by tile, a and b are read from L2 once for each tile of the other; the output is
//          written once.
// Source   definition; DeepSeek-V3, arXiv:2412.19437, section 3.3, for scales of blocks
#pragma once

#include "precast/core/launch.cuh"
#include "precast/core/target_traits.cuh"
#include "precast/gemm/gemm_epilogue.cuh"

namespace precast {

template <typename Params>
struct GemmLaunch {
  Params p;
  GemmGrid grid;
};

#if defined(__CUDACC__)

// CTAs of a multiprocessor that leave a thread the registers of its sums, without spills.
template <typename Tile, typename Gemm>
constexpr int kMinGemmCtas =
    Gemm::kHasBlockScales && sizeof(typename Gemm::A) == 1 && kConvertsFp8 ? 1 : Tile::kShape.ctas;

template <typename Tile, typename Gemm>
__global__ __launch_bounds__(Tile::kThreads, (kMinGemmCtas<Tile, Gemm>)) void  //
    GemmKernel(const __grid_constant__ GemmLaunch<typename Gemm::Params> launch) {
  extern __shared__ __align__(128) unsigned char gemm_stages[];
  launch_dependent_grids();
  wait_on_dependent_grids();
  TilePlace place;
  if (!place_tile<Tile>(launch.p, launch.grid, place)) return;
  TileSums<Tile> sums = {};
  GemmMainloop<Tile, Gemm>(launch.p, place, shared_address(gemm_stages)).run(sums);
  write_tile<Tile, Gemm>(launch.p, place, sums);
}

#if !defined(__CUDACC_RTC__)

template <int kTile, typename Gemm>
cudaError_t launch_gemm_tile(const typename Gemm::Params& p, bool enable_pdl, cudaStream_t stream) {
  using Tile = GemmTile<kTile, Gemm::kColumnBytes>;
  static_assert(Tile::kSharedBytes <= kSharedKibPerCta * 1024, "a CTA has this much shared memory");
  const GemmGrid grid(Tile::kShape, p.kind, p.groups, p.tokens, p.columns);
  const int64_t ctas = grid.ctas() * groups_of_grid(p.kind, p.groups);
  if (ctas > 0x7fffffff) return cudaErrorInvalidValue;
  const auto kernel = GemmKernel<Tile, Gemm>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes);
  if (error != cudaSuccess) return error;
  return launch(kernel, dim3(static_cast<unsigned>(ctas)), dim3(Tile::kThreads), enable_pdl, stream,
                GemmLaunch<typename Gemm::Params>{p, grid}, Tile::kSharedBytes);
}

// Launches the product on `stream` with tile `tile` of kGemmTiles. The problem is not empty.
// Returns cudaErrorInvalidValue if it has more than 2^31 - 1 tiles.
template <typename Gemm, int kTile = 0>
cudaError_t launch_gemm(const typename Gemm::Params& p, int tile, bool enable_pdl,
                        cudaStream_t stream) {
  if constexpr (kTile == kNumGemmTiles) {
    return cudaErrorInvalidValue;
  } else {
    if (tile == kTile) return launch_gemm_tile<kTile, Gemm>(p, enable_pdl, stream);
    return launch_gemm<Gemm, kTile + 1>(p, tile, enable_pdl, stream);
  }
}

#endif

#endif  // __CUDACC__

}  // namespace precast
