// SPDX-License-Identifier: Apache-2.0
// Eight truth values to a byte, of one array or of each segment of one.
//
//   big     y[j] = sum over i < 8 of (x[8 j + i] != 0) << (7 - i)
//   little  y[j] = sum over i < 8 of (x[8 j + i] != 0) << i
//
// What is behind the end of x, or of a segment, counts as 0. Segment s of x starts at indptr[s] and
// its bytes at new_indptr[s], the sum of ceil(length / 8) of the segments before it.
//
// Layout   x           [n]             bytes, contiguous, at any address
//          y           [ceil(n / 8)]   bytes; of segments, any length: nothing is written behind it
//          indptr      [segments + 1]  int32 or int64
//          new_indptr  [segments + 1]  int32
// Threads  PackBitsKernel: 32 values a thread, 16 of them 256 threads on. SegmentPackBitsKernel: 4
//          bytes of y a thread, 32 lanes beside each other; a warp finds its first segment by
//          bisection, a lane goes on from there. SegmentIndptrKernel: one CTA.
// Traffic  reads x once, writes y once.
// Source   numpy.packbits.
#pragma once

#include "precast/core/block.cuh"
#include "precast/core/items.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/vec.cuh"

namespace precast {

struct PackBitsParams {
  const void* x;  // [count]
  void* y;        // [ceil(count / 8)], or for segments [bytes]
  int64_t count;
  bool little;
  // Of segments alone:
  const void* indptr;         // [segments + 1]
  const int32_t* new_indptr;  // [segments + 1]
  int32_t segments;
  int64_t bytes;
};

struct SegmentIndptrParams {
  const void* indptr;   // [segments + 1]
  int32_t* new_indptr;  // [segments + 1]
  int32_t segments;
};

#if defined(__CUDACC__)

using Byte = unsigned char;

// The truth values of four bytes as the lowest 4 bits.
__device__ __forceinline__ uint32_t pack_four(uint32_t bytes, bool little) {
  // Bit 7 of each byte: whether it is not zero. Then one multiplication moves the four together.
  const uint32_t truth = (((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes) >> 7 & 0x01010101u;
  return truth * (little ? 0x01020408u : 0x08040201u) >> 24 & 15u;
}

__device__ __forceinline__ uint32_t pack_eight(uint32_t low, uint32_t high, bool little) {
  const uint32_t first = pack_four(low, little), second = pack_four(high, little);
  return little ? first | second << 4 : first << 4 | second;
}

__device__ __forceinline__ uint32_t load_byte_at(const Byte* source) {
  unsigned short bits;
  asm volatile("ld.global.u8 %0, [%1];" : "=h"(bits) : "l"(source) : "memory");
  return bits;
}

__device__ __forceinline__ uint2 load_eight_aligned(const Byte* source) {
  uint2 v;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(source) : "memory");
  return v;
}

// The first `count` of eight bytes from any address, zeros behind them. Reads whole aligned words,
// none of which holds no byte of x, which lies between `begin` and `end`.
__device__ __forceinline__ uint2 load_eight(const Byte* source, int64_t count, const Byte* begin,
                                            const Byte* end) {
  if (count <= 0) return make_uint2(0u, 0u);
  const uint32_t offset = reinterpret_cast<uint64_t>(source) & 7u;
  const Byte* aligned = source - offset;
  uint2 bytes;
  if (offset == 0 && aligned + 8 <= end) {
    bytes = load_eight_aligned(aligned);
  } else if (aligned >= begin && aligned + 16 <= end) {
    const uint2 low = load_eight_aligned(aligned), high = load_eight_aligned(aligned + 8);
    const uint64_t first = uint64_t(low.y) << 32 | low.x, second = uint64_t(high.y) << 32 | high.x;
    const uint64_t both = first >> 8 * offset | second << (64 - 8 * offset);
    bytes = make_uint2(static_cast<uint32_t>(both), static_cast<uint32_t>(both >> 32));
  } else {
    uint32_t words[2] = {0u, 0u};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < count) words[i / 4] |= load_byte_at(source + i) << (i % 4 * 8);
    }
    return make_uint2(words[0], words[1]);
  }
  if (count < 8) {
    const uint64_t kept = (uint64_t(bytes.y) << 32 | bytes.x) & ((uint64_t(1) << 8 * count) - 1);
    bytes = make_uint2(static_cast<uint32_t>(kept), static_cast<uint32_t>(kept >> 32));
  }
  return bytes;
}

__device__ __forceinline__ void store_byte(Byte* target, uint32_t bits) {
  asm volatile("st.global.u8 [%0], %1;" ::"l"(target), "h"(static_cast<unsigned short>(bits))
               : "memory");
}

// kAligned: x and y are 16-byte aligned, and whole vectors are read as such.
template <bool kAligned>
__global__ __launch_bounds__(kItemThreads) void PackBitsKernel(
    const __grid_constant__ PackBitsParams p) {
  constexpr int kItems = 2, kSize = kVecBytes;
  const Byte* x = static_cast<const Byte*>(p.x);
  Byte* y = static_cast<Byte*>(p.y);
  const int64_t first = (int64_t(blockIdx.x) * kItemThreads * kItems + threadIdx.x) * kSize;

  allow_next_grid();
  wait_for_previous_grid();

  uint4 values[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int64_t at = first + int64_t(i) * kItemThreads * kSize;
    if (kAligned && at + kSize <= p.count) {
      values[i] = load_vec(x + at).bits;
    } else {
      const uint2 low = load_eight(x + at, p.count - at, x, x + p.count);
      const uint2 high = load_eight(x + at + 8, p.count - at - 8, x, x + p.count);
      values[i] = make_uint4(low.x, low.y, high.x, high.y);
    }
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int64_t at = first + int64_t(i) * kItemThreads * kSize;
    const uint32_t low = pack_eight(values[i].x, values[i].y, p.little);
    const uint32_t high = pack_eight(values[i].z, values[i].w, p.little);
    if (kAligned && at + kSize <= p.count) {
      asm volatile("st.global.u16 [%0], %1;" ::"l"(y + at / 8),
                   "h"(static_cast<unsigned short>(low | high << 8))
                   : "memory");
    } else {
      if (at < p.count) store_byte(y + at / 8, low);
      if (at + 8 < p.count) store_byte(y + at / 8 + 1, high);
    }
  }
}

template <typename Index>
__device__ __forceinline__ int64_t load_index(const void* indptr, int32_t i) {
  Index value;
  if constexpr (sizeof(Index) == 4) {
    asm volatile("ld.global.s32 %0, [%1];"
                 : "=r"(value)
                 : "l"(static_cast<const Index*>(indptr) + i)
                 : "memory");
  } else {
    asm volatile("ld.global.s64 %0, [%1];"
                 : "=l"(value)
                 : "l"(static_cast<const Index*>(indptr) + i)
                 : "memory");
  }
  return value;
}

// One CTA of kMaxThreads threads; each pass adds up as many segments.
template <typename Index>
__global__ __launch_bounds__(kMaxThreads) void SegmentIndptrKernel(
    const __grid_constant__ SegmentIndptrParams p) {
  __shared__ int32_t sums[kMaxWarps];
  const int thread = threadIdx.x, lane = thread % kWarpSize, warp = thread / kWarpSize;

  allow_next_grid();
  wait_for_previous_grid();

  int32_t before = 0;  // the bytes of the passes before
  for (int32_t start = 0; start <= p.segments; start += kMaxThreads) {
    const int32_t segment = start + thread;
    int32_t bytes = 0;
    if (segment < p.segments) {
      const int64_t length =
          load_index<Index>(p.indptr, segment + 1) - load_index<Index>(p.indptr, segment);
      bytes = length > 0 ? static_cast<int32_t>((length + 7) / 8) : 0;
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

template <typename Index>
__global__ __launch_bounds__(kItemThreads) void SegmentPackBitsKernel(
    const __grid_constant__ PackBitsParams p) {
  constexpr int kItems = 4;
  const Byte* x = static_cast<const Byte*>(p.x);
  Byte* y = static_cast<Byte*>(p.y);
  const int64_t warp = int64_t(blockIdx.x) * (kItemThreads / kWarpSize) + threadIdx.x / kWarpSize;
  const int64_t first = warp * kWarpSize * kItems;  // byte of y

  allow_next_grid();
  wait_for_previous_grid();

  const int64_t written = load_index<int32_t>(p.new_indptr, p.segments);
  const int64_t bytes = written < p.bytes ? written : p.bytes;
  if (first >= bytes) return;
  int32_t segment = 0;  // the last one that starts at `first` or before
  for (int32_t count = p.segments; count > 1;) {
    const int32_t half = count / 2;
    if (load_index<int32_t>(p.new_indptr, segment + half) <= first) segment += half;
    count -= half;
  }
  uint2 values[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int64_t at = first + i * kWarpSize + threadIdx.x % kWarpSize;
    values[i] = make_uint2(0u, 0u);
    if (at >= bytes) continue;
    while (load_index<int32_t>(p.new_indptr, segment + 1) <= at) ++segment;
    const int64_t from = load_index<Index>(p.indptr, segment) +
                         (at - load_index<int32_t>(p.new_indptr, segment)) * 8;
    int64_t end = load_index<Index>(p.indptr, segment + 1);
    if (end > p.count) end = p.count;  // Why: an indptr that is wrong must not read elsewhere.
    if (from >= 0) values[i] = load_eight(x + from, end - from, x, x + p.count);
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int64_t at = first + i * kWarpSize + threadIdx.x % kWarpSize;
    if (at < bytes) store_byte(y + at, pack_eight(values[i].x, values[i].y, p.little));
  }
}

#if !defined(__CUDACC_RTC__)

// Launches the packing of one array on `stream`; nothing for an empty one. cudaErrorInvalidValue
// from 2^44 values on.
inline cudaError_t launch_packbits(const PackBitsParams& p, bool enable_pdl, cudaStream_t stream) {
  if (p.count == 0) return cudaSuccess;
  const uint64_t ctas = (uint64_t(p.count) - 1) / (2 * kVecBytes * kItemThreads) + 1;
  if (ctas > 0x7fffffffu) return cudaErrorInvalidValue;
  const bool aligned =
      reinterpret_cast<uint64_t>(p.x) % kVecBytes == 0 && reinterpret_cast<uint64_t>(p.y) % 2 == 0;
  const auto kernel = aligned ? PackBitsKernel<true> : PackBitsKernel<false>;
  return launch(kernel, dim3(static_cast<uint32_t>(ctas)), dim3(kItemThreads), enable_pdl, stream,
                p);
}

// Launches the sums of the segments' bytes on `stream`.
template <typename Index>
cudaError_t launch_segment_indptr(const SegmentIndptrParams& p, bool enable_pdl,
                                  cudaStream_t stream) {
  return launch(SegmentIndptrKernel<Index>, dim3(1), dim3(kMaxThreads), enable_pdl, stream, p);
}

// Launches the packing of segments on `stream`; nothing where there is no segment or no byte.
// cudaErrorInvalidValue from 2^41 bytes on.
template <typename Index>
cudaError_t launch_segment_packbits(const PackBitsParams& p, bool enable_pdl, cudaStream_t stream) {
  if (p.segments == 0 || p.bytes == 0) return cudaSuccess;
  const uint64_t ctas = (uint64_t(p.bytes) - 1) / (4 * kItemThreads) + 1;
  if (ctas > 0x7fffffffu) return cudaErrorInvalidValue;
  return launch(SegmentPackBitsKernel<Index>, dim3(static_cast<uint32_t>(ctas)), dim3(kItemThreads),
                enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
