// SPDX-License-Identifier: Apache-2.0
// How the consumer warpgroups of kernels for sm_90a take the work tiles that their producer finds.
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

#endif  // __CUDACC__

}  // namespace precast
