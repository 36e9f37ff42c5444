// SPDX-License-Identifier: Apache-2.0
// The consumers of GEMM without scales of blocks for sm_90a: a warpgroup computes the sums of its
// rows of a tile, as depth_sums.cuh or block_sums.cuh say, and writes them.
#pragma once

#include "precast/gemm/sm90/plain_tile.cuh"
#include "precast/gemm/sm90/scheduler.cuh"
#include "precast/gemm/sm90/sum_scales.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename Types, typename Tile>
class PlainConsumer {
  using Params = PlainLaunchParams<Types>;
  using Storage = PlainStorage<Tile>;
  using TileSums = typename Types::template TileSums<Tile, PipelineBarriers<Tile::kStages>, Params>;
  using Sums = typename TileSums::Sums;
  using Epilogue = typename Types::template Epilogue<Tile>;

 public:
  __device__ __forceinline__ PlainConsumer(const Params& params, Storage& shared,
                                           Sm90GemmBuffers<Tile, Storage> buffers)
      : params_(params),
        shared_(shared),
        base_(buffers.base),
        sums_(params, shared.stages, buffers.base) {}

  __device__ __forceinline__ void run() {
    GemmScheduler<Tile, Params> scheduler(params_);
    // Why a vote: see uniform().
    for (GemmTile tile; __any_sync(0xffffffffu, scheduler.next(tile));) {
      SumScales<Tile, Params>::prefetch(params_, tile);
      Sums sums;
      sums_.compute(tile.column, sums);
      write_parts(tile, sums);
    }
    if constexpr (Tile::kBuffers > 0) finish_boxes();
  }

 private:
  // The lane's first row of a part of the tile.
  static __device__ __forceinline__ int row_of(int part) {
    const int warp = threadIdx.x / 32 - 4;
    return part * (64 * Tile::kConsumers) + 16 * warp + threadIdx.x % 32 / 4;
  }

  // Those of this warp.
  __device__ __forceinline__ uint32_t store_buffers() const {
    if constexpr (Tile::kBuffers > 0) {
      return shared_address(shared_.out[threadIdx.x / 32 - 4]);
    } else {
      return 0;
    }
  }

  // Why templates: the compiler does not unroll a loop of this size.
  template <int kPart = 0>
  __device__ __forceinline__ void write_parts(const GemmTile& tile, const Sums& sums) const {
    const int row = row_of(kPart);
    const Epilogue epilogue(params_, tile, row, {params_, tile, row});
    if constexpr (Params::kIsGated) {  // no CTAs share a sum
      epilogue.write_tile(store_buffers(), sums[kPart]);
    } else if (params_.use == ClusterUse::splits_k) {
      epilogue.write_sum_of_cluster(base_, sums[kPart]);
    } else {
      epilogue.write_tile(store_buffers(), sums[kPart]);
    }
    if constexpr (kPart + 1 < Tile::kParts) write_parts<kPart + 1>(tile, sums);
  }

  const Params& params_;
  Storage& shared_;
  const uint32_t base_;
  TileSums sums_;
};

#endif  // __CUDACC__

}  // namespace precast
