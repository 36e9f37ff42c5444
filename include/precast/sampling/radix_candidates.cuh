// SPDX-License-Identifier: Apache-2.0
// The last step of radix selection: the few elements of one bin are gathered as candidates in every
// CTA, and the threshold is selected among them.
#pragma once

#include "precast/sampling/radix_histogram.cuh"

namespace precast {

#if defined(__CUDACC__)

// Returns the smallest of the first `count` candidate keys such that the amounts of all larger keys
// sum to less than `target`. All threads of a CTA call it.
__device__ __forceinline__ uint32_t select_from_list(RadixSelectStorage& s, int count,
                                                     uint32_t target) {
  if (threadIdx.x == 0) s.result = 0xffffffffu;
  __syncthreads();
  int threads = 1;  // threads that share a key
  while (threads < 8 && 2 * threads * count <= blockDim.x) threads *= 2;
#pragma unroll 1
  for (int start = 0; start < count; start += blockDim.x / threads) {
    const int i = start + threadIdx.x / threads;
    const uint32_t key = i < count ? s.candidates[i].x : 0xffffffffu;
    uint32_t amount_above = 0;
#pragma unroll 4
    for (int j = threadIdx.x % threads; j < count; j += threads) {
      const uint2 other = s.candidates[j];
      amount_above += other.x > key ? other.y : 0;
    }
#pragma unroll 1
    for (int distance = 1; distance < threads; distance *= 2) {
      amount_above += __shfl_xor_sync(0xffffffffu, amount_above, distance);
    }
    const uint32_t smallest =
        __reduce_min_sync(0xffffffffu, amount_above < target ? key : 0xffffffffu);
    if (threadIdx.x % kWarpSize == 0) atomicMin(&s.result, smallest);
  }
  __syncthreads();
  return s.result;
}

// Returns the k-th largest of the tile maxima: at least k elements reach it.
__device__ __forceinline__ float kth_tile_maximum(RadixSelectStorage& s, const float* tile_maxima,
                                                  int num_tiles, int k) {
#pragma unroll 1
  for (int i = threadIdx.x; i < num_tiles; i += blockDim.x) {
    s.candidates[i] = {to_ordered_key(tile_maxima[i]), 1};
  }
  return from_ordered_key(select_from_list(s, num_tiles, k));
}

// Gathers the row's elements with keys in the range in every CTA; a zero of the other sign may be
// among them. Returns their number. If it exceeds kMaxCandidates, the candidates are not complete.
// `tile_maxima` may be null.
template <typename Row>
__device__ __forceinline__ int gather_candidates(Row& row, RadixSelectStorage& s,
                                                 uint32_t* cta_count, int ctas, KeyRange keys,
                                                 const ItemAmount& amount,
                                                 const float* tile_maxima) {
  const float upper_bound = from_ordered_key(keys.high),
              lower_bound = from_ordered_key(keys.high - keys.range);
  const auto needs_tile = [&](int i) {
    return tile_maxima == nullptr || tile_maxima[row.first_tile + i] >= lower_bound;
  };
  for_each_half_tile(row, needs_tile, [&](int, int, const float (&x)[kItemsPerLane / 2]) {
    uint32_t matches = 0;
#pragma unroll
    for (int j = 0; j < kItemsPerLane / 2; ++j) {
      matches |= x[j] >= lower_bound && !(x[j] > upper_bound) ? 1u << j : 0;
    }
#pragma unroll 1
    for (; matches != 0; matches &= matches - 1) {
      const int match = __ffs(matches) - 1;
      float y = x[0];
#pragma unroll
      for (int j = 1; j < kItemsPerLane / 2; ++j) y = match == j ? x[j] : y;
      const uint32_t slot = atomicAdd(cta_count, 1u);
      if (slot < kMaxCandidatesPerCta) s.cta_candidates[slot] = to_ordered_key(y);
    }
  });
  publish_smem(ctas);
  // Each warp copies the candidates of one CTA, and continues with the next CTA that is left.
  const int lane = threadIdx.x % kWarpSize;
  int rank = threadIdx.x / kWarpSize;
  const uint32_t count = load_pair_from_cta(cta_count, min(lane, ctas - 1)).x;
  uint2 pair = load_pair_from_cta(&s.cta_candidates[2 * lane], min(rank, ctas - 1));
  uint32_t prefix_sum = lane < ctas ? count : 0;
#pragma unroll
  for (int distance = 1; distance < kMaxSamplerCtas; distance *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, prefix_sum, distance);
    if (lane >= distance) prefix_sum += other;
  }
  if (__any_sync(0xffffffffu, count > kMaxCandidatesPerCta)) return kMaxCandidates + 1;
#pragma unroll 1
  while (rank < ctas) {
    const int end = __shfl_sync(0xffffffffu, prefix_sum, rank);
    const int start = end - __shfl_sync(0xffffffffu, count, rank);
#pragma unroll 1
    for (int i = start + 2 * lane; i < end; i += 2 * kWarpSize) {
      if (i >= start + 2 * kWarpSize) pair = load_pair_from_cta(&s.cta_candidates[i - start], rank);
      s.candidates[i] = {pair.x, amount(from_ordered_key(pair.x))};
      if (i + 1 < end) s.candidates[i + 1] = {pair.y, amount(from_ordered_key(pair.y))};
    }
    rank += blockDim.x / kWarpSize;
    if (rank < ctas) pair = load_pair_from_cta(&s.cta_candidates[2 * lane], rank);
  }
  return __shfl_sync(0xffffffffu, prefix_sum, kMaxSamplerCtas - 1);
}

#endif  // __CUDACC__

}  // namespace precast
