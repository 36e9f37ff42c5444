// SPDX-License-Identifier: Apache-2.0
// Masks and transforms of acc_s, the scores of a KV block.
//
// apply_mask() is all that the plain kernels need: causal mask and sliding window. The general
// kernels (Tile::kGeneral) call logits_transform(), which adds soft cap, ALiBi, custom masks,
// multi-item scoring, and scales that are not positive. For token j and query i at position
// i + kv_len - q_len:
//
//   x = scale * score
//   x += alibi_slope[h] * (j - i)
//   x = soft_cap * tanh(x / soft_cap)
//   x = -inf if query i does not attend to token j
//
// Source   Press et al., ALiBi, arXiv:2108.12409; Gemma 2, arXiv:2408.00118, for the soft cap.
#pragma once

#include "precast/attention/mask_row.cuh"
#include "precast/attention/softmax.cuh"

namespace precast {

#if defined(__CUDACC__)

// Sets the scores to -inf that causal mask and window hide. `first_token`: token of acc_s[.][0].
template <typename Tile, int kMmaN>
__device__ __forceinline__ void apply_mask(const AttentionParams& p, const BlockInfo& block,
                                           int32_t first_token,
                                           float (&acc_s)[Tile::kRowTiles][kMmaN][4]) {
  first_token += threadIdx.x % 4 * 2;
#pragma unroll
  for (int m = 0; m < Tile::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const PackGqaRow row(p, block, row_of_lane<Tile>(m, half));
      const MaskBounds bounds(p, block.work, row.q_idx);
      const int32_t begin = bounds.begin - first_token, end = bounds.end - first_token;
#pragma unroll
      for (int i = 0; i < 2 * kMmaN; ++i) {
        const int token = i / 2 * 8 + i % 2;
        float& score = acc_s[m][i / 2][half * 2 + i % 2];
        if (token < begin || token >= end) score = negative_infinity();
      }
    }
  }
}

// tanh(x) by exp2. The absolute error is 1e-6; that of tanh.approx is 5e-4.
__device__ __forceinline__ float tanh_by_exp2(float x) {
  return 1.0f - 2.0f * fast_reciprocal(1.0f + fast_exp2(2.0f * kLog2E * x));
}

// Which tokens a query attends to, by all masks.
struct QueryMask {
  AttentionMask mask;
  int32_t begin, end;  // by window, causal mask, and the work tile
  int32_t position;    // of the query
  MaskRow row;         // custom mask
  int32_t prefix_len;  // multi-item: tokens of the prefix
  int32_t item_begin;  // multi-item: first token of the query's item

  __device__ __forceinline__ QueryMask(const AttentionParams& p, const WorkTile& work,
                                       int32_t q_idx) {
    const MaskBounds bounds(p, work, q_idx);
    mask = p.mask;
    begin = bounds.begin;
    end = bounds.end;
    position = work.kv_len - work.q_len + q_idx;
    if (mask == AttentionMask::custom) {
      row = MaskRow(p, work, q_idx);
    } else if (mask == AttentionMask::multi_item) {
      if (position < end) end = position + 1;
      prefix_len = static_cast<int32_t>(p.prefix_len[work.request_idx]);
      const int32_t after_prefix = position - prefix_len;
      int32_t item_pos = 0;
      if (after_prefix >= 0 && after_prefix < p.token_pos_len) {
        item_pos = p.token_pos[int64_t(work.request_idx) * p.token_pos_len + after_prefix];
      }
      item_begin = after_prefix < 0 ? 0 : position - item_pos + 1;
    }
  }

  __device__ __forceinline__ bool attends_to(int32_t token) const {
    if (token < begin || token >= end) return false;
    if (mask == AttentionMask::custom) return row.attends_to(token);
    return mask != AttentionMask::multi_item || token < prefix_len || token >= item_begin;
  }
};

// Transforms scores to masked logits in base 2. `first_token`: token of acc_s[.][0].
template <typename Tile>
__device__ __forceinline__ void logits_transform(
    const AttentionParams& p, const BlockInfo& block, int32_t first_token, float scale,
    typename OnlineSoftmax<Tile>::template AccS<Tile::kWarpN>& acc_s) {
  first_token += threadIdx.x % 4 * 2;
  const bool has_alibi = p.positions == PositionEncoding::alibi;
  const float inverse_cap = p.soft_cap > 0.0f ? 1.0f / p.soft_cap : 0.0f;
#pragma unroll
  for (int m = 0; m < Tile::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int tile_row = row_of_lane<Tile>(m, half);
      if (tile_row >= block.num_rows) continue;
      const PackGqaRow row(p, block, tile_row);
      const QueryMask mask(p, block.work, row.q_idx);
      const float slope = has_alibi ? load_scalar(p.alibi_slopes + row.q_head) : 0.0f;
#pragma unroll
      for (int i = 0; i < Tile::kWarpN / 4; ++i) {
        const int32_t token = first_token + i / 2 * 8 + i % 2;
        float& score = acc_s[m][i / 2][half * 2 + i % 2];
        float x = score * scale;
        if (has_alibi) x += slope * static_cast<float>(token - row.q_idx);
        if (p.soft_cap > 0.0f) x = p.soft_cap * tanh_by_exp2(x * inverse_cap);
        score = mask.attends_to(token) ? x * kLog2E : negative_infinity();
      }
    }
  }
}

#endif  // __CUDACC__

}  // namespace precast
