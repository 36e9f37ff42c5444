// SPDX-License-Identifier: Apache-2.0
// The 8-bit floating-point types, and conversion to and from fp32.
//
// Conversion to fp8 rounds to nearest even and saturates: infinity and numbers beyond the largest
// one become that number; NaN stays NaN. From compute capability 8.9 on it is one instruction for
// two numbers, below it integer arithmetic with the same result. Source: OCP 8-bit Floating Point
// Specification 1.0.
#pragma once

#include "precast/core/types.cuh"

#if defined(__CUDACC__)
#include <cuda_fp8.h>
#endif

namespace precast {

#if defined(__CUDACC__)

using e4m3 = __nv_fp8_e4m3;
using e5m2 = __nv_fp8_e5m2;

template <typename F>
struct Fp8;
template <>
struct Fp8<e4m3> {
  static constexpr __nv_fp8_interpretation_t kKind = __NV_E4M3;
  static constexpr float kMax = 448.0f;
};
template <>
struct Fp8<e5m2> {
  static constexpr __nv_fp8_interpretation_t kKind = __NV_E5M2;
  static constexpr float kMax = 57344.0f;
};

template <>
struct TypeName<e4m3> {
  static constexpr DType value = DType::e4m3;
};
template <>
struct TypeName<e5m2> {
  static constexpr DType value = DType::e5m2;
};

template <>
__device__ __forceinline__ e4m3 from_float<e4m3>(float x) {
  return e4m3(x);
}
template <>
__device__ __forceinline__ e5m2 from_float<e5m2>(float x) {
  return e5m2(x);
}
__device__ __forceinline__ float to_float(e4m3 x) { return float(x); }
__device__ __forceinline__ float to_float(e5m2 x) { return float(x); }

// Packs four numbers in memory order, the first in the lowest byte.
template <typename F>
__device__ __forceinline__ uint32_t pack_fp8(float a, float b, float c, float d) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, Fp8<F>::kKind);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, Fp8<F>::kKind);
  return low | high << 16;
}

template <typename F>
__device__ __forceinline__ void unpack_fp8(uint32_t bits, float (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(
        static_cast<__nv_fp8x2_storage_t>(bits >> 16 * i), Fp8<F>::kKind);
    const float2 both = __half22float2(__half2(pair));
    x[2 * i] = both.x;
    x[2 * i + 1] = both.y;
  }
}

// Stores 4, 8 or 16 numbers; `target` must be aligned to that many bytes. The stores are volatile,
// like all of core/vec.cuh.
template <typename F>
__device__ __forceinline__ void store_fp8(F* target, const float (&x)[4]) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(target), "r"(pack_fp8<F>(x[0], x[1], x[2], x[3]))
               : "memory");
}

template <typename F>
__device__ __forceinline__ void store_fp8(F* target, const float (&x)[8]) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(target),
               "r"(pack_fp8<F>(x[0], x[1], x[2], x[3])), "r"(pack_fp8<F>(x[4], x[5], x[6], x[7]))
               : "memory");
}

template <typename F>
__device__ __forceinline__ void store_fp8(F* target, const float (&x)[16]) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target),
               "r"(pack_fp8<F>(x[0], x[1], x[2], x[3])), "r"(pack_fp8<F>(x[4], x[5], x[6], x[7])),
               "r"(pack_fp8<F>(x[8], x[9], x[10], x[11])),
               "r"(pack_fp8<F>(x[12], x[13], x[14], x[15]))
               : "memory");
}

template <typename F>
__device__ __forceinline__ void store_one_fp8(F* target, float x) {
  const unsigned short bits = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, Fp8<F>::kKind);
  asm volatile("st.global.u8 [%0], %1;" ::"l"(target), "h"(bits) : "memory");
}

#endif  // __CUDACC__

}  // namespace precast
