// SPDX-License-Identifier: Apache-2.0
// The producer warps of GEMM without scales of blocks for sm_90a: one thread copies `a` of each
// stage by TMA, one of another warp `b`. A thread takes about 100 clocks for a box, and a small
// tile has no more.
//
// A stage is full when both boxes have arrived. It is empty when each consumer warp that reads them
// has left it, in both CTAs if these share one.
#pragma once

#include "precast/gemm/sm90/copy_operand.cuh"
#include "precast/gemm/sm90/plain_tile.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename Types, typename Tile>
class PlainProducer {
  using Params = PlainLaunchParams<Types>;
  using Storage = PlainStorage<Tile>;

 public:
  // That fill a stage, besides the bytes of the boxes.
  static __device__ __forceinline__ uint32_t arrivals(const Params&) { return 2; }

  __device__ __forceinline__ PlainProducer(const Params& params, Storage& shared,
                                           Sm90GemmBuffers<Tile, Storage> buffers)
      : params_(params), shared_(shared), buffers_(buffers) {}

  __device__ __forceinline__ void run(int warp) {
    constexpr int kBlock = Tile::kRowBytes / Types::Family::kElementBytes;  // of the depth
    if (warp == 0) {
      copy_operand<Tile, false, kBlock>(params_, shared_, buffers_, params_.a_group_step);
    }
    if (warp == 2) {
      copy_operand<Tile, true, kBlock>(params_, shared_, buffers_, params_.b_group_step);
    }
    __syncwarp();
  }

 private:
  const Params& params_;
  Storage& shared_;
  Sm90GemmBuffers<Tile, Storage> buffers_;
};

#endif  // __CUDACC__

}  // namespace precast
