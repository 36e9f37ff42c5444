// SPDX-License-Identifier: Apache-2.0
// Conversion of four FP8 numbers in a register to f16, for MMAs that take no FP8.
//
// Below compute capability 8.9, e4m3 becomes f16 by moving its bits: an exponent that is biased by
// 7 is read as one that is biased by 15, so the result lacks a factor of 256. Whoever converts
// multiplies the sum of products by Fp8Rescale, which is exact. Source: OCP 8-bit Floating Point
// Specification 1.0.
#pragma once

#include "precast/core/fp8.cuh"

namespace precast {

#if defined(__CUDACC__)

// The factor that fp8x4_to_f16x2() leaves out.
template <typename KV>
struct Fp8Rescale {
  static constexpr float kScale = 1.0f;
};
#if PRECAST_SM < 89
template <>
struct Fp8Rescale<e4m3> {
  static constexpr float kScale = 256.0f;
};
#endif

// Converts four FP8 numbers to f16: `low` gets the first two, `high` the last two. Where the bits
// are moved, NaN of e4m3 becomes 480 with its sign; to keep NaN would cost the mainloop of
// attention more than the conversion does.
template <typename KV>
__device__ __forceinline__ void fp8x4_to_f16x2(uint32_t x, uint32_t& low, uint32_t& high);
template <>
__device__ __forceinline__ void fp8x4_to_f16x2<e5m2>(uint32_t x, uint32_t& low, uint32_t& high) {
  low = __byte_perm(x, 0u, 0x1404);
  high = __byte_perm(x, 0u, 0x3424);
}
template <>
__device__ __forceinline__ void fp8x4_to_f16x2<e4m3>(uint32_t x, uint32_t& low, uint32_t& high) {
#if PRECAST_SM < 89
  const uint32_t a = __byte_perm(x, 0u, 0x1404), b = __byte_perm(x, 0u, 0x3424);
  low = (a & 0x80008000u) | (a >> 1 & 0x3f803f80u);
  high = (b & 0x80008000u) | (b >> 1 & 0x3f803f80u);
#else
  // Why not the intrinsic: it needs a shift for the upper half.
  asm("{\n"
      ".reg .b16 a, b;\n"
      "mov.b32 {a, b}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, a;\n"
      "cvt.rn.f16x2.e4m3x2 %1, b;\n"
      "}"
      : "=r"(low), "=r"(high)
      : "r"(x));
#endif
}

// The same, but NaN stays NaN everywhere.
template <typename F>
__device__ __forceinline__ void fp8x4_to_f16x2_with_nan(uint32_t x, uint32_t& low, uint32_t& high) {
  fp8x4_to_f16x2<F>(x, low, high);
}
#if PRECAST_SM < 89
template <>
__device__ __forceinline__ void fp8x4_to_f16x2_with_nan<e4m3>(uint32_t x, uint32_t& low,
                                                              uint32_t& high) {
  fp8x4_to_f16x2<e4m3>(x, low, high);
  // The top bit of a byte is set if it is NaN: all other bits of the number are.
  const uint32_t nan = ((x & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
  const uint32_t a = __byte_perm(nan, 0u, 0x1404), b = __byte_perm(nan, 0u, 0x3424);
  // 0x8000 becomes 0x7c00, the exponent of NaN; the mantissa is not 0.
  low |= a - (a >> 5);
  high |= b - (b >> 5);
}
#endif

#endif  // __CUDACC__

}  // namespace precast
