// SPDX-License-Identifier: Apache-2.0
// Inverse-CDF sampling of an element by its weight, level by level.
//
// Each level (the chunks of the row, the tiles of the chunk, the lanes of the tile, the elements of
// the lane) has a uniform random number u of its own and takes the first item whose inclusive
// prefix sum of the masses exceeds u times the total. An item without mass is never taken that way.
// Where rounding leaves no such item, the last item with mass is taken.
#pragma once

#include "precast/sampling/philox.cuh"
#include "precast/sampling/row.cuh"

namespace precast {

// Rejection sampling: a token outside of the top-p set is rejected, and the next round samples from
// the larger weights. After this many rounds the exact threshold is computed, and one more draw
// follows.
constexpr uint32_t kMaxRejectionRounds = 4;
constexpr uint32_t kMaxDraws = kMaxRejectionRounds + 1;

// The Philox seeds and offsets of a launch.
struct RandomSource {
  const uint64_t* seeds;    // [1] or [num_outputs], or null
  const uint64_t* offsets;  // [1] or [num_outputs], or null
  uint64_t seed;
  uint64_t offset;
  bool seed_per_row;
  bool offset_per_row;

#if defined(__CUDACC__)
  // Why the row is not part of the counter if each row has a seed: the row's tokens then do not
  // depend on its place in the batch.
  __device__ __forceinline__ uint4 philox_words(uint32_t row, uint32_t draw) const {
    const uint64_t key = seeds == nullptr ? seed : load(seeds + (seed_per_row ? row : 0));
    const uint64_t counter_offset =
        offsets == nullptr ? offset : load(offsets + (offset_per_row ? row : 0));
    return philox(key, make_uint4(static_cast<uint32_t>(counter_offset),
                                  static_cast<uint32_t>(counter_offset >> 32),
                                  seed_per_row ? 0u : row, draw));
  }

 private:
  __device__ __forceinline__ static uint64_t load(const uint64_t* source) {
    uint64_t value;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(value) : "l"(source) : "memory");
    return value;
  }
#endif
};

#if defined(__CUDACC__)

// Inclusive prefix sum of the numbers that the first `count` lanes hold, added one after the other.
__device__ __forceinline__ float warp_inclusive_scan(float mass, int count) {
  const int lane = threadIdx.x % kWarpSize;
  float sum = 0.0f, prefix = 0.0f;
#pragma unroll 8
  for (int i = 0; i < count; ++i) {
    sum += __shfl_sync(0xffffffffu, mass, i);
    if (lane >= i) prefix = sum;
  }
  return prefix;
}

// Returns the first lane whose prefix sum exceeds the target, or else the last lane with mass.
__device__ __forceinline__ int first_exceeding(float prefix_sum, float target, float mass) {
  const uint32_t above = __ballot_sync(0xffffffffu, prefix_sum > target);
  const uint32_t has_mass = __ballot_sync(0xffffffffu, mass > 0.0f);
  return above != 0 ? __ffs(above) - 1 : has_mass != 0 ? 31 - __clz(has_mass) : 0;
}

// Samples one of the 32 lanes by their masses.
__device__ __forceinline__ int sample_lane(float mass, float u) {
  const float prefix_sum = warp_inclusive_scan(mass, kWarpSize);
  return first_exceeding(prefix_sum, u * __shfl_sync(0xffffffffu, prefix_sum, kWarpSize - 1), mass);
}

// Returns the next larger float of a number that is not negative.
__device__ __forceinline__ float next_float_up(float x) {
  return __uint_as_float(__float_as_uint(x) + 1);
}

// Samples one of `count` tiles by their masses. All lanes of one warp call and get the result.
__device__ __forceinline__ int sample_tile(const float2* tile_stats, int count, float mass,
                                           float u) {
  const int lane = threadIdx.x % kWarpSize;
  const float target = u * mass;
  float sum_before = 0.0f;
  int last_with_mass = 0;
#pragma unroll 1
  for (int first_tile = 0; first_tile < count; first_tile += kWarpSize) {
    const float tile_mass = first_tile + lane < count ? tile_stats[first_tile + lane].x : 0.0f;
    float sum = sum_before, prefix = 0.0f;
#pragma unroll 8
    for (int i = 0; i < kWarpSize; ++i) {
      sum += __shfl_sync(0xffffffffu, tile_mass, i);
      if (lane >= i) prefix = sum;
    }
    sum_before = sum;
    const uint32_t above = __ballot_sync(0xffffffffu, prefix > target);
    if (above != 0) return first_tile + __ffs(above) - 1;
    const uint32_t has_mass = __ballot_sync(0xffffffffu, tile_mass > 0.0f);
    if (has_mass != 0) last_with_mass = first_tile + 31 - __clz(has_mass);
  }
  return last_with_mass;
}

struct SampledItem {
  int index;  // index within the tile
  float weight;
};

// Samples an element of tile `i` of the CTA. All lanes of the tile's warp call it and get the
// result; `mass` is the lane's mass from reduce_tile().
template <typename Row>
__device__ __forceinline__ SampledItem sample_item(const Row& row, int i, float mass, float u_lane,
                                                   float u_item) {
  const int lane = sample_lane(mass, u_lane);
  const float weight = row.weight_at(i, lane, threadIdx.x % kWarpSize);
  const int item = sample_lane(weight, u_item);
  return {index_in_tile(lane, item), __shfl_sync(0xffffffffu, weight, item)};
}

#endif  // __CUDACC__

}  // namespace precast
