// SPDX-License-Identifier: Apache-2.0
// The logits of the general kernels, which have what the plain ones leave out: soft cap, ALiBi,
// masks bit by bit, multi-item scoring, scales that are not positive.
//
//   x = scale * score;  x += slope[h] (j - i);  x = cap tanh(x / cap);  -inf where i does not see j
//
// for token j and query i, which is at position i + kv_len - q_len.
//
// Source   Press et al., ALiBi, arXiv:2108.12409; Gemma 2, arXiv:2408.00118, for the cap.
#pragma once

#include "precast/attention/softmax.cuh"

namespace precast {

#if defined(__CUDACC__)

// tanh by the exponential: an absolute error of 1e-6, where tanh.approx has 5e-4.
__device__ __forceinline__ float tanh_of(float x) {
  return 1.0f - 2.0f * fast_reciprocal(1.0f + fast_exp2(2.0f * kLog2E * x));
}

// Which tokens a query sees.
struct Visibility {
  AttentionMask mask;
  int32_t begin, end;         // by window, causal mask, and the piece
  int32_t position;           // of the query
  const unsigned char* bits;  // custom: the request's mask
  int64_t first_bit;          // of the query's row
  int64_t bits_end;           // of the whole mask; what is not there hides
  int32_t prefix;             // items: tokens of the prefix
  int32_t item_begin;         // the first token of its own item

  __device__ __forceinline__ Visibility(const AttentionParams& p, const Piece& piece,
                                        int32_t query) {
    const TokenLimits limits(p, piece, query);
    mask = p.mask;
    begin = limits.begin;
    end = limits.end;
    position = piece.kv_len - piece.q_len + query;
    if (mask == AttentionMask::custom) {
      const int64_t from = p.mask_indptr[piece.request];
      bits = p.packed_mask + from;
      bits_end = from < 0 ? 0 : (p.mask_bytes - from) * 8;
      first_bit = int64_t(query) * piece.kv_len;
    } else if (mask == AttentionMask::items) {
      if (position < end) end = position + 1;
      prefix = static_cast<int32_t>(p.prefix_len[piece.request]);
      const int32_t behind = position - prefix;
      int32_t place = 0;
      if (behind >= 0 && behind < p.token_pos_len) {
        place = p.token_pos[int64_t(piece.request) * p.token_pos_len + behind];
      }
      item_begin = behind < 0 ? 0 : position - place + 1;
    }
  }

  __device__ __forceinline__ bool sees(int32_t token) const {
    if (token < begin || token >= end) return false;
    if (mask == AttentionMask::custom) {
      const int64_t bit = first_bit + token;
      return bit < bits_end && bits[bit >> 3] >> (bit & 7) & 1;
    }
    return mask != AttentionMask::items || token < prefix || token >= item_begin;
  }
};

// Scores become logits in base 2. `first`: token of the group's first score.
template <typename Tile>
__device__ __forceinline__ void logits_of_scores(
    const AttentionParams& p, const AttentionWork& work, int32_t first, float scale,
    typename RowStates<Tile>::template Scores<Tile::kWarpTokens>& scores) {
  first += threadIdx.x % 4 * 2;
  const bool has_slopes = p.positions == PositionEncoding::alibi;
  const float inverse_cap = p.soft_cap > 0.0f ? 1.0f / p.soft_cap : 0.0f;
#pragma unroll
  for (int m = 0; m < Tile::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int in_tile = row_of_lane<Tile>(m, half);
      if (in_tile >= work.rows) continue;
      const AttentionRow row(p, work, in_tile);
      const Visibility visible(p, work.piece, row.query);
      const float slope = has_slopes ? load_scalar(p.alibi_slopes + row.head) : 0.0f;
#pragma unroll
      for (int i = 0; i < Tile::kWarpTokens / 4; ++i) {
        const int32_t token = first + i / 2 * 8 + i % 2;
        float& score = scores[m][i / 2][half * 2 + i % 2];
        float x = score * scale;
        if (has_slopes) x += slope * static_cast<float>(token - row.query);
        if (p.soft_cap > 0.0f) x = p.soft_cap * tanh_of(x * inverse_cap);
        score = visible.sees(token) ? x * kLog2E : negative_infinity();
      }
    }
  }
}

#endif  // __CUDACC__

}  // namespace precast
