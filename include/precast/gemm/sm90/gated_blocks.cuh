// SPDX-License-Identifier: Apache-2.0
// Block-scaled e4m3 GEMM for sm_90a of groups of tokens whose weights have two rows for each column
// of the output, of which the second is a gate: gemm/sm90/gemm.cuh with
//
//   h[t, n]         = silu(sums[t, columns + n]) * sums[t, n]                  fp32, not rounded
//   out_scale[g, t] = max(max_{n in g} |h[t, n]|, eps) / 448                   g is 128 columns
//   out[t, n]       = round(h[t, n] * (1 / out_scale[n / 128, t]))             e4m3
//
// Layout   out        [tokens, columns]        e4m3; columns are a multiple of 128
//          out_scale  [columns / 128, tokens]  fp32, any distance of the blocks: what the next
//                                              product reads
// Threads  A tile has 128 tokens, 128 columns and their gates. A warpgroup computes 64 tokens: all
//          columns, then all gates, which share an accumulator and have sums of their own.
// Source   Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202; DeepSeek-V3,
//          arXiv:2412.19437, section 3.5.2
// Measured 2026-11-28 on an H200, first products of Qwen3-30B (128 experts, 2 * 768 x 2048, eight
//          of a token): 1024, 4096 and 16384 tokens 132, 276 and 851 us; the product alone with its
//          best tile 135 and 853 us with 1024 and 16384 tokens
#pragma once

#include "precast/gemm/sm90/consumer.cuh"
#include "precast/gemm/sm90/gated_blocks_choose.cuh"
#include "precast/gemm/sm90/gated_blocks_epilogue.cuh"
#include "precast/gemm/sm90/launch.cuh"
#include "precast/gemm/sm90/producer.cuh"

namespace precast {

#if defined(PRECAST_SM)

// Both parts have the same rows, and other columns of a stage.
template <int kTokensOf = kGatedBlocksTile.rows, int kRowsOfWeight = kGatedBlocksTile.columns>
struct GatedBlocksTile
    : Sm90GemmTile<kTokensOf, kRowsOfWeight, false, fp8_tile_scales(kTokensOf) * 4> {
  static constexpr int kColumns = kRowsOfWeight / 2, kWeights = kColumns;
  static constexpr int kParts = 2, kPartRows = 0, kPartColumns = kColumns;
  static constexpr int kScales = fp8_tile_scales(kTokensOf);
  static constexpr bool kOverlaps = false;
};

#endif  // PRECAST_SM

#if defined(__CUDACC__)

template <typename Tile>
class GatedBlocksConsumer {
  using Barriers = Fp8GemmBarriers<Tile::kStages>;
  // In the storage, the scales come behind the barriers, which are a multiple of 16 bytes.
  static constexpr int kScalesOffset =
      Sm90GemmBuffers<Tile>::kStorageOffset + int(sizeof(Barriers));
  using TileSums = BlockSums<Tile, Barriers, Fp8Factors<Tile>, kScalesOffset, Tile::kScales * 4>;

 public:
  __device__ __forceinline__ GatedBlocksConsumer(const Sm90GatedParams& params,
                                                 Fp8GemmStorage<Tile>& shared,
                                                 Sm90GemmBuffers<Tile> buffers)
      : params_(params), sums_(params, shared.stages, buffers.base) {}

  __device__ __forceinline__ void run() {
    GemmScheduler<Tile, Sm90GatedParams> scheduler(params_);
    // Why a vote: see uniform().
    for (GemmTile tile; __any_sync(0xffffffffu, scheduler.next(tile));) {
      typename TileSums::Sums sums;
      sums_.compute(tile.column, sums);
      GatedBlocksEpilogue<Tile>::write_tile(params_, tile, sums_.first_row(), sums);
    }
  }

 private:
  const Sm90GatedParams& params_;
  TileSums sums_;
};

template <typename Tile>
__global__ __launch_bounds__(Tile::kCtaThreads, Tile::kCtasPerSm) void GatedBlocksKernel(
    const __grid_constant__ Sm90GatedParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char gated_blocks_smem[];
  run_gemm_cta<Tile, Fp8GemmStorage<Tile>, Fp8GemmProducer<Tile, Sm90GatedParams>,
               GatedBlocksConsumer<Tile>, GatedBlocksEpilogue<Tile>>(params, gated_blocks_smem);
#endif
}

#if !defined(__CUDACC_RTC__)

// Launches the product on `stream`. `params` has the problem, whose tokens are ranges, and where
// scales are written; the problem is not empty, and the choice is legal for it.
inline cudaError_t launch_gated_blocks(Sm90GatedParams params, const GatedBlocksChoice& choice,
                                       int sms, bool enable_pdl, cudaStream_t stream) {
  using Tile = GatedBlocksTile<>;
  const Fp8Scales& scales = params.p.a_scale;
  params.has_four_scales = scales.block_stride == 1 && scales.depth_stride % 4 == 0 &&
                           reinterpret_cast<uint64_t>(scales.data) % 16 == 0;
  cudaError_t error = prepare_gemm<Tile>(params, choice, DType::e4m3, 1, params.p.groups, sms);
  if (error != cudaSuccess) return error;
  constexpr int kBytes = Sm90GemmBuffers<Tile>::kBytes;
  static_assert(kBytes <= Tile::kSharedBytes, "a CTA has this much shared memory");
  error = launch_gemm_ctas<Tile>(GatedBlocksKernel<Tile>, kBytes, enable_pdl, stream, params);
  if (params.cluster_ctas == 1 || !is_cluster_too_large(error)) return error;
  // A part of a GPU may have no room for a cluster.
  return launch_gated_blocks(params, {choice.tile, 0, 0.0}, sms, enable_pdl, stream);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
