// SPDX-License-Identifier: Apache-2.0
// What the consumer warpgroups of kernels for sm_90a share: the work tiles that their producer
// finds, and the mask of scores.
#pragma once

#include "precast/attention/sm90/pipeline.cuh"

namespace precast {

#if defined(__CUDACC__)

// Calls process(block) for each work tile, and combines the splits of those that have some. All
// threads of all consumers call it.
template <typename Tile, typename Storage, typename Process>
__device__ __forceinline__ void for_each_work(const AttentionParams& p, Storage& shared,
                                              const Process& process) {
  for (uint32_t count = 0;; ++count) {
    const PipelineState<Tile::kWorkSlots> state = PipelineState<Tile::kWorkSlots>::after(count);
    shared.work.wait_full(state, "work of a consumer");
    const WorkSlot& slot = shared.slots[state.stage];
    if (!slot.is_valid) return;
    process(slot.block);
    if (slot.block.work.num_splits > 1) {
      const PipelineState<Tile::kWorkSlots> next =
          PipelineState<Tile::kWorkSlots>::after(count + 1);
      shared.work.wait_full(next, "the next work of a consumer");
      combine_splits<Tile, typename Tile::Query>(
          p, slot.block, shared.counters + slot.block.work.counter,
          !shared.slots[next.stage].is_valid, shared.combine);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&shared.work.empty[count % Tile::kWorkSlots]);
  }
}

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
