// SPDX-License-Identifier: Apache-2.0
// The mask of scores in the registers of a warpgroup.
#pragma once

#include "precast/attention/sm90/pipeline.cuh"

namespace precast {

#if defined(__CUDACC__)

// Sets the scores of a KV block to -inf that causal mask, window and the end of the tokens hide.
// `first`: the token of the first column; row_of(half): the rows of the tile that this lane holds.
// Columns that no row of the tile masks are left out.
template <int kColumns, typename RowOf>
__device__ __forceinline__ void mask_scores(const AttentionParams& p, const BlockInfo& block,
                                            int32_t first, const RowOf& row_of,
                                            float (&acc_s)[kColumns / 2]) {
  int32_t begin[2], end[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const PackGqaRow row(p, block, row_of(half));
    const MaskBounds bounds(p, block.work, row.q_idx);
    begin[half] = bounds.begin - first - threadIdx.x % 4 * 2;
    end[half] = bounds.end - first - threadIdx.x % 4 * 2;
  }
  constexpr int kGroup = 32;  // columns that are looked at together
#pragma unroll
  for (int column = 0; column < kColumns; column += kGroup) {
    const int32_t token = first + column;
    if (token >= block.unmasked_begin && token + kGroup <= block.unmasked_end) continue;
#pragma unroll
    for (int i = column / 2; i < (column + kGroup) / 2; ++i) {
      const int half = i / 2 % 2, offset = i / 4 * 8 + i % 2;
      if (offset < begin[half] || offset >= end[half]) acc_s[i] = negative_infinity();
    }
  }
}

#endif  // __CUDACC__

}  // namespace precast
