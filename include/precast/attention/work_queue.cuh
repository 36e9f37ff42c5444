// SPDX-License-Identifier: Apache-2.0
// The work tiles of a CTA in shared memory: what the mainloop needs to know of a work tile, and the
// queue that one thread fills while the CTA works.
#pragma once

#include "precast/attention/params.cuh"
#include "precast/attention/self_plan.cuh"
#include "precast/attention/tile.cuh"

namespace precast {

#if defined(__CUDACC__)

// A work tile and what follows from it. WorkTile::head counts KV heads times blocks of V columns;
// here it is taken apart.
struct BlockInfo {
  WorkTile work;
  int32_t kv_head;
  int32_t v_column;   // first column of V, and of the output, that the CTA computes
  int32_t first_row;  // first packed row
  int32_t num_rows;   // rows of the tile that exist
  int32_t unmasked_begin, unmasked_end;  // tokens that no row masks by causal mask or window
};

// A packed row of a tile (PackGQA): its query and its query head.
struct PackGqaRow {
  int32_t q_idx;  // in the request
  int32_t q_head;

  __device__ __forceinline__ PackGqaRow(const AttentionParams& p, const BlockInfo& block, int row) {
    const int32_t packed = block.first_row + row;
    q_idx = static_cast<int32_t>(p.group_size.divide(packed));
    q_head = (block.kv_head - q_idx) * static_cast<int32_t>(p.group_size.value) + packed;
  }
};

// The tokens [begin, end) that a query attends to by the causal mask and the window.
struct MaskBounds {
  int32_t begin, end;

  __device__ __forceinline__ MaskBounds(const AttentionParams& p, const WorkTile& work,
                                        int32_t q_idx) {
    const int32_t position = work.kv_len - work.q_len + q_idx;
    // Why begin is not negative: its difference to a token must not overflow.
    begin = p.window_left >= 0 && position > p.window_left ? position - p.window_left : 0;
    end = work.kv_end;
    if (p.mask == AttentionMask::causal && position < end) end = position + 1;
  }
};

// Computes which rows of a tile of `block_m` rows exist, and which tokens none of them masks.
__device__ __forceinline__ void complete_block(const AttentionParams& p, BlockInfo& block,
                                               int32_t block_m) {
  block.first_row = block.work.m_block * block_m;
  // Why min: the lengths of a plan made on the device may name more queries than q has.
  const int32_t queries = max(0, min(block.work.q_len, p.q_rows - block.work.q_begin));
  const int32_t rows = queries * static_cast<int32_t>(p.group_size.value) - block.first_row;
  block.num_rows = max(0, min(rows, block_m));
  const PackGqaRow first(p, block, 0), last(p, block, block.num_rows - 1);
  block.unmasked_begin = MaskBounds(p, block.work, last.q_idx).begin;
  block.unmasked_end = MaskBounds(p, block.work, first.q_idx).end;
}

// A work tile in the queue, with the addresses of page or token 0 of its KV head. The 16-row tile
// keeps these in registers instead.
template <bool kWarpsSplitKv>
struct QueuedBlock : BlockInfo {
  const uint4 *k_base, *v_base;
};
template <>
struct QueuedBlock<true> : BlockInfo {};

// The words of a plan that a CTA of the 16-row tile starts from, two for each lane of a warp.
struct PlanWords {
  int32_t first;   // two CtaStart, then a PackedShape
  int32_t second;  // the mode, then the number of partial results
  static constexpr int kStarts = 2 * kStartInts;
  static_assert(kStarts + 8 == 32, "a word for each lane");

  __device__ __forceinline__ explicit PlanWords(const AttentionParams& p) {
    const PlanHeader* header = reinterpret_cast<const PlanHeader*>(p.schedule.plan);
    const int32_t* starts =
        reinterpret_cast<const int32_t*>(TileScheduler::first_start(p.schedule) + blockIdx.x);
    const int lane = threadIdx.x % 32;
    first = load_relaxed(lane < kStarts ? starts + lane : header->shape.words + lane - kStarts);
    second = load_relaxed(lane == 0 ? reinterpret_cast<const int32_t*>(&header->mode)
                                    : &header->num_partials);
  }

  __device__ __forceinline__ bool differ(const PlanWords& other) const {
    return (first != other.first) | (second != other.second);
  }
};

// What finds the work tiles of a CTA, in a plan or in the lengths, and what a thread of the 16-row
// tile reads of these.
template <bool kPlansItself, int kThreads>
struct SchedulerOf {
  using type = TileScheduler;
  using Source = PlanWords;
};
template <int kThreads>
struct SchedulerOf<true, kThreads> {
  using type = SelfPlannedScheduler;
  using Source = LengthsOfThread<kThreads>;
};

// A circular queue of a CTA's work tiles: the current one, the next two, and, but for the 16-row
// tile, the previous one, whose results some warps may still be writing. Why not in registers: the
// 128-row tile has none left. In static_persistent mode, kFetchCount threads fetch as many work
// tiles in parallel. Why: to find one takes as long as half a KV block, and all warps wait for it.
template <typename Tile>
struct WorkTileQueue {
  using Scheduler = typename SchedulerOf<Tile::kPlansItself, Tile::kThreads>::type;
  using Source = typename SchedulerOf<Tile::kPlansItself, Tile::kThreads>::Source;
  static constexpr int kFetchCount = Tile::kWarpsSplitKv ? 1 : 4;
  static constexpr int kDepth = Tile::kWarpsSplitKv ? 3 : 8;

  QueuedBlock<Tile::kWarpsSplitKv> blocks[kDepth];
  bool is_valid[kDepth];
  int32_t* counters;  // split counters of the plan
  // A Scheduler. Why bytes: shared memory has no constructors.
  alignas(16) unsigned char scheduler_storage[sizeof(Scheduler)];

  __device__ Scheduler& scheduler() { return *reinterpret_cast<Scheduler*>(scheduler_storage); }

  // The first kFetchCount threads call this for the work tiles 1, 2, ... in order. The CTA can read
  // the work tile after a barrier.
  __device__ void fetch(const AttentionParams& p, int tile_idx) {
    if constexpr (kFetchCount > 1) {
      if (scheduler().is_static()) {
        if (tile_idx % kFetchCount != 1) return;
        tile_idx += threadIdx.x;
        is_valid[tile_idx % kDepth] =
            scheduler().get_work_of_round(tile_idx, blocks[tile_idx % kDepth].work);
        if (is_valid[tile_idx % kDepth]) complete(p, tile_idx % kDepth);
        return;
      }
    }
    if (threadIdx.x == 0) fetch_next(p, tile_idx % kDepth);
  }

  __device__ void fetch_next(const AttentionParams& p, int slot) {
    is_valid[slot] = scheduler().get_next_work(blocks[slot].work);
    if (is_valid[slot]) complete(p, slot);
  }

  // Computes what follows from the work tile.
  __device__ void complete(const AttentionParams& p, int slot) {
    QueuedBlock<Tile::kWarpsSplitKv>& block = blocks[slot];
    block.kv_head = block.work.head / Tile::kVSplits;
    block.v_column = block.work.head % Tile::kVSplits * Tile::kDimV;
    if constexpr (!Tile::kWarpsSplitKv) {
      block.k_base = static_cast<const uint4*>(p.k.data) + block.kv_head * p.k.head_stride;
      block.v_base = static_cast<const uint4*>(p.v.data) + block.kv_head * p.v.head_stride +
                     block.v_column * Tile::kKvBytes / 16;
    }
    complete_block(p, block, Tile::kBlockM);
  }

  // One thread calls this first. The plan of another call is read, but no work is taken from it.
  __device__ void init(const AttentionParams& p) {
    // Why before the test: the loads of is_planned() and of the scheduler overlap.
    const bool planned = is_planned(p.schedule, p.max_partials);
    scheduler() = TileScheduler(p.schedule, blockIdx.x);
    counters = scheduler().counters();
    is_valid[0] = false;
    if (planned) fetch_next(p, 0);
  }

  // Does the same as init(), by the first warp, from words that may be of any plan or none.
  // `scratch`: shared memory, 16-byte aligned, that holds 34 words. is_early: the plan may change
  // later, so that work in static_persistent mode, which reads more of it, is not found.
  __device__ void init_by_warp(const AttentionParams& p, const PlanWords& words, int32_t* scratch,
                               bool is_early) {
    scratch[threadIdx.x] = words.first;
    if (threadIdx.x < 2) scratch[32 + threadIdx.x] = words.second;
    __syncwarp();
    if (threadIdx.x != 0) return;
    const PackedShape& shape = *reinterpret_cast<const PackedShape*>(scratch + PlanWords::kStarts);
    const ScheduleMode mode = static_cast<ScheduleMode>(scratch[32]);
    scheduler() = TileScheduler(p.schedule, blockIdx.x, reinterpret_cast<CtaStart*>(scratch), mode);
    is_valid[0] = false;
    if (is_early && scheduler().is_static()) return;
    counters = scheduler().counters();
    if (!is_planned(shape, scratch[33], p.schedule.shape, p.max_partials)) return;
    fetch_next(p, 0);
    is_valid[0] = is_valid[0] && (!is_early || is_possible(p, blocks[0].work));
  }

  // Whether a work tile names queries and a head that exist. Its tokens are checked where they are
  // looked up.
  static __device__ bool is_possible(const AttentionParams& p, const WorkTile& work) {
    const uint32_t heads = p.schedule.shape.heads, rows = p.q_rows;
    return static_cast<uint32_t>(work.head) < heads && work.m_block == 0 &&
           static_cast<uint32_t>(work.q_begin) <= rows;
  }

  // The same without a plan: all threads of the CTA call it.
  __device__ void init_without_plan(const AttentionParams& p,
                                    const LengthsOfThread<Tile::kThreads>& lengths,
                                    SelfPlanScratch& scratch) {
    const SelfPlannedScheduler found = plan_cta(p, lengths, scratch);
    if (threadIdx.x != 0) return;
    scheduler() = found;
    counters = p.schedule.plan;
    is_valid[0] = scheduler().get_next_work(blocks[0].work, [&](int32_t request_idx) {
      return scratch.request(request_idx, p.lengths.q_len_per_req);
    });
    if (is_valid[0]) complete(p, 0);
  }
};

#endif  // __CUDACC__

}  // namespace precast
