// SPDX-License-Identifier: Apache-2.0
// The sums of a tile of products of 16 bits for sm_90a. A warpgroup computes 64 rows of it in
// registers, over the whole depth:
//
//   sums += A B                     wgmma over 64 of the depth for each stage
//
// The tensor cores have the wgmma of the other warpgroup while this one gives a stage back and
// starts the next. Why not to start the next one before: a stage that is not full yet would keep
// this warpgroup from giving back the one before it, and the producers have no other.
#pragma once

#include "precast/core/sm90/wgmma.cuh"
#include "precast/gemm/sm90/scheduler.cuh"
#include "precast/gemm/sm90/tile.cuh"

namespace precast {

#if defined(__CUDACC__)

// `Barriers` are those of the stages, `T` is the type of both operands.
template <typename T, typename Tile, typename Barriers, typename Params>
class DepthSums {
  using Mma = Wgmma<T, Tile::kColumns>;
  using Acc = float[Tile::kColumns / 2];
  using State = PipelineState<Tile::kStages>;
  static constexpr int kSteps = Tile::kRowBytes / 32;  // wgmma of a stage
  static_assert(Tile::kParts == 1, "64 rows for each warpgroup");

 public:
  using Sums = Acc[1];

  // The stages begin at the address `base`.
  __device__ __forceinline__ DepthSums(const Params& params, Barriers& stages, uint32_t base)
      : params_(params),
        stages_(stages),
        blocks_(DepthRange(params).count()),
        first_place_(uniform((base & 0x3ffff) >> 4)),
        releases_in_(cta_to_release(params.use)) {}

  // Computes the sums of a tile, and gives its stages back.
  __device__ __forceinline__ void compute(int, Sums& sums) {
#pragma unroll
    for (float& x : sums[0]) x = 0.0f;
    if constexpr (Tile::kTakesRowMajorB) {
      if (params_.row_major_b) {
        multiply_stages<true>(sums[0]);
        return;
      }
    }
    multiply_stages<false>(sums[0]);
  }

 private:
  template <bool kRowMajorB>
  __device__ __forceinline__ void multiply_stages(Acc& acc) {
    int left = uniform(blocks_);
    if (left == 0) return;
    State at = {uniform(state_.stage), static_cast<uint32_t>(uniform(state_.parity))};
    const uint32_t first =
        first_place_ + (uniform(threadIdx.x / kWarpgroupSize) - 1) * (64 * Tile::kRowBytes >> 4);
    State last = at;
    stages_.wait_full(at, "the first full stage");
    // The second warpgroup begins its first tile when the first one has multiplied a stage, and
    // stays behind it: so the tensor cores have work while one of them writes its rows.
    const bool staggers = Tile::kConsumers == 2 && params_.staggers && is_first_;
    const bool is_second = uniform(threadIdx.x / kWarpgroupSize) == 2;
    if (staggers && is_second) named_barrier(2, 2 * kWarpgroupSize);
    multiply<kRowMajorB>(first, at, acc);
    if (staggers && !is_second) {
      wgmma_wait_group<0>();
      named_barrier_arrive(2, 2 * kWarpgroupSize);
    }
    is_first_ = false;
    at.advance();
    bool is_full = test_full(at);
#pragma unroll 1
    for (--left; left > 0; --left) {
      if (!is_full) stages_.wait_full(at, "a full stage");
      wgmma_wait_group<0>();
      release(last);
      multiply<kRowMajorB>(first, at, acc);
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
    return mbarrier_test_parity(&stages_.full[at.stage], at.parity);
  }

  // Starts the product of 64 rows of a stage, which is full. `first` is where the warpgroup's rows
  // are in stage 0, in units of 16 bytes.
  template <bool kRowMajorB>
  __device__ __forceinline__ void multiply(uint32_t first, const State& at, Acc& acc) const {
    constexpr bool kRowsAcross = kRowMajorB && Tile::kSwapped;  // not contiguous along k
    constexpr bool kColumnsAcross = kRowMajorB && !Tile::kSwapped;
    const uint32_t stage = at.stage * (Tile::kStageBytes >> 4);
    const uint32_t rows = first + stage;
    const uint32_t columns = first_place_ + stage + (Tile::kRowOperandBytes >> 4);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Mma::template add_ss<kColumnsAcross, kRowsAcross>(acc, place<kRowsAcross>(rows, step),
                                                        place<kColumnsAcross>(columns, step));
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
    mbarrier_arrive_in_cta_if(&stages_.empty[of.stage], releases_in_);
  }

  const Params& params_;
  Barriers& stages_;
  const int blocks_;  // of the depth, in a tile
  // In units of 16 bytes. Why masked: in a cluster, addresses have the rank of the CTA in their
  // upper bits, which would be bits of the descriptor's panel step.
  const uint32_t first_place_;
  const int releases_in_;  // a CTA of the cluster
  State state_;
  bool is_first_ = true;  // no tile has been multiplied
};

#endif  // __CUDACC__

}  // namespace precast
