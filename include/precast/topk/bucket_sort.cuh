// SPDX-License-Identifier: Apache-2.0
// Sorts a list of distinct integers in shared memory into descending order by one bucket pass.
//
// The range of the integers is divided into 2048 bins of equal width. Each integer goes to its bin
// and is ranked there by counting the larger ones. If a bin holds too many for that, a bitonic
// network sorts the list.
#pragma once

#include "precast/topk/radix_select.cuh"

namespace precast {

constexpr int kMaxSorted = 8192;
constexpr uint32_t kMaxInBin = 256;

#if defined(__CUDACC__)

// Maps an integer to its bin; bin 0 holds the largest.
struct BinMap {
  uint32_t highest;
  int shift;  // the number of bits below the highest 32 of an integer
  int log2_width;

  __device__ __forceinline__ uint32_t operator()(uint64_t x) const {
    return (highest - static_cast<uint32_t>(x >> shift)) >> log2_width;
  }
};

// Returns the map for integers of `bits` bits whose highest 32 bits lie in this range.
__device__ __forceinline__ BinMap make_bin_map(uint32_t highest, uint32_t lowest, int bits) {
  return {highest, bits - 32, max(0, 32 - __clz(highest - lowest) - kDigitBits)};
}

// Sorts in descending order. The list must have room up to the next power of two. All threads call
// it.
__device__ __forceinline__ void bitonic_sort(uint64_t* list, uint32_t size) {
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
      // With strides up to the warp size, a warp's pairs lie in elements that only this warp
      // accesses.
      if (stride > kWarpSize || (stride == 1 && run >= 2 * kWarpSize)) {
        __syncthreads();
      } else {
        __syncwarp();
      }
    }
  }
  __syncthreads();
}

// Replaces the counts of the bins by their exclusive prefix sums. Returns the largest count among
// the bins whose prefix sum is below `end`. All threads call it, each for some of the bins.
__device__ __forceinline__ uint32_t exclusive_scan_bins(TopKStorage& s, uint32_t* bins,
                                                        uint32_t end) {
  constexpr int kMaxBinsPerThread = kNumBins / kMinThreads;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int bins_per_thread = kNumBins / blockDim.x;
  uint32_t* own = bins + threadIdx.x * bins_per_thread;
  uint32_t counts[kMaxBinsPerThread], sum = 0, max_count = 0;
#pragma unroll
  for (int i = 0; i < kMaxBinsPerThread; ++i) {
    counts[i] = i < bins_per_thread ? own[i] : 0;
    sum += counts[i];
  }
  uint32_t prefix_sum = sum;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, prefix_sum, distance);
    if (lane >= distance) prefix_sum += other;
  }
  if (lane == kWarpSize - 1) s.warp_sums[warp] = prefix_sum;
  __syncthreads();
  uint32_t before = prefix_sum - sum + warp_sum(lane < warp ? s.warp_sums[lane] : 0u);
#pragma unroll
  for (int i = 0; i < kMaxBinsPerThread; ++i) {
    if (i < bins_per_thread) own[i] = before;
    if (before < end) max_count = max(max_count, counts[i]);
    before += counts[i];
  }
  max_count = __reduce_max_sync(0xffffffffu, max_count);
  if (lane == 0) s.warp_max_counts[warp] = max_count;
  __syncthreads();
  return __reduce_max_sync(0xffffffffu,
                           lane < blockDim.x / kWarpSize ? s.warp_max_counts[lane] : 0u);
}

// Calls put(rank, x) for each of the `size` integers of `bits` bits, which is at least 32. A
// barrier must precede the call. All threads call it.
template <typename Put>
__device__ __forceinline__ void bucket_sort(TopKStorage& s, uint64_t* list, uint32_t size, int bits,
                                            const Put& put) {
  constexpr int kMaxItemsPerThread = kMaxSorted / kMinThreads;
  uint32_t* bins = s.histogram[0];
#pragma unroll 1
  for (int i = threadIdx.x; i < kNumBins; i += blockDim.x) bins[i] = 0;
  if (threadIdx.x == 0) {
    s.max_key = 0;
    s.min_key = 0xffffffffu;
  }
  const int shift = bits - 32;
  uint32_t highest = 0, lowest = 0xffffffffu;
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) {
    const uint32_t x = static_cast<uint32_t>(list[i] >> shift);
    highest = max(highest, x);
    lowest = min(lowest, x);
  }
  __syncthreads();
  highest = __reduce_max_sync(0xffffffffu, highest);
  lowest = __reduce_min_sync(0xffffffffu, lowest);
  if (threadIdx.x % kWarpSize == 0) {
    atomicMax(&s.max_key, highest);
    atomicMin(&s.min_key, lowest);
  }
  __syncthreads();
  const BinMap bin_map = make_bin_map(s.max_key, s.min_key, bits);
  uint64_t x[kMaxItemsPerThread];
  uint32_t rank_in_bin[kMaxItemsPerThread];
#pragma unroll
  for (int i = 0; i < kMaxItemsPerThread; ++i) {
    const uint32_t at = i * blockDim.x + threadIdx.x;
    if (at >= size) continue;
    x[i] = list[at];
    rank_in_bin[i] = atomicAdd(&bins[bin_map(x[i])], 1u);
  }
  __syncthreads();
  if (exclusive_scan_bins(s, bins, size) > kMaxInBin) {
    bitonic_sort(list, size);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) put(i, list[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kMaxItemsPerThread; ++i) {
    if (i * blockDim.x + threadIdx.x < size) list[bins[bin_map(x[i])] + rank_in_bin[i]] = x[i];
  }
  __syncthreads();
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) {
    const uint64_t item = list[i];
    const uint32_t bin = bin_map(item);
    uint32_t rank = bins[bin];
    const uint32_t end = bin + 1 < kNumBins ? bins[bin + 1] : size;
#pragma unroll 4
    for (uint32_t j = rank; j < end; ++j) rank += list[j] > item;
    put(rank, item);
  }
}

// Returns the map for a list of integers of `bits` bits whose keys are at least `threshold_key`.
// The list must be visible to all threads, which all call it.
__device__ __forceinline__ BinMap bin_map_of_list(TopKStorage& s, const uint64_t* list,
                                                  uint32_t size, uint32_t threshold_key, int bits) {
  if (threadIdx.x == 0) s.max_key = 0;
  uint32_t highest = 0;
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) {
    highest = max(highest, static_cast<uint32_t>(list[i] >> (bits - 32)));
  }
  __syncthreads();
  highest = __reduce_max_sync(0xffffffffu, highest);
  if (threadIdx.x % kWarpSize == 0) atomicMax(&s.max_key, highest);
  __syncthreads();
  const int unused = 32 + kIndexBits - bits;
  return make_bin_map(s.max_key, threshold_key << unused, bits);
}

// Stores integers to a list.
struct StoreToList {
  uint64_t* list;

  __device__ __forceinline__ void operator()(uint32_t i, uint64_t x) const { list[i] = x; }
};

// Calls put(rank, x) for each of the k largest of `size` integers, using `sorted`, which has room
// for k + kMaxInBin. Returns false, without a call of put, if a bin holds too many. `bins` must be
// zero. Integers below the range of `bin_map` go to its last bin. Unless `ordered`, the ranks are
// some permutation of 0 to k - 1. All threads call it.
template <typename Put>
__device__ __forceinline__ bool bucket_select(TopKStorage& s, uint32_t* bins, const uint64_t* list,
                                              uint64_t* sorted, uint32_t size, uint32_t k,
                                              const BinMap& bin_map, bool ordered, const Put& put) {
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) {
    atomicAdd(&bins[min(bin_map(list[i]), kNumBins - 1u)], 1u);
  }
  __syncthreads();
  if (exclusive_scan_bins(s, bins, k) > kMaxInBin) return false;
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) {
    const uint64_t x = list[i];
    const uint32_t slot = atomicAdd(&bins[min(bin_map(x), kNumBins - 1u)], 1u);
    if (slot < k + kMaxInBin) sorted[slot] = x;
  }
  __syncthreads();
  // bins[i] is now the start of bin i + 1.
  const uint32_t end = min(size, k + kMaxInBin);
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < end; i += blockDim.x) {
    const uint64_t item = sorted[i];
    const uint32_t bin = min(bin_map(item), kNumBins - 1u);
    uint32_t rank = bin == 0 ? 0 : bins[bin - 1];
    uint32_t next = rank < k ? bins[bin] : rank;
    if (!ordered && next <= k) rank = next = i;
#pragma unroll 4
    for (uint32_t j = rank; j < next; ++j) rank += sorted[j] > item;
    if (rank < k) put(rank, item);
  }
  return true;
}

#endif  // __CUDACC__

}  // namespace precast
