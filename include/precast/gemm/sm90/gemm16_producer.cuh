// SPDX-License-Identifier: Apache-2.0
// The producer warps of GEMM of 16-bit operands for sm_90a: one thread copies `a` of each stage by
// TMA, one of another warp `b`. A thread takes about 100 clocks for a box, and a small tile has no
// more.
//
// A stage is full when both boxes have arrived. It is empty when each consumer warp that reads them
// has left it, in both CTAs if these share one.
#pragma once

#include "precast/gemm/sm90/gemm16_tile.cuh"
#include "precast/gemm/sm90/scheduler.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename Tile, typename Params>
class Gemm16Producer {
  using Storage = Gemm16Storage<Tile>;

 public:
  // That fill a stage, besides the bytes of the boxes.
  static __device__ __forceinline__ uint32_t arrivals(const Params&) { return 2; }

  __device__ __forceinline__ Gemm16Producer(const Params& params, Storage& shared,
                                            Fp8GemmBuffers<Tile, Storage> buffers)
      : params_(params), shared_(shared), buffers_(buffers) {}

  __device__ __forceinline__ void run(int warp) {
    if (warp == 0) copy_operand<false>();
    if (warp == 2) copy_operand<true>();
    __syncwarp();
  }

 private:
  template <bool kWeight>
  __device__ __forceinline__ void copy_operand() {
    constexpr int kCount = kWeight ? Tile::kWeights : Tile::kTokens;
    constexpr int kBlock = Tile::kRowBytes / 2;  // of the depth
    PipelineState<Tile::kStages> state;
    GemmScheduler<Tile, Params> scheduler(params_);
    const DepthRange depth(params_);
    const bool is_shared = params_.use == (kWeight ? ClusterUse::shares_b : ClusterUse::shares_a);
    const int step = kWeight ? params_.b_group_step : params_.a_group_step;
    const TensorMap* map = kWeight ? &params_.b : &params_.a;
    const bool is_chosen = elect_lane();
    for (GemmTile tile; scheduler.next(tile);) {
      const int row = kWeight ? tile.column : tile.token;
      const int group = step * (kWeight ? tile.b_group : tile.a_group);
#pragma unroll 1
      for (int block = depth.begin; block < depth.end; ++block) {
        if (is_chosen) {
          shared_.stages.wait_empty(state, kWeight ? "an empty stage for b" : "one for a");
          uint64_t* full = &shared_.stages.full[state.stage];
          mbarrier_arrive_expect_tx(full, kCount * Tile::kRowBytes);
          copy_operand_rows<Tile, kCount>(kWeight == Tile::kSwapped ? buffers_.rows(state.stage)
                                                                    : buffers_.columns(state.stage),
                                          map, full, is_shared, block * kBlock, row, group);
        }
        state.advance();
      }
    }
  }

  const Params& params_;
  Storage& shared_;
  Fp8GemmBuffers<Tile, Storage> buffers_;
};

#endif  // __CUDACC__

}  // namespace precast
