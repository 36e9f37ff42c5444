// SPDX-License-Identifier: Apache-2.0
// The parts of a tile, in slots of the workspace, become its result: in the order of the parts,
// whoever merges them. Of a narrow tile the CTA does it that is the last to write its part; of
// others, whose slots are many times as large, all CTAs of the tile that are still there.
#pragma once

#include "precast/attention/epilogue.cuh"

namespace precast {

#if defined(__CUDACC__)

// Adds to a word of the plan's counters and gives what was there. What the CTA wrote before a
// barrier is visible to who adds later, and to its CTA after a barrier.
__device__ __forceinline__ uint32_t add_to_counter(int32_t* counter, uint32_t x) {
  uint32_t value;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(value)
               : "l"(counter), "r"(x)
               : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_counter(const int32_t* counter) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

// Merges four columns of a row, number `i` of the tile's, from all parts.
template <typename Tile, typename Q>
__device__ __forceinline__ void merge_columns(const AttentionParams& p, const AttentionWork& work,
                                              int i) {
  constexpr int kColumns = Tile::kDimV / 4;
  constexpr int kMany = 20;  // loads in flight of a thread
  const int32_t parts = work.piece.parts;
  // Slots count 16 bytes here; the first part's is in no line with the others'.
  constexpr uint32_t kSlot = kSlotFloats<Tile> / 4;
  const uint32_t first = work.piece.slot(0) * kSlot, step = work.piece.slot_step * kSlot;
  uint32_t next = work.piece.slot(1) * kSlot - step;
  const int row = i / kColumns, column = i % kColumns * 4;
  const PartialRows at = PartialRows::at<Tile>(p.partials);
  const char* const sums =
      reinterpret_cast<const char*>(at.sums + PartialRows::place<Tile>(row, column));
  const char* const row_ends = reinterpret_cast<const char*>(at.ends + row);
  MergedColumns merged;
  for (int32_t done = 0; done < parts; done += kMany) {
    float4 x[kMany];
    float2 ends[kMany];
#pragma unroll
    for (int j = 0; j < kMany; ++j) {
      const uint64_t bytes = uint64_t(done + j == 0 ? first : next) * 16;
      const bool exists = done + j < parts;
      x[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      ends[j] = make_float2(negative_infinity(), 0.0f);
      if (exists) x[j] = __ldcg(reinterpret_cast<const float4*>(sums + bytes));
      if (exists) ends[j] = __ldcg(reinterpret_cast<const float2*>(row_ends + bytes));
      next += step;
      keep(next);
    }
    merged.add(x, ends);
  }
  write_merged<Q>(p, work, row, column, merged);
}

// Of the CTA, in shared memory.
struct MergeShared {
  uint32_t word;   // from thread 0 to all
  uint32_t began;  // clock() at the start of the CTA's work
};

// The first counter of a tile has three counts of CTAs: that have written their part, that did not
// wait for the others, and that have left. The second one is of chunks of the tile.
constexpr int kCountBits = 10;
constexpr uint32_t kMostParts = (1 << kCountBits) - 1;
constexpr uint32_t kArrived = 1, kGone = kArrived << kCountBits, kLeft = kGone << kCountBits;

// Tells that this CTA's part is written. Gives the counter once all are, or 0 if this CTA is not to
// wait for that: if it has more to do, or has waited for as long as it had worked, for the others
// need not even be on the device. One thread calls.
__device__ __forceinline__ uint32_t await_parts(int32_t* counter, uint32_t parts, bool may_wait,
                                                uint32_t began) {
  const auto all_there = [&](uint32_t counts) { return (counts & kMostParts) == parts; };
  const uint32_t own = may_wait ? kArrived : kArrived + kGone;
  uint32_t counts = add_to_counter(counter, own) + own;
  const uint32_t now = clock(), most = now - began;
  while (may_wait && !all_there(counts)) {
    if (uint32_t(clock()) - now < most) {
      __nanosleep(64);
    } else if (atomicCAS(reinterpret_cast<uint32_t*>(counter), counts, counts + kGone) == counts) {
      return 0;
    }
    counts = load_counter(counter);
  }
  return all_there(counts) ? counts : 0;
}

// Merges the parts of a tile together with all other CTAs that have one and are still there, in
// chunks. If all of them are, a CTA's chunks follow from its part; if not, from a counter. The last
// to write its part is there in any case. Who leaves last sets both counters back.
template <typename Tile, typename Q>
__device__ __forceinline__ void merge_together(const AttentionParams& p, const AttentionWork& work,
                                               int32_t* counters, bool may_wait,
                                               MergeShared& shared) {
  constexpr int kColumns = Tile::kDimV / 4;
  const uint32_t parts = work.piece.parts, items = work.rows * kColumns;
  constexpr uint32_t kNone = ~0u / Tile::kThreads;
  const auto take = [&] { return uint32_t(atomicAdd(counters + 1, 1)); };
  uint32_t chunk = kNone;
  bool follows = false;
  if (threadIdx.x == 0) {
    const uint32_t counts = await_parts(counters, parts, may_wait, shared.began);
    follows = (counts / kGone & kMostParts) == 0;
    if (counts != 0) chunk = follows ? work.piece.part : take();
  }
  while (true) {
    if (threadIdx.x == 0) {
      shared.word = chunk;
      // The next one: it comes while this one is merged.
      if (chunk != kNone) chunk = follows ? chunk + parts : take();
    }
    __syncthreads();
    const uint32_t i = shared.word * Tile::kThreads + threadIdx.x;
    __syncthreads();
    if (i - threadIdx.x >= items) break;
    if (i < items) merge_columns<Tile, Q>(p, work, i);
  }
  if (threadIdx.x == 0 && add_to_counter(counters, kLeft) / kLeft == parts - 1) {
    counters[0] = 0;
    counters[1] = 0;
  }
}

// Merges the parts of a tile once all are written; sets its counters back. Of a narrow tile the CTA
// does it that is the last to have written one. All threads of the CTA call; `is_last_piece`: of
// the CTA.
template <typename Tile, typename Q>
__device__ __noinline__ void merge_parts(const AttentionParams& p, const AttentionWork& work,
                                         int32_t* counters, bool is_last_piece,
                                         MergeShared& shared) {
  const uint32_t parts = work.piece.parts;
  __syncthreads();
  if constexpr (!Tile::kNarrow) {
    if (work.piece.counters() > 1 && parts <= kMostParts) {
      merge_together<Tile, Q>(p, work, counters, is_last_piece, shared);
      return;
    }
  }
  if (threadIdx.x == 0) {
    shared.word = add_to_counter(counters, kArrived);
    if (shared.word == parts - 1) *counters = 0;
  }
  __syncthreads();
  if (shared.word != parts - 1) return;
  for (int i = threadIdx.x; i < work.rows * (Tile::kDimV / 4); i += Tile::kThreads) {
    merge_columns<Tile, Q>(p, work, i);
  }
}

#endif  // __CUDACC__

}  // namespace precast
