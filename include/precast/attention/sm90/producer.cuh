// SPDX-License-Identifier: Apache-2.0
// The producer warps of attention for sm_90a. Each warp has one task: finding work tiles, or
// copying Q, K or V of each work tile into its buffers by TMA.
//
// A KV block of ragged keys is one copy. A block of a page table is copied by atoms: eight tokens
// with all their panels. Atoms lie one behind the other, so wgmma reads both layouts by other
// steps of its descriptors. No atom begins in one page and ends in another, because page sizes are
// multiples of eight. Other pages are copied row by row with cp.async, into the layout of ragged
// keys; then each of the four warps copies a quarter of the rows of K and V.
#pragma once

#include "precast/attention/sm90/pipeline.cuh"
#include "precast/core/cp_async.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename Tile>
class Sm90Producer {
  using Storage = Sm90SharedStorage<Tile>;
  static constexpr int kQueryWarp = 2, kWorkWarp = 3;
  static constexpr int kRowsOfWarp = Tile::kBlockN / 4;  // that are copied with cp.async

 public:
  __device__ __forceinline__ Sm90Producer(const Sm90AttentionParams& params, Storage& shared,
                                          Sm90Buffers<Tile> buffers)
      : params_(params), p_(params.p), shared_(shared), buffers_(buffers) {}

  __device__ __forceinline__ void run(int warp) {
    if (params_.kv_copy == KvCopy::rows) {
      copy_rows_of_work(warp);
    } else if (warp == kWorkWarp) {
      if (threadIdx.x % 32 != 0) return;
      start_work();
      for (PipelineState<kWorkSlots> state; find_work(state); state.advance()) continue;
    } else if (warp == kQueryWarp) {
      PipelineState<Tile::kQueryStages> state;
      for_each_work([&](const BlockInfo& block) { copy_queries(block, state); });
    } else if (warp == 0) {
      copy_cache<Tile::kDimK>(params_.k, shared_.k, [&](int stage) { return buffers_.k(stage); });
    } else {
      copy_cache<Tile::kDimV>(params_.v, shared_.v, [&](int stage) { return buffers_.v(stage); });
    }
  }

 private:
  // -- Work ---------------------------------------------------------------------------------------
  // One thread calls these two functions.

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

  template <typename Visit>
  __device__ __forceinline__ void for_each_work(const Visit& visit) {
    for_each_work([](const auto&) {}, visit);
  }

  // -- Copies by TMA ------------------------------------------------------------------------------

  __device__ __forceinline__ void copy_queries(const BlockInfo& block,
                                               PipelineState<Tile::kQueryStages>& state) {
    if (block.work.kv_begin >= block.work.kv_end) return;
    shared_.q.wait_empty(state, "an empty buffer of Q");
    if (threadIdx.x % 32 == 0) {
      uint64_t* const full = &shared_.q.full[state.stage];
      const int32_t group = static_cast<int32_t>(p_.group_size.value);
      const int32_t token = block.work.q_begin + block.first_row / group;
      const uint32_t rows = p_.schedule.shape.block_m;
      mbarrier_arrive_expect_tx(full, rows * Tile::kDimK * 2);
#pragma unroll
      for (int panel = 0; panel < Tile::kDimK / kPanel; ++panel) {
        copy_box(buffers_.q(state.stage) + panel * Tile::kBlockM * kPanelBytes, &params_.q, full,
                 panel * kPanel, 0, token, block.kv_head);
      }
    }
    state.advance();
  }

  // Copies the KV blocks of each work tile, the last one first. `buffer(stage)` is their address.
  template <int kDim, typename Buffer>
  __device__ __forceinline__ void copy_cache(const TensorMap& map,
                                             PipelineBarriers<Tile::kStages>& barriers,
                                             const Buffer& buffer) {
    PipelineState<Tile::kStages> state;
    const bool has_atoms = params_.kv_copy == KvCopy::atoms;
    const int lane = threadIdx.x % 32;
    for_each_work([&](const BlockInfo& block) {
      const WorkTile& work = block.work;
      const int32_t kv_end = work.kv_end, kv_head = block.kv_head;
      int32_t begin = work.kv_begin + num_kv_blocks<Tile>(work) * Tile::kBlockN;
      // The page of a lane's atom is looked up while it waits for a buffer of the block before.
      uint32_t page = 0;
      const auto look_up = [&] {
        if (has_atoms) page = find_page(work, begin - Tile::kBlockN + lane * kAtomRows);
      };
      if (begin > work.kv_begin) look_up();
      while (begin > work.kv_begin) {
        begin -= Tile::kBlockN;
        barriers.wait_empty(state, "an empty buffer of K or V");
        uint64_t* const full = &barriers.full[state.stage];
        const uint32_t target = buffer(state.stage);
        if (!has_atoms) {
          if (lane == 0) {
            mbarrier_arrive_expect_tx(full, Tile::kBlockN * kDim * 2);
            copy_box(target, &map, full, 0, work.kv_start + begin, 0, kv_head);
          }
        } else {
          constexpr uint32_t kAtomBytes = kAtomRows * kDim * 2;
          const int atoms = (min(Tile::kBlockN, kv_end - begin) + kAtomRows - 1) / kAtomRows;
          if (lane == 0) mbarrier_arrive_expect_tx(full, atoms * kAtomBytes);
          __syncwarp();
          if (lane < atoms) {
            copy_box(target + lane * kAtomBytes, &map, full, 0, entry_of(begin + lane * kAtomRows),
                     0, kv_head, valid_page(page));
          }
        }
        if (begin > work.kv_begin) look_up();
        state.advance();
      }
    });
  }

  // -- Copies by cp.async -------------------------------------------------------------------------

  // Copies this warp's rows of K and V of each work tile, the last block first. One of the warps
  // copies Q, too, and one finds work.
  __device__ __forceinline__ void copy_rows_of_work(int warp) {
    const bool finds_work = warp == kWorkWarp && threadIdx.x % 32 == 0;
    if (finds_work) start_work();
    const auto find = [&](const PipelineState<kWorkSlots>& state) {
      if (finds_work) find_work(state);
    };
    PipelineState<Tile::kQueryStages> q;
    PipelineState<Tile::kStages> kv;
    const int first_row = warp * kRowsOfWarp, own_row = first_row + threadIdx.x % 32;
    for_each_work(find, [&](const BlockInfo& block) {
      if (warp == kQueryWarp) copy_queries(block, q);
      const WorkTile& work = block.work;
      int32_t begin = work.kv_begin + num_kv_blocks<Tile>(work) * Tile::kBlockN;
      uint32_t page = 0;
      if (begin > work.kv_begin) page = find_page(work, begin - Tile::kBlockN + own_row);
      while (begin > work.kv_begin) {
        begin -= Tile::kBlockN;
        page = valid_page(page);
        copy_rows<Tile::kDimK>(p_.k, block, begin, first_row, page, shared_.k, kv, buffers_.k(0));
        copy_rows<Tile::kDimV>(p_.v, block, begin, first_row, page, shared_.v, kv, buffers_.v(0));
        if (begin > work.kv_begin) page = find_page(work, begin - Tile::kBlockN + own_row);
        kv.advance();
      }
    });
  }

  // Copies this warp's rows, from `first_row` on, of the KV block at token `begin`. Those behind
  // the end of the work tile become 0. `page` is that of this lane's row.
  template <int kDim>
  __device__ __forceinline__ void copy_rows(const AttentionCache& cache, const BlockInfo& block,
                                            int32_t begin, int first_row, uint32_t page,
                                            PipelineBarriers<Tile::kStages>& barriers,
                                            const PipelineState<Tile::kStages>& state,
                                            uint32_t buffer) const {
    constexpr int kChunks = kDim / 8;                       // of 16 bytes
    constexpr int kUnroll = Tile::kConsumers == 2 ? 4 : 1;  // as registers allow
    const int lane = threadIdx.x % 32;
    const uint64_t own =
        reinterpret_cast<uint64_t>(cache.data) +
        16 * (block.kv_head * cache.head_stride + uint64_t(page) * cache.page_stride +
              uint64_t(entry_of(begin + first_row + lane)) * cache.entry_stride);
    const int32_t count = block.work.kv_end - begin - first_row;
    const uint32_t target = buffer + state.stage * Tile::kBlockN * kDim * 2;
    barriers.wait_empty(state, "an empty buffer of K or V");
#pragma unroll kUnroll
    for (int place = lane; place < kRowsOfWarp * kChunks; place += 32) {
      const int row = place / kChunks, chunk = place % kChunks, block_row = first_row + row;
      const uint64_t source = __shfl_sync(0xffffffffu, own, row);
      const uint32_t offset = chunk / 8 * (Tile::kBlockN * kPanelBytes) + block_row * kPanelBytes +
                              (chunk % 8 ^ row % 8) * 16;
      cp_async(target + offset, reinterpret_cast<const uint4*>(source) + chunk, row < count);
    }
    cp_async_arrive(&barriers.full[state.stage]);
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

  const Sm90AttentionParams& params_;
  const AttentionParams& p_;
  Storage& shared_;
  const Sm90Buffers<Tile> buffers_;
};

#endif  // __CUDACC__

}  // namespace precast
