// SPDX-License-Identifier: Apache-2.0
// The consumers of GEMM without scales of blocks for sm_90a. A warpgroup computes 64 rows of a tile
// in registers, over the whole depth:
//
//   acc += A B                      wgmma over 128 bytes of the depth for each stage
//   sums += acc                     of 8 bits, after a few stages, for which acc is new
//
// The tensor cores have the wgmma of the other warpgroup while this one gives a stage back and
// starts the next. Why not to start the next one before: a stage that is not full yet would keep
// this warpgroup from giving back the one before it, and the producers have no other.
#pragma once

#include "precast/core/sm90/wgmma.cuh"
#include "precast/gemm/sm90/plain_epilogue.cuh"
#include "precast/gemm/sm90/scheduler.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename Types, typename Tile>
class PlainConsumer {
  using Params = PlainLaunchParams<Types>;
  using Mma = Wgmma<typename Types::Operand, Tile::kColumns>;
  using Acc = float[Tile::kColumns / 2];
  using State = PipelineState<Tile::kStages>;
  using Storage = PlainStorage<Tile>;
  static constexpr int kSteps = Tile::kRowBytes / 32;  // wgmma of a stage
  static_assert(Tile::kParts == 1, "64 rows for each warpgroup");

 public:
  __device__ __forceinline__ PlainConsumer(const Params& params, Storage& shared,
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
      const SumScales<Tile, Params> scales(params_, tile, first_row());
      Acc sums;
#pragma unroll
      for (float& x : sums) x = 0.0f;
      if (!params_.has_row_major_b()) {
        accumulate<false>(sums);
      } else if constexpr (Params::kTakesRowMajorB) {
        accumulate<true>(sums);
      }
      const PlainEpilogue<Types, Tile> epilogue(params_, tile, first_row(), scales);
      if (params_.use == ClusterUse::splits_k) {
        epilogue.write_sum_of_cluster(first_place_ << 4, sums);
      } else {
        epilogue.write_tile(store_buffers(), sums);
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

  // Adds the product of the tile's operands to the sums, which are zeros.
  template <bool kRowMajorB>
  __device__ __forceinline__ void accumulate(Acc& sums) {
    int left = uniform(blocks_);
    if (left == 0) return;
    State at = {uniform(state_.stage), static_cast<uint32_t>(uniform(state_.parity))};
    bool is_full = false;
    if constexpr (Types::kPromotedStages == 0) {
      multiply_stages<kRowMajorB, false>(left, at, is_full, sums);
    } else {
#pragma unroll 1
      for (; left > 0; left -= Types::kPromotedStages) {
        Acc acc;
        multiply_stages<kRowMajorB, true>(min(left, Types::kPromotedStages), at, is_full, acc);
#pragma unroll
        for (int i = 0; i < Tile::kColumns / 2; ++i) sums[i] += acc[i];
      }
    }
    state_ = at;
  }

  // Multiplies `left` stages, at least one, from `at` on, and gives them back. `is_full`: whether
  // the first one is known to be full; then, whether the next one is.
  template <bool kRowMajorB, bool kNew>
  __device__ __forceinline__ void multiply_stages(int left, State& at, bool& is_full, Acc& acc) {
    const uint32_t first =
        first_place_ + (uniform(threadIdx.x / kWarpgroupSize) - 1) * (64 * Tile::kRowBytes >> 4);
    State last = at;
    if (!is_full) shared_.stages.wait_full(at, "the first full stage");
    // The second warpgroup begins its first tile when the first one has multiplied a stage, and
    // stays behind it: so the tensor cores have work while one of them writes its rows.
    const bool staggers = Tile::kConsumers == 2 && params_.staggers && is_first_;
    const bool is_second = uniform(threadIdx.x / kWarpgroupSize) == 2;
    if (staggers && is_second) named_barrier(2, 2 * kWarpgroupSize);
    multiply<kRowMajorB, kNew>(first, at, acc);
    if (staggers && !is_second) {
      wgmma_wait_group<0>();
      named_barrier_arrive(2, 2 * kWarpgroupSize);
    }
    is_first_ = false;
    at.advance();
    is_full = test_full(at);
#pragma unroll 1
    for (--left; left > 0; --left) {
      if (!is_full) shared_.stages.wait_full(at, "a full stage");
      wgmma_wait_group<0>();
      release(last);
      multiply<kRowMajorB, false>(first, at, acc);
      last = at;
      at.advance();
      is_full = test_full(at);
    }
    wgmma_wait_group<0>();
    keep_behind_wait(acc);
    release(last);
  }

  __device__ __forceinline__ bool test_full(const State& at) const {
    return mbarrier_test_parity(&shared_.stages.full[at.stage], at.parity);
  }

  // Starts the product of 64 rows of a stage, which is full, into a new accumulator or added to it.
  // `first` is where the warpgroup's rows
  // are in stage 0, in units of 16 bytes.
  template <bool kRowMajorB, bool kNew>
  __device__ __forceinline__ void multiply(uint32_t first, const State& at, Acc& acc) const {
    constexpr bool kRowsAcross = kRowMajorB && Tile::kSwapped;  // not contiguous along k
    constexpr bool kColumnsAcross = kRowMajorB && !Tile::kSwapped;
    const uint32_t stage = at.stage * (Tile::kStageBytes >> 4);
    const uint32_t rows = first + stage;
    const uint32_t columns = first_place_ + stage + (Tile::kRowOperandBytes >> 4);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint64_t a = place<kRowsAcross>(rows, step);
      const uint64_t b = place<kColumnsAcross>(columns, step);
      if constexpr (kNew) {
        if (step == 0) {
          Mma::template new_ss<false>(acc, a, b);
          continue;
        }
      }
      if constexpr (kRowMajorB) {
        Mma::template add_ss<kColumnsAcross, kRowsAcross>(acc, a, b);
      } else {
        Mma::template add_ss<false>(acc, a, b);
      }
    }
    wgmma_commit_group();
  }

  // The descriptor of an operand at `first`, in units of 16 bytes, for a step of the depth: 32
  // bytes of each row; or, across, the next rows of panels of a stage's depth.
  template <bool kAcross>
  static __device__ __forceinline__ uint64_t place(uint32_t first, int step) {
    constexpr int kAtomBytes = 8 * Tile::kRowBytes, kDepth = Tile::kRowBytes / 2;  // of 16 bits
    constexpr uint64_t kLayout = kAcross ? wgmma_descriptor(0, kAtomBytes, kDepth * Tile::kRowBytes)
                                         : wgmma_descriptor(0, kAtomBytes, 0);
    constexpr int kStepBytes = kAcross ? kDepth / kSteps * Tile::kRowBytes : 32;
    return kLayout | (first + step * (kStepBytes >> 4));
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
