// SPDX-License-Identifier: Apache-2.0
// Weights of int4, and a bf16 scale for 128 of them along the depth.
//
//   weight[n, k] = int4[n, k] * scale[n, k / 128]
//
// Numbers are bf16 when they are multiplied, exactly. Scales would not be exact there: the sum of
// 128 products is multiplied by its scale in fp32.
//
// Bits     Of a word of gemm/w4_weight.cuh: number i of pair j is bits 4 j to 4 j + 3 of half i, as
//          int4 + 8. Behind the upper bits of 128, the bits are those of bf16 128 + int4 + 8.
// Scales   [columns / 64, depth / 128, 8, 8] bf16: number c of row r is the scale of column
//          8 c + r of 64.
// Source   definition
#pragma once

#include "precast/core/mma_operand.cuh"
#include "precast/gemm/w4_weight.cuh"

namespace precast {

// The element type of such a weight: two numbers in a byte.
struct int4_pair {
  unsigned char pair;
};

template <>
constexpr int kW4ScaleBytes<int4_pair> = kW4Columns * 2;

#if defined(__CUDACC__)

// Converts a word to the numbers of its four pairs.
__device__ __forceinline__ void unpack_int4(uint32_t word, uint32_t (&pairs)[4]) {
  constexpr uint32_t kOne = 0x3f803f80u, kMinus136 = 0xc308c308u;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t bits = (word >> 4 * i & 0x000f000fu) | 0x43004300u;
    pairs[i] = fma_bf16_pairs(bits, kOne, kMinus136);
  }
}

// MMAs of bf16 tokens with such a weight.
template <>
struct MmaOperands<bf16, int4_pair> : MmaOperands<bf16, bf16> {};

template <>
class W4Scales<int4_pair> {
 public:
  static constexpr bool kScaleSums = true;
  static constexpr int kWords = 1;

  __device__ __forceinline__ explicit W4Scales(const uint32_t (&words)[kWords]) : both_(words[0]) {}
  __device__ __forceinline__ explicit W4Scales(uint32_t from) : both_(load_shared_word(from)) {}

  __device__ __forceinline__ void unpack(uint32_t word, int, uint32_t (&a)[4]) const {
    unpack_int4(word, a);
  }
  __device__ __forceinline__ float low() const { return __uint_as_float(both_ << 16); }
  __device__ __forceinline__ float high() const { return __uint_as_float(both_ & 0xffff0000u); }
  __device__ __forceinline__ uint32_t loaded() const { return both_; }

 private:
  uint32_t both_;
};

#endif  // __CUDACC__

}  // namespace precast
