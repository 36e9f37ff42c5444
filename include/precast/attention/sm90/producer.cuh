// SPDX-License-Identifier: Apache-2.0
// What the producer warps of attention for sm_90a share: the work tiles that one of their threads
// finds, the copies of Q, and the pages of tokens.
#pragma once

#include "precast/attention/sm90/pipeline.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename Tile>
class Sm90Producer {
  using Storage = Sm90SharedStorage<Tile>;

 protected:
  static constexpr int kQueryWarp = 2, kWorkWarp = 3;

  __device__ __forceinline__ Sm90Producer(const Sm90AttentionParams& params, Storage& shared,
                                          Sm90Buffers<Tile> buffers)
      : params_(params), p_(params.p), shared_(shared), buffers_(buffers) {}

  // `arrivals`: those that fill a stage of K or V.
  static __device__ __forceinline__ void init(Storage& shared, uint32_t arrivals) {
    shared.k.init(arrivals, Tile::kConsumerWarps);
    shared.v.init(arrivals, Tile::kConsumerWarps);
  }

  // -- Work ---------------------------------------------------------------------------------------

  // Fills the ring, and does nothing else. One thread calls it.
  __device__ __forceinline__ void find_all_work() {
    start_work();
    for (PipelineState<kWorkSlots> state; find_work(state); state.advance()) continue;
  }

  // Calls visit(block) for each work tile, by all lanes of a warp.
  template <typename Visit>
  __device__ __forceinline__ void for_each_work(const Visit& visit) {
    for_each_work([](const auto&) {}, visit);
  }

  // The same where all four warps copy K or V: then one of them copies Q, too, and one finds work.
  template <typename Visit>
  __device__ __forceinline__ void for_each_work_of_all(int warp, const Visit& visit) {
    const bool finds_work = warp == kWorkWarp && threadIdx.x % 32 == 0;
    if (finds_work) start_work();
    uint32_t copies = 0;  // of Q; a count takes one register
    const auto find = [&](const PipelineState<kWorkSlots>& state) {
      if (finds_work) find_work(state);
    };
    for_each_work(find, [&](const BlockInfo& block) {
      if (warp == kQueryWarp) {
        PipelineState<Tile::kQueryStages> q = state_after<Tile::kQueryStages>(copies);
        copy_queries(block, q);
        if (block.work.kv_begin < block.work.kv_end) ++copies;
      }
      visit(block);
    });
  }

  // -- Queries ------------------------------------------------------------------------------------

  __device__ __forceinline__ void copy_queries(const BlockInfo& block,
                                               PipelineState<Tile::kQueryStages>& state) {
    if (block.work.kv_begin >= block.work.kv_end) return;
    shared_.q.wait_empty(state, "an empty buffer of Q");
    if (threadIdx.x % 32 == 0) {
      uint64_t* const full = &shared_.q.full[state.stage];
      const int32_t group = static_cast<int32_t>(p_.group_size.value);
      const int32_t token = block.work.q_begin + block.first_row / group;
      const uint32_t rows = p_.schedule.shape.block_m;
      mbarrier_arrive_expect_tx(full, rows * Tile::kQueryRowBytes);
#pragma unroll
      for (int panel = 0; panel < Tile::kQueryPanels; ++panel) {
        copy_box(buffers_.q(state.stage) + panel * Tile::kQueryPanelBytes, &params_.q, full,
                 panel * Tile::kQueryPanel, 0, token, block.kv_head);
      }
    }
    state.advance();
  }

  // -- Pages --------------------------------------------------------------------------------------

  // The page of a token as the table has it, or 0 behind the end of the work tile.
  __device__ __forceinline__ uint32_t find_page(const WorkTile& work, uint32_t token) const {
    const uint32_t index = work.kv_start + p_.page_size.divide(token);
    if (token >= static_cast<uint32_t>(work.kv_end)) return 0;
    if (p_.kv_indices == nullptr) return index;
    return index < p_.num_kv_indices ? p_.kv_indices[index] : 0;
  }

  // A page of the cache, whatever the table has. Why apart: no copy has to wait for the next page.
  __device__ __forceinline__ uint32_t valid_page(uint32_t page) const {
    return page < p_.num_pages ? page : 0;
  }

  // The place of a token in its page.
  __device__ __forceinline__ uint32_t entry_of(uint32_t token) const {
    return token - p_.page_size.divide(token) * p_.page_size.value;
  }

  // Where the row of a token lies.
  __device__ __forceinline__ uint64_t row_address(const AttentionCache& cache, int32_t kv_head,
                                                  uint32_t page, uint32_t token) const {
    return reinterpret_cast<uint64_t>(cache.data) +
           16 * (kv_head * cache.head_stride + uint64_t(page) * cache.page_stride +
                 uint64_t(entry_of(token)) * cache.entry_stride);
  }

  const Sm90AttentionParams& params_;
  const AttentionParams& p_;
  Storage& shared_;
  const Sm90Buffers<Tile> buffers_;

 private:
  __device__ __forceinline__ TileScheduler& scheduler() {
    return *reinterpret_cast<TileScheduler*>(shared_.scheduler);
  }

  __device__ __forceinline__ void start_work() {
    scheduler() = TileScheduler(p_.schedule, blockIdx.x);
    shared_.counters = scheduler().counters();
  }

  // Fills the next slot of the ring, and returns whether there is work in it. Work is taken only
  // from the plan of this call.
  __device__ __forceinline__ bool find_work(const PipelineState<kWorkSlots>& state) {
    shared_.work.wait_empty(state, "an empty slot of work");
    WorkSlot& slot = shared_.slots[state.stage];
    slot.is_valid =
        is_planned(p_.schedule, p_.max_partials) && scheduler().get_next_work(slot.block.work);
    if (slot.is_valid) {
      slot.block.kv_head = slot.block.work.head;
      slot.block.v_column = 0;
      complete_block(p_, slot.block, p_.schedule.shape.block_m);
    }
    mbarrier_arrive(&shared_.work.full[state.stage]);
    return slot.is_valid;
  }

  // Calls visit(block) for each work tile, by all lanes of the warp, and before it find(slot).
  template <typename Find, typename Visit>
  __device__ __forceinline__ void for_each_work(const Find& find, const Visit& visit) {
    for (PipelineState<kWorkSlots> state;; state.advance()) {
      find(state);
      shared_.work.wait_full(state, "work of a producer");
      const WorkSlot& slot = shared_.slots[state.stage];
      if (!slot.is_valid) return;
      visit(slot.block);
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(&shared_.work.empty[state.stage]);
    }
  }
};

#endif  // __CUDACC__

}  // namespace precast
