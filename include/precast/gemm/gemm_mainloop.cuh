// SPDX-License-Identifier: Apache-2.0
// The sums of a tile: steps of 128 bytes of the depth, from the first to the last, by MMAs with
// fp32 accumulators.
//
// With scales of blocks, a step is a block. Its sum is multiplied by the product of both scales and
// added in fp32, so that what tensor cores round away is small beside the sum of one block.
#pragma once

#include "precast/core/mma_operand.cuh"
#include "precast/gemm/gemm_operands.cuh"

namespace precast {

// What a kernel multiplies, besides its tile: element types, and the arguments.
template <typename A_, typename B_, typename Out_, bool kRowMajorB_ = false>
struct PlainGemm {
  using A = A_;
  using B = B_;
  using Out = Out_;
  using Params = GemmParams;
  static constexpr bool kHasBlockScales = false;
  static constexpr bool kRowMajorB = kRowMajorB_;
  static constexpr int kColumnBytes = kGemmStepBytes;  // of the weight in a step
};

#if defined(__CUDACC__)

template <typename Out_>
struct BlockScaledGemm {
  using A = e4m3;
  using B = e4m3;
  using Out = Out_;
  using Params = Fp8GemmParams;
  static constexpr bool kHasBlockScales = true;
  static constexpr bool kRowMajorB = false;
  static constexpr int kColumnBytes = kGemmStepBytes;
};

template <typename Tile>
using TileSums = float[Tile::kMmaM][Tile::kMmaN][4];

// The first token of the tile that a lane has sums of: row l / 4 of its warp's part.
template <typename Tile>
__device__ __forceinline__ int first_token_of_lane() {
  return threadIdx.x / 32 / Tile::kColumnWarps * Tile::kWarpTokens + threadIdx.x % 32 / 4;
}

// The scales of the blocks of a tile.
template <typename Tile, typename Params>
class BlockScales;

// The columns of a tile have one scale.
template <typename Tile>
class BlockScales<Tile, Fp8GemmParams> {
 public:
  __device__ __forceinline__ BlockScales(const Fp8GemmParams& p, const TilePlace& place) : p_(p) {
    a_ = p.a_scale.data + place.a_group * p.a_scale.group_stride;
    b_ = p.b_scale.data + place.weight * p.b_scale.group_stride +
         (place.column >> p.b_scale.rows_log2) * p.b_scale.block_stride;
#pragma unroll
    for (int i = 0; i < 2 * Tile::kMmaM; ++i) {
      const int token = place.token + first_token_of_lane<Tile>() + i * 8;
      const int row = min(token, place.token_end - 1) >> p.a_scale.rows_log2;
      a_offsets_[i] = static_cast<uint32_t>(row * p.a_scale.block_stride);
    }
  }

  // Loads the scales of a step, of each in order, before its products, which hide how long that
  // takes.
  __device__ __forceinline__ void load(int step) {
#pragma unroll
    for (int i = 0; i < 2 * Tile::kMmaM; ++i) of_token_[i] = a_[a_offsets_[i]];
    of_columns_ = *b_;
    if (p_.a_scale.packed) {
#pragma unroll
      for (float& scale : of_token_) scale = unpacked_scale(scale, step);
      of_columns_ = unpacked_scale(of_columns_, step);
      if (step % 4 != 3) return;
    }
    a_ += p_.a_scale.depth_stride;
    b_ += p_.b_scale.depth_stride;
  }

  // sums += acc * scales of the step
  __device__ __forceinline__ void promote(TileSums<Tile>& sums, const TileSums<Tile>& acc) const {
    constexpr float kRescale = MmaOperands<e4m3, e4m3>::kRescale;
#pragma unroll
    for (int m = 0; m < Tile::kMmaM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float scale = of_token_[2 * m + half] * of_columns_;
#pragma unroll
        for (int n = 0; n < Tile::kMmaN; ++n) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            sums[m][n][i] += acc[m][n][i] * kRescale * scale;
          }
        }
      }
    }
  }

 private:
  const Fp8GemmParams& p_;
  const float *a_, *b_;  // of the next step
  uint32_t a_offsets_[2 * Tile::kMmaM];
  float of_token_[2 * Tile::kMmaM], of_columns_;
};

template <typename Tile, typename Gemm>
class GemmMainloop {
  using Operands = MmaOperands<typename Gemm::A, typename Gemm::B>;
  using Params = typename Gemm::Params;

 public:
  // `smem` is the shared address of the stages.
  __device__ __forceinline__ GemmMainloop(const Params& p, const TilePlace& place, uint32_t smem)
      : p_(p),
        place_(place),
        copies_(p, place, smem),
        loads_(smem),
        steps_(static_cast<int>(
            (int64_t(p.depth) * int(sizeof(typename Gemm::A)) + kGemmStepBytes - 1) /
            kGemmStepBytes)) {}

  // Adds the products of the whole depth. All threads call it once.
  __device__ __forceinline__ void run(TileSums<Tile>& sums) {
    constexpr int kAhead = Tile::kStages - 1;
#pragma unroll
    for (int step = 0; step < kAhead; ++step) start(step);
    if constexpr (Gemm::kHasBlockScales) {
      BlockScales<Tile, Params> scales(p_, place_);
      for (int step = 0; step < steps_; ++step) {
        wait_and_start(step + kAhead);
        scales.load(step);
        TileSums<Tile> acc = {};
        multiply(acc);
        scales.promote(sums, acc);
      }
    } else {
      for (int step = 0; step < steps_; ++step) {
        wait_and_start(step + kAhead);
        multiply(sums);
      }
    }
  }

 private:
  // Starts the copies of a step, if there is one. Each step is a group, also one that is empty, so
  // that there are always as many groups to wait for.
  __device__ __forceinline__ void start(int step) {
    if (step < steps_) copies_.start(write_);
    cp_async_commit_group();
    write_ = write_ == kLastStage ? 0 : write_ + Tile::kStageBytes;
  }

  // Waits for the current step. Then all warps have multiplied the step before, whose stage the
  // copies of `later` overwrite.
  __device__ __forceinline__ void wait_and_start(int later) {
    cp_async_wait_group<Tile::kStages - 2>();
    __syncthreads();
    start(later);
  }

  // Multiplies the current step, 32 bytes of the depth at a time.
  __device__ __forceinline__ void multiply(TileSums<Tile>& acc) {
    constexpr int kParts = kGemmStepBytes / 32;
    loads_.begin_step(read_);
    if constexpr (sizeof(typename Gemm::A) == 1 && kConvertsFp8) {
      // Converted fragments leave no registers for those of other parts.
#pragma unroll 1
      for (int part = 0; part < kParts; ++part) {
        Fragments<Tile> fragments;
        loads_.load(fragments, read_, part);
        multiply(acc, fragments);
      }
    } else {
      Fragments<Tile> fragments[2];  // of this part, and of the next
      loads_.load(fragments[0], read_, 0);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (part + 1 < kParts) loads_.load(fragments[(part + 1) % 2], read_, part + 1);
        multiply(acc, fragments[part % 2]);
      }
    }
    read_ = read_ == kLastStage ? 0 : read_ + Tile::kStageBytes;
  }

  static __device__ __forceinline__ void multiply(TileSums<Tile>& acc, const Fragments<Tile>& x) {
#pragma unroll
    for (int m = 0; m < Tile::kMmaM; ++m) {
#pragma unroll
      for (int n = 0; n < Tile::kMmaN; ++n) {
        Operands::mma(acc[m][n], x.a[m], x.b[n / 2][n % 2 * 2], x.b[n / 2][n % 2 * 2 + 1]);
      }
    }
  }

  static constexpr uint32_t kLastStage = (Tile::kStages - 1) * Tile::kStageBytes;

  const Params& p_;
  const TilePlace& place_;
  OperandCopies<Tile, typename Gemm::A, typename Gemm::B, Gemm::kRowMajorB> copies_;
  FragmentLoads<Tile, typename Gemm::B, Gemm::kRowMajorB> loads_;
  int steps_;
  uint32_t read_ = 0, write_ = 0;  // offsets of stages
};

#endif  // __CUDACC__

}  // namespace precast
