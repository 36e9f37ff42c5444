// SPDX-License-Identifier: Apache-2.0
// The parameters of rope/rope.cuh: a list of segments, and how the launcher assigns the work of a
// token to threads.
#pragma once

#include "precast/core/items.cuh"
#include "precast/core/vec.cuh"
#include "precast/paged/slot_mapping.cuh"
#include "precast/rope/rotation.cuh"

namespace precast {

constexpr int kRopeVec = 8;  // elements of a vector
constexpr int kMaxRopeSegments = 5;

// Where a launch may write: rows only, or also pages of a cache, whose page table has int32 and
// int64 numbers or only int32.
enum class RopeOutput { rows, pages, pages32 };

struct RopeSegment {
  const void* input;  // [tokens, heads, dim]
  void* out;          // [tokens, heads, dim], or pages [pages, ..., dim]
  int64_t input_token_stride;
  int64_t input_head_stride;
  int64_t out_token_stride;  // in pages: between entries
  int64_t out_head_stride;
  int64_t out_page_stride;
  int heads;
  int dim;
  bool rotates;
  bool is_paged;
  float scale;
  // The following is set by the launcher.
  int second;       // the first column of the second vectors
  FastDivmod vecs;  // threads a head
  uint32_t begin;   // the segment's first thread among those of a token
  uint32_t end;
};

struct RopeParams {
  RopeSegment segments[kMaxRopeSegments];
  int segment_count;
  uint32_t tokens;
  bool interleave;
  RopeAngleSource source;
  SlotMapping slots;  // for paged segments
  // The following is set by the launcher.
  Items items;  // per_row is the number of threads a token
  // how many tokens ahead rows of the cache are prefetched; 0 for no prefetch
  uint32_t prefetch_distance;
  bool evict_last;
};

#if !defined(__CUDACC_RTC__)

// Assigns the work of a token to threads; returns false if there are more threads than 32 bits can
// count.
inline bool plan_rope(RopeParams& p, int heads_per_thread) {
  uint64_t threads = 0;
  for (int i = 0; i < kMaxRopeSegments; ++i) {
    RopeSegment& s = p.segments[i];
    s.begin = s.end = static_cast<uint32_t>(threads);
    s.vecs = FastDivmod(1);
    if (i >= p.segment_count || s.heads == 0 || s.dim == 0) continue;
    const bool halves = s.rotates && !p.interleave;
    s.second = halves ? s.dim / 2 : (s.dim + 2 * kRopeVec - 1) / (2 * kRopeVec) * kRopeVec;
    const uint32_t vecs = (s.second + kRopeVec - 1) / kRopeVec;
    s.vecs = FastDivmod(vecs);
    threads += uint64_t(s.heads + heads_per_thread - 1) / heads_per_thread * vecs;
    if (threads > kMaxItems) return false;
    s.end = static_cast<uint32_t>(threads);
  }
  if (threads == 0) return true;
  if (threads > kMaxItems / p.tokens) return false;
  p.items.per_row = FastDivmod(static_cast<uint32_t>(threads));
  p.items.count = static_cast<uint32_t>(threads) * p.tokens;
  return true;
}

template <typename T, typename Out>
bool is_aligned(const RopeParams& p) {
  const RopeCache& cache = p.source.cache;
  uint64_t bits = reinterpret_cast<uint64_t>(cache.rows) | cache.stride * sizeof(float);
  for (int i = 0; i < p.segment_count; ++i) {
    const RopeSegment& s = p.segments[i];
    bits |= s.dim % (s.rotates ? 2 * kRopeVec : kRopeVec);
    bits |= reinterpret_cast<uint64_t>(s.input);
    bits |= (s.input_token_stride | s.input_head_stride) * sizeof(T);
    // Counts an element of the output as if it had the size of one of the input.
    const int64_t ratio = sizeof(T) / sizeof(Out);
    bits |= reinterpret_cast<uint64_t>(s.out) * ratio;
    bits |= (s.out_token_stride | s.out_head_stride | s.out_page_stride) * sizeof(T);
  }
  return bits % kVecBytes == 0;
}

inline int64_t bytes_of(const RopeParams& p) {
  int64_t elements = 0;
  for (int i = 0; i < p.segment_count; ++i) {
    elements += int64_t(p.segments[i].heads) * p.segments[i].dim;
  }
  return elements * p.tokens * 4;
}

#endif

}  // namespace precast
