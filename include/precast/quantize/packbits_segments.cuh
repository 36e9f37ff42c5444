// SPDX-License-Identifier: Apache-2.0
// Eight truth values to a byte, of each segment of an array, as quantize/packbits.cuh packs them.
//
// What is behind the end of a segment counts as 0. Segment s of x starts at indptr[s] and its bytes
// at new_indptr[s], the sum of ceil(length / 8) of the segments before it.
//
// Layout   x           [n]             bytes, contiguous, at any address
//          y           any length      bytes: nothing is written behind the segments' own
//          indptr      [segments + 1]  int32 or int64
//          new_indptr  [segments + 1]  int32
// Threads  as of one array, and of many bytes a warp writes 512 at once, where the first CTAs take
//          what is partial at the ends of segments. With few segments every warp adds up their
//          bytes; with many SegmentIndptrKernel, one CTA, does so first.
// Traffic  reads x once, writes y once.
// Source   numpy.packbits.
// Measured 2026-11-21 on an H200: 64 segments of 4001000 values 68.4 us, 0.961 of
//          the elementwise ceiling.
#pragma once

#include "precast/core/block.cuh"
#include "precast/core/launch.cuh"
#include "precast/paged/slot_mapping.cuh"
#include "precast/quantize/packbits.cuh"

namespace precast {

struct SegmentParams {
  PackBitsParams bits;
  const void* indptr;   // [segments + 1]
  int32_t* new_indptr;  // [segments + 1]
  int32_t segments;
  int32_t passes;     // of a warp; the launcher sets it
  int32_t span;       // bytes of y of a pass; the launcher sets it
  uint32_t end_ctas;  // that pack ends of segments, a warp each; the launcher sets it
};

// So many segments a warp adds up by itself.
constexpr int kSegmentsPerLane = 4;
constexpr int kFewSegments = 32 * kSegmentsPerLane;

#if defined(__CUDACC__)

// Of a lane in large segments. Why: where they are not aligned, a warp reads one more vector, of a
// line that another warp reads too. On H200 64 segments of 4001003 values took 68.8 us instead of
// 71.4 with four.
constexpr int kManyPackVecs = 8;
constexpr int kManyWarpBytes = kManyPackVecs / kPackVecs * kWarpBytes;

// Of indices whose type the template knows.
template <typename Int>
__device__ __forceinline__ int64_t load_bound(const void* indptr, int32_t i) {
  return load_index(Index{indptr, sizeof(Int) == 8}, i);
}

__device__ __forceinline__ int64_t bytes_of(int64_t length) {
  return length > 0 ? (length + 7) / 8 : 0;
}

// One CTA of kMaxThreads threads; each pass adds up as many segments.
template <typename Int>
__global__ __launch_bounds__(kMaxThreads) void SegmentIndptrKernel(
    const __grid_constant__ SegmentParams p) {
  __shared__ int32_t sums[kMaxWarps];
  const int thread = threadIdx.x, lane = thread % kWarpSize, warp = thread / kWarpSize;

  allow_next_grid();
  wait_for_previous_grid();

  int32_t before = 0;  // the bytes of the passes before
  for (int32_t start = 0; start <= p.segments; start += kMaxThreads) {
    const int32_t segment = start + thread;
    int32_t bytes = 0;
    if (segment < p.segments) {
      bytes = static_cast<int32_t>(
          bytes_of(load_bound<Int>(p.indptr, segment + 1) - load_bound<Int>(p.indptr, segment)));
    }
    int32_t sum = bytes;  // of the lanes up to this one
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const int32_t other = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum += other;
    }
    if (lane == kWarpSize - 1) sums[warp] = sum;
    __syncthreads();
    int32_t of_warps = sums[lane];  // of the warps up to the lane's
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const int32_t other = __shfl_up_sync(0xffffffffu, of_warps, distance);
      if (lane >= distance) of_warps += other;
    }
    const int32_t all = __shfl_sync(0xffffffffu, of_warps, kWarpSize - 1);
    const int32_t of_warps_before = __shfl_sync(0xffffffffu, of_warps, warp > 0 ? warp - 1 : 0);
    if (segment <= p.segments) {
      p.new_indptr[segment] = before + sum - bytes + (warp > 0 ? of_warps_before : 0);
    }
    before += all;
    __syncthreads();  // `sums` is written again.
  }
}

// A segment: its values in x and its bytes in y.
template <typename Int>
struct Segment {
  int32_t number;
  int64_t begin, end;
  int64_t first_byte, end_byte;

  __device__ __forceinline__ Segment(const SegmentParams& p, int32_t number, int64_t first_byte)
      : number(number),
        begin(load_bound<Int>(p.indptr, number)),
        end(load_bound<Int>(p.indptr, number + 1)),
        first_byte(first_byte),
        end_byte(first_byte + bytes_of(end - begin)) {}

  __device__ __forceinline__ void advance(const SegmentParams& p) {
    ++number;
    begin = end;
    end = load_bound<Int>(p.indptr, number + 1);
    first_byte = end_byte;
    end_byte += bytes_of(end - begin);
  }

  // On to the segment of the byte `at`, which is not before this one.
  __device__ __forceinline__ void advance_to(const SegmentParams& p, int64_t at) {
    while (end_byte <= at && number + 1 < p.segments) advance(p);
  }

  // Whether not all values of the span from the byte `at` on, which is its own, are its own.
  __device__ __forceinline__ bool ends_in(int64_t at) const {
    return begin + (at - first_byte) * 8 + kWarpValues > end;
  }
};

// The first byte of the span of kWarpBytes that has the byte `at`.
__device__ __forceinline__ int64_t span_of(const PackBitsParams& p, int64_t at) {
  const int64_t in_memory = at + offset_in(p.y, kWarpBytes);
  return at - in_memory % kWarpBytes;
}

// Where a warp starts: a segment whose first byte is not behind the warp's.
struct SegmentStart {
  int32_t number;
  int64_t first_byte;
  int64_t bytes;  // of all segments
};

// For the byte `first`, of the segments up to `number`. Of up to kFewSegments, from indptr alone;
// `writes`: the warp that writes new_indptr.
template <typename Int>
__device__ __forceinline__ SegmentStart add_up_segments(const SegmentParams& p, int64_t first,
                                                        int32_t number, bool writes) {
  const int lane = threadIdx.x % kWarpSize;
  const int each = (p.segments + kWarpSize - 1) / kWarpSize;
  int64_t bounds[kSegmentsPerLane + 1];
#pragma unroll
  for (int i = 0; i <= kSegmentsPerLane; ++i) {
    const int32_t bound = lane * each + i;
    bounds[i] = load_bound<Int>(p.indptr, bound < p.segments ? bound : p.segments);
  }
  int32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kSegmentsPerLane; ++i) {
    if (i < each) sum += static_cast<int32_t>(bytes_of(bounds[i + 1] - bounds[i]));
  }
  int32_t start = sum;  // becomes the sum of the lanes before
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const int32_t other = __shfl_up_sync(0xffffffffu, start, distance);
    if (lane >= distance) start += other;
  }
  const int32_t all = __shfl_sync(0xffffffffu, start, kWarpSize - 1);
  start -= sum;
  if (writes) {
    int32_t at = start;
#pragma unroll
    for (int i = 0; i < kSegmentsPerLane; ++i) {
      if (i < each && lane * each + i < p.segments) p.new_indptr[lane * each + i] = at;
      at += static_cast<int32_t>(bytes_of(bounds[i + 1] - bounds[i]));
    }
    if (lane == 0) p.new_indptr[p.segments] = all;
  }
  const bool before = lane * each <= number && start <= first;
  const uint32_t votes = __ballot_sync(0xffffffffu, before) | 1u;
  const int last = 31 - __clz(votes);
  return {last * each, __shfl_sync(0xffffffffu, start, last), all};
}

// The same of any number, by search in new_indptr, where the lanes divide what is left by 32.
__device__ __forceinline__ SegmentStart find_segment(const SegmentParams& p, int64_t first) {
  const int lane = threadIdx.x % kWarpSize;
  int32_t number = 0;
  for (int32_t count = p.segments; count > 1;) {
    const int32_t step = (count - 1) / kWarpSize + 1;
    const bool before =
        lane * step < count && load_bound<int32_t>(p.new_indptr, number + lane * step) <= first;
    const int last = 31 - __clz(__ballot_sync(0xffffffffu, before) | 1u);
    number += last * step;
    count = count - last * step < step ? count - last * step : step;
  }
  return {number, load_bound<int32_t>(p.new_indptr, number),
          load_bound<int32_t>(p.new_indptr, p.segments)};
}

// A byte a lane where there are few: eight loads that no branch tells apart, all on their way at
// once.
template <typename Int>
__device__ __forceinline__ void pack_few(const SegmentParams& p, Segment<Int> segment,
                                         int64_t first, int64_t bytes) {
  const int64_t byte = first + threadIdx.x % kWarpSize;
  if (byte < 0 || byte >= bytes) return;
  segment.advance_to(p, byte);
  const int64_t from = segment.begin + (byte - segment.first_byte) * 8;
  // Why: an indptr that is wrong must not read elsewhere.
  const int64_t end = segment.end < p.bits.count ? segment.end : p.bits.count;
  const Byte* x = static_cast<const Byte*>(p.bits.x) + from;
  unsigned short values[8] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (from >= 0 && from + i < end) values[i] = load_bytes<1>(x + i);
  }
  uint32_t bits = 0u;
#pragma unroll
  for (int i = 0; i < 8; ++i) bits |= values[i] != 0 ? 1u << i : 0u;
  store_bits(static_cast<Byte*>(p.bits.y) + byte, in_order(bits, p.bits.little));
}

// Packs what is partial, or of several segments: byte by byte, each from a segment of its own.
template <typename Int>
__device__ __forceinline__ void pack_partial(const SegmentParams& p, Segment<Int> segment,
                                             int64_t first, int span, int64_t bytes) {
  constexpr int kItems = 4;  // at once
  const Byte* x = static_cast<const Byte*>(p.bits.x);
  const int64_t last = first + span < bytes ? first + span : bytes;
#pragma unroll 1
  for (int64_t at = first + threadIdx.x % kWarpSize; at < last; at += kItems * kWarpSize) {
    uint2 values[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t byte = at + i * kWarpSize;
      values[i] = make_uint2(0u, 0u);
      if (byte < 0 || byte >= last) continue;
      segment.advance_to(p, byte);
      const int64_t from = segment.begin + (byte - segment.first_byte) * 8;
      // Why: an indptr that is wrong must not read elsewhere.
      const int64_t end = segment.end < p.bits.count ? segment.end : p.bits.count;
      if (from >= 0) values[i] = load_eight(x + from, end - from, x, x + p.bits.count);
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t byte = at + i * kWarpSize;
      if (byte < 0 || byte >= last) continue;
      store_bits(static_cast<Byte*>(p.bits.y) + byte,
                 in_order(pack_eight(values[i]), p.bits.little));
    }
  }
}

// The first end_ctas CTAs pack, a warp a segment, the spans in which segments end, and the others
// leave those out. Without such CTAs all is packed in order.
template <typename Int, bool kFew>
__global__ __launch_bounds__(kPackThreads) void SegmentPackBitsKernel(
    const __grid_constant__ SegmentParams p) {
  const Byte* x = static_cast<const Byte*>(p.bits.x);
  Byte* y = static_cast<Byte*>(p.bits.y);
  const int lane = threadIdx.x % kWarpSize;
  const bool packs_end = blockIdx.x < p.end_ctas;
  const int32_t end = blockIdx.x * kPackWarps + threadIdx.x / kWarpSize;  // number of its segment
  int64_t first = first_of_warp(p.bits, int64_t(blockIdx.x) - p.end_ctas, p.passes, p.span);

  allow_next_grid();
  if (may_overlap_previous_grid()) {
    // About where the warp's values are: each segment before puts them off by up to 7.
    // Each line once: lines that several lanes asked for cost a small call 0.3 us on H200.
    const int64_t near = first * 8 + lane * 128;
    if (!packs_end && lane * 128 < p.span * 8 && near >= 0 && near < p.bits.count) {
      prefetch_to_l2(x + near);
    }
    const int bound = static_cast<int>(threadIdx.x) * 16;  // of 64 or 128 bytes
    if (kFew && bound <= p.segments) prefetch_to_l2(static_cast<const Int*>(p.indptr) + bound);
  }
  wait_for_previous_grid();

  if (packs_end && end >= p.segments) return;
  SegmentStart start;
  if constexpr (kFew) {
    const bool writes = blockIdx.x == 0 && threadIdx.x < kWarpSize;
    start = add_up_segments<Int>(p, packs_end ? p.bits.bytes : max(first, int64_t(0)),
                                 packs_end ? end : p.segments - 1, writes);
  } else if (packs_end) {
    start = {end, load_bound<int32_t>(p.new_indptr, end),
             load_bound<int32_t>(p.new_indptr, p.segments)};
  } else {
    start = find_segment(p, max(first, int64_t(0)));
  }
  const int64_t bytes = start.bytes < p.bits.bytes ? start.bytes : p.bits.bytes;
  if (bytes == 0 || (!packs_end && first >= bytes)) return;
  Segment<Int> segment(p, start.number, start.first_byte);
  int passes = p.passes, span = p.span;
  if (packs_end) {
    while (segment.number < end) segment.advance(p);
    if (segment.first_byte == segment.end_byte) return;
    first = span_of(p.bits, segment.end_byte - 1);
    // The span is left to the first segment that ends in it, or to no one.
    if (first < segment.first_byte || !segment.ends_in(first)) return;
    passes = 1;
    span = kWarpBytes;
  }
  if (p.span == kWarpSize) {
    pack_few(p, segment, first, bytes);
    return;
  }
  // Whether `size` bytes of y from `at` on are of one segment, which is then that of `at`.
  const auto is_whole = [&](int64_t at, int size) {
    segment.advance_to(p, at);
    const int64_t from = segment.begin + (at - segment.first_byte) * 8;
    return at >= 0 && at + size <= bytes && from >= 0 && from + size * 8 <= segment.end &&
           whole_vecs_are_in(p.bits, x + from, size * 8);
  };
  const auto values_of = [&](int64_t at) {
    return x + segment.begin + (at - segment.first_byte) * 8;
  };
  for (int pass = 0; pass < passes && first < bytes; ++pass) {
    if (span == kManyWarpBytes && is_whole(first, kManyWarpBytes)) {
      pack_whole<kManyPackVecs>(values_of(first), y + first, p.bits.little);
    } else {
#pragma unroll 1
      for (int64_t at = first; at < first + span; at += kWarpBytes) {
        if (is_whole(at, kWarpBytes)) {
          pack_whole<kPackVecs>(values_of(at), y + at, p.bits.little);
        } else if (packs_end || p.end_ctas == 0 || at < 0 || !segment.ends_in(at)) {
          pack_partial(p, segment, at, kWarpBytes, bytes);
        }
      }
    }
    first += kPackWarps * span;
  }
}

#if !defined(__CUDACC_RTC__)

// Launches the sums of the segments' bytes on `stream`.
template <typename Int>
cudaError_t launch_segment_indptr(const SegmentParams& p, bool enable_pdl, cudaStream_t stream) {
  return launch(SegmentIndptrKernel<Int>, dim3(1), dim3(kMaxThreads), enable_pdl, stream, p);
}

// Launches the same and the packing of segments on `stream`, once or, from kFewSegments on, twice.
// cudaErrorInvalidValue from 2^39 bytes on.
template <typename Int>
cudaError_t launch_segment_packbits(SegmentParams p, bool enable_pdl, cudaStream_t stream) {
  // Why: a warp first looks for its segment, which takes as long as a pass. On H200 2000 segments
  // of 100000 values took 57.5 us, 58.1 with four passes and 60.3 with one.
  constexpr int kPasses = 2;
  const bool many = p.bits.bytes > int64_t(1) << 22;
  p.passes = many ? kPasses : 1;
  // Few bytes go one a lane: a warp alone is slow at what is partial.
  p.span = many ? kManyWarpBytes : p.bits.bytes > int64_t(1) << 14 ? kWarpBytes : kWarpSize;
  uint32_t ctas;
  if (!plan_packbits(p.bits, uint64_t(kPackWarps) * p.span * p.passes, ctas)) {
    return cudaErrorInvalidValue;
  }
  // Why: what is partial takes longer, and at the end of the grid nothing else would run meanwhile.
  // On H200 64 segments of 4001000 values took 71.9 us without such CTAs, 68.4 with them.
  const bool few_ends = many && p.bits.bytes >= p.segments * int64_t(16 * kWarpBytes);
  p.end_ctas = few_ends ? (uint32_t(p.segments) + kPackWarps - 1) / kPackWarps : 0;
  if (ctas + uint64_t(p.end_ctas) > 0x7fffffffu) return cudaErrorInvalidValue;
  const dim3 grid(ctas + p.end_ctas), block(kPackThreads);
  if (p.segments <= kFewSegments) {
    return launch(SegmentPackBitsKernel<Int, true>, grid, block, enable_pdl, stream, p);
  }
  const cudaError_t status = launch_segment_indptr<Int>(p, enable_pdl, stream);
  if (status != cudaSuccess) return status;
  return launch(SegmentPackBitsKernel<Int, false>, grid, block, enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
