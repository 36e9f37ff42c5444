// SPDX-License-Identifier: Apache-2.0
// The sums of a tile of products of 8 bits for sm_90a. A warpgroup computes 64 rows of it, or two
// parts, which are 64 rows and others, or two halves of the columns of the same rows. For each
// block of the depth, a stage,
//
//   acc = A B                       wgmma over 128 of the depth, into a new accumulator
//   sums += factor acc              fp32
//
// Why a new accumulator: tensor cores keep about 14 bits of a sum of products of 8 bits
// (core/sm90/wgmma.cuh).
//
// Source   DeepSeek-V3, arXiv:2412.19437, section 3.5.2.
#pragma once

#include "precast/core/sm90/wgmma.cuh"
#include "precast/gemm/sm90/scheduler.cuh"
#include "precast/gemm/sm90/tile.cuh"

namespace precast {

#if defined(__CUDACC__)

// The factors of blocks without scales: 1.
struct UnitFactors {
  static constexpr bool kAreLoaded = false;
  static __device__ __forceinline__ float add(float sum, float acc, int) { return sum + acc; }
};

// `Tile` says by kOverlaps whether a block is multiplied while the one before is added. `Barriers`
// are those of the stages. `Factors` are those of a lane in a block: with kAreLoaded, made of the
// address of the stage's scales, which begin at kScalesOffset and are kScalesBytes long, the lane's
// first row in the first part, the part, and the tile's first column.
template <typename Tile, typename Barriers, typename Factors, int kScalesOffset = 0,
          int kScalesBytes = 0>
class BlockSums {
  using Acc = float[Tile::kColumns / 2];
  using State = PipelineState<Tile::kStages>;
  static constexpr int kSteps = Tile::kRowBytes / 32;  // wgmma of a block of the depth

  // Where the warpgroup is in the pipeline, and whether it has seen that this stage is full.
  struct Block {
    State state;
    bool is_full;
    uint32_t rows, columns;  // places of the stage's operands, units of 16 bytes
    uint32_t scales;         // the address of the stage's
  };

 public:
  using Sums = Acc[Tile::kParts];

  // The stages begin at the address `base`.
  template <typename Params>
  __device__ __forceinline__ BlockSums(const Params& params, Barriers& stages, uint32_t base)
      : stages_(stages),
        blocks_(DepthRange(params).count()),
        base_(uniform(base)),
        warpgroup_(uniform(threadIdx.x / kWarpgroupSize) - 1),
        row_(kept(row_of(0))),
        releases_in_(kept(cta_to_release(params.use))),
        zero_(Factors::kAreLoaded ? kept(static_cast<int>(params.use) >> 4) : 0) {}

  __device__ __forceinline__ uint32_t base() const { return base_; }

  // The lane's first row in the tile, of the first part, and of any.
  __device__ __forceinline__ int first_row() const { return row_; }
  static __device__ __forceinline__ int row_of(int part) {
    const int warp = threadIdx.x / 32 - 4;
    return part * Tile::kPartRows + 16 * warp + threadIdx.x % 32 / 4;
  }

  // Computes the sums of a tile whose first column is `column`, and gives its stages back.
  __device__ __forceinline__ void compute(int column, Sums& sums) {
#pragma unroll
    for (int part = 0; part < Tile::kParts; ++part) {
#pragma unroll
      for (float& x : sums[part]) x = 0.0f;
    }
    Block at = {{uniform(state_.stage), static_cast<uint32_t>(uniform(state_.parity))}};
    locate(at);
    const int blocks = uniform(blocks_);
    if constexpr (Tile::kOverlaps) {
      add_overlapped(column, at, blocks, sums[0]);
    } else {
      Acc acc;
      if (Tile::kParts > 1) {
#pragma unroll
        for (float& x : acc) x = 0.0f;
      }
#pragma unroll(Tile::kParts > 1 ? 4 : 2)
      for (int left = blocks; left > 0; --left) {
        wait_full(at);
        const Block here = at;
#pragma unroll
        for (int part = 0; part < Tile::kParts; ++part) {
          multiply(here, part, acc);
          const Factors factors = load_factors(here, column, part);
          wgmma_wait_group<0>();
          keep_behind_wait(acc);
          if (part == Tile::kParts - 1) {
            advance(at);
            at.is_full = is_full(at);
            release(here, factors);
          }
          add(sums[part], acc, factors);
        }
      }
    }
    state_ = at.state;
  }

 private:
  // Goes to the next stage. Why the places are kept: the compiler would compute them when the sums
  // are added, and the tensor cores would wait for it.
  __device__ __forceinline__ void advance(Block& at) const {
    at.state.advance();
    locate(at);
    at.rows = kept(at.rows);
    at.columns = kept(at.columns);
    if constexpr (Factors::kAreLoaded) at.scales = kept(at.scales);
  }
  __device__ __forceinline__ void locate(Block& at) const {
    const uint32_t stage = (base_ >> 4) + at.state.stage * (Tile::kStageBytes >> 4);
    at.rows = stage + warpgroup_ * (64 * Tile::kRowBytes >> 4);
    at.columns = stage + (Tile::kRowOperandBytes >> 4);
    at.scales = base_ + kScalesOffset + at.state.stage * kScalesBytes;
  }

  // What is asked before sums are added is known when they are. Behind the last block no stage may
  // become full; try_wait would wait there for microseconds.
  __device__ __forceinline__ bool is_full(const Block& at) const {
    return mbarrier_test_parity(&stages_.full[at.state.stage], at.state.parity);
  }
  __device__ __forceinline__ void wait_full(const Block& at) {
    if (__builtin_expect(!at.is_full, 0)) stages_.wait_full(at.state, "a full stage");
  }

  // Multiplies each block while the one before is added. Two accumulators take turns.
  __device__ __forceinline__ void add_overlapped(int column, Block& at, int left, Acc& sums) {
    if (left == 0) return;
    Acc even, odd;
    Block last = at;
    Factors of_last = start(at, column, even);
#pragma unroll 1
    for (; left > 2; left -= 2) {
      const Block middle = at;
      const Factors of_middle = start(at, column, odd);
      finish<1>(at, last, of_last, sums, even);
      last = at;
      of_last = start(at, column, even);
      finish<1>(at, middle, of_middle, sums, odd);
    }
    if (left == 2) {
      const Block middle = at;
      const Factors of_middle = start(at, column, odd);
      finish<1>(at, last, of_last, sums, even);
      finish<0>(at, middle, of_middle, sums, odd);
    } else {
      finish<0>(at, last, of_last, sums, even);
    }
  }

  // Waits for a stage, starts its product, and goes to the next stage. Why the factors are loaded
  // before: what a warp reads of shared memory behind wgmma comes when these have read theirs, so
  // that one would wait for this product before adding the last one.
  __device__ __forceinline__ Factors start(Block& at, int column, Acc& acc) {
    wait_full(at);
    const Factors factors = load_factors(at, column, 0);
    multiply(at, 0, acc);
    advance(at);
    return factors;
  }

  // Adds the product of the stage `of`, when at most kPending later ones are not complete.
  template <int kPending>
  __device__ __forceinline__ void finish(Block& at, const Block& of, const Factors& factors,
                                         Acc& sums, Acc& acc) {
    wgmma_wait_group<kPending>();
    keep_behind_wait(acc);
    at.is_full = is_full(at);
    release(of, factors);
    add(sums, acc, factors);
  }

  // Starts the product of 64 rows of a stage, which is full.
  __device__ __forceinline__ void multiply(const Block& at, int part, Acc& acc) const {
    using Mma = Wgmma<e4m3, Tile::kColumns>;
    constexpr uint64_t kLayout = wgmma_descriptor(0, 8 * Tile::kRowBytes, 0);
    const uint32_t rows = at.rows + part * (Tile::kPartRows * Tile::kRowBytes >> 4);
    const uint32_t columns = at.columns + part * (Tile::kPartColumns * Tile::kRowBytes >> 4);
    wgmma_fence();
    if constexpr (Tile::kParts == 1) {
      Mma::template new_ss<false>(acc, kLayout | rows, kLayout | columns);
    } else {
      // Registers of its own for this one would be too many.
      Mma::template either_ss<false>(acc, kLayout | rows, kLayout | columns, false);
    }
#pragma unroll
    for (int step = 1; step < kSteps; ++step) {
      Mma::template add_ss<false>(acc, kLayout | (rows + 2 * step), kLayout | (columns + 2 * step));
    }
    wgmma_commit_group();
    // Why: the compiler would load the scales between two wgmma, and wait for them there. A
    // warpgroup that issues all at once has the tensor cores for itself while the other one adds.
    __syncwarp();
  }

  __device__ __forceinline__ Factors load_factors(const Block& of, int column, int part) const {
    if constexpr (Factors::kAreLoaded) {
      return Factors(of.scales, row_, part, column);
    } else {
      return {};
    }
  }

  // This warp will not read the stage any more. Why the factors: the GPU may arrive before it has
  // read the scales of which they are, unless the address of the barrier depends on them; and a
  // producer may write others at once. They add zero to it.
  __device__ __forceinline__ void release(const Block& of, const Factors& factors) {
    int zero = 0;
    if constexpr (Factors::kAreLoaded) {
      __syncwarp();
      const int first = __float_as_int(factors.of(0));
      const int last = __float_as_int(factors.of(Tile::kColumns / 2 - 1));
      zero = first & last & zero_;
    }
    mbarrier_arrive_in_cta_if(&stages_.empty[of.state.stage], releases_in_, zero);
  }

  static __device__ __forceinline__ void add(Acc& sums, const Acc& acc, const Factors& factors) {
#pragma unroll
    for (int i = 0; i < Tile::kColumns / 2; ++i) sums[i] = factors.add(sums[i], acc[i], i);
    // Why: the compiler would add when the next part is multiplied, for which registers are too
    // few.
    if constexpr (Tile::kParts > 1) keep_behind_wait(sums);
  }

  Barriers& stages_;
  const int blocks_;  // of the depth, in a tile
  const uint32_t base_;
  const int warpgroup_;
  const int row_;          // the lane's first one in the tile
  const int releases_in_;  // a CTA of the cluster
  const int zero_;         // zero, which the compiler does not know
  State state_;
};

#endif  // __CUDACC__

}  // namespace precast
