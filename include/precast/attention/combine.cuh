// SPDX-License-Identifier: Apache-2.0
// Combines the splits of a tile from the split workspace to the output
// (split-KV). The splits are added in a fixed order, so the result does not
// depend on which CTA combines them.
//
// A 16-row tile is combined by the CTA that writes its last split. The partial
// results of larger tiles are many times as large, so all CTAs of the tile that
// can wait combine it together.
#pragma once

#include "precast/attention/combine_columns.cuh"

namespace precast {

#if defined(__CUDACC__)

// Adds to a split counter and returns its old value. What the CTA wrote before
// a barrier is visible to a thread that adds later, and after a barrier to that
// thread's CTA.
__device__ __forceinline__ uint32_t atomic_add_acq_rel(int32_t* counter, uint32_t x) {
  uint32_t value;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(value)
               : "l"(counter), "r"(x)
               : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_acquire(const int32_t* counter) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

// Shared memory of the CTA.
struct CombineSharedStorage {
  uint32_t broadcast;    // from thread 0 to all threads
  uint32_t step;         // from one chunk of this CTA to the next; 0: a counter gives them
  uint32_t begin_clock;  // clock() when the CTA began
};

// The first split counter of a tile holds three counts of CTAs: those that have
// written their split (arrived), those of them that did not wait for the others
// (gone), and those that have finished (left). The second counter hands out
// chunks of the tile to combine.
constexpr int kCountBits = 10;
constexpr uint32_t kMaxCounted = (1 << kCountBits) - 1;
constexpr uint32_t kArrived = 1, kGone = kArrived << kCountBits, kLeft = kGone << kCountBits;

// Counts this CTA's split as written. Returns the counter once all splits are
// written, or 0 if this CTA does not wait for that: because it has more work,
// or because it has waited as long as it had worked. Why not longer: the other
// CTAs may not even run yet. `is_last`: whether it was the last to arrive. One
// thread calls it.
__device__ __forceinline__ uint32_t wait_for_splits(int32_t* counter, uint32_t num_splits,
                                                    bool may_wait, uint32_t begin_clock,
                                                    bool& is_last) {
  const auto all_arrived = [&](uint32_t counts) { return (counts & kMaxCounted) == num_splits; };
  const uint32_t own = may_wait ? kArrived : kArrived + kGone;
  uint32_t counts = atomic_add_acq_rel(counter, own) + own;
  is_last = all_arrived(counts);
  const uint32_t now = clock(), max_wait = now - begin_clock;
  while (may_wait && !all_arrived(counts)) {
    if (uint32_t(clock()) - now < max_wait) {
      __nanosleep(64);
    } else if (atomicCAS(reinterpret_cast<uint32_t*>(counter), counts, counts + kGone) == counts) {
      return 0;
    }
    counts = load_acquire(counter);
  }
  return all_arrived(counts) ? counts : 0;
}

// Combines a tile in chunks, together with all other CTAs that have a split of
// it and wait. If no CTA is gone, the chunks of a CTA follow from its split
// index; otherwise from a counter. The CTA that arrives last never goes, so the
// tile is always combined. The CTA that leaves last resets both counters.
//
// Two splits have no second counter in stream_k mode, and need none: the CTA
// that arrives last combines alone if the other one is gone, which has said so
// before; otherwise each takes half of the chunks.
template <typename Tile, typename Q>
__device__ __forceinline__ void combine_together(const AttentionParams& p, const BlockInfo& block,
                                                 int32_t* counters, bool may_wait,
                                                 CombineSharedStorage& shared) {
  constexpr int kColumns = Tile::kDimV / 4;
  const uint32_t num_splits = block.work.num_splits, items = block.num_rows * kColumns;
  // A chunk has so many groups of columns for each thread.
  constexpr uint32_t kMostGroups = 4;
  const uint32_t groups = num_splits <= 2 ? kMostGroups : num_splits <= 4 ? kMostGroups / 2 : 1;
  // Combines a chunk; returns false if there is none.
  const auto combine = [&](uint32_t chunk) {
    if constexpr (Tile::kCombinesWideRows) {
      constexpr uint32_t kWarps = Tile::kThreads / 32;
      const uint32_t warp = Tile::thread() / 32;
      if (num_splits <= kCombineLanes) {
        // No CTA is left without a chunk.
        const bool two = num_splits <= 2 && block.num_rows >= 2 * kWarps * num_splits;
        const uint32_t rows = two ? 2 * kWarps : kWarps, row = chunk * rows + warp;
        if (chunk * rows >= block.num_rows) return false;
        if (two) {
          combine_rows<Tile, Q, 2, 2>(p, block, row, kWarps);
        } else if (num_splits <= 2) {
          combine_rows<Tile, Q, 1, 2>(p, block, row, kWarps);
        } else {
          combine_rows<Tile, Q, 1, kCombineLanes>(p, block, row, kWarps);
        }
        return true;
      }
      // Where there are fewer chunks than CTAs, lanes share a group.
      if (items * kCombineLanes <= num_splits * Tile::kThreads) {
        constexpr uint32_t kOfWarp = 32 / kCombineLanes;
        if (chunk * kWarps * kOfWarp >= items) return false;
        const int place = warp * kOfWarp + threadIdx.x % kOfWarp;
        combine_columns_by_lanes<Tile, Q>(p, block, chunk * kWarps * kOfWarp + place, items);
        return true;
      }
    }
    const uint32_t begin = chunk * groups * Tile::kThreads;
    if (begin >= items) return false;
    const int first = begin + Tile::thread();
    if (groups == kMostGroups) {
      combine_columns<Tile, Q, kMostGroups>(p, block, first, items);
    } else if (groups > 1) {
      combine_columns<Tile, Q, kMostGroups / 2>(p, block, first, items);
    } else {
      combine_columns<Tile, Q>(p, block, first, items);
    }
    return true;
  };
  constexpr uint32_t kNoChunk = ~0u / (kMostGroups * Tile::kThreads);
  const auto take_chunk = [&] { return uint32_t(atomicAdd(counters + 1, 1)); };
  uint32_t next = kNoChunk;
  if (Tile::thread() == 0) {
    bool is_last;
    const uint32_t counts =
        wait_for_splits(counters, num_splits, may_wait, shared.begin_clock, is_last);
    const uint32_t gone = counts / kGone & kMaxCounted;
    const bool is_alone = num_splits == 2 && is_last && gone > (may_wait ? 0u : 1u);
    const bool is_static = counts == 0 || gone == 0 || num_splits == 2;
    shared.step = !is_static ? 0 : is_alone ? 1 : num_splits;
    uint32_t chunk = kNoChunk;
    if (counts != 0) chunk = is_alone ? 0 : is_static ? block.work.split_idx : take_chunk();
    // Takes the next chunk early, so that the atomic overlaps with the work on
    // this one.
    if (!is_static) next = take_chunk();
    shared.broadcast = chunk;
  }
  Tile::barrier();
  uint32_t chunk = shared.broadcast;
  const uint32_t step = shared.step;
  while (combine(chunk)) {
    if (step > 0) {
      chunk += step;
      continue;
    }
    Tile::barrier();
    if (Tile::thread() == 0) {
      shared.broadcast = next;
      next = take_chunk();
    }
    Tile::barrier();
    chunk = shared.broadcast;
  }
  if (Tile::thread() == 0 && atomic_add_acq_rel(counters, kLeft) / kLeft == num_splits - 1) {
    counters[0] = 0;
    if (num_splits > 2) counters[1] = 0;
  }
}

// Combines the splits of a tile once all are written, and resets its split
// counters. All threads of the CTA must call it after the CTA has written its
// split. `is_last_work`: the CTA has no more work.
template <typename Tile, typename Q>
__device__ __noinline__ void combine_splits(const AttentionParams& p, const BlockInfo& block,
                                            int32_t* counters, bool is_last_work,
                                            CombineSharedStorage& shared) {
  const uint32_t num_splits = block.work.num_splits;
  Tile::barrier();
  if constexpr (!Tile::kWarpsSplitKv) {
    if ((num_splits == 2 || block.work.num_counters() > 1) && num_splits <= kMaxCounted) {
      // Why copies: outputs may lie where params do, for all the compiler knows, so it would read
      // these again for each group of columns.
      const AttentionParams own_params = p;
      const BlockInfo own_block = block;
      combine_together<Tile, Q>(own_params, own_block, counters, is_last_work, shared);
      return;
    }
  }
  if (Tile::thread() == 0) {
    shared.broadcast = atomic_add_acq_rel(counters, kArrived);
    if (shared.broadcast == num_splits - 1) *counters = 0;
  }
  Tile::barrier();
  if (shared.broadcast != num_splits - 1) return;
  const int items = block.num_rows * (Tile::kDimV / 4);
  for (int i = Tile::thread(); i < items; i += Tile::kThreads) {
    combine_columns<Tile, Q>(p, block, i, items);
  }
}

#endif  // __CUDACC__

}  // namespace precast
