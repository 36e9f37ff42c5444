// SPDX-License-Identifier: Apache-2.0
// What the lanes of a warp fold of the elements of a slab.
#pragma once

#include "precast/sampling_select.cuh"

namespace precast {

#if defined(__CUDACC__)

// 1 if x is at least `floor`, or NaN, else 0. Why numbers and not predicates: additions under a
// predicate wait for it, one by one.
__device__ __forceinline__ float reaches(float x, float floor) {
  float one;
  asm("set.geu.f32.f32 %0, %1, %2;" : "=f"(one) : "f"(x), "f"(floor));
  return one;
}

// NaN if one is.
__device__ __forceinline__ float max_or_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
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
  float mass, max;
  __device__ __forceinline__ void add(float x) {
    mass += positive_part(x);
    max = fmaxf(max, x);
  }
};

struct FoldMax {
  float max;
  static constexpr float mass = 0.0f;
  __device__ __forceinline__ void add(float x) { max = fmaxf(max, x); }
};

struct FoldMaxOrNan {
  float max;
  static constexpr float mass = 0.0f;
  __device__ __forceinline__ void add(float x) { max = max_or_nan(max, x); }
};

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

#endif  // __CUDACC__

}  // namespace precast
