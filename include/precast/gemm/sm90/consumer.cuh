// SPDX-License-Identifier: Apache-2.0
// The consumers of block-scaled GEMM for sm_90a. A warpgroup computes 64 rows of a tile, for each
// block of the depth
//
//   acc = A B                       wgmma over 128 of the depth, into a new accumulator
//   sums += (a_scale b_scale) acc   fp32, one rounding for the product of scales and one for the
//   sum
//
// Why a new accumulator: tensor cores keep about 14 bits of a sum of products of 8 bits
// (core/sm90/wgmma.cuh), and the scales of the next block differ.
//
// Source   DeepSeek-V3, arXiv:2412.19437, section 3.5.2.
#pragma once

#include "precast/core/sm90/wgmma.cuh"
#include "precast/gemm/sm90/epilogue.cuh"
#include "precast/gemm/sm90/scheduler.cuh"
#include "precast/gemm/sm90/tile.cuh"

namespace precast {

#if defined(__CUDACC__)

// What the accumulator of a lane is multiplied by in one block of the depth.
template <typename Tile, bool kSwapped = Tile::kSwapped>
struct Fp8Factors {
  // Columns of a tile that have one scale of the weight: the largest number that divides both the
  // tile's and 128.
  static constexpr int kSegment = Tile::kColumns % 128 == 0  ? 128
                                  : Tile::kColumns % 64 == 0 ? 64
                                  : Tile::kColumns % 32 == 0 ? 32
                                                             : 16;
  static constexpr int kSegments = Tile::kColumns / kSegment;
  float of_segment[kSegments][2];  // [segment, row l / 4 or the one eight below]

  // `column` is the tile's first.
  __device__ __forceinline__ Fp8Factors(const float* scales, int row, int column) {
    const float2 weight = *reinterpret_cast<const float2*>(scales + Tile::kTokens);
    const float token[2] = {scales[row], scales[row + 8]};
    const int first = kFp8Block - column % kFp8Block;  // columns with the first scale
#pragma unroll
    for (int i = 0; i < kSegments; ++i) {
      const float of_weight = i * kSegment < first ? weight.x : weight.y;
      of_segment[i][0] = token[0] * of_weight;
      of_segment[i][1] = token[1] * of_weight;
    }
  }
  __device__ __forceinline__ float of(int i) const {
    return of_segment[i / 4 * 8 / kSegment][i / 2 % 2];
  }
};

// In a swapped tile, the rows have one scale and each column another.
template <typename Tile>
struct Fp8Factors<Tile, true> {
  float2 of_pair[Tile::kColumns / 8];  // columns 8 j + 2 q and the next

  __device__ __forceinline__ Fp8Factors(const float* scales, int, int) {
    const float weight = scales[Tile::kTokens];
    const int q = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < Tile::kColumns / 8; ++j) {
      const float2 token = *reinterpret_cast<const float2*>(scales + 8 * j + 2 * q);
      of_pair[j] = make_float2(token.x * weight, token.y * weight);
    }
  }
  __device__ __forceinline__ float of(int i) const {
    return i % 2 == 0 ? of_pair[i / 4].x : of_pair[i / 4].y;
  }
};

template <typename T, typename Tile>
class Fp8GemmConsumer {
  using Acc = float[Tile::kColumns / 2];
  using State = PipelineState<Tile::kStages>;
  using Factors = Fp8Factors<Tile>;

 public:
  // `warp` is the warp's number among those of the consumers.
  __device__ __forceinline__ Fp8GemmConsumer(const Sm90GemmParams& params,
                                             Fp8GemmStorage<Tile>& shared,
                                             Fp8GemmBuffers<Tile> buffers, int warp)
      : params_(params),
        shared_(shared),
        buffers_(buffers),
        depth_(params),
        first_place_(buffers.base >> 4),
        row_(16 * warp + threadIdx.x % 32 / 4),
        warpgroup_(warp / 4),
        releases_both_(params.use == ClusterUse::shares_a || params.use == ClusterUse::shares_b) {}

  __device__ __forceinline__ void run() {
    GemmScheduler<Tile> scheduler(params_);
    for (GemmTile tile; scheduler.next(tile);) {
      Acc sums;
#pragma unroll
      for (float& x : sums) x = 0.0f;
      accumulate(tile, sums);
      const Fp8GemmEpilogue<T, Tile> epilogue(params_, tile, row_);
      if (params_.use == ClusterUse::splits_k) {
        epilogue.write_sum_of_cluster(buffers_.base, sums);
      } else {
        epilogue.write(sums);
      }
    }
  }

 private:
  __device__ __forceinline__ void accumulate(const GemmTile& tile, Acc& sums) {
    if constexpr (Tile::kOverlaps) {
      accumulate_overlapped(tile, sums);
    } else {
#pragma unroll 1
      for (int block = depth_.begin; block < depth_.end; ++block) {
        Acc acc;
        multiply(acc);
        const Factors factors = load_factors(state_, tile);
        wgmma_wait_group<0>();
        keep_behind_wait(acc);
        release(state_);
        add(sums, acc, factors);
        state_.advance();
      }
    }
  }

  // Multiplies each block while the one before is added. Two accumulators take turns.
  __device__ __forceinline__ void accumulate_overlapped(const GemmTile& tile, Acc& sums) {
    int left = depth_.end - depth_.begin;
    if (left == 0) return;
    Acc even, odd;
    State last = state_;
    multiply(even);
    state_.advance();
#pragma unroll 1
    for (; left > 2; left -= 2) {
      multiply(odd);
      finish<1>(last, tile, sums, even);
      last = state_;
      state_.advance();
      multiply(even);
      finish<1>(last, tile, sums, odd);
      last = state_;
      state_.advance();
    }
    if (left == 2) {
      multiply(odd);
      finish<1>(last, tile, sums, even);
      last = state_;
      state_.advance();
      finish<0>(last, tile, sums, odd);
    } else {
      finish<0>(last, tile, sums, even);
    }
  }

  // Adds the product of the stage `of`, when at most kPending later ones are not complete.
  template <int kPending>
  __device__ __forceinline__ void finish(const State& of, const GemmTile& tile, Acc& sums,
                                         Acc& acc) {
    const Factors factors = load_factors(of, tile);
    wgmma_wait_group<kPending>();
    keep_behind_wait(acc);
    release(of);
    add(sums, acc, factors);
  }

  // Starts the product of the current stage.
  __device__ __forceinline__ void multiply(Acc& acc) {
    using Mma = Wgmma<e4m3, Tile::kColumns>;
    constexpr uint64_t kLayout = wgmma_descriptor(0, 8 * Tile::kRowBytes, 0);
    shared_.stages.wait_full(state_, "a full stage");
    const uint32_t stage = first_place_ + state_.stage * (Tile::kStageBytes >> 4);
    const uint64_t rows = kLayout | (stage + warpgroup_ * (64 * Tile::kRowBytes >> 4));
    const uint64_t columns = kLayout | (stage + (Tile::kRowOperandBytes >> 4));
    wgmma_fence();
    Mma::template new_ss<false>(acc, rows, columns);
#pragma unroll
    for (int step = 1; step < Tile::kRowBytes / 32; ++step) {
      Mma::template add_ss<false>(acc, rows + 2 * step, columns + 2 * step);
    }
    wgmma_commit_group();
  }

  __device__ __forceinline__ Factors load_factors(const State& of, const GemmTile& tile) const {
    return Factors(shared_.scales[of.stage], row_, tile.column);
  }

  // This warp will not read the stage any more. Its lanes have read the scales.
  __device__ __forceinline__ void release(const State& of) {
    uint64_t* const empty = &shared_.stages.empty[of.stage];
    __syncwarp();
    if (releases_both_) {
      if (threadIdx.x % 32 < 2) mbarrier_arrive_in_cta(empty, threadIdx.x % 32);
    } else {
      mbarrier_arrive_of_warp(empty);
    }
  }

  static __device__ __forceinline__ void add(Acc& sums, const Acc& acc, const Factors& factors) {
#pragma unroll
    for (int i = 0; i < Tile::kColumns / 2; ++i) sums[i] = fmaf(acc[i], factors.of(i), sums[i]);
  }

  const Sm90GemmParams& params_;
  Fp8GemmStorage<Tile>& shared_;
  Fp8GemmBuffers<Tile> buffers_;
  const DepthRange depth_;
  const uint32_t first_place_;  // units of 16 bytes
  const int row_;               // of the tile, the lane's first
  const int warpgroup_;
  const bool releases_both_;
  State state_;
};

#endif  // __CUDACC__

}  // namespace precast
