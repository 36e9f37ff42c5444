// SPDX-License-Identifier: Apache-2.0
// Quantises the 16 elements of a thread for quantize/block_quantize.cuh, which says the formulas:
// the scale of a block, and its elements in e2m1 or e4m3.
//
// Threads  a thread holds a block of 16 elements, or half of one of 32, whose two lanes exchange
//          their maxima; so all lanes of a warp call quantize_block(), and each gets the scale
#pragma once

#include "precast/core/fp4.cuh"
#include "precast/core/fp8.cuh"
#include "precast/core/vec.cuh"

namespace precast {

enum class BlockRecipe : int { nvfp4, mxfp4, mxfp8 };

constexpr int block_size(BlockRecipe recipe) { return recipe == BlockRecipe::nvfp4 ? 16 : 32; }

#if defined(__CUDACC__)

template <typename T>
struct PairOf;
template <>
struct PairOf<f16> {
  using Type = __half2;
};
template <>
struct PairOf<bf16> {
  using Type = __nv_bfloat162;
};

// Returns the largest magnitude of a thread's elements. With kNan it is NaN if an element is;
// otherwise NaN is ignored.
template <bool kNan, typename T>
__device__ __forceinline__ float largest(const Vec<T> (&vecs)[2]) {
  using Pair = typename PairOf<T>::Type;
  const uint4 a = vecs[0].bits, b = vecs[1].bits;
  const uint32_t words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  const auto larger = [](Pair x, Pair y) { return kNan ? __hmax2_nan(x, y) : __hmax2(x, y); };
  Pair max_value = __habs2(reinterpret_cast<const Pair&>(words[0]));
#pragma unroll
  for (int i = 1; i < 8; ++i) {
    max_value = larger(max_value, __habs2(reinterpret_cast<const Pair&>(words[i])));
  }
  max_value = larger(max_value, __lowhigh2highlow(max_value));
  return kNan ? __low2float(max_value) : fmaxf(__low2float(max_value), 0.0f);
}

constexpr float kLargestFloat = 3.402823466e38f;

// The byte of a block's scale, and the factor for its elements.
struct BlockScale {
  uint32_t bits;
  float multiplier;
};

template <BlockRecipe kRecipe>
__device__ __forceinline__ BlockScale block_scale(float amax, float global) {
  if constexpr (kRecipe == BlockRecipe::nvfp4) {
    const e4m3 scale = from_float<e4m3>(__fmul_rn(global, __fmul_rn(amax, 1.0f / 6.0f)));
    const float value = to_float(scale);
    const float multiplier = __frcp_rn(__fmul_rn(value, __frcp_rn(global)));
    return {to_bits(scale), value == 0.0f ? 0.0f : fminf(multiplier, kLargestFloat)};
  } else {
    const uint32_t bits =
        kRecipe == BlockRecipe::mxfp4 ? ue8m0_scale_of_e2m1(amax) : ue8m0_scale_of_e4m3(amax);
    return {bits, ue8m0_reciprocal(bits)};
  }
}

__device__ __forceinline__ void store_scale_byte(void* scales, uint32_t index, uint32_t bits) {
  asm volatile("st.global.u8 [%0], %1;" ::"l"(static_cast<unsigned char*>(scales) + index),
               "h"(static_cast<unsigned short>(bits))
               : "memory");
}

constexpr int kBlockElements = 16;  // of a thread
template <BlockRecipe kRecipe>
constexpr uint32_t kBlockLanes = kRecipe == BlockRecipe::nvfp4 ? 1 : 2;  // lanes that share a scale

// Converts the thread's elements to e2m1. `small` says that none is NaN or 7 or more.
template <typename T>
__device__ __forceinline__ uint2 quantize_e2m1(const Vec<T> (&vecs)[2], float multiplier,
                                               bool small) {
  uint32_t words[2];
#if !PRECAST_HAS_E2M1_CONVERSION
  if (small) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float x[8];
      unpack(vecs[i], x);
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = __fmul_rn(fabsf(x[j]), multiplier);
      words[i] = pack_small_e2m1(x, vecs[i].bits);
    }
    return make_uint2(words[0], words[1]);
  }
#endif
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float x[8];
    unpack(vecs[i], x);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = __fmul_rn(x[j], multiplier);
    words[i] = pack_e2m1(x);
  }
  return make_uint2(words[0], words[1]);
}

template <typename T>
__device__ __forceinline__ void quantize_e4m3(const Vec<T> (&vecs)[2], float multiplier,
                                              float (&x)[kBlockElements]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float half[8];
    unpack(vecs[i], half);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[8 * i + j] = __fmul_rn(half[j], multiplier);
  }
}

// Quantises the elements of a thread, stores them if `writes`, and returns the bits of their scale.
// All lanes of a warp must call it, because the lanes of a block exchange maxima.
template <typename T, BlockRecipe kRecipe>
__device__ __forceinline__ uint32_t quantize_block(const Vec<T> (&vecs)[2], float global, void* out,
                                                   int64_t out_offset, bool writes) {
  float amax = largest<true>(vecs);
  const bool has_nan = amax != amax;
  // Why a vote: otherwise the compiler computes the second maximum in every case.
  if (__any_sync(0xffffffffu, has_nan)) amax = largest<false>(vecs);
  if constexpr (kBlockLanes<kRecipe> == 2) {
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
  }
  const BlockScale quant_scale = block_scale<kRecipe>(amax, global);
  if (writes) {
    if constexpr (kRecipe == BlockRecipe::mxfp8) {
      float x[kBlockElements];
      quantize_e4m3(vecs, quant_scale.multiplier, x);
      store_fp8(static_cast<e4m3*>(out) + out_offset, x);
    } else {
      const bool small = !has_nan && __fmul_rn(amax, quant_scale.multiplier) < 7.0f;
      const uint2 words = quantize_e2m1(vecs, quant_scale.multiplier, small);
      asm volatile(
          "st.global.v2.u32 [%0], {%1, %2};" ::"l"(static_cast<char*>(out) + out_offset / 2),
          "r"(words.x), "r"(words.y)
          : "memory");
    }
  }
  return quant_scale.bits;
}

#endif  // __CUDACC__

}  // namespace precast
