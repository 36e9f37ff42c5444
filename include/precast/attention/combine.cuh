// SPDX-License-Identifier: Apache-2.0
// Combines the splits of a tile from the split workspace to the output
// (split-KV). The splits are added in their order, so the result does not
// depend on which CTA combines them.
//
// A 16-row tile is combined by the CTA that writes its last split. The partial
// results of larger tiles are many times as large, so all CTAs of the tile that
// can wait combine it together.
#pragma once

#include "precast/attention/epilogue.cuh"

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

// Combines all splits of kItems groups of four columns: of the groups `first`,
// `first` + kThreads,
// ..., of which there are `count`, row by row. Why several: each waits for
// loads, and where a tile has few splits, a group has few of them.
template <typename Tile, typename Q, int kItems = 1>
__device__ __forceinline__ void combine_columns(const AttentionParams& p, const BlockInfo& block,
                                                int first, int count) {
  constexpr int kColumns = Tile::kDimV / 4;
  constexpr int kBatch = Tile::kCombineBatch / kItems;
  const int32_t num_splits = block.work.num_splits;
  // Offsets in units of 16 bytes. Split 0 does not fit the step of the other
  // splits.
  constexpr uint32_t kPartial = kPartialFloats<Tile> / 4;
  const uint32_t first_split = block.work.partial(0) * kPartial,
                 step = block.work.partial_step * kPartial;
  uint32_t next = block.work.partial(1) * kPartial - step;
  const PartialResult base = PartialResult::at<Tile>(p.partials);
  const auto row_of = [&](int item) { return (first + item * Tile::kThreads) / kColumns; };
  const auto column_of = [&](int item) { return (first + item * Tile::kThreads) % kColumns * 4; };
  CombinedColumns combined[kItems];
  for (int32_t begin = 0; begin < num_splits; begin += kBatch) {
    float4 acc_o[kItems][kBatch];
    float2 row_stats[kItems][kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const uint64_t bytes = uint64_t(begin + j == 0 ? first_split : next) * 16;
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        const bool exists = begin + j < num_splits && first + item * Tile::kThreads < count;
        const int row = row_of(item);
        const char* const from_o = reinterpret_cast<const char*>(
            base.acc_o + PartialResult::offset<Tile>(row, column_of(item)));
        const char* const from_stats = reinterpret_cast<const char*>(base.row_stats + row);
        acc_o[item][j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        row_stats[item][j] = make_float2(negative_infinity(), 0.0f);
        if (exists) acc_o[item][j] = __ldcg(reinterpret_cast<const float4*>(from_o + bytes));
        if (exists)
          row_stats[item][j] = __ldcg(reinterpret_cast<const float2*>(from_stats + bytes));
      }
      next += step;
      keep_in_register(next);
    }
#pragma unroll
    for (int item = 0; item < kItems; ++item) combined[item].add(acc_o[item], row_stats[item]);
  }
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    if (first + item * Tile::kThreads >= count) break;
    write_combined<Q>(p, block, row_of(item), column_of(item), combined[item]);
  }
}

// Shared memory of the CTA.
struct CombineSharedStorage {
  uint32_t broadcast;    // from thread 0 to all threads
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
// CTAs may not even run yet. One thread calls it.
__device__ __forceinline__ uint32_t wait_for_splits(int32_t* counter, uint32_t num_splits,
                                                    bool may_wait, uint32_t begin_clock) {
  const auto all_arrived = [&](uint32_t counts) { return (counts & kMaxCounted) == num_splits; };
  const uint32_t own = may_wait ? kArrived : kArrived + kGone;
  uint32_t counts = atomic_add_acq_rel(counter, own) + own;
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
template <typename Tile, typename Q>
__device__ __forceinline__ void combine_together(const AttentionParams& p, const BlockInfo& block,
                                                 int32_t* counters, bool may_wait,
                                                 CombineSharedStorage& shared) {
  constexpr int kColumns = Tile::kDimV / 4;
  const uint32_t num_splits = block.work.num_splits, items = block.num_rows * kColumns;
  // A chunk has so many groups of columns for each thread.
  constexpr uint32_t kMostGroups = 4;
  const uint32_t groups = num_splits <= 2 ? kMostGroups : num_splits <= 4 ? kMostGroups / 2 : 1;
  constexpr uint32_t kNoChunk = ~0u / (kMostGroups * Tile::kThreads);
  const auto take_chunk = [&] { return uint32_t(atomicAdd(counters + 1, 1)); };
  uint32_t chunk = kNoChunk;
  bool is_static = false;
  if (Tile::thread() == 0) {
    const uint32_t counts = wait_for_splits(counters, num_splits, may_wait, shared.begin_clock);
    is_static = (counts / kGone & kMaxCounted) == 0;
    if (counts != 0) chunk = is_static ? block.work.split_idx : take_chunk();
  }
  while (true) {
    if (Tile::thread() == 0) {
      shared.broadcast = chunk;
      // Takes the next chunk early, so that the atomic overlaps with the work
      // on this one.
      if (chunk != kNoChunk) chunk = is_static ? chunk + num_splits : take_chunk();
    }
    Tile::barrier();
    const uint32_t begin = shared.broadcast * groups * Tile::kThreads;
    Tile::barrier();
    if (begin >= items) break;
    const int first = begin + Tile::thread();
    if (groups == kMostGroups) {
      combine_columns<Tile, Q, kMostGroups>(p, block, first, items);
    } else if (groups > 1) {
      combine_columns<Tile, Q, kMostGroups / 2>(p, block, first, items);
    } else {
      combine_columns<Tile, Q>(p, block, first, items);
    }
  }
  if (Tile::thread() == 0 && atomic_add_acq_rel(counters, kLeft) / kLeft == num_splits - 1) {
    counters[0] = 0;
    counters[1] = 0;
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
    if (block.work.num_counters() > 1 && num_splits <= kMaxCounted) {
      combine_together<Tile, Q>(p, block, counters, is_last_work, shared);
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
