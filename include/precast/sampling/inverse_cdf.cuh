// SPDX-License-Identifier: Apache-2.0
// The draw of an element by its weight: the inverse of the cumulative distribution, level by level.
//
// Every level (groups, slabs of the group, lanes of the slab, elements of the lane) takes
// a uniform number of its own and the sequential sums of its masses: the first item whose sum
// exceeds u times the last sum. An item without mass is never the first; where rounding leaves
// none, the last item with mass is drawn.
#pragma once

#include "precast/sampling/philox.cuh"
#include "precast/sampling/row.cuh"

namespace precast {

// A token that top_p does not keep is drawn again from what is above it. What that does not settle
// in a few rounds, the exact threshold does, with one draw more.
constexpr uint32_t kRounds = 4;
constexpr uint32_t kDraws = kRounds + 1;

// Seeds and offsets of the rows' random numbers.
struct RandomSource {
  const uint64_t* seeds;    // [1] or [outputs], or null
  const uint64_t* offsets;  // [1] or [outputs], or null
  uint64_t seed;
  uint64_t offset;
  bool seed_per_row;
  bool offset_per_row;

#if defined(__CUDACC__)
  // Why the row is left out where each has a seed: its tokens are the same wherever it stands.
  __device__ __forceinline__ uint4 words(uint32_t row, uint32_t draw) const {
    const uint64_t key = seeds == nullptr ? seed : load(seeds + (seed_per_row ? row : 0));
    const uint64_t at = offsets == nullptr ? offset : load(offsets + (offset_per_row ? row : 0));
    return philox(key, make_uint4(static_cast<uint32_t>(at), static_cast<uint32_t>(at >> 32),
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

// Sequential sums of the numbers that the first `count` lanes hold: lane l gets that of 0 to l.
__device__ __forceinline__ float running_sum(float mass, int count) {
  const int lane = threadIdx.x % kWarpSize;
  float sum = 0.0f, mine = 0.0f;
#pragma unroll 8
  for (int i = 0; i < count; ++i) {
    sum += __shfl_sync(0xffffffffu, mass, i);
    if (lane >= i) mine = sum;
  }
  return mine;
}

// The lane whose running sum is the first to exceed the target, or the last one with mass.
__device__ __forceinline__ int first_above(float running, float target, float mass) {
  const uint32_t hits = __ballot_sync(0xffffffffu, running > target);
  const uint32_t some = __ballot_sync(0xffffffffu, mass > 0.0f);
  return hits != 0 ? __ffs(hits) - 1 : some != 0 ? 31 - __clz(some) : 0;
}

// Picks one of the lanes by their masses.
__device__ __forceinline__ int pick_one(float mass, float u) {
  const float running = running_sum(mass, kWarpSize);
  return first_above(running, u * __shfl_sync(0xffffffffu, running, kWarpSize - 1), mass);
}

// The next larger one of a number that is not negative.
__device__ __forceinline__ float just_above(float x) {
  return __uint_as_float(__float_as_uint(x) + 1);
}

// Picks one of `count` slabs by their masses; all lanes of one warp call and get it.
__device__ __forceinline__ int pick_slab(const float2* slots, int count, float mass, float u) {
  const int lane = threadIdx.x % kWarpSize;
  const float target = u * mass;
  float before = 0.0f;
  int last = 0;
#pragma unroll 1
  for (int start = 0; start < count; start += kWarpSize) {
    const float of_slab = start + lane < count ? slots[start + lane].x : 0.0f;
    float sum = before, mine = 0.0f;
#pragma unroll 8
    for (int i = 0; i < kWarpSize; ++i) {
      sum += __shfl_sync(0xffffffffu, of_slab, i);
      if (lane >= i) mine = sum;
    }
    before = sum;
    const uint32_t hits = __ballot_sync(0xffffffffu, mine > target);
    if (hits != 0) return start + __ffs(hits) - 1;
    const uint32_t some = __ballot_sync(0xffffffffu, of_slab > 0.0f);
    if (some != 0) last = start + 31 - __clz(some);
  }
  return last;
}

struct Drawn {
  int place;  // in the slab
  float weight;
};

// Picks an element of a slab, slab `i` of the row's CTA: all lanes of its warp call and get it. The
// lane's mass was folded by one.
template <typename Row>
__device__ __forceinline__ Drawn pick_element(const Row& row, int i, float mass, float u_lane,
                                              float u_element) {
  const int lane = pick_one(mass, u_lane);
  const float weight = row.weight(i, lane, threadIdx.x % kWarpSize);
  const int at = pick_one(weight, u_element);
  return {place_in_slab(lane, at), __shfl_sync(0xffffffffu, weight, at)};
}

#endif  // __CUDACC__

}  // namespace precast
