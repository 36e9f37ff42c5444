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

// Combines all splits of a group of four columns, of which there are `count`,
// by four lanes of a warp, which add every fourth split each. All lanes of the
// warp call it.
constexpr int kCombineLanes = 4;
template <typename Tile, typename Q>
__device__ __forceinline__ void combine_columns_by_lanes(const AttentionParams& p,
                                                         const BlockInfo& block, int group,
                                                         int count) {
  constexpr int kColumns = Tile::kDimV / 4, kBatch = Tile::kCombineBatch;
  constexpr uint32_t kPartial = kPartialFloats<Tile> / 4;  // in units of 16 bytes
  const int32_t num_splits = block.work.num_splits;
  const int lane = threadIdx.x % 32 / (32 / kCombineLanes);
  const uint32_t first_split = block.work.partial(0) * kPartial,
                 step = block.work.partial_step * kPartial,
                 before_second = block.work.partial(1) * kPartial - step;
  const PartialResult base = PartialResult::at<Tile>(p.partials);
  const int row = group / kColumns, column = group % kColumns * 4;
  const char* const from_o =
      reinterpret_cast<const char*>(base.acc_o + PartialResult::offset<Tile>(row, column));
  const char* const from_stats = reinterpret_cast<const char*>(base.row_stats + row);
  CombinedColumns combined;
  for (int32_t begin = lane; begin - lane < num_splits; begin += kBatch * kCombineLanes) {
    float4 acc_o[kBatch];
    float2 row_stats[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int32_t split = begin + j * kCombineLanes;
      const bool exists = split < num_splits && group < count;
      const uint64_t bytes = uint64_t(split == 0 ? first_split : before_second + split * step) * 16;
      acc_o[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      row_stats[j] = make_float2(negative_infinity(), 0.0f);
      if (exists) acc_o[j] = __ldcg(reinterpret_cast<const float4*>(from_o + bytes));
      if (exists) row_stats[j] = __ldcg(reinterpret_cast<const float2*>(from_stats + bytes));
    }
    combined.add(acc_o, row_stats);
  }
#pragma unroll
  for (int distance = 32 / kCombineLanes; distance < 32; distance *= 2) {
    combine_lanes(combined, distance);
  }
  if (lane == 0 && group < count) write_combined<Q>(p, block, row, column, combined);
}

// Combines all splits of whole rows, of which there are at most kSplits, by a
// warp: of the rows `row`, `row` + `step`, ..., kRows in all. Why whole rows:
// what follows from row_max and row_sum is computed once for many columns.
template <typename Tile, typename Q, int kRows, int kSplits>
__device__ __forceinline__ void combine_rows(const AttentionParams& p, const BlockInfo& block,
                                             int first_row, int step) {
  constexpr int kGroups = Tile::kDimV / 128;  // of four columns, of a lane
  static_assert(Tile::kDimV % 128 == 0, "a lane has whole groups");
  const int lane = threadIdx.x % 32;
  float4 acc_o[kRows][kSplits][kGroups];
  float2 row_stats[kRows][kSplits];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = first_row + i * step;
#pragma unroll
    for (int split = 0; split < kSplits; ++split) {
      const bool exists = row < block.num_rows && split < block.work.num_splits;
      const PartialResult from = PartialResult::at<Tile>(
          p.partials + int64_t(block.work.partial(exists ? split : 0)) * kPartialFloats<Tile>);
      row_stats[i][split] = make_float2(negative_infinity(), 0.0f);
      if (exists) row_stats[i][split] = __ldcg(from.row_stats + row);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int offset = PartialResult::offset<Tile>(row, 4 * (lane + 32 * group));
        acc_o[i][split][group] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (exists) {
          acc_o[i][split][group] = __ldcg(reinterpret_cast<const float4*>(from.acc_o + offset));
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = first_row + i * step;
    if (row >= block.num_rows) break;
    float row_max = negative_infinity(), row_sum = 0.0f, scale[kSplits];
#pragma unroll
    for (const float2& stats : row_stats[i]) row_max = fmaxf(row_max, stats.x);
#pragma unroll
    for (int split = 0; split < kSplits; ++split) {
      scale[split] = exp2_relative(row_stats[i][split].x, row_max);
      row_sum = fmaf(row_stats[i][split].y, scale[split], row_sum);
    }
    const PackGqaRow packed(p, block, row);
    const RowResult result(p, packed.q_head, row_max, row_sum);
    Q* const out = output_row<Q>(p, block, packed) + 4 * lane;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int split = 0; split < kSplits; ++split) {
        const float4& x = acc_o[i][split][group];
        sum.x = fmaf(x.x, scale[split], sum.x);
        sum.y = fmaf(x.y, scale[split], sum.y);
        sum.z = fmaf(x.z, scale[split], sum.z);
        sum.w = fmaf(x.w, scale[split], sum.w);
      }
      uint2 bits;
      bits.x = pack_pair(Q(), sum.x * result.factor, sum.y * result.factor);
      bits.y = pack_pair(Q(), sum.z * result.factor, sum.w * result.factor);
      *reinterpret_cast<uint2*>(out + 128 * group) = bits;
    }
    if (lane == 0) write_lse(p, block, packed, result.lse);
  }
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
