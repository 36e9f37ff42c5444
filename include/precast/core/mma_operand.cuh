// SPDX-License-Identifier: Apache-2.0
// MMAs on 32 bytes of the depth, whatever the operands are: 16 numbers of 16 bits, or 32 of FP8.
//
// The fragments are those of core/mma.cuh, with four numbers of FP8 in a register instead of two of
// 16 bits. So ldmatrix loads both in the same way: lane l = 4 g + q holds bytes 4 q .. 4 q + 3 of
// each 16-byte chunk of its rows.
//
// FP8 is multiplied by mma.m16n8k32 from compute capability 8.9 on. Below it is converted to f16,
// which holds each number exactly, for two m16n8k16: one has the first two numbers of each register
// of both operands, the other the last two. The sum may then lack the factor MmaOperands::kRescale.
// Of the instruction, ptxas 13.0 makes the same for 9.0, 10.0 and 11.0, and an MMA of FP8 for 8.9
// and 12.0 alone. Source: PTX ISA, "Matrix Fragments for mma.m16n8k32".
#pragma once

#include "precast/core/fp8_to_f16.cuh"
#include "precast/core/mma.cuh"

namespace precast {

#if defined(__CUDACC__)

#if PRECAST_SM == 89 || PRECAST_SM == 120
constexpr bool kConvertsFp8 = false;
#else
constexpr bool kConvertsFp8 = true;  // which takes registers
#endif

// c += a * b for operands of one 16-bit type.
template <typename A, typename B>
struct MmaOperands {
  static_assert(sizeof(A) == 2 && TypeName<A>::value == TypeName<B>::value, "one 16-bit type");
  static constexpr float kRescale = 1.0f;

  static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    mma_m16n8k16<A>(c, a, b0, b1);
  }
};

#if PRECAST_SM >= 89

#define PRECAST_FP8_MMA(A, B)                                                                      \
  template <>                                                                                      \
  struct MmaOperands<A, B> {                                                                       \
    static constexpr float kRescale = 1.0f;                                                        \
                                                                                                   \
    static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, \
                                               uint32_t b1) {                                      \
      asm("mma.sync.aligned.m16n8k32.row.col.f32." #A "." #B                                       \
          ".f32 {%0, %1, %2, %3}, {%4, %5, "                                                       \
          "%6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                                   \
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                         \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                         \
    }                                                                                              \
  };

PRECAST_FP8_MMA(e4m3, e4m3)
PRECAST_FP8_MMA(e4m3, e5m2)
PRECAST_FP8_MMA(e5m2, e4m3)
#undef PRECAST_FP8_MMA

#else

template <typename A, typename B>
struct Fp8MmaOperands {
  static constexpr float kRescale = Fp8Rescale<A>::kScale * Fp8Rescale<B>::kScale;

  static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    uint32_t a_low[4], a_high[4], b_low[2], b_high[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) fp8x4_to_f16x2_with_nan<A>(a[i], a_low[i], a_high[i]);
    fp8x4_to_f16x2_with_nan<B>(b0, b_low[0], b_high[0]);
    fp8x4_to_f16x2_with_nan<B>(b1, b_low[1], b_high[1]);
    mma_m16n8k16<f16>(c, a_low, b_low[0], b_low[1]);
    mma_m16n8k16<f16>(c, a_high, b_high[0], b_high[1]);
  }
};
template <>
struct MmaOperands<e4m3, e4m3> : Fp8MmaOperands<e4m3, e4m3> {};
template <>
struct MmaOperands<e4m3, e5m2> : Fp8MmaOperands<e4m3, e5m2> {};
template <>
struct MmaOperands<e5m2, e4m3> : Fp8MmaOperands<e5m2, e4m3> {};

#endif

#endif  // __CUDACC__

}  // namespace precast
