// SPDX-License-Identifier: Apache-2.0
// The accumulators with which a lane reduces its elements of a tile, and the reductions over the
// statistics of tiles and chunks.
#pragma once

#include "precast/core/math.cuh"
#include "precast/sampling/radix_select.cuh"

namespace precast {

#if defined(__CUDACC__)

// Returns 1 if x is at least `threshold` or NaN, else 0. Why a float rather than a predicate:
// additions under a predicate wait for that predicate one after the other.
__device__ __forceinline__ float is_at_least(float x, float threshold) {
  float one;
  asm("set.geu.f32.f32 %0, %1, %2;" : "=f"(one) : "f"(x), "f"(threshold));
  return one;
}

// Returns max(x, 0); a NaN stays NaN.
__device__ __forceinline__ float positive_part(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

// Each accumulator takes the elements of a lane one by one in add().
struct MassAccumulator {
  float mass;
  __device__ __forceinline__ void add(float x) { mass += positive_part(x); }
};

struct ThresholdMassAccumulator {
  float mass, threshold;
  __device__ __forceinline__ void add(float x) {
    mass = __fmaf_rn(is_at_least(x, threshold), x, mass);
  }
};

struct MassMaxAccumulator {
  static constexpr bool kHasSecond = false;
  float mass, max;
  __device__ __forceinline__ void add(float x) {
    mass += positive_part(x);
    max = fmaxf(max, x);
  }
};

struct MaxAccumulator {
  static constexpr bool kHasSecond = false;
  float max;
  static constexpr float mass = 0.0f;
  __device__ __forceinline__ void add(float x) { max = fmaxf(max, x); }
};

struct NanMaxAccumulator {
  static constexpr bool kHasSecond = false;
  float max;
  static constexpr float mass = 0.0f;
  __device__ __forceinline__ void add(float x) { max = max_or_nan(max, x); }
};

// The largest element with the index of its first occurrence, and the second largest element.
struct TopTwoAccumulator {
  static constexpr bool kHasSecond = true;
  float max, second;
  int first_index, index;
  static constexpr float mass = 0.0f;
  __device__ __forceinline__ void add(float x) {
    second = fmaxf(second, fminf(max, x));
    if (x > max) first_index = index;
    max = max_or_nan(max, x);
    ++index;
  }
};

template <bool kTopTwo>
__device__ __forceinline__ auto initial_maxima() {
  const float none = -__int_as_float(0x7f800000);
  if constexpr (kTopTwo) {
    return TopTwoAccumulator{none, none, 0, 0};
  } else {
    return NanMaxAccumulator{none};
  }
}

struct FixedPointMassAccumulator {
  float threshold, scale;
  uint32_t mass;
  __device__ __forceinline__ void add(float x) {
    mass += to_fixed_point(x < threshold ? 0.0f : x, scale);
  }
};

struct FirstMatchAccumulator {
  float target;
  int index;
  int first_index;
  __device__ __forceinline__ void add(float x) {
    if (x == target && index < first_index) first_index = index;
    ++index;
  }
};

// Whether a row with this total mass is a distribution.
__device__ __forceinline__ bool is_valid_mass(float total) {
  return total > 0.0f && total < __int_as_float(0x7f800000);
}

// Reductions over pairs of statistics, one pair for each tile or chunk. All lanes of a warp call
// reduce() and get the result over the first `count` pairs.
struct MassMaxReduction {
  static __device__ __forceinline__ float2 reduce(const float2* stats, int count) {
    float mass = 0.0f, max = -__int_as_float(0x7f800000);
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
      const float2 one = stats[i];
      mass += one.x;
      max = max_or_nan(max, one.y);
    }
    return {mass, max};
  }
};

struct CountReduction {
  static __device__ __forceinline__ float2 reduce(const float2* stats, int count) {
    uint32_t x = 0, y = 0;
#pragma unroll 1
    for (int i = threadIdx.x % kWarpSize; i < count; i += kWarpSize) {
      x += __float_as_uint(stats[i].x);
      y += __float_as_uint(stats[i].y);
    }
    return {__uint_as_float(__reduce_add_sync(0xffffffffu, x)),
            __uint_as_float(__reduce_add_sync(0xffffffffu, y))};
  }
};

#endif  // __CUDACC__

}  // namespace precast
