// SPDX-License-Identifier: Apache-2.0
// Packs eight truth values into a byte, for each segment of an array, as in quantize/packbits.cuh.
//
// Values behind the end of a segment count as 0. Segment s of x starts at indptr[s], and its bytes
// start at new_indptr[s], the sum of ceil(length / 8) over the segments before it.
//
// Layout   x           [n]             bytes, contiguous, at any address
//          y           any length      bytes; nothing is written behind those of the segments
//          indptr      [segments + 1]  int32 or int64
//          new_indptr  [segments + 1]  int32
// Threads  as for one array; for large arrays a warp writes 512 bytes at once, and the first CTAs
//          pack the partial spans at the ends of segments. How a warp finds its segment is said in
//          quantize/packbits_indptr.cuh.
// Traffic  reads x once, writes y once
// Source   numpy.packbits
// Measured 2026-11-21 on an H200: 64 segments of 4001000 values 68.4 us, 0.961 of
//          the elementwise ceiling.
#pragma once

#include "precast/core/launch.cuh"
#include "precast/quantize/packbits.cuh"
#include "precast/quantize/packbits_indptr.cuh"

namespace precast {

#if defined(__CUDACC__)

// Vectors of a lane in large segments. Why: in unaligned segments a warp reads one more vector, in
// a line that another warp reads, too. On an H200, 64 segments of 4001003 values took 68.8 us
// instead of 71.4 with four.
constexpr int kLargePackVecs = 8;
constexpr int kLargeWarpBytes = kLargePackVecs / kPackVecs * kWarpBytes;

// Returns the first byte of the kWarpBytes span that holds byte `at`.
__device__ __forceinline__ int64_t span_of(const PackBitsParams& p, int64_t at) {
  const int64_t in_memory = at + offset_in(p.y, kWarpBytes);
  return at - in_memory % kWarpBytes;
}

// Packs one byte a lane, for small arrays. The eight loads have no branches between them, so that
// all are in flight at once.
template <typename Int>
__device__ __forceinline__ void pack_small(const SegmentParams& p, Segment<Int> segment,
                                           int64_t first, int64_t bytes) {
  const int64_t byte = first + threadIdx.x % kWarpSize;
  if (byte < 0 || byte >= bytes) return;
  segment.advance_to(p, byte);
  const int64_t from = segment.begin + (byte - segment.first_byte) * 8;
  // Why: a wrong indptr must not make the kernel read elsewhere.
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
  store_bits(static_cast<Byte*>(p.bits.y) + byte, to_bit_order(bits, p.bits.little));
}

// Packs spans that are partial or have several segments: byte by byte, each from its own segment.
template <typename Int>
__device__ __forceinline__ void pack_partial(const SegmentParams& p, Segment<Int> segment,
                                             int64_t first, int span, int64_t bytes) {
  constexpr int kItems = 4;  // loads in flight
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
      // Why: a wrong indptr must not make the kernel read elsewhere.
      const int64_t end = segment.end < p.bits.count ? segment.end : p.bits.count;
      if (from >= 0) values[i] = load_8_bytes(x + from, end - from, x, x + p.bits.count);
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t byte = at + i * kWarpSize;
      if (byte < 0 || byte >= last) continue;
      store_bits(static_cast<Byte*>(p.bits.y) + byte,
                 to_bit_order(pack_8_bits(values[i]), p.bits.little));
    }
  }
}

// The first end_ctas CTAs pack the spans in which segments end, one segment a warp, and the other
// CTAs skip these spans. Without such CTAs everything is packed in order.
template <typename Int, bool kFew>
__global__ __launch_bounds__(kPackThreads) void SegmentPackBitsKernel(
    const __grid_constant__ SegmentParams p) {
  const Byte* x = static_cast<const Byte*>(p.bits.x);
  Byte* y = static_cast<Byte*>(p.bits.y);
  const int lane = threadIdx.x % kWarpSize;
  const bool packs_end = blockIdx.x < p.end_ctas;
  const int32_t end = blockIdx.x * kPackWarps + threadIdx.x / kWarpSize;  // index of its segment
  int64_t first = first_byte_of_warp(p.bits, int64_t(blockIdx.x) - p.end_ctas, p.passes, p.span);

  launch_dependent_grids();
  if (may_overlap_previous_grid()) {
    // The approximate place of the warp's values: each previous segment shifts them by up to 7.
    // Each line is prefetched once, because several requests for a line cost a small launch 0.3 us
    // on an H200.
    const int64_t expected = first * 8 + lane * 128;
    if (!packs_end && lane * 128 < p.span * 8 && expected >= 0 && expected < p.bits.count) {
      prefetch_to_l2(x + expected);
    }
    const int bound = static_cast<int>(threadIdx.x) * 16;  // entries in 64 or 128 bytes
    if (kFew && bound <= p.segments) prefetch_to_l2(static_cast<const Int*>(p.indptr) + bound);
  }
  wait_on_dependent_grids();

  if (packs_end && end >= p.segments) return;
  SegmentStart start;
  if constexpr (kFew) {
    const bool writes = blockIdx.x == 0 && threadIdx.x < kWarpSize;
    start = scan_segments<Int>(p, packs_end ? p.bits.bytes : max(first, int64_t(0)),
                               packs_end ? end : p.segments - 1, writes);
  } else if (packs_end) {
    start = {end, load_indptr<int32_t>(p.new_indptr, end),
             load_indptr<int32_t>(p.new_indptr, p.segments)};
  } else {
    start = find_segment(p, max(first, int64_t(0)));
  }
  const int64_t bytes = start.bytes < p.bits.bytes ? start.bytes : p.bits.bytes;
  if (bytes == 0 || (!packs_end && first >= bytes)) return;
  Segment<Int> segment(p, start.index, start.first_byte);
  int passes = p.passes, span = p.span;
  if (packs_end) {
    while (segment.index < end) segment.advance(p);
    if (segment.first_byte == segment.end_byte) return;
    first = span_of(p.bits, segment.end_byte - 1);
    // The span belongs to the first segment that ends in it, if there is one.
    if (first < segment.first_byte || !segment.ends_in(first)) return;
    passes = 1;
    span = kWarpBytes;
  }
  if (p.span == kWarpSize) {
    pack_small(p, segment, first, bytes);
    return;
  }
  // Whether `size` bytes of y from `at` on belong to one segment. Advances to the segment of `at`.
  const auto is_whole = [&](int64_t at, int size) {
    segment.advance_to(p, at);
    const int64_t from = segment.begin + (at - segment.first_byte) * 8;
    return at >= 0 && at + size <= bytes && from >= 0 && from + size * 8 <= segment.end &&
           full_vecs_in_bounds(p.bits, x + from, size * 8);
  };
  const auto values_of = [&](int64_t at) {
    return x + segment.begin + (at - segment.first_byte) * 8;
  };
  for (int pass = 0; pass < passes && first < bytes; ++pass) {
    if (span == kLargeWarpBytes && is_whole(first, kLargeWarpBytes)) {
      pack_full_vecs<kLargePackVecs>(values_of(first), y + first, p.bits.little);
    } else {
#pragma unroll 1
      for (int64_t at = first; at < first + span; at += kWarpBytes) {
        if (is_whole(at, kWarpBytes)) {
          pack_full_vecs<kPackVecs>(values_of(at), y + at, p.bits.little);
        } else if (packs_end || p.end_ctas == 0 || at < 0 || !segment.ends_in(at)) {
          pack_partial(p, segment, at, kWarpBytes, bytes);
        }
      }
    }
    first += kPackWarps * span;
  }
}

#if !defined(__CUDACC_RTC__)

// Launches the packing of segments on `stream`: one kernel for up to kMaxScannedSegments segments,
// else two. Returns cudaErrorInvalidValue from 2^39 bytes on.
template <typename Int>
cudaError_t launch_segment_packbits(SegmentParams p, bool enable_pdl, cudaStream_t stream) {
  // Why two: a warp first searches its segment, which takes as long as a pass. On an H200, 2000
  // segments of 100000 values took 57.5 us, 58.1 with four passes and 60.3 with one.
  constexpr int kPasses = 2;
  const bool many = p.bits.bytes > int64_t(1) << 22;
  p.passes = many ? kPasses : 1;
  // Small arrays are packed one byte a lane, because a single warp is slow at partial spans.
  p.span = many ? kLargeWarpBytes : p.bits.bytes > int64_t(1) << 14 ? kWarpBytes : kWarpSize;
  uint32_t ctas;
  if (!plan_packbits(p.bits, uint64_t(kPackWarps) * p.span * p.passes, ctas)) {
    return cudaErrorInvalidValue;
  }
  // Why: partial spans take longer, and at the end of the grid no other work would overlap them. On
  // an H200, 64 segments of 4001000 values took 71.9 us without such CTAs, and 68.4 with them.
  const bool few_ends = many && p.bits.bytes >= p.segments * int64_t(16 * kWarpBytes);
  p.end_ctas = few_ends ? (uint32_t(p.segments) + kPackWarps - 1) / kPackWarps : 0;
  if (ctas + uint64_t(p.end_ctas) > 0x7fffffffu) return cudaErrorInvalidValue;
  const dim3 grid(ctas + p.end_ctas), block(kPackThreads);
  if (p.segments <= kMaxScannedSegments) {
    return launch(SegmentPackBitsKernel<Int, true>, grid, block, enable_pdl, stream, p);
  }
  const cudaError_t status = launch_segment_indptr<Int>(p, enable_pdl, stream);
  if (status != cudaSuccess) return status;
  return launch(SegmentPackBitsKernel<Int, false>, grid, block, enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
