// SPDX-License-Identifier: Apache-2.0
// Brings a list of distinct numbers in shared memory into descending order.
//
// The range of the numbers is cut into 2048 bins of equal width; each number goes to its bin, and
// there the larger ones are counted. Where a bin holds too many for that, a bitonic network sorts.
#pragma once

#include "precast/topk/radix_select.cuh"

namespace precast {

constexpr int kMaxSorted = 8192;
constexpr uint32_t kMostInBin = 256;

#if defined(__CUDACC__)

// A number's bin, counted from the largest.
struct Binning {
  uint32_t highest;
  int top;    // bits of a number below its highest 32
  int width;  // log2

  __device__ __forceinline__ uint32_t operator()(uint64_t x) const {
    return (highest - static_cast<uint32_t>(x >> top)) >> width;
  }
};

// For numbers of `bits` bits, of which the highest 32 lie between these.
__device__ __forceinline__ Binning binning_of(uint32_t highest, uint32_t lowest, int bits) {
  return {highest, bits - 32, max(0, 32 - __clz(highest - lowest) - kDigitBits)};
}

// All threads: numbers in descending order; behind `size` there is room up to the next power of
// two.
__device__ __forceinline__ void sort_bitonic(uint64_t* list, uint32_t size) {
  uint32_t padded = 2 * kWarpSize;
  while (padded < size) padded *= 2;
#pragma unroll 1
  for (uint32_t i = size + threadIdx.x; i < padded; i += blockDim.x) list[i] = 0;
  __syncthreads();
#pragma unroll 1
  for (uint32_t run = 2; run <= padded; run *= 2) {
#pragma unroll 1
    for (uint32_t stride = run / 2; stride > 0; stride /= 2) {
#pragma unroll 1
      for (uint32_t pair = threadIdx.x; pair < padded / 2; pair += blockDim.x) {
        const uint32_t low = 2 * pair - (pair & (stride - 1));
        const uint64_t a = list[low], b = list[low + stride];
        const bool descending = (low & run) == 0;
        if ((a < b) == descending) {
          list[low] = b;
          list[low + stride] = a;
        }
      }
      // A warp's pairs of strides up to its size lie in elements that are its own.
      if (stride > kWarpSize || (stride == 1 && run >= 2 * kWarpSize)) {
        __syncthreads();
      } else {
        __syncwarp();
      }
    }
  }
  __syncthreads();
}

// All threads: how many of the bins before each, in place; the largest count of those that start
// before `end`. Threads share bins.
__device__ __forceinline__ uint32_t sum_bins(ListShared& s, uint32_t* bins, uint32_t end) {
  constexpr int kMostEach = kBins / kLeastThreads;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int each = kBins / blockDim.x;
  uint32_t* own = bins + threadIdx.x * each;
  uint32_t held[kMostEach], sum = 0, most = 0;
#pragma unroll
  for (int i = 0; i < kMostEach; ++i) {
    held[i] = i < each ? own[i] : 0;
    sum += held[i];
  }
  uint32_t up_to = sum;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, up_to, distance);
    if (lane >= distance) up_to += other;
  }
  if (lane == kWarpSize - 1) s.warp_sums[warp] = up_to;
  __syncthreads();
  uint32_t before = up_to - sum + warp_sum(lane < warp ? s.warp_sums[lane] : 0u);
#pragma unroll
  for (int i = 0; i < kMostEach; ++i) {
    if (i < each) own[i] = before;
    if (before < end) most = max(most, held[i]);
    before += held[i];
  }
  most = __reduce_max_sync(0xffffffffu, most);
  if (lane == 0) s.warp_most[warp] = most;
  __syncthreads();
  return __reduce_max_sync(0xffffffffu, lane < blockDim.x / kWarpSize ? s.warp_most[lane] : 0u);
}

// All threads: calls put(rank, x) for each of the `size` numbers of `bits` bits, from 32 up.
// Another barrier than this function's goes ahead of it.
template <typename Put>
__device__ __forceinline__ void in_order(ListShared& s, uint64_t* list, uint32_t size, int bits,
                                         const Put& put) {
  constexpr int kMostEach = kMaxSorted / kLeastThreads;
  uint32_t* bins = s.histogram[0];
#pragma unroll 1
  for (int i = threadIdx.x; i < kBins; i += blockDim.x) bins[i] = 0;
  if (threadIdx.x == 0) {
    s.highest = 0;
    s.lowest = 0xffffffffu;
  }
  const int top = bits - 32;
  uint32_t highest = 0, lowest = 0xffffffffu;
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) {
    const uint32_t x = static_cast<uint32_t>(list[i] >> top);
    highest = max(highest, x);
    lowest = min(lowest, x);
  }
  __syncthreads();
  highest = __reduce_max_sync(0xffffffffu, highest);
  lowest = __reduce_min_sync(0xffffffffu, lowest);
  if (threadIdx.x % kWarpSize == 0) {
    atomicMax(&s.highest, highest);
    atomicMin(&s.lowest, lowest);
  }
  __syncthreads();
  const Binning bin = binning_of(s.highest, s.lowest, bits);
  uint64_t x[kMostEach];
  uint32_t place[kMostEach];
#pragma unroll
  for (int i = 0; i < kMostEach; ++i) {
    const uint32_t at = i * blockDim.x + threadIdx.x;
    if (at >= size) continue;
    x[i] = list[at];
    place[i] = atomicAdd(&bins[bin(x[i])], 1u);
  }
  __syncthreads();
  if (sum_bins(s, bins, size) > kMostInBin) {
    sort_bitonic(list, size);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) put(i, list[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kMostEach; ++i) {
    if (i * blockDim.x + threadIdx.x < size) list[bins[bin(x[i])] + place[i]] = x[i];
  }
  __syncthreads();
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) {
    const uint64_t own = list[i];
    const uint32_t at = bin(own);
    uint32_t rank = bins[at];
    const uint32_t end = at + 1 < kBins ? bins[at + 1] : size;
#pragma unroll 4
    for (uint32_t j = rank; j < end; ++j) rank += list[j] > own;
    put(rank, own);
  }
}

// All threads: for numbers of `bits` bits that are seen by all, from a key of `floor` on.
__device__ __forceinline__ Binning binning_from(ListShared& s, const uint64_t* list, uint32_t size,
                                                uint32_t floor, int bits) {
  if (threadIdx.x == 0) s.highest = 0;
  uint32_t highest = 0;
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) {
    highest = max(highest, static_cast<uint32_t>(list[i] >> (bits - 32)));
  }
  __syncthreads();
  highest = __reduce_max_sync(0xffffffffu, highest);
  if (threadIdx.x % kWarpSize == 0) atomicMax(&s.highest, highest);
  __syncthreads();
  const int unused = 32 + kPlaceBits - bits;
  return binning_of(s.highest, floor << unused, bits);
}

// Puts numbers on a list.
struct PutOnList {
  uint64_t* list;

  __device__ __forceinline__ void operator()(uint32_t i, uint64_t x) const { list[i] = x; }
};

// All threads: calls put(rank, x) for each of the k largest of `size` numbers, by way of `sorted`,
// which has room for k + kMostInBin. False, and nothing is called, where a bin holds too many.
// `bins`: zeros. Numbers may lie below the range of `bin`. Ranks are those of some other order of
// the k where not `ordered`.
template <typename Put>
__device__ __forceinline__ bool largest_in_order(ListShared& s, uint32_t* bins,
                                                 const uint64_t* list, uint64_t* sorted,
                                                 uint32_t size, uint32_t k, const Binning& bin,
                                                 bool ordered, const Put& put) {
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) {
    atomicAdd(&bins[min(bin(list[i]), kBins - 1u)], 1u);
  }
  __syncthreads();
  if (sum_bins(s, bins, k) > kMostInBin) return false;
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) {
    const uint64_t x = list[i];
    const uint32_t at = atomicAdd(&bins[min(bin(x), kBins - 1u)], 1u);
    if (at < k + kMostInBin) sorted[at] = x;
  }
  __syncthreads();
  // A bin's number is now where the next one starts.
  const uint32_t end = min(size, k + kMostInBin);
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < end; i += blockDim.x) {
    const uint64_t own = sorted[i];
    const uint32_t at = min(bin(own), kBins - 1u);
    uint32_t rank = at == 0 ? 0 : bins[at - 1];
    uint32_t next = rank < k ? bins[at] : rank;
    if (!ordered && next <= k) rank = next = i;
#pragma unroll 4
    for (uint32_t j = rank; j < next; ++j) rank += sorted[j] > own;
    if (rank < k) put(rank, own);
  }
  return true;
}

#endif  // __CUDACC__

}  // namespace precast
