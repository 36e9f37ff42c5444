// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding of queries and keys, in one launch.
//
//   out[t, h, x(i)] = round(scale * (in[t, h, x(i)] cos - in[t, h, y(i)] sin))
//   out[t, h, y(i)] = round(scale * (in[t, h, y(i)] cos + in[t, h, x(i)] sin))
//
// for pair i of rotary_dim / 2, with the cosine and sine of rope/rotation.cuh. x(i), y(i) are
// i, i + rotary_dim / 2 (NeoX) or 2 i, 2 i + 1 (interleaved). All arithmetic is fp32. The rounding
// is to T, or to fp8 after a multiplication by scale.
//
// Layout   Work is a list of segments, tensors [tokens, heads, dim] with unit column stride and any
//          other two: queries and keys, which turn; what lies behind rotary_dim, values and other
//          columns without rotation, which are copied and converted. out may be in: each element
//          is written by the thread that read it, after it did. A segment may be written to the
//          pages of a KV cache in place of rows.
// Threads  A thread takes two vectors of 8 elements at the same place of kHeads heads. NeoX: they
//          hold the two halves of 8 pairs. Otherwise: `a` is in the first half of the columns, `b`
//          at the same place of the second. Either way a warp's accesses are whole lines, and a
//          rotation is loaded or computed once for kHeads heads. Neighbouring threads go along the
//          columns, then the heads, then the tokens.
// Traffic  reads and writes each element once, and the cache's row of each token.
// Source   Su et al., RoFormer, arXiv:2104.09864.
// Measured 2026-11-21 on an H200, bf16, with shares of the elementwise ceiling of the same run
//          (4387 GB/s); positions are int64:
//          16384 tokens, 32 + 8 heads of 128   cache, in place   80.8 us  0.97
//                                              cache             80.3 us  0.98
//                                              computed          79.0 us  0.97
//                                              of requests       79.4 us  0.96
//          to fp8, 4096 tokens, 128 heads of 64 + 512, one key  208.2 us  1.00
//                               32 + 8 heads of 64 + 64          16.2 us  0.90
#pragma once

#include "precast/core/fp8.cuh"
#include "precast/core/items.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/store.cuh"
#include "precast/core/vec.cuh"
#include "precast/paged/slot_mapping.cuh"
#include "precast/rope/rotation.cuh"

namespace precast {

constexpr int kRopeVec = 8;  // elements of a thread's vector
constexpr int kMaxRopeSegments = 5;

// What a launch may write to: rows alone, or pages of a cache, too, found by a page table of int32
// and int64 numbers or of int32 alone.
enum class RopeTarget { rows, pages, narrow_pages };

struct RopeSegment {
  const void* input;  // [tokens, heads, dim]
  void* out;          // [tokens, heads, dim], or pages [pages, ..., dim]
  int64_t input_token_stride;
  int64_t input_head_stride;
  int64_t out_token_stride;  // in pages: from one entry to the next
  int64_t out_head_stride;
  int64_t out_page_stride;
  int heads;
  int dim;
  bool turns;
  bool is_paged;
  float scale;
  // The launcher sets the rest.
  int second;        // the column of the second vector of the first thread
  FastDivmod units;  // threads a head
  uint32_t begin;    // its first thread among those of a token
  uint32_t end;
};

struct RopeParams {
  RopeSegment segments[kMaxRopeSegments];
  int segment_count;
  uint32_t tokens;
  bool interleave;
  RopeSource source;
  SlotMapping slots;  // of paged segments
  // The launcher sets the rest.
  Items items;            // per_row is threads a token
  uint32_t tokens_ahead;  // how far ahead rows of the cache are asked for; 0: not at all
  bool evict_last;
};

#if !defined(__CUDACC_RTC__)

// Numbers the work of a token; false if it is more than 32 bits count.
inline bool plan_rope(RopeParams& p, int heads_per_thread) {
  uint64_t threads = 0;
  for (int i = 0; i < kMaxRopeSegments; ++i) {
    RopeSegment& s = p.segments[i];
    s.begin = s.end = static_cast<uint32_t>(threads);
    s.units = FastDivmod(1);
    if (i >= p.segment_count || s.heads == 0 || s.dim == 0) continue;
    const bool halves = s.turns && !p.interleave;
    s.second = halves ? s.dim / 2 : (s.dim + 2 * kRopeVec - 1) / (2 * kRopeVec) * kRopeVec;
    const uint32_t units = (s.second + kRopeVec - 1) / kRopeVec;
    s.units = FastDivmod(units);
    threads += uint64_t(s.heads + heads_per_thread - 1) / heads_per_thread * units;
    if (threads > kMaxItems) return false;
    s.end = static_cast<uint32_t>(threads);
  }
  if (threads == 0) return true;
  if (threads > kMaxItems / p.tokens) return false;
  p.items.per_row = FastDivmod(static_cast<uint32_t>(threads));
  p.items.count = static_cast<uint32_t>(threads) * p.tokens;
  return true;
}

#endif

#if defined(__CUDACC__)

// What a thread works on.
struct RopeItem {
  uint32_t token;
  int segment;
  int head;    // the first of kHeads
  int column;  // of the first vector
};

template <int kHeads>
__device__ __forceinline__ RopeItem rope_item(const RopeParams& p, uint32_t item) {
  RopeItem at;
  at.token = p.items.per_row.divide(item);
  uint32_t rest = item - at.token * p.items.per_row.value;
  at.segment = 0;
#pragma unroll
  for (int i = 0; i + 1 < kMaxRopeSegments; ++i) at.segment += rest >= p.segments[i].end;
  const RopeSegment& segment = p.segments[at.segment];
  rest -= segment.begin;
  const uint32_t group = segment.units.divide(rest);
  at.head = static_cast<int>(group) * kHeads;
  at.column = static_cast<int>(rest - group * segment.units.value) * kRopeVec;
  return at;
}

// Threads of a CTA. Fewer where rows of the cache are waited for, so that a slow warp keeps less of
// a multiprocessor: on H200 128 were 1 to 6 % faster than 256, and with two heads a thread 64 were
// 0.5 % (to fp8 3 %) faster than 128. Those that compute share a table in the CTA.
constexpr int rope_threads(RopeAngles angles, int heads) {
  return angles == RopeAngles::computed ? 256 : heads > 1 ? 64 : 128;
}

// Two heads a thread leave it 64 registers, so that 64 KiB of a multiprocessor are in flight.
constexpr int rope_min_ctas(int threads, int heads) { return heads > 1 ? 1024 / threads : 1; }

template <typename T, typename Out, bool kInterleave, RopeAngles kAngles, bool kAligned, int kHeads,
          RopeTarget kTarget>
__global__ __launch_bounds__(rope_threads(kAngles, kHeads),
                             rope_min_ctas(rope_threads(kAngles, kHeads), kHeads))  //
    void RopeKernel(const __grid_constant__ RopeParams p) {
  constexpr bool kPaged = kTarget != RopeTarget::rows;
  using Finder = SlotLookup<kTarget == RopeTarget::pages ? SlotKind::table : SlotKind::table32>;
  __shared__ RopeTurns turns;
  if constexpr (kAngles == RopeAngles::computed) {
    fill_turns(turns, p.source);
    __syncthreads();
  }
  uint32_t item = blockIdx.x * rope_threads(kAngles, kHeads) + threadIdx.x;
  const bool exists = item < p.items.count;
  if constexpr (kAngles == RopeAngles::cached) {
    if (!exists) return;
  }
  // Why: a warp looks for its requests together, so the threads behind the last item stay.
  if (!exists) item = p.items.count - 1;
  const RopeItem at = rope_item<kHeads>(p, item);
  const RopeSegment& segment = p.segments[at.segment];
  const int heads = exists ? min(segment.heads - at.head, kHeads) : 0;
  // Elements that exist from the first and from the second vector on.
  const int first_end = segment.dim < segment.second ? segment.dim : segment.second;
  const int a_left = first_end - at.column;
  const int b_left = segment.dim - segment.second - at.column;
  const T* input = static_cast<const T*>(segment.input) +  //
                   at.token * segment.input_token_stride + at.head * segment.input_head_stride +
                   at.column;  // [kHeads, 8] and [kHeads, 8]
  const bool has_b = b_left > 0;
  const RopePositions& positions = p.source.positions;
  const bool by_token = kAngles == RopeAngles::cached || positions.ids.data != nullptr;
  const bool searches = kAngles == RopeAngles::computed && !by_token;
  const bool is_paged = kPaged && segment.is_paged;

  if (may_overlap_previous_grid()) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h < heads) {
        prefetch_to_l2(input + h * segment.input_head_stride);
        if (has_b) prefetch_to_l2(input + h * segment.input_head_stride + segment.second);
      }
    }
    if (by_token && at.head == 0) prefetch_to_l2(address_of(positions.ids, at.token));
    if (kAngles == RopeAngles::cached && segment.turns && at.head == 0) {
      const int32_t guess = guess_low_word(positions.ids, at.token);
      Rotation::prefetch(p.source, guess, at.column / kRopeVec);
    }
    if (searches && static_cast<int>(threadIdx.x) < min(positions.requests, kWarpSize)) {
      prefetch_to_l2(address_of(positions.indptr, threadIdx.x + 1));
      prefetch_to_l2(address_of(positions.offsets, threadIdx.x));
    }
    if (is_paged) Finder::prefetch(p.slots, at.token);
  }
  wait_for_previous_grid();

  // Why: indices are asked for before the data and used after they are, so that what depends on
  // them does not wait for the data.
  RequestSearch search;
  if constexpr (kAngles == RopeAngles::computed) {
    if (searches) search.read(positions, 0, positions.requests);
  }
  RawIndex id;
  if (by_token && segment.turns) id = RawIndex(positions.ids, at.token);
  int32_t position_ahead = -1;
  // The threads of the first segment's first head, which is of queries and turns.
  if (by_token && p.tokens_ahead > 0 && at.segment == 0 && at.head == 0 &&
      at.token + p.tokens_ahead < p.tokens) {
    if constexpr (kAngles == RopeAngles::cached) {
      position_ahead = load_low_word(positions.ids, at.token + p.tokens_ahead);
    } else {
      // Why: sines are computed while the heads are on their way, if the position is there before
      // them. 2.5 % faster on H200 with 16384 tokens.
      prefetch_to_l2(address_of(positions.ids, at.token + p.tokens_ahead));
    }
  }
  Finder slot;
  if (is_paged) slot = Finder(p.slots, at.token);

  const L2Policy policy = read_policy(p.evict_last);
  Vec<T> a[kHeads], b[kHeads];  // [kHeads, 8]
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const T* head = input + h * segment.input_head_stride;
    const bool has_head = h < heads;
    a[h] = has_head ? load<kAligned>(head, a_left, policy) : zero_vec<T>();
    b[h] =
        has_head && has_b ? load<kAligned>(head + segment.second, b_left, policy) : zero_vec<T>();
  }

  // Why here: on H200 17 % faster with 64 tokens, and 5 % with 16384, than ahead of the loads.
  allow_next_grid();

  int32_t position = 0;
  if constexpr (kAngles == RopeAngles::computed) {
    position = searches ? search.position(positions, at.token) : id.saturated(positions.ids);
  }
  bool turns_it = segment.turns;
  Rotation rotation;
  if (turns_it) {
    const RopePairs pairs = {kInterleave ? at.column / 2 : at.column,
                             (segment.second + at.column) / 2};
    if constexpr (kAngles == RopeAngles::cached) {
      // Why the low word alone: the row's loads do not wait for the high one, then.
      turns_it = p.source.cache.has(id.low);
      if (turns_it) rotation.load<kInterleave, kAligned>(p.source, id.low, pairs);
    } else {
      rotation.compute<kInterleave>(turns, p.source, position, pairs);
    }
  }
  if constexpr (kAngles == RopeAngles::cached) turns_it = turns_it && id.is_low(positions.ids);

  int64_t offset = at.token * segment.out_token_stride;
  if (is_paged) {
    if (!slot.find(p.slots)) return;
    offset = slot.page * segment.out_page_stride + slot.entry * segment.out_token_stride;
  }
  Out* out = static_cast<Out*>(segment.out) + offset + at.head * segment.out_head_stride +
             at.column;  // [kHeads, 8] and [kHeads, 8]
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h >= heads) break;
    Out* head = out + h * segment.out_head_stride;
    float x[8], y[8];
    unpack(a[h], x);
    unpack(b[h], y);
    if (turns_it) rotation.apply<kInterleave>(x, y);
    if constexpr (sizeof(Out) == sizeof(T)) {
      // What does not turn keeps its bits, those of a NaN too.
      store<kAligned>(head, turns_it ? pack<T>(x) : a[h], a_left);
      if (has_b) store<kAligned>(head + segment.second, turns_it ? pack<T>(y) : b[h], b_left);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[i] *= segment.scale;
        y[i] *= segment.scale;
      }
      store_rounded<kAligned>(head, x, a_left);
      if (has_b) store_rounded<kAligned>(head + segment.second, y, b_left);
    }
  }
  if constexpr (kAngles == RopeAngles::cached) {
    Rotation::prefetch(p.source, position_ahead, at.column / kRopeVec);
  }
}

#if !defined(__CUDACC_RTC__)

// Where there are more threads' work than these, each takes two heads: 1024 tokens of 40 heads of
// 128 were 3 % faster with one.
constexpr uint64_t kManyRopeItems = 1 << 19;

template <typename T, typename Out>
bool is_aligned(const RopeParams& p) {
  const RopeCache& cache = p.source.cache;
  uint64_t bits = reinterpret_cast<uint64_t>(cache.rows) | cache.stride * sizeof(float);
  for (int i = 0; i < p.segment_count; ++i) {
    const RopeSegment& s = p.segments[i];
    bits |= s.dim % (s.turns ? 2 * kRopeVec : kRopeVec);
    bits |= reinterpret_cast<uint64_t>(s.input);
    bits |= (s.input_token_stride | s.input_head_stride) * sizeof(T);
    // As if one element of the output had the bytes of one of the input.
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

template <typename T, typename Out, RopeAngles kAngles, RopeTarget kTarget, bool kInterleave>
cudaError_t launch_rope_as(RopeParams p, bool enable_pdl, cudaStream_t stream) {
  const bool aligned = is_aligned<T, Out>(p);
  if (!plan_rope(p, 1)) return cudaErrorInvalidValue;
  if (p.items.count == 0) return cudaSuccess;
  const bool many = aligned && p.items.count >= kManyRopeItems;
  if (many) plan_rope(p, 2);
  const auto kernel = many      ? RopeKernel<T, Out, kInterleave, kAngles, true, 2, kTarget>
                      : aligned ? RopeKernel<T, Out, kInterleave, kAngles, true, 1, kTarget>
                                : RopeKernel<T, Out, kInterleave, kAngles, false, 1, kTarget>;
  p.tokens_ahead = many ? tokens_ahead(bytes_of(p), p.tokens) : 0;
  p.evict_last = reads_evict_last(bytes_of(p),
                                  p.segment_count > 0 && p.segments[0].input == p.segments[0].out);
  const int threads = rope_threads(kAngles, many ? 2 : 1);
  const uint32_t ctas = (p.items.count - 1) / threads + 1;
  return launch(kernel, dim3(ctas), dim3(threads), enable_pdl, stream, p);
}

// Launches the rotation on `stream`; nothing without tokens or heads. Out is T, or an fp8 type.
// cudaErrorInvalidValue if there are more than 2^32 vectors of a thread.
template <typename T, typename Out, RopeAngles kAngles, RopeTarget kTarget>
cudaError_t launch_rope(const RopeParams& p, bool enable_pdl, cudaStream_t stream) {
  if (p.tokens == 0) return cudaSuccess;
  return p.interleave ? launch_rope_as<T, Out, kAngles, kTarget, true>(p, enable_pdl, stream)
                      : launch_rope_as<T, Out, kAngles, kTarget, false>(p, enable_pdl, stream);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
