// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding of queries and keys, in one launch.
//
//   out[t, h, x(i)] = round(scale * (in[t, h, x(i)] cos - in[t, h, y(i)] sin))
//   out[t, h, y(i)] = round(scale * (in[t, h, y(i)] cos + in[t, h, x(i)] sin))
//
// for pair i of rotary_dim / 2, with the cosine and sine of rope/rotation.cuh. x(i), y(i) are i, i
// + rotary_dim / 2 (NeoX) or 2 i, 2 i + 1 (interleaved). All arithmetic is fp32. The result is
// rounded to T, or to fp8 after a multiplication by scale.
//
// Layout   A launch processes a list of segments, tensors [tokens, heads, dim] with unit column
//          stride and any other two: queries and keys, which are rotated; and the columns behind
//          rotary_dim, values and other columns without rotation, which are copied and converted.
//          out may be in, because each element is written by the thread that has read it. A segment
//          may be written to the pages of a KV cache instead of rows.
// Threads  A thread takes two vectors of 8 elements at the same columns of kHeads heads. NeoX: they
//          hold the two halves of 8 pairs. Otherwise `a` is in the first half of the columns, and
//          `b` at the same place of the second. In both cases a warp accesses whole lines, and a
//          rotation is loaded or computed once for kHeads heads. Neighbouring threads go along the
//          columns, then the heads, then the tokens.
// Traffic  reads and writes each element once, and reads the cache's row of each token
// Source   Su et al., RoFormer, arXiv:2104.09864
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
#include "precast/core/launch.cuh"
#include "precast/core/store.cuh"
#include "precast/core/vec.cuh"
#include "precast/paged/slot_mapping.cuh"
#include "precast/rope/rope_params.cuh"
#include "precast/rope/rotation.cuh"

namespace precast {

#if defined(__CUDACC__)

// The work of a thread.
struct RopeItem {
  uint32_t token;
  int segment;
  int head;    // the first of kHeads heads
  int column;  // the first column of the first vector
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
  const uint32_t group = segment.vecs.divide(rest);
  at.head = static_cast<int>(group) * kHeads;
  at.column = static_cast<int>(rest - group * segment.vecs.value) * kRopeVec;
  return at;
}

// Threads of a CTA. CTAs that wait for rows of the cache are smaller, so that a slow warp holds
// fewer resources of a multiprocessor: on an H200 128 threads were 1 to 6 % faster than 256, and
// with two heads a thread 64 were 0.5 % (to fp8 3 %) faster than 128. CTAs that compute angles
// share a table.
constexpr int rope_threads(RopeAngles angles, int heads) {
  return angles == RopeAngles::computed ? 256 : heads > 1 ? 64 : 128;
}

// With two heads, a thread may have 64 registers, so that 64 KiB of a multiprocessor are in flight.
constexpr int rope_min_ctas(int threads, int heads) { return heads > 1 ? 1024 / threads : 1; }

template <typename T, typename Out, bool kInterleave, RopeAngles kAngles, bool kAligned, int kHeads,
          RopeOutput kTarget>
__global__ __launch_bounds__(rope_threads(kAngles, kHeads),
                             rope_min_ctas(rope_threads(kAngles, kHeads), kHeads))  //
    void RopeKernel(const __grid_constant__ RopeParams p) {
  constexpr bool kPaged = kTarget != RopeOutput::rows;
  using Finder = SlotLookup<kTarget == RopeOutput::pages ? SlotKind::table : SlotKind::table32>;
  __shared__ RopeFrequencyTable frequency_table;
  if constexpr (kAngles == RopeAngles::computed) {
    fill_frequency_table(frequency_table, p.source);
    __syncthreads();
  }
  uint32_t item = blockIdx.x * rope_threads(kAngles, kHeads) + threadIdx.x;
  const bool exists = item < p.items.count;
  if constexpr (kAngles == RopeAngles::cached) {
    if (!exists) return;
  }
  // Why: a warp searches its requests together, so the threads behind the last item must stay.
  if (!exists) item = p.items.count - 1;
  const RopeItem at = rope_item<kHeads>(p, item);
  const RopeSegment& segment = p.segments[at.segment];
  const int heads = exists ? min(segment.heads - at.head, kHeads) : 0;
  // The elements that exist from the start of the first and of the second vector.
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
    if (kAngles == RopeAngles::cached && segment.rotates && at.head == 0) {
      const int32_t guess = prefetch_low_word(positions.ids, at.token);
      Rotation::prefetch(p.source, guess, at.column / kRopeVec);
    }
    if (searches && static_cast<int>(threadIdx.x) < min(positions.requests, kWarpSize)) {
      prefetch_to_l2(address_of(positions.indptr, threadIdx.x + 1));
      prefetch_to_l2(address_of(positions.offsets, threadIdx.x));
    }
    if (is_paged) Finder::prefetch(p.slots, at.token);
  }
  wait_on_dependent_grids();

  // Why: indices are loaded before the data and used after it is loaded, so that loads which depend
  // on them do not wait for the data.
  RequestLookup search;
  if constexpr (kAngles == RopeAngles::computed) {
    if (searches) search.read(positions, 0, positions.requests);
  }
  LoadedIndex id;
  if (by_token && segment.rotates) id = LoadedIndex(positions.ids, at.token);
  int32_t next_position = -1;
  // By the threads of the first segment's first head, which belongs to the queries and is rotated.
  if (by_token && p.prefetch_distance > 0 && at.segment == 0 && at.head == 0 &&
      at.token + p.prefetch_distance < p.tokens) {
    if constexpr (kAngles == RopeAngles::cached) {
      next_position = load_low_word(positions.ids, at.token + p.prefetch_distance);
    } else {
      // Why: sines are computed while the heads are loaded, if the position has arrived before.
      // This was 2.5 % faster on an H200 with 16384 tokens.
      prefetch_to_l2(address_of(positions.ids, at.token + p.prefetch_distance));
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

  // Why here: on an H200 17 % faster with 64 tokens, and 5 % with 16384, than before the loads.
  launch_dependent_grids();

  int32_t position = 0;
  if constexpr (kAngles == RopeAngles::computed) {
    position = searches ? search.position(positions, at.token) : id.saturated(positions.ids);
  }
  bool rotates_token = segment.rotates;
  Rotation rotation;
  if (rotates_token) {
    const RopePairs pairs = {kInterleave ? at.column / 2 : at.column,
                             (segment.second + at.column) / 2};
    if constexpr (kAngles == RopeAngles::cached) {
      // Why only the low word: the loads of the row then do not wait for the high one.
      rotates_token = p.source.cache.has(id.low);
      if (rotates_token) rotation.load<kInterleave, kAligned>(p.source, id.low, pairs);
    } else {
      rotation.compute<kInterleave>(frequency_table, p.source, position, pairs);
    }
  }
  if constexpr (kAngles == RopeAngles::cached) {
    rotates_token = rotates_token && id.fits_low_word(positions.ids);
  }

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
    if (rotates_token) rotation.apply<kInterleave>(x, y);
    if constexpr (sizeof(Out) == sizeof(T)) {
      // Elements that are not rotated keep their bits, even those of a NaN.
      store<kAligned>(head, rotates_token ? pack<T>(x) : a[h], a_left);
      if (has_b) store<kAligned>(head + segment.second, rotates_token ? pack<T>(y) : b[h], b_left);
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
    Rotation::prefetch(p.source, next_position, at.column / kRopeVec);
  }
}

#if !defined(__CUDACC_RTC__)

// Larger launches give each thread two heads: with one, 1024 tokens of 40 heads of 128 were 3 %
// faster.
constexpr uint64_t kLargeLaunchItems = 1 << 19;

template <typename T, typename Out, RopeAngles kAngles, RopeOutput kTarget, bool kInterleave>
cudaError_t launch_rope_variant(RopeParams p, bool enable_pdl, cudaStream_t stream) {
  const bool aligned = is_aligned<T, Out>(p);
  if (!plan_rope(p, 1)) return cudaErrorInvalidValue;
  if (p.items.count == 0) return cudaSuccess;
  const bool many = aligned && p.items.count >= kLargeLaunchItems;
  if (many) plan_rope(p, 2);
  const auto kernel = many      ? RopeKernel<T, Out, kInterleave, kAngles, true, 2, kTarget>
                      : aligned ? RopeKernel<T, Out, kInterleave, kAngles, true, 1, kTarget>
                                : RopeKernel<T, Out, kInterleave, kAngles, false, 1, kTarget>;
  p.prefetch_distance = many ? prefetch_distance(bytes_of(p), p.tokens) : 0;
  p.evict_last = reads_evict_last(bytes_of(p),
                                  p.segment_count > 0 && p.segments[0].input == p.segments[0].out);
  const int threads = rope_threads(kAngles, many ? 2 : 1);
  const uint32_t ctas = (p.items.count - 1) / threads + 1;
  return launch(kernel, dim3(ctas), dim3(threads), enable_pdl, stream, p);
}

// Launches the rotation on `stream`, unless there are no tokens or heads. Out is T, or an fp8 type.
// Returns cudaErrorInvalidValue if there are more than 2^32 threads.
template <typename T, typename Out, RopeAngles kAngles, RopeOutput kTarget>
cudaError_t launch_rope(const RopeParams& p, bool enable_pdl, cudaStream_t stream) {
  if (p.tokens == 0) return cudaSuccess;
  return p.interleave ? launch_rope_variant<T, Out, kAngles, kTarget, true>(p, enable_pdl, stream)
                      : launch_rope_variant<T, Out, kAngles, kTarget, false>(p, enable_pdl, stream);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
