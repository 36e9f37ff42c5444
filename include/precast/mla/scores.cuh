// SPDX-License-Identifier: Apache-2.0
// The scores of an MLA tile: a warp computes 16 rows and kWarpN tokens of
//
//   acc_s = q_nope ckv^T + kpe_ratio q_pe kpe^T
//
// With ckv_scales, the product of each 128 columns is multiplied by the token's number.
#pragma once

#include "precast/attention/gemm.cuh"
#include "precast/mla/query.cuh"

namespace precast {

#if defined(__CUDACC__)

// What gemm_qk() asks of a tile, for kColumns of rows that lie as Rows.
template <typename Rows, int kColumns, bool kIsFp8>
struct MlaProduct {
  static constexpr int kRowTiles = 1, kDimK = kColumns;
  static constexpr bool kFp8 = kIsFp8;
  using KeyRows = Rows;
};

// Where the row of a lane begins for an ldmatrix_x4() of eight rows and four chunks.
template <typename Rows>
__device__ __forceinline__ uint32_t eight_rows_first() {
  const int lane = threadIdx.x % 32;
  return Rows::offset(lane % 8, lane / 8);
}

// gemm_qk() of eight tokens: an ldmatrix has two k steps of them, or four of e4m3.
template <typename Product, typename Q, typename KV, typename QFrag>
__device__ __forceinline__ void gemm_qk_of_eight(float (&acc_s)[1][1][4], uint32_t smem_k,
                                                 uint32_t lane_offset, const QFrag& q_frag) {
  using T = typename MmaType<Q, KV>::type;
  using Rows = typename Product::KeyRows;
  constexpr int kStepsPerLoad = Product::kFp8 ? 4 : 2, kSteps = Product::kDimK / 16;
  static_assert(kSteps % kStepsPerLoad == 0, "whole loads");
#pragma unroll
  for (int first = 0; first < kSteps; first += kStepsPerLoad) {
    uint32_t b[4];
    ldmatrix_x4(b, smem_k + Rows::later(lane_offset, first / kStepsPerLoad * 4));
#pragma unroll
    for (int i = 0; i < kStepsPerLoad; ++i) {
      uint32_t a[1][4];
      q_frag.load(a, first + i);
      if constexpr (Product::kFp8) {
        uint32_t b0, b1;
        fp8x4_to_f16x2<KV>(b[i], b0, b1);
        mma_m16n8k16<T>(acc_s[0][0], a[0], b0, b1);
      } else {
        mma_m16n8k16<T>(acc_s[0][0], a[0], b[2 * i], b[2 * i + 1]);
      }
    }
  }
}

template <typename Tile, typename Q, typename KV, bool kHasScales>
class MlaScores {
  static constexpr int kMmaN = Tile::kWarpN / 8;
  static constexpr int kCkvSteps = Tile::kDimV / 16;
  using CkvRows = typename Tile::ValueRows;
  using KpeRows = typename Tile::KeyRows;

 public:
  using AccS = float[1][kMmaN][4];

  // The first row and token of the warp.
  static __device__ __forceinline__ int first_row() {
    return threadIdx.x / 32 / Tile::kTokenWarps * 16;
  }
  static __device__ __forceinline__ int token_warp() {
    return threadIdx.x / 32 % Tile::kTokenWarps;
  }
  static __device__ __forceinline__ int first_token() { return token_warp() * Tile::kWarpN; }
  // The row that a lane holds; half: 0 or 1, as in attention/softmax.cuh.
  static __device__ __forceinline__ int row_of_lane(int half) {
    return first_row() + half * 8 + threadIdx.x % 32 / 4;
  }

  __device__ __forceinline__ explicit MlaScores(uint32_t smem_q)
      : smem_rows_(smem_q + first_row() * Tile::QueryRows::kStride),
        q_offset_(rows_first<typename Tile::QueryRows>()),
        ckv_offset_(lane_offset<CkvRows>()),
        kpe_offset_(0) {
    if constexpr (Tile::kDimK > 0) kpe_offset_ = lane_offset<KpeRows>();
    keep_in_register(q_offset_);
    keep_in_register(ckv_offset_);
  }

  // Scores of the KV block at the shared address `stage`: kpe, then ckv. `scales`: of its tokens.
  __device__ __forceinline__ void compute(AccS& acc_s, uint32_t stage, float kpe_ratio,
                                          const float* scales) const {
    if constexpr (Tile::kDimK > 0) {
      gemm<KpeRows, Tile::kDimK, kCkvSteps>(acc_s, stage + first_token() * KpeRows::kStride,
                                            kpe_offset_);
      if constexpr (Tile::kFp8) {
#pragma unroll
        for (int i = 0; i < 4 * kMmaN; ++i) acc_s[0][i / 4][i % 4] *= kpe_ratio;
      }
    }
    const uint32_t ckv = stage + Tile::kKeyBytes + first_token() * CkvRows::kStride;
    if constexpr (kHasScales) {
      add_groups(acc_s, ckv, scales);
    } else {
      gemm<CkvRows, Tile::kDimV, 0>(acc_s, ckv, ckv_offset_);
    }
  }

 private:
  template <typename Rows>
  static __device__ __forceinline__ uint32_t lane_offset() {
    if constexpr (kMmaN == 1) return eight_rows_first<Rows>();
    return Tile::kFp8 ? rows_first<Rows>() : chunks_first<Rows>();
  }

  template <typename Rows, int kColumns, int kFirstStep>
  __device__ __forceinline__ void gemm(AccS& acc_s, uint32_t rows, uint32_t offset) const {
    multiply<Rows, kColumns>(acc_s, rows, offset,
                             MlaQFragments<Tile, kFirstStep>{smem_rows_, q_offset_});
  }

  template <typename Rows, int kColumns, typename QFrag>
  static __device__ __forceinline__ void multiply(AccS& acc_s, uint32_t rows, uint32_t offset,
                                                  const QFrag& q_frag) {
    using Product = MlaProduct<Rows, kColumns, Tile::kFp8>;
    if constexpr (kMmaN == 1) {
      gemm_qk_of_eight<Product, Q, KV>(acc_s, rows, offset, q_frag);
    } else {
      gemm_qk<Product, Q, KV>(acc_s, rows, offset, q_frag);
    }
  }

  // Adds the products of each group of columns times the scales of the tokens. Why one after the
  // other: ptxas would spill registers.
  __device__ __forceinline__ void add_groups(AccS& acc_s, uint32_t ckv, const float* scales) const {
    constexpr int kColumns = kMlaScaleColumns;
    // What is swizzled together are 128 bytes, so a group only moves the first byte of a row.
    MlaQFragments<Tile, 0> q_frag = {smem_rows_, q_offset_};
    scales += (first_token() + threadIdx.x % 4 * 2) * Tile::kScaleGroups;
#pragma unroll 1
    for (int group = 0; group < Tile::kScaleGroups; ++group) {
      AccS product = {};
      multiply<CkvRows, kColumns>(product, ckv, ckv_offset_, q_frag);
#pragma unroll
      for (int i = 0; i < 4 * kMmaN; ++i) {
        const int token = i / 4 * 8 + i % 2;
        acc_s[0][i / 4][i % 4] = fmaf(product[0][i / 4][i % 4], scales[token * Tile::kScaleGroups],
                                      acc_s[0][i / 4][i % 4]);
      }
      ckv += kColumns * Tile::kKvBytes;
      q_frag.smem_rows += kColumns * 2;
      ++scales;
    }
  }

  uint32_t smem_rows_, q_offset_, ckv_offset_, kpe_offset_;
};

// Turns scores into logits in base 2, and those of hidden tokens into -inf. `first_token`: token of
// acc_s[0][0][0] in lane 0; `is_masked`: whether a row of the tile hides a token of the block.
template <typename Scores>
__device__ __forceinline__ void mla_logits(const MlaParams& p, const BlockInfo& block,
                                           int32_t first_token, float scale, bool is_masked,
                                           typename Scores::AccS& acc_s) {
  constexpr int kScores = sizeof(acc_s) / sizeof(float);
#pragma unroll
  for (int i = 0; i < kScores; ++i) acc_s[0][i / 4][i % 4] *= scale;
  if (!is_masked) return;
  first_token += threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const PackGqaRow row(p, block, Scores::row_of_lane(half));
    const int32_t end = MaskBounds(p, block.work, row.q_idx).end - first_token;
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      const int token = i / 2 * 8 + i % 2;
      if (token >= end) acc_s[0][i / 2][half * 2 + i % 2] = negative_infinity();
    }
  }
}

#endif  // __CUDACC__

}  // namespace precast
