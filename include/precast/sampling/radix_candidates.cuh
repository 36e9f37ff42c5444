// SPDX-License-Identifier: Apache-2.0
// The few elements that a threshold is among, as a list in every CTA, and the threshold of them.
#pragma once

#include "precast/sampling/radix_histogram.cuh"

namespace precast {

#if defined(__CUDACC__)

// All threads of a CTA: the least of the first `count` keys of the list that less than `need` is
// larger than.
__device__ __forceinline__ uint32_t find_in_list(SelectShared& s, int count, uint32_t need) {
  if (threadIdx.x == 0) s.result = 0xffffffffu;
  __syncthreads();
  int threads = 1;  // of a key, side by side
  while (threads < 8 && 2 * threads * count <= blockDim.x) threads *= 2;
#pragma unroll 1
  for (int start = 0; start < count; start += blockDim.x / threads) {
    const int i = start + threadIdx.x / threads;
    const uint32_t key = i < count ? s.list[i].x : 0xffffffffu;
    uint32_t above = 0;
#pragma unroll 4
    for (int j = threadIdx.x % threads; j < count; j += threads) {
      const uint2 other = s.list[j];
      above += other.x > key ? other.y : 0;
    }
#pragma unroll 1
    for (int distance = 1; distance < threads; distance *= 2) {
      above += __shfl_xor_sync(0xffffffffu, above, distance);
    }
    const uint32_t least = __reduce_min_sync(0xffffffffu, above < need ? key : 0xffffffffu);
    if (threadIdx.x % kWarpSize == 0) atomicMin(&s.result, least);
  }
  __syncthreads();
  return s.result;
}

// The k-th largest of the slabs' maxima: at least k elements reach it.
__device__ __forceinline__ float kth_of_maxima(SelectShared& s, const float* maxima, int slabs,
                                               int k) {
#pragma unroll 1
  for (int i = threadIdx.x; i < slabs; i += blockDim.x) s.list[i] = {to_key(maxima[i]), 1};
  return from_key(find_in_list(s, slabs, k));
}

// Lists the row's elements with such keys, and perhaps a zero of the other sign, in every CTA.
// Returns their number; what exceeds kCandidates is not there. `maxima`: those of the slabs, or
// null.
template <typename Row>
__device__ __forceinline__ int gather(Row& row, SelectShared& s, uint32_t* own_count, int ctas,
                                      Keys keys, const Amount& amount, const float* maxima) {
  const float most = from_key(keys.high), least = from_key(keys.high - keys.range);
  const auto wants = [&](int i) { return maxima == nullptr || maxima[row.first + i] >= least; };
  each_half(row, wants, [&](int, int, const float (&x)[kPerLane / 2]) {
    uint32_t hits = 0;
#pragma unroll
    for (int j = 0; j < kPerLane / 2; ++j) hits |= x[j] >= least && !(x[j] > most) ? 1u << j : 0;
#pragma unroll 1
    for (; hits != 0; hits &= hits - 1) {
      const int hit = __ffs(hits) - 1;
      float y = x[0];
#pragma unroll
      for (int j = 1; j < kPerLane / 2; ++j) y = hit == j ? x[j] : y;
      const uint32_t at = atomicAdd(own_count, 1u);
      if (at < kOwnCandidates) s.own[at] = to_key(y);
    }
  });
  show_shared(ctas);
  // A warp takes the list of a CTA, and of the next one that is left.
  const int lane = threadIdx.x % kWarpSize;
  int rank = threadIdx.x / kWarpSize;
  const uint32_t count = load_pair_from_cta(own_count, min(lane, ctas - 1)).x;
  uint2 two = load_pair_from_cta(&s.own[2 * lane], min(rank, ctas - 1));
  uint32_t up_to = lane < ctas ? count : 0;
#pragma unroll
  for (int distance = 1; distance < kMaxCtas; distance *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, up_to, distance);
    if (lane >= distance) up_to += other;
  }
  if (__any_sync(0xffffffffu, count > kOwnCandidates)) return kCandidates + 1;
#pragma unroll 1
  while (rank < ctas) {
    const int end = __shfl_sync(0xffffffffu, up_to, rank);
    const int start = end - __shfl_sync(0xffffffffu, count, rank);
#pragma unroll 1
    for (int i = start + 2 * lane; i < end; i += 2 * kWarpSize) {
      if (i >= start + 2 * kWarpSize) two = load_pair_from_cta(&s.own[i - start], rank);
      s.list[i] = {two.x, amount(from_key(two.x))};
      if (i + 1 < end) s.list[i + 1] = {two.y, amount(from_key(two.y))};
    }
    rank += blockDim.x / kWarpSize;
    if (rank < ctas) two = load_pair_from_cta(&s.own[2 * lane], rank);
  }
  return __shfl_sync(0xffffffffu, up_to, kMaxCtas - 1);
}

#endif  // __CUDACC__

}  // namespace precast
