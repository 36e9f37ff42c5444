// SPDX-License-Identifier: Apache-2.0
// The producer warps of block-scaled GEMM for sm_90a. One thread copies `a` of each stage by TMA,
// one of another warp `b`: a thread takes about 100 clocks for a box, and a small tile has no more.
// The lanes of a third warp copy the scales with cp.async: so these may have any strides, and need
// no copy in another layout. Where those of a tile's tokens lie one behind the other, one lane
// copies them at once, and a fourth warp copies those of the weight.
//
// Why four warps of few instructions: consumers wait for the one of them that shares its part of
// the SM with a producer of many, and a small tile is multiplied faster than one warp brings all
// scales.
//
// A stage is full when the boxes have arrived and the scales are written. It is empty when each
// consumer warp that reads the boxes has left it, in both CTAs if these share one.
#pragma once

#include "precast/core/cp_async.cuh"
#include "precast/core/sm90/bulk_copy.cuh"
#include "precast/gemm/sm90/copy_operand.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename Tile, typename Params = Sm90GemmParams>
class Fp8GemmProducer {
 public:
  // That fill a stage, besides the bytes of the copies: of the two operands, and of the scales of
  // tokens and weight, or of each lane that copies some of them.
  static __device__ __forceinline__ uint32_t arrivals(const Params& params) {
    return has_scales_in_row(params) ? 2 + 1 + kWeightScales : 2 + 32;
  }

  __device__ __forceinline__ Fp8GemmProducer(const Params& params, Fp8GemmStorage<Tile>& shared,
                                             Sm90GemmBuffers<Tile> buffers)
      : params_(params), p_(params.p), shared_(shared), buffers_(buffers) {}

  __device__ __forceinline__ void run(int warp) {
    if (warp == 0) {
      copy_operand<Tile, false, kFp8Block>(params_, shared_, buffers_, 1);
    } else if (warp == 1) {
      if constexpr (Params::kIsGated) {
        copy_scales();
      } else if (params_.has_scales_in_row) {
        copy_rows_of_scales();
      } else if (p_.a_scale.packed) {
        unpack_scales();
      } else {
        copy_scales();
      }
    } else if (warp == 2) {
      copy_operand<Tile, true, kFp8Block>(params_, shared_, buffers_, 1);
    } else if (has_scales_in_row(params_)) {
      if constexpr (!Params::kIsGated) copy_scales_of_weight();
    }
    __syncwarp();
  }

 private:
  // Groups of a gated weight begin anywhere, and its scales are not packed.
  static __device__ __forceinline__ bool has_scales_in_row(const Params& params) {
    return !Params::kIsGated && params.has_scales_in_row;
  }

  // Where the scales of a block's tokens lie in a row, one lane copies them all at once, in
  // multiples of 16 bytes: what is read behind the last token lies in the same 16 bytes, and no
  // output depends on it.
  __device__ __forceinline__ void copy_rows_of_scales() {
    Fp8GemmStorage<Tile>& shared = kept_object(shared_);
    PipelineState<Tile::kStages> state;
    GemmScheduler<Tile, Params> scheduler(params_);
    const DepthRange depth(params_);
    const bool is_chosen = elect_lane();
    for (GemmTile tile; scheduler.next(tile);) {
      // The other CTA of a pair may have the last tokens.
      const int tokens = min(max(p_.tokens - tile.token, 0), Tile::kTokens);
      const uint32_t bytes = (tokens + 3) / 4 * 16;
      const float* source = p_.a_scale.data + tile.a_group * p_.a_scale.group_stride +
                            depth.begin * p_.a_scale.depth_stride + tile.token;
      if (is_chosen) {
#pragma unroll 1
        for (int block = depth.begin; block < depth.end; ++block) {
          shared.stages.wait_empty(state, "an empty stage for the scales of tokens");
          uint64_t* full = &shared.stages.full[state.stage];
          mbarrier_arrive_expect_tx(full, bytes);
          if (bytes != 0) {
            cp_async_bulk(shared_address(shared.scales[state.stage]), source, bytes, full);
          }
          source += p_.a_scale.depth_stride;
          state.advance();
        }
      }
      __syncwarp();
    }
  }

  // Beside it, one lane of this warp copies the weight's scale, or two lanes those of a tile that
  // may end in another block of columns.
  __device__ __forceinline__ void copy_scales_of_weight() {
    const int lane = threadIdx.x % 32;
    const int last_block = ceil_div(p_.columns, kFp8Block) - 1;
    Fp8GemmStorage<Tile>& shared = kept_object(shared_);
    PipelineState<Tile::kStages> state;
    GemmScheduler<Tile, Params> scheduler(params_);
    const DepthRange depth(params_);
    for (GemmTile tile; scheduler.next(tile);) {
      const int column_block = min(tile.column / kFp8Block + lane, last_block);
      const float* source = p_.b_scale.data + tile.b_group * p_.b_scale.group_stride +
                            depth.begin * p_.b_scale.depth_stride +
                            column_block * p_.b_scale.block_stride;
      if (lane < kWeightScales) {
#pragma unroll 1
        for (int block = depth.begin; block < depth.end; ++block) {
          shared.stages.wait_empty(state, "an empty stage for the scales of the weight");
          const float* target = shared.scales[state.stage] + Tile::kTokens + lane;
          cp_async_word(shared_address(target), source, true);
          cp_async_arrive(&shared.stages.full[state.stage]);
          source += p_.b_scale.depth_stride;
          state.advance();
        }
      }
      __syncwarp();
    }
  }

  __device__ __forceinline__ void copy_scales() {
    const int lane = threadIdx.x % 32;
    const int column_blocks = ceil_div(p_.columns, kFp8Block);
    PipelineState<Tile::kStages> state;
    GemmScheduler<Tile, Params> scheduler(params_);
    const DepthRange depth(params_);
    for (GemmTile tile; scheduler.next(tile);) {
      const float* of_group = p_.a_scale.data + tile.a_group * p_.a_scale.group_stride +
                              depth.begin * p_.a_scale.depth_stride;
      const bool by_four = params_.has_four_scales && tile.token % 4 == 0;
      // The second one is the block behind the first, or that of its gates.
      const int column_block = tile.column / kFp8Block + (Params::kIsGated ? 0 : lane);
      const bool has_weight = lane < 2 && column_block < column_blocks;
      const int weight_block = column_block + (Params::kIsGated ? lane * column_blocks : 0);
      const float* of_weight = p_.b_scale.data + tile.b_group * p_.b_scale.group_stride +
                               depth.begin * p_.b_scale.depth_stride +
                               (has_weight ? weight_block : 0) * p_.b_scale.block_stride;
#pragma unroll 1
      for (int block = depth.begin; block < depth.end; ++block) {
        shared_.stages.wait_empty(state, "an empty stage for the scales");
        uint64_t* full = &shared_.stages.full[state.stage];
        const uint32_t target = shared_address(shared_.scales[state.stage]);
        if (by_four) {
          copy_four_scales(target, of_group, tile.token);
        } else {
          copy_each_scale(target, of_group, tile.token);
        }
        of_group += p_.a_scale.depth_stride;
        if (lane < 2) cp_async_word(target + (Tile::kTokens + lane) * 4, of_weight, has_weight);
        of_weight += p_.b_scale.depth_stride;
        cp_async_arrive(full);
        state.advance();
      }
    }
  }

  // The same where four blocks of the depth have one word, which is loaded once. Lanes write what
  // it says to shared memory, so that consumers need not know.
  __device__ __forceinline__ void unpack_scales() {
    constexpr int kOfLane = ceil_div(Tile::kTokens, 32);
    const int lane = threadIdx.x % 32;
    PipelineState<Tile::kStages> state;
    GemmScheduler<Tile, Params> scheduler(params_);
    const DepthRange depth(params_);
    for (GemmTile tile; scheduler.next(tile);) {
      const float* of_group = p_.a_scale.data + tile.a_group * p_.a_scale.group_stride;
      const float* of_weight = p_.b_scale.data + tile.b_group * p_.b_scale.group_stride;
      const int last = ceil_div(p_.columns, kFp8Block) - 1;
      of_weight += min(tile.column / kFp8Block + lane % 2, last) * p_.b_scale.block_stride;
      float of_token[kOfLane], of_column = 0.0f;
#pragma unroll 1
      for (int block = depth.begin; block < depth.end; ++block) {
        if (block == depth.begin || block % 4 == 0) {
#pragma unroll
          for (int i = 0; i < kOfLane; ++i) {
            const int token = min(tile.token + i * 32 + lane, p_.tokens - 1);
            of_token[i] = of_group[block / 4 * p_.a_scale.depth_stride +
                                   (token >> p_.a_scale.rows_log2) * p_.a_scale.block_stride];
          }
          of_column = of_weight[block / 4 * p_.b_scale.depth_stride];
        }
        shared_.stages.wait_empty(state, "an empty stage for unpacked scales");
        float* target = shared_.scales[state.stage];
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
          const int at = i * 32 + lane;
          if (Tile::kTokens % 32 == 0 || at < Tile::kTokens) {
            target[at] = unpacked_scale(of_token[i], block);
          }
        }
        if (lane < 2) target[Tile::kTokens + lane] = unpacked_scale(of_column, block);
        mbarrier_arrive(&shared_.stages.full[state.stage]);
        state.advance();
      }
    }
  }

  // Copies the scales of the tokens from `first` on, four at once, with zeros for those that do not
  // exist.
  __device__ __forceinline__ void copy_four_scales(uint32_t target, const float* of_group,
                                                   int first) const {
    constexpr int kFours = Tile::kTokens / 4;
#pragma unroll
    for (int i = 0; i < ceil_div(kFours, 32); ++i) {
      const int four = i * 32 + threadIdx.x % 32;
      if (kFours % 32 == 0 || four < kFours) {
        const int token = first + 4 * four;
        const int count = min(max(p_.tokens - token, 0), 4);
        cp_async_part(target + four * 16, of_group + (count > 0 ? token : 0), 4 * count);
      }
    }
  }
  // Why offsets of 32 bits, for each stage again: pointers take more registers than a producer has.
  __device__ __forceinline__ void copy_each_scale(uint32_t target, const float* of_group,
                                                  int first) const {
#pragma unroll
    for (int i = 0; i < ceil_div(Tile::kTokens, 32); ++i) {
      const int at = i * 32 + threadIdx.x % 32;
      if (Tile::kTokens % 32 == 0 || at < Tile::kTokens) {
        const int token = first + at;
        const bool exists = token < p_.tokens;
        const uint32_t offset =
            (token >> p_.a_scale.rows_log2) * static_cast<uint32_t>(p_.a_scale.block_stride);
        cp_async_word(target + at * 4, of_group + (exists ? offset : 0), exists);
      }
    }
  }

  // Of a tile: it may begin in one block of columns and end in the next.
  static constexpr int kWeightScales = kFp8Block % Tile::kWeights == 0 ? 1 : 2;

  const Params& params_;
  const Fp8GemmParams& p_;
  Fp8GemmStorage<Tile>& shared_;
  Sm90GemmBuffers<Tile> buffers_;
};

#endif  // __CUDACC__

}  // namespace precast
