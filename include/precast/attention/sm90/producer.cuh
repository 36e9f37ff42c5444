// SPDX-License-Identifier: Apache-2.0
// The producer warps of attention for sm_90a. Each warp has one task: finding work tiles, or
// copying Q, K or V of each work tile into its buffers by TMA.
//
// A KV block of ragged keys is one copy. A block of a page table is copied by atoms: eight tokens
// with all their panels. Atoms lie one behind the other, so wgmma reads both layouts by other
// steps of its descriptors. No atom begins in one page and ends in another, because page sizes are
// multiples of eight. Other pages are copied row by row with cp.async, into the layout of ragged
// keys.
#pragma once

#include "precast/attention/sm90/pipeline.cuh"
#include "precast/core/cp_async.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename Tile>
class Sm90Producer {
  using Storage = Sm90SharedStorage<Tile>;
  static constexpr int kRowsOfLane = Tile::kBlockN / 32;

 public:
  __device__ __forceinline__ Sm90Producer(const Sm90AttentionParams& params, Storage& shared,
                                          Sm90Buffers<Tile> buffers)
      : params_(params), p_(params.p), shared_(shared), buffers_(buffers) {}

  __device__ __forceinline__ void run(int warp) {
    if (warp == 0) {
      copy_cache<Tile::kDimK>(params_.k, p_.k, shared_.k,
                              [&](int stage) { return buffers_.k(stage); });
    } else if (warp == 1) {
      copy_cache<Tile::kDimV>(params_.v, p_.v, shared_.v,
                              [&](int stage) { return buffers_.v(stage); });
    } else if (warp == 2) {
      copy_queries();
    } else if (threadIdx.x % 32 == 0) {
      find_work();
    }
  }

 private:
  // Fills the ring. One thread calls it. Work is taken only from the plan of this call.
  __device__ __forceinline__ void find_work() {
    bool is_valid = is_planned(p_.schedule, p_.max_partials);
    TileScheduler& scheduler = *reinterpret_cast<TileScheduler*>(shared_.scheduler);
    scheduler = TileScheduler(p_.schedule, blockIdx.x);
    shared_.counters = scheduler.counters();
    PipelineState<kWorkSlots> state;
    do {
      shared_.work.wait_empty(state, "an empty slot of work");
      WorkSlot& slot = shared_.slots[state.stage];
      is_valid = is_valid && scheduler.get_next_work(slot.block.work);
      if (is_valid) {
        slot.block.kv_head = slot.block.work.head;
        slot.block.v_column = 0;
        complete_block(p_, slot.block, p_.schedule.shape.block_m);
      }
      slot.is_valid = is_valid;
      mbarrier_arrive(&shared_.work.full[state.stage]);
      state.advance();
    } while (is_valid);
  }

  // Calls visit(block) for each work tile, by all lanes of the warp.
  template <typename Visit>
  __device__ __forceinline__ void for_each_work(const Visit& visit) {
    for (PipelineState<kWorkSlots> state;; state.advance()) {
      shared_.work.wait_full(state, "work of a producer");
      const WorkSlot& slot = shared_.slots[state.stage];
      if (!slot.is_valid) return;
      visit(slot.block);
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(&shared_.work.empty[state.stage]);
    }
  }

  __device__ __forceinline__ void copy_queries() {
    PipelineState<Tile::kQueryStages> state;
    const int32_t group = static_cast<int32_t>(p_.group_size.value);
    for_each_work([&](const BlockInfo& block) {
      if (block.work.kv_begin >= block.work.kv_end) return;
      shared_.q.wait_empty(state, "an empty buffer of Q");
      if (threadIdx.x % 32 == 0) {
        uint64_t* const full = &shared_.q.full[state.stage];
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
    });
  }

  // Copies the KV blocks of each work tile, the last one first. `buffer(stage)` is their address.
  template <int kDim, typename Buffer>
  __device__ __forceinline__ void copy_cache(const TensorMap& map, const AttentionCache& cache,
                                             PipelineBarriers<Tile::kStages>& barriers,
                                             const Buffer& buffer) {
    PipelineState<Tile::kStages> state;
    const KvCopy kind = params_.kv_copy;
    const int lane = threadIdx.x % 32;
    for_each_work([&](const BlockInfo& block) {
      const WorkTile& work = block.work;
      const int32_t kv_end = work.kv_end, kv_head = block.kv_head;
      int32_t begin = work.kv_begin + num_kv_blocks<Tile>(work) * Tile::kBlockN;
      // The pages of a block are looked up while the lanes wait for a buffer of the one before.
      uint32_t pages[kRowsOfLane] = {};
      const auto look_up = [&] {
        if (kind == KvCopy::atoms) {
          pages[0] = page_of(work, begin - Tile::kBlockN + lane * kAtomRows);
        } else if (kind == KvCopy::rows) {
#pragma unroll
          for (int i = 0; i < kRowsOfLane; ++i) {
            pages[i] = page_of(work, begin - Tile::kBlockN + i * 32 + lane);
          }
        }
      };
      if (begin > work.kv_begin) look_up();
      while (begin > work.kv_begin) {
        begin -= Tile::kBlockN;
        barriers.wait_empty(state, "an empty buffer of K or V");
        uint64_t* const full = &barriers.full[state.stage];
        const uint32_t target = buffer(state.stage);
        if (kind == KvCopy::box) {
          if (lane == 0) {
            mbarrier_arrive_expect_tx(full, Tile::kBlockN * kDim * 2);
            copy_box(target, &map, full, 0, work.kv_start + begin, 0, kv_head);
          }
        } else if (kind == KvCopy::atoms) {
          constexpr uint32_t kAtomBytes = kAtomRows * kDim * 2;
          const int atoms = (min(Tile::kBlockN, kv_end - begin) + kAtomRows - 1) / kAtomRows;
          if (lane == 0) mbarrier_arrive_expect_tx(full, atoms * kAtomBytes);
          __syncwarp();
          if (lane < atoms) {
            copy_box(target + lane * kAtomBytes, &map, full, 0, entry_of(begin + lane * kAtomRows),
                     0, kv_head, pages[0]);
          }
        } else {
          copy_rows<kDim>(cache, kv_head, begin, kv_end, pages, target);
          cp_async_arrive(full);
        }
        if (begin > work.kv_begin) look_up();
        state.advance();
      }
    });
  }

  // Copies the rows of a block; those behind `kv_end` become 0. pages[i] is that of row 32 i +
  // lane.
  template <int kDim>
  __device__ __forceinline__ void copy_rows(const AttentionCache& cache, int32_t kv_head,
                                            int32_t begin, int32_t kv_end,
                                            const uint32_t (&pages)[kRowsOfLane],
                                            uint32_t target) const {
    constexpr int kChunks = kDim / 8;                       // of 16 bytes
    constexpr int kUnroll = Tile::kConsumers == 2 ? 4 : 2;  // as registers allow
    const uint4* const base = static_cast<const uint4*>(cache.data) + kv_head * cache.head_stride;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      const uint64_t own = reinterpret_cast<uint64_t>(
          base + (uint64_t(pages[i]) * cache.page_stride +
                  uint64_t(entry_of(begin + i * 32 + lane)) * cache.entry_stride));
#pragma unroll kUnroll
      for (int step = 0; step < kChunks; ++step) {
        const int place = step * 32 + lane, row = place / kChunks, chunk = place % kChunks;
        const uint64_t source = __shfl_sync(0xffffffffu, own, row);
        const int block_row = i * 32 + row;
        const uint32_t offset = chunk / 8 * (Tile::kBlockN * kPanelBytes) +
                                block_row * kPanelBytes + (chunk % 8 ^ block_row % 8) * 16;
        cp_async(target + offset, reinterpret_cast<const uint4*>(source) + chunk,
                 begin + block_row < kv_end);
      }
    }
  }

  // The page of a token, or page 0 behind the end of the work tile.
  __device__ __forceinline__ uint32_t page_of(const WorkTile& work, uint32_t token) const {
    const uint32_t index = work.kv_start + p_.page_size.divide(token);
    uint32_t page = 0;
    if (token < static_cast<uint32_t>(work.kv_end)) {
      if (p_.kv_indices == nullptr) {
        page = index;
      } else if (index < p_.num_kv_indices) {
        page = p_.kv_indices[index];
      }
    }
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
