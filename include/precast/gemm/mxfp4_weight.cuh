// SPDX-License-Identifier: Apache-2.0
// Weights of MXFP4: e2m1 numbers, and a ue8m0 scale for 32 of them along the depth.
//
//   weight[n, k] = e2m1[n, k] * 2^(scale[n, k / 32] - 127)
//
// Bits     Of a word of gemm/w4_weight.cuh. Number i of a pair is half i of a register: bf16 has
//          its sign in bit 15 and its lowest exponent and highest mantissa bits in bits 8 to 6. A
//          word has the bits where few instructions bring them there. The code is sign, e1, e0, m;
//          bits are those of half i:
//
//            pair      sign                    e1   e0   m     brought by
//            0         15                      8    7    6     nothing
//            1         11                      4    3    2     a shift by 4 to the left
//            2         5 of the other half     14   13   12    a rotation by 6 to the right
//            3         9                       10   1    0     two shifts
//
//          The bits mean e2m1 * 2^-126 there, because the exponent's bias is 127 instead of 1, and
//          for codes 0 and 1 the number is as subnormal as in e2m1. One multiplication by a power
//          of two makes it the weight, exactly; it is smaller by 2^64, so that the power has an
//          exponent for all scales from 2^-127 to 2^65. Larger ones are not supported. Scales below
//          2^-68 give weights that lose bits.
// Scales   [columns / 64, depth / 128, column 16, sixteen 4, 4] bytes: byte j of [c, s] is the
//          scale of column 16 s + c of 64, and of the numbers 32 j to 32 j + 31 of 128 along the
//          depth.
// Source   OCP Microscaling Formats (MX) Specification 1.0
#pragma once

#include "precast/core/mma_operand.cuh"
#include "precast/gemm/w4_weight.cuh"

namespace precast {

// The element type of such a weight: two numbers in a byte.
struct mxfp4 {
  unsigned char pair;
};

template <>
constexpr int kW4ScaleBytes<mxfp4> = kW4Columns * kW4Depth / 32;

#if defined(__CUDACC__)

// Returns what the bits of a weight are multiplied by, twice: 2^(scale - 65), of one of the bytes.
__device__ __forceinline__ uint32_t mxfp4_factor(uint32_t scales, int byte) {
  const uint32_t both = __byte_perm(scales, 0u, 0x4040 + byte * 0x0101);
  // Why not shifted: the pipe that shifts is the busier one.
  uint32_t factor;
  asm("mad.lo.u32 %0, %1, 128, %2;" : "=r"(factor) : "r"(both), "r"((62u << 7) * 0x00010001u));
  return factor;
}

// Returns the products of two numbers each.
__device__ __forceinline__ uint32_t multiply_bf16_pairs(uint32_t x, uint32_t y) {
  return fma_bf16_pairs(x, y, 0x80008000u);
}

// Converts a word to the weights of its four pairs, which are smaller by 2^64. `low` and `high` are
// the factors of columns g and g + 8.
__device__ __forceinline__ void unpack_mxfp4(uint32_t word, uint32_t low, uint32_t high,
                                             uint32_t (&pairs)[4]) {
  constexpr uint32_t kBits = 0x81c081c0u;
  pairs[0] = multiply_bf16_pairs(word & kBits, low);
  pairs[1] = multiply_bf16_pairs(word << 4 & kBits, high);
  pairs[2] = multiply_bf16_pairs(__funnelshift_r(word, word, 6) & kBits, low);
  pairs[3] = multiply_bf16_pairs((word << 6 & 0x80c080c0u) | (word >> 2 & 0x01000100u), high);
}

// MMAs of bf16 tokens with such a weight.
template <>
struct MmaOperands<bf16, mxfp4> : MmaOperands<bf16, bf16> {
  static constexpr float kRescale = 18446744073709551616.0f;  // 2^64
};

template <>
class W4Scales<mxfp4> {
 public:
  static constexpr bool kScaleSums = false;
  static constexpr int kWords = 2;

  __device__ __forceinline__ explicit W4Scales(const uint32_t (&words)[kWords])
      : low_(words[0]), high_(words[1]) {}
  __device__ __forceinline__ explicit W4Scales(uint32_t from)
      : low_(load_shared_word(from)), high_(load_shared_word(from + 128)) {}

  __device__ __forceinline__ void unpack(uint32_t word, int thirty_two, uint32_t (&a)[4]) const {
    unpack_mxfp4(word, mxfp4_factor(low_, thirty_two), mxfp4_factor(high_, thirty_two), a);
  }
  __device__ __forceinline__ float low() const { return 1.0f; }
  __device__ __forceinline__ float high() const { return 1.0f; }
  __device__ __forceinline__ uint32_t loaded() const { return low_ & high_; }

 private:
  uint32_t low_, high_;
};

#endif  // __CUDACC__

}  // namespace precast
