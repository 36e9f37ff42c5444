// SPDX-License-Identifier: Apache-2.0
// The consumers of GEMM of 16-bit operands for sm_90a. A warpgroup computes 64 rows of a tile in
// registers, over the whole depth:
//
//   acc += A B                      wgmma over 64 of the depth for each stage
//
// The tensor cores have the wgmma of the other warpgroup while this one gives a stage back and
// starts the next. Why not to start the next one before: a stage that is not full yet would keep
// this warpgroup from giving back the one before it, and the producers have no other.
#pragma once

#include "precast/core/sm90/wgmma.cuh"
#include "precast/gemm/sm90/gemm16_epilogue.cuh"
#include "precast/gemm/sm90/scheduler.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename A, typename T, typename Tile, typename Params>
class Gemm16Consumer {
  using Acc = float[Tile::kColumns / 2];
  using State = PipelineState<Tile::kStages>;
  using Storage = Gemm16Storage<Tile>;
  static constexpr int kSteps = Tile::kRowBytes / 32;  // wgmma of a stage
  static_assert(Tile::kParts == 1, "64 rows for each warpgroup");

 public:
  __device__ __forceinline__ Gemm16Consumer(const Params& params, Storage& shared,
                                            Sm90GemmBuffers<Tile, Storage> buffers)
      : params_(params),
        shared_(shared),
        blocks_(DepthRange(params).count()),
        first_place_(uniform(buffers.base >> 4)),
        releases_in_(cta_to_release(params.use)) {}

  __device__ __forceinline__ void run() {
    GemmScheduler<Tile, Params> scheduler(params_);
    // Why a vote: see uniform().
    for (GemmTile tile; __any_sync(0xffffffffu, scheduler.next(tile));) {
      Acc acc;
#pragma unroll
      for (float& x : acc) x = 0.0f;
      accumulate(acc);
      const Gemm16Epilogue<T, Tile, Params> epilogue(params_, tile, first_row());
      if (params_.use == ClusterUse::splits_k) {
        epilogue.write_sum_of_cluster(first_place_ << 4, acc);
      } else {
        epilogue.write_tile(store_buffers(), acc);
      }
    }
    if constexpr (Tile::kBuffers > 0) {
      // Shared memory stays until TMA has read it.
      if (elect_lane()) wait_stores_have_read<0>();
      __syncwarp();
    }
  }

 private:
  // The lane's first row in the tile.
  static __device__ __forceinline__ int first_row() {
    const int warp = threadIdx.x / 32 - 4;
    return 16 * warp + threadIdx.x % 32 / 4;
  }

  // Those of this warp.
  __device__ __forceinline__ uint32_t store_buffers() const {
    if constexpr (Tile::kBuffers > 0) {
      return shared_address(shared_.out[threadIdx.x / 32 - 4]);
    } else {
      return 0;
    }
  }

  __device__ __forceinline__ void accumulate(Acc& acc) {
    int left = uniform(blocks_);
    if (left == 0) return;
    State at = {uniform(state_.stage), static_cast<uint32_t>(uniform(state_.parity))};
    const uint32_t first =
        first_place_ + (uniform(threadIdx.x / kWarpgroupSize) - 1) * (64 * Tile::kRowBytes >> 4);
    State last = at;
    shared_.stages.wait_full(at, "the first full stage");
    // The second warpgroup begins its first tile when the first one has multiplied a stage, and
    // stays behind it: so the tensor cores have work while one of them writes its rows.
    const bool staggers = Tile::kConsumers == 2 && params_.staggers && is_first_;
    const bool is_second = uniform(threadIdx.x / kWarpgroupSize) == 2;
    if (staggers && is_second) named_barrier(2, 2 * kWarpgroupSize);
    multiply(first, at, acc);
    if (staggers && !is_second) {
      wgmma_wait_group<0>();
      named_barrier_arrive(2, 2 * kWarpgroupSize);
    }
    is_first_ = false;
    at.advance();
    bool is_full = test_full(at);
#pragma unroll 1
    for (--left; left > 0; --left) {
      if (!is_full) shared_.stages.wait_full(at, "a full stage");
      wgmma_wait_group<0>();
      release(last);
      multiply(first, at, acc);
      last = at;
      at.advance();
      is_full = test_full(at);
    }
    wgmma_wait_group<0>();
    keep_behind_wait(acc);
    release(last);
    state_ = at;
  }

  __device__ __forceinline__ bool test_full(const State& at) const {
    return mbarrier_test_parity(&shared_.stages.full[at.stage], at.parity);
  }

  // Starts the product of 64 rows of a stage, which is full. `first` is where the warpgroup's rows
  // are in stage 0, in units of 16 bytes.
  __device__ __forceinline__ void multiply(uint32_t first, const State& at, Acc& acc) const {
    constexpr uint64_t kLayout = wgmma_descriptor(0, 8 * Tile::kRowBytes, 0);
    const uint32_t stage = at.stage * (Tile::kStageBytes >> 4);
    const uint32_t rows = first + stage;
    const uint32_t columns = first_place_ + stage + (Tile::kRowOperandBytes >> 4);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Wgmma<A, Tile::kColumns>::template add_ss<false>(acc, kLayout | (rows + 2 * step),
                                                       kLayout | (columns + 2 * step));
    }
    wgmma_commit_group();
  }

  // This warp will not read the stage any more.
  __device__ __forceinline__ void release(const State& of) const {
    mbarrier_arrive_in_cta_if(&shared_.stages.empty[of.stage], releases_in_);
  }

  const Params& params_;
  Storage& shared_;
  const int blocks_;            // of the depth, in a tile
  const uint32_t first_place_;  // units of 16 bytes
  const int releases_in_;       // a CTA of the cluster
  State state_;
  bool is_first_ = true;  // no tile has been multiplied
};

#endif  // __CUDACC__

}  // namespace precast
