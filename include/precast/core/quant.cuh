// SPDX-License-Identifier: Apache-2.0
// Quantisation to 8 bits with a scale: the parts that all granularities share.
//
//   amax   = max(max |x|, eps)             over the elements that share a scale
//   scale  = amax / max(Q)                 the dequantisation scale, or that rounded up to 2^n
//   code   = round(x * (1 / scale))        to nearest even, saturating
//
// Every operation is an IEEE fp32 operation, in this order, so that plain PyTorch gives the same
// bits. max(Q) is 448 for e4m3, 57344 for e5m2 and 127 for int8.
//
// NaN and infinity: a NaN makes its scale NaN, and with it all codes of the scale. An infinity
// makes the scale infinite, finite numbers 0, and itself NaN. Scales that are powers of two have no
// infinity; either makes them NaN. int8 has no NaN: its code is 0.
#pragma once

#include "precast/core/block.cuh"
#include "precast/core/fp8.cuh"
#include "precast/core/vec.cuh"

namespace precast {

// How scales are stored. `exponents` means four bytes a word, each the biased exponent of a power
// of two (E8M0 of the OCP Microscaling Formats 1.0), the first in the lowest byte.
enum class ScaleFormat : int { numbers, powers_of_two, exponents };

#if defined(__CUDACC__)

// -- the largest magnitude ------------------------------------------------------------------------
// Magnitudes are compared as the bits of non-negative fp32 numbers. These have the order of the
// numbers, with NaN above infinity, so that an integer maximum keeps a NaN where fmaxf() drops it.

__device__ __forceinline__ uint32_t magnitude_bits(float x) {
  return __float_as_uint(x) & 0x7fffffffu;
}

__device__ __forceinline__ uint32_t widen_magnitude(bf16, uint32_t bits) { return bits << 16; }
__device__ __forceinline__ uint32_t widen_magnitude(f16, uint32_t bits) {
  return __float_as_uint(__half2float(__ushort_as_half(static_cast<unsigned short>(bits))));
}

// Reduces two 16-bit magnitudes at once: their bits have the order of the numbers, as in fp32.
template <typename T>
__device__ __forceinline__ uint32_t amax_bits(Vec<T> vec) {
  static_assert(sizeof(T) == 2, "a 16-bit type");
  constexpr uint32_t kMagnitudes = 0x7fff7fffu;
  const uint32_t pair = __vmaxu2(__vmaxu2(vec.bits.x & kMagnitudes, vec.bits.y & kMagnitudes),
                                 __vmaxu2(vec.bits.z & kMagnitudes, vec.bits.w & kMagnitudes));
  const uint32_t low = pair & 0xffffu;
  const uint32_t high = pair >> 16;
  return widen_magnitude(T(), low > high ? low : high);
}

template <int kSize>
__device__ __forceinline__ uint32_t amax_bits(const float (&x)[kSize]) {
  uint32_t most = 0u;
#pragma unroll
  for (int i = 0; i < kSize; ++i) most = max(most, magnitude_bits(x[i]));
  return most;
}

__device__ __forceinline__ uint32_t amax_bits(Vec<f32> vec) {
  float x[4];
  unpack(vec, x);
  return amax_bits(x);
}

// Maximum over each aligned group of `lanes` (a power of two) lanes, valid in every lane. All 32
// lanes must call it.
__device__ __forceinline__ uint32_t warp_max(uint32_t x, int lanes = kWarpSize) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    if (distance < lanes) x = max(x, __shfl_xor_sync(0xffffffffu, x, distance));
  }
  return x;
}

// Maximum over the CTA, valid in every thread. All threads must call it (blockDim.x a multiple of
// 32, one dimension). `scratch` is shared memory that only this call uses.
__device__ __forceinline__ uint32_t block_max(uint32_t x, uint32_t (&scratch)[kMaxWarps]) {
  const int lane = threadIdx.x % kWarpSize;
  x = warp_max(x);
  if (lane == 0) scratch[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  return warp_max(lane < blockDim.x / kWarpSize ? scratch[lane] : 0u);
}

// -- scales ---------------------------------------------------------------------------------------

template <typename Q>
struct CodeRange {
  static constexpr float kMax = Fp8<Q>::kMax;
};
template <>
struct CodeRange<i8> {
  static constexpr float kMax = 127.0f;
};

// Rounds a positive normal number up to a power of two; NaN for infinity and NaN.
__device__ __forceinline__ float round_up_to_power_of_two(float x) {
  const uint32_t bits = __float_as_uint(x);
  return __uint_as_float(bits < 0x7f800000u ? (bits + 0x7fffffu) & 0x7f800000u : 0x7fffffffu);
}

struct QuantScale {
  float scale;
  float reciprocal;
  uint32_t exponent;  // biased; for powers of two only
};

// `eps` must be at least 1e-30, so that the reciprocal is finite.
template <typename Q>
__device__ __forceinline__ QuantScale quant_scale(uint32_t amax, float eps, ScaleFormat format) {
  const float most = __uint_as_float(max(amax, __float_as_uint(eps)));
  QuantScale result = {__fdiv_rn(most, CodeRange<Q>::kMax), 0.0f, 0u};
  if (format == ScaleFormat::numbers) {
    result.reciprocal = __frcp_rn(result.scale);
    return result;
  }
  constexpr uint32_t kNan = 0x7fffffffu;
  const uint32_t bits = __float_as_uint(result.scale);
  const bool finite = bits < 0x7f800000u;
  // Does the same as round_up_to_power_of_two(), and keeps the exponent. 2^127 is never reached:
  // the largest fp32 gives 2^120.
  result.exponent = finite ? (bits + 0x7fffffu) >> 23 : 255u;
  result.scale = __uint_as_float(finite ? result.exponent << 23 : kNan);
  result.reciprocal = __uint_as_float(finite ? (254u - result.exponent) << 23 : kNan);
  return result;
}

// Stores one scale at `row_offset + index * stride` (in words of four bytes) of `scales`. A row has
// `count` scales; the unused bytes of its last word become 0.
__device__ __forceinline__ void store_scale(void* scales, ScaleFormat format, int64_t row_offset,
                                            uint32_t index, int64_t stride, uint32_t count,
                                            const QuantScale& scale) {
  uint32_t* words = static_cast<uint32_t*>(scales) + row_offset;
  if (format != ScaleFormat::exponents) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(words + index * stride),
                 "r"(__float_as_uint(scale.scale))
                 : "memory");
    return;
  }
  unsigned char* word = reinterpret_cast<unsigned char*>(words + index / 4 * stride);
  uint32_t byte = scale.exponent;
  for (uint32_t i = index % 4; i < 4; ++i) {
    asm volatile("st.global.u8 [%0], %1;" ::"l"(word + i), "h"((unsigned short)byte) : "memory");
    if (index + 1 != count) break;
    byte = 0u;
  }
}

// -- codes ----------------------------------------------------------------------------------------

template <typename Q>
__device__ __forceinline__ uint32_t pack_codes(float a, float b, float c, float d) {
  return pack_fp8<Q>(a, b, c, d);
}

template <>
__device__ __forceinline__ uint32_t pack_codes<i8>(float a, float b, float c, float d) {
  const int w = __float2int_rn(a), x = __float2int_rn(b);
  const int y = __float2int_rn(c), z = __float2int_rn(d);
  uint32_t high, bits;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, 0;" : "=r"(high) : "r"(z), "r"(y));
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(bits) : "r"(x), "r"(w), "r"(high));
  return bits;
}

// Multiplies, rounds and stores a vector of which `count` elements exist. `target` must be aligned
// to kSize bytes if kAligned.
template <typename Q, bool kAligned, int kSize>
__device__ __forceinline__ void store_codes(Q* target, const float (&x)[kSize], float reciprocal,
                                            int64_t count) {
  uint32_t words[kSize / 4];
#pragma unroll
  for (int i = 0; i < kSize / 4; ++i) {
    words[i] = pack_codes<Q>(x[4 * i] * reciprocal, x[4 * i + 1] * reciprocal,
                             x[4 * i + 2] * reciprocal, x[4 * i + 3] * reciprocal);
  }
  if constexpr (!kAligned) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (i < count) {
        asm volatile("st.global.u8 [%0], %1;" ::"l"(target + i),
                     "h"((unsigned short)(words[i / 4] >> (i % 4 * 8)))
                     : "memory");
      }
    }
  } else if constexpr (kSize == 8) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(target), "r"(words[0]), "r"(words[1])
                 : "memory");
  } else {
    static_assert(kSize == 4, "a vector of 16 or 32-bit elements");
    asm volatile("st.global.u32 [%0], %1;" ::"l"(target), "r"(words[0]) : "memory");
  }
}

#endif  // __CUDACC__

}  // namespace precast
