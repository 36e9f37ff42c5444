// SPDX-License-Identifier: Apache-2.0
// The element types, their names at run time, and conversion to and from fp32.
//
// A host compiler that includes this file gets the names only, no CUDA header.
#pragma once

#if defined(__CUDACC_RTC__)
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <cstdint>
#endif

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace precast {

// The type that a module was compiled for. Bindings read it at run time, because a binding is
// compiled once for all modules of an op.
enum class DType : int { f32, f16, bf16, e4m3, e5m2, i8 };

#if defined(__CUDACC__)

using f32 = float;
using f16 = __half;
using bf16 = __nv_bfloat16;
using i8 = signed char;

template <typename T>
struct TypeName;
template <>
struct TypeName<f32> {
  static constexpr DType value = DType::f32;
};
template <>
struct TypeName<f16> {
  static constexpr DType value = DType::f16;
};
template <>
struct TypeName<bf16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct TypeName<i8> {
  static constexpr DType value = DType::i8;
};

__device__ __forceinline__ float to_float(f32 x) { return x; }
__device__ __forceinline__ float to_float(f16 x) { return __half2float(x); }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(i8 x) { return static_cast<float>(x); }

// Rounds to nearest even.
template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ f32 from_float<f32>(float x) {
  return x;
}
template <>
__device__ __forceinline__ f16 from_float<f16>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
  return __float2bfloat16_rn(x);
}

#endif  // __CUDACC__

}  // namespace precast
