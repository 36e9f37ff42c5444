// SPDX-License-Identifier: Apache-2.0
// The consumers of block-scaled GEMM for sm_90a: a warpgroup computes the sums of its rows of a
// tile, as block_sums.cuh says, where the factor of a block of the depth is the product of the
// scales of the token and of the weight, and writes them.
//
// Source   DeepSeek-V3, arXiv:2412.19437, section 3.5.2.
#pragma once

#include "precast/gemm/sm90/block_sums.cuh"
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
  static constexpr bool kAreLoaded = true;
  float of_segment[kSegments][2];  // [segment, row l / 4 or the one eight below]

  // Of the lane's rows in a part, where `row` is its first in the first part; `column` is the
  // tile's first.
  __device__ __forceinline__ Fp8Factors(uint32_t scales, int row, int part, int column) {
    const uint32_t of_row = scales + row * 4;
    const int further = part * Tile::kPartRows;
    const float token[2] = {load_scale(of_row + further * 4),
                            load_scale(of_row + further * 4 + 32)};
    if constexpr (kFp8Block % Tile::kColumns == 0) {  // the part lies in one block
      const int block = Tile::kPartColumns == 0 ? 0 : part;
      const float of_weight = load_scale(scales + (Tile::kTokens + block) * 4);
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
  __device__ __forceinline__ float add(float sum, float acc, int i) const {
    return fmaf(acc, of(i), sum);
  }
};

// In a swapped tile, the rows have one scale and each column another.
template <typename Tile>
struct Fp8Factors<Tile, true> {
  static constexpr bool kAreLoaded = true;
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
  __device__ __forceinline__ float add(float sum, float acc, int i) const {
    return fmaf(acc, of(i), sum);
  }
};

template <typename T, typename Tile>
class Fp8GemmConsumer {
  using Barriers = Fp8GemmBarriers<Tile::kStages>;
  // In the storage, the scales come behind the barriers, which are a multiple of 16 bytes.
  static constexpr int kScalesOffset =
      Sm90GemmBuffers<Tile>::kStorageOffset + int(sizeof(Barriers));
  using TileSums = BlockSums<Tile, Barriers, Fp8Factors<Tile>, kScalesOffset, Tile::kScales * 4>;
  using Sums = typename TileSums::Sums;
  using Epilogue = Fp8BoxEpilogue<T, Tile>;

 public:
  __device__ __forceinline__ Fp8GemmConsumer(const Sm90GemmParams& params,
                                             Fp8GemmStorage<Tile>& shared,
                                             Sm90GemmBuffers<Tile> buffers)
      : params_(params), shared_(shared), sums_(params, shared.stages, buffers.base) {}

  __device__ __forceinline__ void run() {
    if (Epilogue::kStoresBoxes && threadIdx.x % kWarpgroupSize == 0) {
      prefetch_tensor_map(&params_.out);
    }
    GemmScheduler<Tile> scheduler(params_);
    // Why a vote: see uniform().
    for (GemmTile tile; __any_sync(0xffffffffu, scheduler.next(tile));) {
      Sums sums;
      const RowGroups groups = Epilogue::load_groups(params_, tile, sums_.first_row());
      sums_.compute(tile.column, sums);
      write_parts(tile, sums, groups);
    }
    if constexpr (Epilogue::kStoresBoxes) finish_boxes();
  }

 private:
  // Why templates: the compiler does not unroll a loop of this size.
  template <int kPart = 0>
  __device__ __forceinline__ void write_parts(const GemmTile& tile, const Sums& sums,
                                              const RowGroups& groups) const {
    const Epilogue epilogue(params_, tile, TileSums::row_of(kPart), {},
                            sums_.base() + Sm90GemmBuffers<Tile>::kWarpBufferOffset);
    if (params_.use == ClusterUse::splits_k) {
      epilogue.template write_sum_of_cluster<kPart>(sums_.base(), &shared_.stages.sums,
                                                    sums[kPart]);
    } else {
      epilogue.template write_tile<kPart>(sums[kPart], groups);
    }
    if constexpr (kPart + 1 < Tile::kParts) write_parts<kPart + 1>(tile, sums, groups);
  }

  const Sm90GemmParams& params_;
  Fp8GemmStorage<Tile>& shared_;
  TileSums sums_;
};

#endif  // __CUDACC__

}  // namespace precast
