// SPDX-License-Identifier: Apache-2.0
// What the lanes of a warp fold of the elements of a slab, and what is told of slabs and groups.
#pragma once

#include "precast/core/math.cuh"
#include "precast/sampling/radix_select.cuh"

namespace precast {

#if defined(__CUDACC__)

// 1 if x is at least `floor`, or NaN, else 0. Why numbers and not predicates: additions under a
// predicate wait for it, one by one.
__device__ __forceinline__ float reaches(float x, float floor) {
  float one;
  asm("set.geu.f32.f32 %0, %1, %2;" : "=f"(one) : "f"(x), "f"(floor));
  return one;
}

// NaN stays.
__device__ __forceinline__ float positive_part(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

// What lanes fold of their elements.
struct FoldMass {
  float mass;
  __device__ __forceinline__ void add(float x) { mass += positive_part(x); }
};

struct FoldCutMass {
  float mass, floor;
  __device__ __forceinline__ void add(float x) { mass = __fmaf_rn(reaches(x, floor), x, mass); }
};

struct FoldMassAndMax {
  static constexpr bool kHasSecond = false;
  float mass, max;
  __device__ __forceinline__ void add(float x) {
    mass += positive_part(x);
    max = fmaxf(max, x);
  }
};

struct FoldMax {
  static constexpr bool kHasSecond = false;
  float max;
  static constexpr float mass = 0.0f;
  __device__ __forceinline__ void add(float x) { max = fmaxf(max, x); }
};

struct FoldMaxOrNan {
  static constexpr bool kHasSecond = false;
  float max;
  static constexpr float mass = 0.0f;
  __device__ __forceinline__ void add(float x) { max = max_or_nan(max, x); }
};

// The largest, the first of its places, and the second largest.
struct FoldTopTwo {
  static constexpr bool kHasSecond = true;
  float max, second;
  int at, seen;
  static constexpr float mass = 0.0f;
  __device__ __forceinline__ void add(float x) {
    second = fmaxf(second, fminf(max, x));
    if (x > max) at = seen;
    max = max_or_nan(max, x);
    ++seen;
  }
};

template <bool kTwo>
__device__ __forceinline__ auto no_tops() {
  const float none = -__int_as_float(0x7f800000);
  if constexpr (kTwo) {
    return FoldTopTwo{none, none, 0, 0};
  } else {
    return FoldMaxOrNan{none};
  }
}

struct FoldFixedMass {
  float floor, scale;
  uint32_t mass;
  __device__ __forceinline__ void add(float x) { mass += fixed_mass(x < floor ? 0.0f : x, scale); }
};

struct FirstEqual {
  float wanted;
  int seen;
  int at;
  __device__ __forceinline__ void add(float x) {
    if (x == wanted && seen < at) at = seen;
    ++seen;
  }
};

// Whether a row of this mass is a distribution.
__device__ __forceinline__ bool is_mass(float total) {
  return total > 0.0f && total < __int_as_float(0x7f800000);
}

// The pairs that slabs and groups tell. over(): all lanes of a warp get the sum of `count` of them.
struct MassAndMax {
  static __device__ __forceinline__ float2 over(const float2* slots, int count) {
    float mass = 0.0f, max = -__int_as_float(0x7f800000);
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
      const float2 one = slots[i];
      mass += one.x;
      max = max_or_nan(max, one.y);
    }
    return {mass, max};
  }
};

struct Counts {
  static __device__ __forceinline__ float2 over(const float2* slots, int count) {
    uint32_t x = 0, y = 0;
#pragma unroll 1
    for (int i = threadIdx.x % kWarpSize; i < count; i += kWarpSize) {
      x += __float_as_uint(slots[i].x);
      y += __float_as_uint(slots[i].y);
    }
    return {__uint_as_float(__reduce_add_sync(0xffffffffu, x)),
            __uint_as_float(__reduce_add_sync(0xffffffffu, y))};
  }
};

#endif  // __CUDACC__

}  // namespace precast
