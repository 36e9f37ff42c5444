// SPDX-License-Identifier: Apache-2.0
// Masks and transforms of acc_s, the scores of a KV block.
//
// apply_mask() is all that the plain kernels need: causal mask and sliding window. The general
// kernels (Tile::kGeneral) add soft cap, ALiBi, custom masks, multi-item scoring, and scales that
// are not positive, by LogitsTransform and VisibleTokens. For token j and query i at position i +
// kv_len - q_len:
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

// The same for a KV block of two KV heads, which has the key of each token for one head and then
// for the other: a row attends to those of its own head. Scores that stay are multiplied by `sign`.
template <typename Tile, int kMmaN>
__device__ __forceinline__ void apply_mask_of_pair(const AttentionParams& p, const BlockInfo& block,
                                                   int32_t first_token, bool is_unmasked,
                                                   float sign,
                                                   float (&acc_s)[Tile::kRowTiles][kMmaN][4]) {
  const int32_t heads = static_cast<int32_t>(p.group_size.value);  // query heads of the pair
  first_token += threadIdx.x % 4;
#pragma unroll
  for (int m = 0; m < Tile::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const PackGqaRow row(p, block, row_of_lane<Tile>(m, half));
      const bool is_second = 2 * (row.q_head - block.kv_head * heads) >= heads;
      int32_t begin = 0, end = 4 * kMmaN;  // what the row attends to, counted from first_token
      if (!is_unmasked) {
        const MaskBounds bounds(p, block.work, row.q_idx);
        begin = bounds.begin - first_token;
        end = bounds.end - first_token;
      }
#pragma unroll
      for (int i = 0; i < 2 * kMmaN; ++i) {
        const int token = i / 2 * 4;
        const bool is_own = (i % 2 == 1) == is_second;
        float& score = acc_s[m][i / 2][half * 2 + i % 2];
        score = is_own && token >= begin && token < end ? score * sign : negative_infinity();
      }
    }
  }
}

// Which of 32 tokens from `token` on a query attends to, by all masks; the bit of `token` is the
// lowest.
__device__ __forceinline__ uint32_t visible_word(const AttentionParams& p, const WorkTile& work,
                                                 int32_t q_idx, int32_t token) {
  const MaskBounds bounds(p, work, q_idx);
  uint32_t bits = bits_before(bounds.end, token) & ~bits_before(bounds.begin, token);
  if (p.mask == AttentionMask::custom) {
    if (bits != 0) bits &= MaskRow(p, work, q_idx).word(token);
  } else if (p.mask == AttentionMask::multi_item) {
    const int32_t position = work.kv_len - work.q_len + q_idx;
    const int32_t prefix_len = static_cast<int32_t>(p.prefix_len[work.request_idx]);
    const int32_t after_prefix = position - prefix_len;
    int32_t item_pos = 0;
    if (after_prefix >= 0 && after_prefix < p.token_pos_len) {
      item_pos = p.token_pos[int64_t(work.request_idx) * p.token_pos_len + after_prefix];
    }
    const int32_t item_begin = after_prefix < 0 ? 0 : position - item_pos + 1;
    bits &= bits_before(position + 1, token) &
            (bits_before(prefix_len, token) | ~bits_before(item_begin, token));
  }
  return bits;
}

// Which of kTokens tokens of a KV block a row attends to, by all masks. The four lanes that share
// the row have a word of 32 tokens each.
template <int kTokens>
class VisibleTokens {
  static constexpr int kWords = (kTokens + 31) / 32;
  static_assert(kWords == 1 || kWords == 2 || kWords == 4, "each lane has a word");

 public:
  VisibleTokens() = default;  // all of them

  // Those from `first_token` on.
  __device__ __forceinline__ VisibleTokens(const AttentionParams& p, const BlockInfo& block,
                                           int tile_row, int32_t first_token) {
    own_ = 0;
    if (tile_row >= block.num_rows) return;
    own_ = visible_word(p, block.work, PackGqaRow(p, block, tile_row).q_idx,
                        first_token + threadIdx.x % kWords * 32);
  }

  // Whether this lane's word has no bit of a token that is hidden.
  __device__ __forceinline__ bool has_all() const { return own_ == ~0u; }

  // Sets the scores of hidden tokens to -inf. score(i): the lane's score i of the row. All lanes
  // must call this.
  template <typename Score>
  __device__ __forceinline__ void apply(const Score& score) const {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t word = __shfl_sync(0xffffffffu, own_, w, 4) >> (threadIdx.x % 4 * 2);
#pragma unroll
      for (int i = 0; i < (kTokens < 32 ? kTokens : 32) / 4; ++i) {
        if (!(word >> (i / 2 * 8 + i % 2) & 1)) score(8 * w + i) = negative_infinity();
      }
    }
  }

 private:
  uint32_t own_ = ~0u;
};

// What turns scores into logits in base 2, before the masks. Why only one number is kept: registers
// are few.
class LogitsTransform {
 public:
  LogitsTransform() = default;

  // `scale`: from scores to logits in base e.
  __device__ __forceinline__ LogitsTransform(const AttentionParams& p, float scale)
      : scale_(scale * unit(p)) {}

  // Whether logits are scores times scale(), which is positive then.
  __device__ __forceinline__ bool is_scale(const AttentionParams& p) const {
    return p.soft_cap <= 0.0f && p.positions != PositionEncoding::alibi && scale_ > 0.0f;
  }
  __device__ __forceinline__ float scale() const { return scale_; }

  // Transforms the kTokens / 4 scores that this lane has of a row. `first_token`: that of score(0).
  template <int kTokens, typename Score>
  __device__ __forceinline__ void apply(const AttentionParams& p, const PackGqaRow& row,
                                        int32_t first_token, const Score& score) const {
    if (p.positions == PositionEncoding::alibi) {
      const float slope = load_scalar(p.alibi_slopes + row.q_head) * unit(p);
      const float distance = static_cast<float>(first_token - row.q_idx);
#pragma unroll
      for (int i = 0; i < kTokens / 4; ++i) {
        score(i) = fmaf(distance + (i / 2 * 8 + i % 2), slope, score(i) * scale_);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kTokens / 4; ++i) score(i) *= scale_;
    }
    if (!(p.soft_cap > 0.0f)) return;
    // soft_cap * tanh(x / soft_cap), where a score is 2 x / soft_cap in base 2. By exp2 and a
    // reciprocal tanh has an absolute error of 1e-6; that of tanh.approx is 5e-4.
    const float cap = p.soft_cap * kLog2E;
#pragma unroll
    for (int i = 0; i < kTokens / 4; ++i) {
      score(i) = fmaf(-2.0f * cap, fast_reciprocal(1.0f + fast_exp2(score(i))), cap);
    }
  }

 private:
  // What a logit in base e is multiplied by: before the soft cap, if there is one.
  static __device__ __forceinline__ float unit(const AttentionParams& p) {
    return p.soft_cap > 0.0f ? 2.0f * kLog2E * fast_reciprocal(p.soft_cap) : kLog2E;
  }

  float scale_;  // what a score is multiplied by
};

// Transforms scores to masked logits in base 2. `first_token`: token of acc_s[.][0].
template <typename Tile>
__device__ __forceinline__ void logits_transform(
    const AttentionParams& p, const BlockInfo& block, int32_t first_token,
    const LogitsTransform& transform,
    typename OnlineSoftmax<Tile>::template AccS<Tile::kWarpN>& acc_s) {
#pragma unroll
  for (int m = 0; m < Tile::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int tile_row = row_of_lane<Tile>(m, half);
      const auto score = [&](int i) -> float& { return acc_s[m][i / 2][half * 2 + i % 2]; };
      const VisibleTokens<Tile::kWarpN> visible(p, block, tile_row, first_token);
      transform.template apply<Tile::kWarpN>(p, PackGqaRow(p, block, tile_row),
                                             first_token + threadIdx.x % 4 * 2, score);
      visible.apply(score);
    }
  }
}

#endif  // __CUDACC__

}  // namespace precast
