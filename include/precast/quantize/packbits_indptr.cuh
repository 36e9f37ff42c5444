// SPDX-License-Identifier: Apache-2.0
// Finds the segments of the values and of the bytes in quantize/packbits_segments.cuh: prefix sums
// of their bytes, and the segment at which a warp starts.
//
// Threads  For up to kMaxScannedSegments segments every warp computes the prefix sums by itself
//          (scan_segments); for more, SegmentIndptrKernel, one CTA, does so first, and each warp
//          searches in its result (find_segment). All lanes of a warp call these two, and all get
//          the result.
// Traffic  reads indptr once for each warp that scans, once for SegmentIndptrKernel
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
  int32_t passes;     // of a warp; set by the launcher
  int32_t span;       // bytes of y that a warp writes in a pass; set by the launcher
  uint32_t end_ctas;  // CTAs that pack the ends of segments, one for each warp; set by the launcher
};

// A warp computes the prefix sums of up to this many segments by itself.
constexpr int kSegmentsPerLane = 4;
constexpr int kMaxScannedSegments = 32 * kSegmentsPerLane;

#if defined(__CUDACC__)

// Loads an entry of an indptr whose type is a template parameter.
template <typename Int>
__device__ __forceinline__ int64_t load_indptr(const void* indptr, int32_t i) {
  return load_index(IndexTensor{indptr, sizeof(Int) == 8}, i);
}

__device__ __forceinline__ int64_t bytes_of(int64_t length) {
  return length > 0 ? (length + 7) / 8 : 0;
}

// One CTA of kMaxThreads threads; each pass takes as many segments.
template <typename Int>
__global__ __launch_bounds__(kMaxThreads) void SegmentIndptrKernel(
    const __grid_constant__ SegmentParams p) {
  __shared__ int32_t warp_sums[kMaxWarps];
  const int thread = threadIdx.x, lane = thread % kWarpSize, warp = thread / kWarpSize;

  launch_dependent_grids();
  wait_on_dependent_grids();

  int32_t before = 0;  // bytes of the previous passes
  for (int32_t start = 0; start <= p.segments; start += kMaxThreads) {
    const int32_t segment = start + thread;
    int32_t bytes = 0;
    if (segment < p.segments) {
      bytes = static_cast<int32_t>(
          bytes_of(load_indptr<Int>(p.indptr, segment + 1) - load_indptr<Int>(p.indptr, segment)));
    }
    int32_t sum = bytes;  // inclusive prefix sum over the lanes
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const int32_t other = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum += other;
    }
    if (lane == kWarpSize - 1) warp_sums[warp] = sum;
    __syncthreads();
    int32_t warp_prefix = warp_sums[lane];  // inclusive prefix sum over the warps
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const int32_t other = __shfl_up_sync(0xffffffffu, warp_prefix, distance);
      if (lane >= distance) warp_prefix += other;
    }
    const int32_t all = __shfl_sync(0xffffffffu, warp_prefix, kWarpSize - 1);
    const int32_t warp_prefix_before =
        __shfl_sync(0xffffffffu, warp_prefix, warp > 0 ? warp - 1 : 0);
    if (segment <= p.segments) {
      p.new_indptr[segment] = before + sum - bytes + (warp > 0 ? warp_prefix_before : 0);
    }
    before += all;
    __syncthreads();  // `warp_sums` is written again.
  }
}

// The values of a segment in x, and its bytes in y.
template <typename Int>
struct Segment {
  int32_t index;
  int64_t begin, end;
  int64_t first_byte, end_byte;

  __device__ __forceinline__ Segment(const SegmentParams& p, int32_t index, int64_t first_byte)
      : index(index),
        begin(load_indptr<Int>(p.indptr, index)),
        end(load_indptr<Int>(p.indptr, index + 1)),
        first_byte(first_byte),
        end_byte(first_byte + bytes_of(end - begin)) {}

  __device__ __forceinline__ void advance(const SegmentParams& p) {
    ++index;
    begin = end;
    end = load_indptr<Int>(p.indptr, index + 1);
    first_byte = end_byte;
    end_byte += bytes_of(end - begin);
  }

  // Advances to the segment of byte `at`, which must not lie before this one.
  __device__ __forceinline__ void advance_to(const SegmentParams& p, int64_t at) {
    while (end_byte <= at && index + 1 < p.segments) advance(p);
  }

  // Whether the span from byte `at` on, which belongs to this segment, holds values behind its end.
  __device__ __forceinline__ bool ends_in(int64_t at) const {
    return begin + (at - first_byte) * 8 + kWarpValues > end;
  }
};

// The segment at which a warp starts. Its first byte is not behind that of the warp.
struct SegmentStart {
  int32_t index;
  int64_t first_byte;
  int64_t bytes;  // of all segments
};

// Finds the start for byte `first` among the segments up to `index`, from indptr alone; for up to
// kMaxScannedSegments segments. The warp with `writes` also writes new_indptr.
template <typename Int>
__device__ __forceinline__ SegmentStart scan_segments(const SegmentParams& p, int64_t first,
                                                      int32_t index, bool writes) {
  const int lane = threadIdx.x % kWarpSize;
  const int each = (p.segments + kWarpSize - 1) / kWarpSize;
  int64_t bounds[kSegmentsPerLane + 1];
#pragma unroll
  for (int i = 0; i <= kSegmentsPerLane; ++i) {
    const int32_t bound = lane * each + i;
    bounds[i] = load_indptr<Int>(p.indptr, bound < p.segments ? bound : p.segments);
  }
  int32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kSegmentsPerLane; ++i) {
    if (i < each) sum += static_cast<int32_t>(bytes_of(bounds[i + 1] - bounds[i]));
  }
  int32_t start = sum;  // becomes the exclusive prefix sum
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
  const bool before = lane * each <= index && start <= first;
  const uint32_t votes = __ballot_sync(0xffffffffu, before) | 1u;
  const int last = 31 - __clz(votes);
  return {last * each, __shfl_sync(0xffffffffu, start, last), all};
}

// Does the same for any number of segments, by a 32-way search in new_indptr.
__device__ __forceinline__ SegmentStart find_segment(const SegmentParams& p, int64_t first) {
  const int lane = threadIdx.x % kWarpSize;
  int32_t index = 0;
  for (int32_t count = p.segments; count > 1;) {
    const int32_t step = (count - 1) / kWarpSize + 1;
    const bool before =
        lane * step < count && load_indptr<int32_t>(p.new_indptr, index + lane * step) <= first;
    const int last = 31 - __clz(__ballot_sync(0xffffffffu, before) | 1u);
    index += last * step;
    count = count - last * step < step ? count - last * step : step;
  }
  return {index, load_indptr<int32_t>(p.new_indptr, index),
          load_indptr<int32_t>(p.new_indptr, p.segments)};
}

#if !defined(__CUDACC_RTC__)

// Launches the prefix sums of the segments' bytes on `stream`.
template <typename Int>
cudaError_t launch_segment_indptr(const SegmentParams& p, bool enable_pdl, cudaStream_t stream) {
  return launch(SegmentIndptrKernel<Int>, dim3(1), dim3(kMaxThreads), enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
