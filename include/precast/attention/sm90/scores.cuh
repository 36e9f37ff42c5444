// SPDX-License-Identifier: Apache-2.0
// What consumers of attention for sm_90a do to scores between Q K^T and the softmax: plain kernels
// mask them, general ones first do what attention/mask.cuh says.
#pragma once

#include "precast/attention/sm90/consumer.cuh"
#include "precast/attention/sm90/mask_scores.cuh"

namespace precast {

#if defined(__CUDACC__)

// mask_scores() of this lane's rows. `first`: the token of the first column.
template <typename Tile>
template <int kColumns, bool kFew>
__device__ __forceinline__ void Sm90Consumer<Tile>::mask(const BlockInfo& block, int32_t first,
                                                         float (&acc_s)[kColumns / 2]) const {
  mask_scores<kColumns>(p_, block, first, [](int half) { return own_row<kFew>(half); }, acc_s);
}

// Finds which tokens from `first` on the two rows of this lane see. Why before the scores are
// computed: it takes registers.
template <typename Tile>
template <bool kFew, int kColumns>
__device__ __forceinline__ void Sm90Consumer<Tile>::find_visible(
    const BlockInfo& block, int32_t first, VisibleTokens<kColumns> (&visible)[2]) const {
  const bool is_bounded = first < block.unmasked_begin || first + kColumns > block.unmasked_end;
  if (!is_bounded && p_.mask != AttentionMask::custom && p_.mask != AttentionMask::multi_item) {
    return;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    visible[half] = VisibleTokens<kColumns>(p_, block, own_row<kFew>(half), first);
  }
}

// Turns the scores of a KV block into logits divided by scale(), and those of hidden tokens into
// -inf.
template <typename Tile>
template <bool kFew, int kColumns>
__device__ __forceinline__ void Sm90Consumer<Tile>::transform_and_mask(
    const BlockInfo& block, int32_t first, const VisibleTokens<kColumns> (&visible)[2],
    float (&acc_s)[kColumns / 2]) const {
  const auto for_rows = [&](const auto& change) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      change(half, [&](int i) -> float& { return acc_s[i / 2 * 4 + 2 * half + i % 2]; });
    }
  };
  if constexpr (Tile::kScalesRows) {
    for_rows([&](int half, const auto& score) {
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) score(i) *= query_scale_[half];
    });
  }
  if (!transform_.is_scale(p_)) {
    for_rows([&](int half, const auto& score) {
      transform_.template apply<kColumns>(p_, PackGqaRow(p_, block, own_row<kFew>(half)),
                                          first + threadIdx.x % 4 * 2, score);
    });
  }
  if (__all_sync(0xffffffffu, visible[0].has_all() && visible[1].has_all())) return;
  for_rows([&](int half, const auto& score) { visible[half].apply(score); });
}

#endif  // __CUDACC__

}  // namespace precast
