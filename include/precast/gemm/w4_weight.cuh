// SPDX-License-Identifier: Apache-2.0
// Weights of 4 bits, MXFP4 (gemm/mxfp4_weight.cuh) or int4 with scales of 128 numbers
// (gemm/int4_weight.cuh): the order that both have.
//
// They lie as fused_moe.interleave_moe_weights_for_sm90_mixed_gemm writes them, in the order in
// which a warp multiplies them. So a lane takes 16 bytes at once, and neither shuffles nor ldmatrix
// bring the numbers to the lanes that need them.
//
// Weights  [columns / 16, depth / 64, lane 32, part 4] words of 32 bits. A word is what lane
//          l = 4 g + q holds of 16 columns and 16 of the depth, in the fragments of mma and wgmma
//          alike:
//
//            pair          0         1         2         3
//            column        g         g + 8     g         g + 8
//            depth         2 q + i   2 q + i   2 q + 8 + i   2 q + 8 + i,   i = 0, 1
//
//          Number i of a pair becomes half i of a register. Which bits of a word it has is the
//          format's.
// Scales   [columns / 64, depth / 128] blocks, in which the scales of columns g and g + 8 of 16 lie
//          in one word or two, the first at 16 g, four bytes further for the next 16 columns.
#pragma once

#include "precast/gemm/gemm_params.cuh"

namespace precast {

// Of a weight.
constexpr int kW4Columns = 64, kW4Depth = 128;  // multiples
constexpr int kW4BandColumns = 16;              // that words of 32 lanes have
constexpr int kW4StepDepth = 64;                // that 16 bytes of a lane have
constexpr int kW4BandBytes = kW4BandColumns * kW4StepDepth / 2;

struct W4GemmParams : GemmParams {
  const unsigned char* b_scales;  // [weights, columns / 64, depth / 128] blocks
};

// The bytes of a block of scales of a format, which is the element type of the weight.
template <typename Weight>
constexpr int kW4ScaleBytes = 0;

#if defined(__CUDACC__)

// The scales of a lane's two columns of 16, of 128 of the depth, loaded from shared memory. A
// format has
//
//   kScaleSums                     whether sums of the 128 are multiplied by them, not numbers
//   unpack(word, thirty_two, a)    the fragment of a word; numbers of which 32 of the 128
//   low(), high()                  the scales of both columns, if kScaleSums
//   loaded()                       bits that depend on all loads
template <typename Weight>
class W4Scales;

__device__ __forceinline__ uint32_t load_shared_word(uint32_t from) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
  return word;
}

// Returns x * y + z, of two numbers each.
__device__ __forceinline__ uint32_t fma_bf16_pairs(uint32_t x, uint32_t y, uint32_t z) {
  uint32_t sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(y), "r"(z));
  return sum;
}

#endif  // __CUDACC__

}  // namespace precast
