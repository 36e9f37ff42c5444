// SPDX-License-Identifier: Apache-2.0
// The number formats of block-scaled tensors: e2m1, the 4-bit floating-point type, and ue8m0, a
// scale that is a power of two.
//
// e2m1 has the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6, in the order of its codes 0 to 7, and the
// sign in bit 3. It has neither infinity nor NaN. Conversion rounds to nearest, ties to the even
// code, and saturates; the sign of zero is kept, and NaN becomes 6. From compute capability 10.0 on
// it is one instruction for two numbers, below it fp32 arithmetic with the same result. ue8m0 is
// the exponent byte of an fp32: byte e stands for 2^(e - 127), and 255 for NaN. Source: OCP
// Microscaling Formats (MX) Specification 1.0.
#pragma once

#include "precast/core/fp8.cuh"
#include "precast/core/types.cuh"

// The conversion instruction needs a target with architecture-specific (100a) or family-specific
// (100f) features.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && \
    (defined(__CUDA_ARCH_SPECIFIC__) || defined(__CUDA_ARCH_FAMILY_SPECIFIC__))
#define PRECAST_HAS_E2M1_CONVERSION 1
#else
#define PRECAST_HAS_E2M1_CONVERSION 0
#endif

namespace precast {

#if defined(__CUDACC__)

// The sum over i of the bits of 2^23 times 16^i, modulo 2^32.
constexpr uint32_t kE2m1CodesBias = 0x4b000000u + 0xb0000000u;

// Returns 2^23 plus the code of a magnitude between 0 and 6, as bits. Why: an fp32 from 2^23 on is
// a whole number, so that the addition rounds to nearest even. The code grows by one for each 0.5
// below 2, each 1 below 4 and each 2 below 6. Of these three lines through even codes the lowest is
// the right one.
__device__ __forceinline__ uint32_t e2m1_code(float magnitude) {
  const uint32_t halves = __float_as_uint(__fmaf_rn(magnitude, 2.0f, 8388608.0f));
  const uint32_t ones = __float_as_uint(__fadd_rn(magnitude, 8388610.0f));
  const uint32_t twos = __float_as_uint(__fmaf_rn(magnitude, 0.5f, 8388612.0f));
  // The minimum of integers is one instruction on sm90, that of floats two.
  return min(min(halves, ones), twos);
}

// Packs eight numbers in memory order, the first in the lowest 4 bits. A NaN must have no sign, as
// the results of arithmetic have none.
__device__ __forceinline__ uint32_t pack_e2m1(const float (&x)[8]) {
#if PRECAST_HAS_E2M1_CONVERSION
  uint32_t word;
  asm("{\n"
      ".reg .b8 a, b, c, d;\n"
      "cvt.rn.satfinite.e2m1x2.f32 a, %2, %1;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 c, %6, %5;\n"
      "cvt.rn.satfinite.e2m1x2.f32 d, %8, %7;\n"
      "mov.b32 %0, {a, b, c, d};\n"
      "}"
      : "=r"(word)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]));
  return word;
#else
  uint32_t codes = 0, signs = 0;
#pragma unroll
  for (int i = 7; i >= 0; --i) {
    codes = codes * 16 + e2m1_code(fminf(fabsf(x[i]), 6.0f));
    signs = __funnelshift_l(__float_as_uint(x[i]), signs, 4);
  }
  return (codes - kE2m1CodesBias) | (signs & 0x88888888u);
#endif
}

// Does the same for magnitudes below 7 without NaN. Bits 15 and 31 of the words are the signs,
// those of numbers 2 i and 2 i + 1 in word i, as in packed 16-bit numbers. This saves the clamp and
// the sign handling of each number.
__device__ __forceinline__ uint32_t pack_small_e2m1(const float (&magnitude)[8], uint4 signs) {
  uint32_t codes = 0;
#pragma unroll
  for (int i = 7; i >= 0; --i) codes = codes * 16 + e2m1_code(magnitude[i]);
  const uint32_t low = __byte_perm(signs.x, signs.y, 0x7351);   // of numbers 0, 2, 1, 3
  const uint32_t high = __byte_perm(signs.z, signs.w, 0x7351);  // of numbers 4, 6, 5, 7
  const uint32_t even = __byte_perm(low, high, 0x5410);
  const uint32_t odd = __byte_perm(low, high, 0x7632);
  return (codes - kE2m1CodesBias) | (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
}

// Converts eight numbers, the first in the lowest 4 bits, to pairs of f16, which holds them
// exactly. Why: the lower byte of each f16 is zero, and one byte permutation looks up the upper
// bytes of four numbers.
__device__ __forceinline__ void e2m1_to_f16(uint32_t codes, uint32_t (&pairs)[4]) {
  const uint32_t magnitudes = codes & 0x77777777u;
  const uint32_t shifted = codes << 4;  // Bits 7 of its bytes are the signs of numbers 0, 2, 4, 6,
  const uint32_t signs[2] = {
      // and bits 7 of the bytes of `codes` those of the other numbers.
      __byte_perm(shifted, codes, 0x5140), __byte_perm(shifted, codes, 0x7362)};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t upper =
        __byte_perm(0x3e3c3800u, 0x46444240u, magnitudes >> 16 * i) | (signs[i] & 0x80808080u);
    pairs[2 * i] = __byte_perm(upper, 0u, 0x1404);
    pairs[2 * i + 1] = __byte_perm(upper, 0u, 0x3424);
  }
}

__device__ __forceinline__ uint32_t to_bits(e4m3 x) { return x.__x; }

// Returns the number twice.
__device__ __forceinline__ __half2 e4m3_to_f16_pair(uint32_t bits) {
  return __half2(
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bits * 0x0101u), __NV_E4M3));
}

// Returns the smallest ue8m0 scale such that amax / scale does not exceed the largest number of a
// format, 2^kExponent * (1 + kMantissa / 2^23). `amax` must not be negative. Infinity gives the
// largest scale, 254.
template <int kExponent, uint32_t kMantissa>
__device__ __forceinline__ uint32_t ue8m0_scale(float amax) {
  const uint32_t bits = __float_as_uint(amax);
  const int exponent = static_cast<int>((bits + 0x7fffffu - kMantissa) >> 23) - kExponent;
  return bits == 0x7f800000u ? 254u : static_cast<uint32_t>(exponent > 0 ? exponent : 0);
}

__device__ __forceinline__ uint32_t ue8m0_scale_of_e2m1(float amax) {
  return ue8m0_scale<2, 0x400000u>(amax);  // 6 = 4 * 1.5
}

__device__ __forceinline__ uint32_t ue8m0_scale_of_e4m3(float amax) {
  return ue8m0_scale<8, 0x600000u>(amax);  // 448 = 256 * 1.75
}

__device__ __forceinline__ float ue8m0_to_float(uint32_t scale) {
  const uint32_t bits = scale == 255u ? 0x7fffffffu : scale << 23;
  return __uint_as_float(scale == 0u ? 0x00400000u : bits);
}

// Returns 1 / scale, which is exact for scales up to 254.
__device__ __forceinline__ float ue8m0_reciprocal(uint32_t scale) {
  return __uint_as_float(scale == 254u ? 0x00400000u : (254u - scale) << 23);
}

#endif  // __CUDACC__

}  // namespace precast
