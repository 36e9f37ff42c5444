// SPDX-License-Identifier: Apache-2.0
// The operands of a tile on their way from global memory to MMAs, in stages of shared memory.
//
// Layout   A stage has `a` [tokens, 128 bytes of the depth], then `b` [columns, 128 bytes]; of a
//          row-major weight, panels of 64 columns, [64 of the depth, 64 columns] each. The eight
//          16-byte chunks of a row of 128 bytes are permuted: chunk c of row r is at c ^ r % 8. So
//          the 8 rows that ldmatrix reads at once, and those that copies write, are in different
//          banks.
// Copies   Eight neighbouring threads copy the 128 bytes of a row by cp.async. What is behind the
//          last token, column or number of the depth is written as zeros.
#pragma once

#include "precast/core/cp_async.cuh"
#include "precast/core/mma.cuh"
#include "precast/gemm/gemm_place.cuh"

namespace precast {

#if defined(__CUDACC__)

// Copies the tokens, step by step, into the stages at the shared address `smem`.
template <typename Tile, typename A>
class TokenCopies {
 protected:
  static constexpr int kRowsPerRound = Tile::kThreads / 8;
  static constexpr int kStepElements = kGemmStepBytes / int(sizeof(A));
  static_assert(Tile::kTokens % kRowsPerRound == 0, "whole rounds");

  template <typename Params>
  __device__ __forceinline__ TokenCopies(const Params& p, const TilePlace& place, uint32_t smem)
      : row_(threadIdx.x / 8), chunk_(threadIdx.x % 8 * 16) {
    target_ = smem + row_ * kGemmStepBytes + (chunk_ ^ row_ % 8 * 16);
    a_stride_ = p.a.row_stride;
    a_rows_ = place.token_end - place.token - row_;
    a_ = static_cast<const char*>(p.a.data) + place.a_group * p.a.group_stride +
         (place.token + row_) * a_stride_ + chunk_;
    depth_left_ = p.depth;
  }

  __device__ __forceinline__ bool is_in_depth() const {
    return chunk_ / int(sizeof(A)) < depth_left_;
  }

  // Starts the copies of the next step, to the stage that begins at `offset`, and returns where
  // this thread's first chunk behind them is. Takes the step off what is left of the depth.
  __device__ __forceinline__ uint32_t start_tokens(uint32_t offset) {
    const bool in_depth = is_in_depth();
    uint32_t to = target_ + offset;
    const char* from = a_;
#pragma unroll
    for (int row = 0; row < Tile::kTokens; row += kRowsPerRound) {
      cp_async(to, from, in_depth && row < a_rows_);
      to += kRowsPerRound * kGemmStepBytes;
      from += kRowsPerRound * a_stride_;
    }
    a_ += kGemmStepBytes;
    depth_left_ -= kStepElements;
    return to;
  }

  int row_, chunk_;  // of this thread; the chunk in bytes
  uint32_t target_;  // of its first chunk in the first stage
  const char* a_;    // its first chunk of the next step
  int64_t a_stride_;
  int a_rows_;      // that exist, from its first on
  int depth_left_;  // from the next step on
};

// Copies both operands.
template <typename Tile, typename A, typename B, bool kRowMajorB>
class OperandCopies : public TokenCopies<Tile, A> {
  using Tokens = TokenCopies<Tile, A>;
  using Tokens::chunk_;
  using Tokens::kRowsPerRound;
  using Tokens::row_;
  static_assert(Tile::kColumns % kRowsPerRound == 0, "whole rounds");
  static_assert(!kRowMajorB || sizeof(B) == 2, "FP8 is not transposed by ldmatrix");

 public:
  template <typename Params>
  __device__ __forceinline__ OperandCopies(const Params& p, const TilePlace& place, uint32_t smem)
      : Tokens(p, place, smem) {
    b_stride_ = p.b.row_stride;
    const char* b = static_cast<const char*>(p.b.data) + place.weight * p.b.group_stride;
    const int columns = p.columns - place.column;
    if constexpr (kRowMajorB) {
      b_ = b + row_ * b_stride_ + place.column * int64_t(sizeof(B)) + chunk_;
      b_rows_ = columns;
    } else {
      b_ = b + (place.column + row_) * b_stride_ + chunk_;
      b_rows_ = columns - row_;
    }
  }

  // Starts the copies of the next step, to the stage that begins at `offset`.
  __device__ __forceinline__ void start(uint32_t offset) {
    const bool in_depth = this->is_in_depth();
    const int depth_left = this->depth_left_;
    uint32_t to = this->start_tokens(offset);
    const char* from = b_;
    if constexpr (kRowMajorB) {
#pragma unroll
      for (int panel = 0; panel < Tile::kColumns; panel += 64) {
#pragma unroll
        for (int row = 0; row < 64; row += kRowsPerRound) {
          const bool exists = row_ + row < depth_left && panel + chunk_ / 2 < b_rows_;
          cp_async(to, from + panel * 2 + row * b_stride_, exists);
          to += kRowsPerRound * kGemmStepBytes;
        }
      }
      b_ += Tokens::kStepElements * b_stride_;
    } else {
#pragma unroll
      for (int row = 0; row < Tile::kColumns; row += kRowsPerRound) {
        cp_async(to, from, in_depth && row < b_rows_);
        to += kRowsPerRound * kGemmStepBytes;
        from += kRowsPerRound * b_stride_;
      }
      b_ += kGemmStepBytes;
    }
  }

 private:
  const char* b_;  // this thread's first chunk of the next step
  int64_t b_stride_;
  int b_rows_;  // that exist, from its first on; columns of a row-major weight
};

// The fragments of 32 bytes of the depth of a warp's part of the tile.
template <typename Tile>
struct Fragments {
  uint32_t a[Tile::kMmaM][4];
  uint32_t b[Tile::kMmaN / 2][4];  // of 16 columns: both registers of eight, then of the others
};

// Where a lane's first row of tokens is in a stage, for ldmatrix.
template <typename Tile>
class TokenFragmentLoads {
 protected:
  __device__ __forceinline__ explicit TokenFragmentLoads(uint32_t smem) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int token = warp / Tile::kColumnWarps * Tile::kWarpTokens;
    a_ = smem + (token + lane % 16) * kGemmStepBytes + ((lane / 16 ^ lane % 8) * 16);
  }

  // Loads the fragments of the `part`-th 32 bytes of the depth of the stage at `offset`.
  __device__ __forceinline__ void load_tokens(Fragments<Tile>& to, uint32_t offset,
                                              int part) const {
#pragma unroll
    for (int m = 0; m < Tile::kMmaM; ++m) {
      ldmatrix_x4(to.a[m], (a_ ^ part * 32) + offset + m * 16 * kGemmStepBytes);
    }
  }

 private:
  uint32_t a_;  // shared address in the first stage
};

// The same of both operands; B is the type of the weight.
template <typename Tile, typename B, bool kRowMajorB>
class FragmentLoads : public TokenFragmentLoads<Tile> {
 public:
  __device__ __forceinline__ explicit FragmentLoads(uint32_t smem)
      : TokenFragmentLoads<Tile>(smem) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int column = warp % Tile::kColumnWarps * Tile::kWarpColumns;
    const uint32_t b = smem + Tile::kABytes;
    if constexpr (kRowMajorB) {
      // Chunks are eight columns; the bits of the warp's, the pair's and the lane's are different.
      const int chunk = column % 64 / 8 + lane / 16;
      b_ = b + column / 64 * (64 * kGemmStepBytes) + lane % 16 * kGemmStepBytes +
           (chunk ^ lane % 8) * 16;
    } else {
      b_ = b + (column + lane / 16 * 8 + lane % 8) * kGemmStepBytes +
           ((lane / 8 % 2 ^ lane % 8) * 16);
    }
  }

  // Called for each step in order, before its loads.
  __device__ __forceinline__ void begin_step(uint32_t) {}

  __device__ __forceinline__ void load(Fragments<Tile>& to, uint32_t offset, int part) const {
    this->load_tokens(to, offset, part);
#pragma unroll
    for (int pair = 0; pair < Tile::kMmaN / 2; ++pair) {
      if constexpr (kRowMajorB) {
        ldmatrix_x4_trans(to.b[pair], (b_ ^ pair * 32) + offset + part * 16 * kGemmStepBytes);
      } else {
        ldmatrix_x4(to.b[pair], (b_ ^ part * 32) + offset + pair * 16 * kGemmStepBytes);
      }
    }
  }

 private:
  uint32_t b_;  // shared address in the first stage
};

#endif  // __CUDACC__

}  // namespace precast
