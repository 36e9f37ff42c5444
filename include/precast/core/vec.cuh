// SPDX-License-Identifier: Apache-2.0
// Vectors of 16 bytes, in which memory-bound kernels load, compute and store.
//
// Loads and stores are volatile asm, so that none moves above wait_on_dependent_grids().
#pragma once

#include "precast/core/types.cuh"

namespace precast {

constexpr int kVecBytes = 16;

#if defined(__CUDACC__)

template <typename T>
struct alignas(kVecBytes) Vec {
  static constexpr int kSize = kVecBytes / sizeof(T);
  uint4 bits;
};

template <typename T>
__device__ __forceinline__ Vec<T> zero_vec() {
  return Vec<T>{make_uint4(0u, 0u, 0u, 0u)};
}

// Loads or stores a vector by an instruction of four words.
#define PRECAST_LOAD_VEC(instruction, vec, source)                                              \
  asm volatile(instruction " {%0, %1, %2, %3}, [%4];"                                           \
               : "=r"((vec).bits.x), "=r"((vec).bits.y), "=r"((vec).bits.z), "=r"((vec).bits.w) \
               : "l"(source)                                                                    \
               : "memory")
#define PRECAST_STORE_VEC(instruction, target, vec)                                     \
  asm volatile(instruction " [%0], {%1, %2, %3, %4};" ::"l"(target), "r"((vec).bits.x), \
               "r"((vec).bits.y), "r"((vec).bits.z), "r"((vec).bits.w)                  \
               : "memory")

// `source` must be 16-byte aligned.
template <typename T>
__device__ __forceinline__ Vec<T> load_vec(const T* source) {
  Vec<T> vec;
  PRECAST_LOAD_VEC("ld.global.v4.u32", vec, source);
  return vec;
}

// The L2 eviction policy of a load.
struct L2Policy {
  uint64_t bits;
};

// The policy for operands that an op reads once. Why: with these lines marked evict_last, the
// written lines are evicted first, and go to memory in longer bursts: on an H200 this moves 1 to 5
// % more bytes a second than no mark, and the kernels that follow lose nothing. Bypassing L1,
// evict_first on reads or writes, and larger prefetch sizes all moved fewer. See reads_evict_last()
// for the cases in which it does not pay off.
__device__ __forceinline__ L2Policy read_policy(bool evict_last) {
  uint64_t bits;
  if (evict_last) {
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(bits));
  } else {
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(bits));
  }
  return L2Policy{bits};
}

template <typename T>
__device__ __forceinline__ Vec<T> load_vec(const T* source, L2Policy policy) {
  uint4 v;
  asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(source), "l"(policy.bits)
               : "memory");
  return Vec<T>{v};
}

// Prefetches the line of `source` into L2. It reads no data, so it may precede
// wait_on_dependent_grids() and overlap the end of the previous grid; a line that the previous grid
// still writes is updated in L2.
__device__ __forceinline__ void prefetch_to_l2(const void* source) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(source));
}

// `target` must be 16-byte aligned.
template <typename T>
__device__ __forceinline__ void store_vec(T* target, Vec<T> vec) {
  PRECAST_STORE_VEC("st.global.v4.u32", target, vec);
}

__device__ __forceinline__ uint32_t load_word(const f32* source) {
  uint32_t word;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(word) : "l"(source) : "memory");
  return word;
}

template <typename T>
__device__ __forceinline__ uint32_t load_word(const T* source) {
  static_assert(sizeof(T) == 2, "a 16-bit type");
  unsigned short word;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(word) : "l"(source) : "memory");
  return word;
}

// Loads one number, such as a scale. The load is volatile, like all others here.
__device__ __forceinline__ float load_scalar(const f32* source) {
  return __uint_as_float(load_word(source));
}

// Loads the first `count` elements from any address; the others become zeros.
template <typename T>
__device__ __forceinline__ Vec<T> load_elements(const T* source, int64_t count) {
  constexpr int kPerWord = 4 / sizeof(T);
  uint32_t words[4] = {0u, 0u, 0u, 0u};
#pragma unroll
  for (int i = 0; i < Vec<T>::kSize; ++i) {
    if (i < count) words[i / kPerWord] |= load_word(source + i) << (i % kPerWord * 16);
  }
  return Vec<T>{make_uint4(words[0], words[1], words[2], words[3])};
}

// Stores the first `count` elements to any address.
template <typename T>
__device__ __forceinline__ void store_elements(T* target, Vec<T> vec, int64_t count) {
  constexpr int kPerWord = 4 / sizeof(T);
  const uint32_t words[4] = {vec.bits.x, vec.bits.y, vec.bits.z, vec.bits.w};
#pragma unroll
  for (int i = 0; i < Vec<T>::kSize; ++i) {
    if (i < count) {
      const uint32_t word = words[i / kPerWord] >> (i % kPerWord * 16);
      if constexpr (sizeof(T) == 2) {
        asm volatile("st.global.u16 [%0], %1;" ::"l"(target + i), "h"((unsigned short)word)
                     : "memory");
      } else {
        asm volatile("st.global.u32 [%0], %1;" ::"l"(target + i), "r"(word) : "memory");
      }
    }
  }
}

// Loads or stores a vector of which `count` elements exist: as a whole from an aligned address, or
// element by element.
template <bool kAligned, typename T>
__device__ __forceinline__ Vec<T> load(const T* source, int64_t count) {
  if constexpr (kAligned) return load_vec(source);
  return load_elements(source, count);
}

template <bool kAligned, typename T>
__device__ __forceinline__ Vec<T> load(const T* source, int64_t count, L2Policy policy) {
  if constexpr (kAligned) return load_vec(source, policy);
  return load_elements(source, count);
}

template <bool kAligned, typename T>
__device__ __forceinline__ void store(T* target, Vec<T> vec, int64_t count) {
  if constexpr (kAligned) {
    store_vec(target, vec);
  } else {
    store_elements(target, vec, count);
  }
}

__device__ __forceinline__ void unpack(Vec<f32> vec, float (&x)[4]) {
  x[0] = __uint_as_float(vec.bits.x);
  x[1] = __uint_as_float(vec.bits.y);
  x[2] = __uint_as_float(vec.bits.z);
  x[3] = __uint_as_float(vec.bits.w);
}

__device__ __forceinline__ float2 unpack_pair(f16, uint32_t bits) {
  return __half22float2(reinterpret_cast<const __half2&>(bits));
}

// Why: a bf16 is the upper half of an fp32, so a shift and a mask replace two conversions.
__device__ __forceinline__ float2 unpack_pair(bf16, uint32_t bits) {
  return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}

template <typename T>
__device__ __forceinline__ void unpack(Vec<T> vec, float (&x)[8]) {
  const uint32_t words[4] = {vec.bits.x, vec.bits.y, vec.bits.z, vec.bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack_pair(T(), words[i]);
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
}

__device__ __forceinline__ uint32_t pack_pair(f16, float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

__device__ __forceinline__ uint32_t pack_pair(bf16, float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Rounds to nearest even.
template <typename T>
__device__ __forceinline__ Vec<T> pack(const float (&x)[8]) {
  return Vec<T>{make_uint4(pack_pair(T(), x[0], x[1]), pack_pair(T(), x[2], x[3]),
                           pack_pair(T(), x[4], x[5]), pack_pair(T(), x[6], x[7]))};
}

template <typename T>
__device__ __forceinline__ Vec<T> pack(const float (&x)[4]) {
  return Vec<T>{make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                           __float_as_uint(x[3]))};
}

#endif  // __CUDACC__

#if !defined(__CUDACC_RTC__)

inline bool exceeds_l2(int64_t bytes) { return bytes > int64_t(1) << 27; }

// Whether read_policy() pays off for an op that moves `bytes`. In place it would also mark the
// written lines, which costs up to 10 % if they fit in L2.
inline bool reads_evict_last(int64_t bytes, bool in_place) {
  return !in_place || exceeds_l2(bytes);
}

#endif

}  // namespace precast
