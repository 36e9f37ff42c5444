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
#include "precast/gemm/sm90/fp8_epilogue.cuh"
#include "precast/gemm/sm90/scheduler.cuh"
#include "precast/gemm/sm90/tile.cuh"

namespace precast {

#if defined(__CUDACC__)

// Scales in shared memory. Why not by pointers: the compiler would load them before they are
// needed.
__device__ __forceinline__ float load_scale(uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address));
  return x;
}
__device__ __forceinline__ float2 load_two_scales(uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
  return x;
}

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

  // Of the lane's rows `row` + `further` and eight below; `column` is the tile's first.
  __device__ __forceinline__ Fp8Factors(uint32_t scales, int row, int further, int column) {
    const uint32_t of_row = scales + row * 4;
    const float token[2] = {load_scale(of_row + further * 4),
                            load_scale(of_row + further * 4 + 32)};
    if constexpr (kFp8Block % Tile::kColumns == 0) {  // the tile lies in one block
      const float of_weight = load_scale(scales + Tile::kTokens * 4);
      of_segment[0][0] = token[0] * of_weight;
      of_segment[0][1] = token[1] * of_weight;
      return;
    }
    const float2 weight = load_two_scales(scales + Tile::kTokens * 4);
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

  __device__ __forceinline__ Fp8Factors(uint32_t scales, int, int, int) {
    const float weight = load_scale(scales + Tile::kTokens * 4);
    const int q = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < Tile::kColumns / 8; ++j) {
      const float2 token = load_two_scales(scales + (8 * j + 2 * q) * 4);
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
  using Sums = Acc[Tile::kParts];
  using State = PipelineState<Tile::kStages>;
  using Factors = Fp8Factors<Tile>;
  using Epilogue = Fp8BoxEpilogue<T, Tile>;
  static constexpr int kSteps = Tile::kRowBytes / 32;  // wgmma of a block of the depth
  // In the storage, the scales come behind the barriers, which are a multiple of 16 bytes.
  static constexpr int kScalesOffset =
      Sm90GemmBuffers<Tile>::kStorageOffset + int(sizeof(Fp8GemmBarriers<Tile::kStages>));

  // Where the warpgroup is in the pipeline, and whether it has seen that this stage is full.
  struct Block {
    State state;
    bool is_full;
    uint32_t rows, columns;  // places of the stage's operands, units of 16 bytes
    uint32_t scales;         // the address of the stage's
  };

 public:
  __device__ __forceinline__ Fp8GemmConsumer(const Sm90GemmParams& params,
                                             Fp8GemmStorage<Tile>& shared,
                                             Sm90GemmBuffers<Tile> buffers)
      : params_(params),
        shared_(shared),
        blocks_(DepthRange(params).count()),
        base_(uniform(buffers.base)),
        warpgroup_(uniform(threadIdx.x / kWarpgroupSize) - 1),
        row_(kept(row_of(0))),
        releases_in_(kept(cta_to_release(params.use))),
        zero_(kept(static_cast<int>(params.use) >> 4)) {}

  __device__ __forceinline__ void run() {
    if (Epilogue::kStoresBoxes && threadIdx.x % kWarpgroupSize == 0) {
      prefetch_tensor_map(&params_.out);
    }
    GemmScheduler<Tile> scheduler(params_);
    // Why a vote: see uniform().
    for (GemmTile tile; __any_sync(0xffffffffu, scheduler.next(tile));) {
      Sums sums;
#pragma unroll
      for (int part = 0; part < Tile::kParts; ++part) {
#pragma unroll
        for (float& x : sums[part]) x = 0.0f;
      }
      const RowGroups groups = Epilogue::load_groups(params_, tile, row_);
      accumulate(tile, sums);
      write_parts(tile, sums, groups);
    }
    if constexpr (Epilogue::kStoresBoxes) finish_boxes();
  }

 private:
  __device__ __forceinline__ void accumulate(const GemmTile& tile, Sums& sums) {
    Block at = {{uniform(state_.stage), static_cast<uint32_t>(uniform(state_.parity))}};
    locate(at);
    const int blocks = uniform(blocks_);
    if constexpr (Tile::kOverlaps) {
      accumulate_overlapped(tile, at, blocks, sums[0]);
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
          const Factors factors = load_factors(here, tile, part);
          wgmma_wait_group<0>();
          keep_behind_wait(acc);
          if (part == Tile::kParts - 1) {
            release(here, factors);
            advance(at);
            at.is_full = is_full(at);
          }
          add(sums[part], acc, factors);
        }
      }
    }
    state_ = at.state;
  }

  // Goes to the next stage. Why the places are kept: the compiler would compute them when the sums
  // are added, and the tensor cores would wait for it.
  __device__ __forceinline__ void advance(Block& at) const {
    at.state.advance();
    locate(at);
    at.rows = kept(at.rows);
    at.columns = kept(at.columns);
    at.scales = kept(at.scales);
  }
  __device__ __forceinline__ void locate(Block& at) const {
    const uint32_t stage = (base_ >> 4) + at.state.stage * (Tile::kStageBytes >> 4);
    at.rows = stage + warpgroup_ * (64 * Tile::kRowBytes >> 4);
    at.columns = stage + (Tile::kRowOperandBytes >> 4);
    at.scales = base_ + kScalesOffset + at.state.stage * (Tile::kScales * 4);
  }

  // What is asked before sums are added is known when they are. Behind the last block no stage may
  // become full; try_wait would wait there for microseconds.
  __device__ __forceinline__ bool is_full(const Block& at) const {
    return mbarrier_test_parity(&shared_.stages.full[at.state.stage], at.state.parity);
  }
  __device__ __forceinline__ void wait_full(const Block& at) {
    if (__builtin_expect(!at.is_full, 0)) shared_.stages.wait_full(at.state, "a full stage");
  }

  // Multiplies each block while the one before is added. Two accumulators take turns.
  __device__ __forceinline__ void accumulate_overlapped(const GemmTile& tile, Block& at, int left,
                                                        Acc& sums) {
    if (left == 0) return;
    Acc even, odd;
    Block last = at;
    start(at, even);
#pragma unroll 1
    for (; left > 2; left -= 2) {
      const Block middle = at;
      start(at, odd);
      finish<1>(at, last, tile, sums, even);
      last = at;
      start(at, even);
      finish<1>(at, middle, tile, sums, odd);
    }
    if (left == 2) {
      const Block middle = at;
      start(at, odd);
      finish<1>(at, last, tile, sums, even);
      finish<0>(at, middle, tile, sums, odd);
    } else {
      finish<0>(at, last, tile, sums, even);
    }
  }

  // Waits for a stage, starts its product, and goes to the next stage.
  __device__ __forceinline__ void start(Block& at, Acc& acc) {
    wait_full(at);
    multiply(at, 0, acc);
    advance(at);
  }

  // Adds the product of the stage `of`, when at most kPending later ones are not complete.
  template <int kPending>
  __device__ __forceinline__ void finish(Block& at, const Block& of, const GemmTile& tile,
                                         Acc& sums, Acc& acc) {
    const Factors factors = load_factors(of, tile, 0);
    wgmma_wait_group<kPending>();
    keep_behind_wait(acc);
    release(of, factors);
    at.is_full = is_full(at);
    add(sums, acc, factors);
  }

  // Starts the product of 64 rows of a stage, which is full.
  __device__ __forceinline__ void multiply(const Block& at, int part, Acc& acc) const {
    using Mma = Wgmma<e4m3, Tile::kColumns>;
    constexpr uint64_t kLayout = wgmma_descriptor(0, 8 * Tile::kRowBytes, 0);
    const uint32_t rows = at.rows + part * (Tile::kConsumers * 64 * Tile::kRowBytes >> 4);
    const uint32_t columns = at.columns;
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

  // Why templates: the compiler does not unroll a loop of this size.
  template <int kPart = 0>
  __device__ __forceinline__ void write_parts(const GemmTile& tile, const Sums& sums,
                                              const RowGroups& groups) const {
    const Epilogue epilogue(params_, tile, row_of(kPart), {},
                            base_ + Sm90GemmBuffers<Tile>::kWarpBufferOffset);
    if (params_.use == ClusterUse::splits_k) {
      epilogue.template write_sum_of_cluster<kPart>(base_, &shared_.stages.sums, sums[kPart]);
    } else {
      epilogue.template write_tile<kPart>(sums[kPart], groups);
    }
    if constexpr (kPart + 1 < Tile::kParts) write_parts<kPart + 1>(tile, sums, groups);
  }

  // The lane's first row in the tile.
  static __device__ __forceinline__ int row_of(int part) {
    const int warp = threadIdx.x / 32 - 4;
    return part * (64 * Tile::kConsumers) + 16 * warp + threadIdx.x % 32 / 4;
  }

  __device__ __forceinline__ Factors load_factors(const Block& of, const GemmTile& tile,
                                                  int part) const {
    return Factors(of.scales, row_, part * (64 * Tile::kConsumers), tile.column);
  }

  // This warp will not read the stage any more. Why the factors: the GPU may arrive before it has
  // read the scales of which they are, unless a register of the arrival depends on them; and a
  // producer writes others at once. They make the number of the CTA larger by zero.
  __device__ __forceinline__ void release(const Block& of, const Factors& factors) {
    __syncwarp();
    const int first = __float_as_int(factors.of(0));
    const int last = __float_as_int(factors.of(Tile::kColumns / 2 - 1));
    mbarrier_arrive_in_cta_if(&shared_.stages.empty[of.state.stage],
                              releases_in_ + (first & last & zero_));
  }

  static __device__ __forceinline__ void add(Acc& sums, const Acc& acc, const Factors& factors) {
#pragma unroll
    for (int i = 0; i < Tile::kColumns / 2; ++i) sums[i] = fmaf(acc[i], factors.of(i), sums[i]);
  }

  const Sm90GemmParams& params_;
  Fp8GemmStorage<Tile>& shared_;
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
