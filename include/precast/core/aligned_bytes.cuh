// SPDX-License-Identifier: Apache-2.0
// Copies of bytes in accesses of 1, 2, 4, 8 or 16 bytes. An op that only copies needs no element
// type, but the largest access size that divides every address and length of a call.
//
// Loads and stores are volatile asm, so that none moves above wait_on_dependent_grids().
#pragma once

#include "precast/core/types.cuh"
#include "precast/core/vec.cuh"

#if !defined(__CUDACC_RTC__)
#include <initializer_list>  // Why: callers pass braced lists
#endif

namespace precast {

#if defined(__CUDACC__)

// The register type of kBytes bytes. Why 16 bits for one byte: PTX loads a byte into a 16-bit
// register.
template <int kBytes>
struct AlignedBytesStorage {
  using type = unsigned short;
};
template <>
struct AlignedBytesStorage<4> {
  using type = uint32_t;
};
template <>
struct AlignedBytesStorage<8> {
  using type = uint2;
};
template <>
struct AlignedBytesStorage<16> {
  using type = uint4;
};

// kBytes bytes at an address that is a multiple of kBytes.
template <int kBytes>
struct AlignedBytes {
  typename AlignedBytesStorage<kBytes>::type bits;

  // `policy` matters only for 16 bytes.
  __device__ __forceinline__ static AlignedBytes load(const char* source, L2Policy policy) {
    AlignedBytes access;
    if constexpr (kBytes == 16) {
      access.bits = load_vec(reinterpret_cast<const f32*>(source), policy).bits;
    } else if constexpr (kBytes == 8) {
      asm volatile("ld.global.v2.u32 {%0, %1}, [%2];"
                   : "=r"(access.bits.x), "=r"(access.bits.y)
                   : "l"(source)
                   : "memory");
    } else if constexpr (kBytes == 4) {
      asm volatile("ld.global.u32 %0, [%1];" : "=r"(access.bits) : "l"(source) : "memory");
    } else if constexpr (kBytes == 2) {
      asm volatile("ld.global.u16 %0, [%1];" : "=h"(access.bits) : "l"(source) : "memory");
    } else {
      static_assert(kBytes == 1, "1, 2, 4, 8 or 16 bytes");
      asm volatile("ld.global.u8 %0, [%1];" : "=h"(access.bits) : "l"(source) : "memory");
    }
    return access;
  }

  __device__ __forceinline__ void store(char* target) const {
    if constexpr (kBytes == 16) {
      store_vec(reinterpret_cast<f32*>(target), Vec<f32>{bits});
    } else if constexpr (kBytes == 8) {
      asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(target), "r"(bits.x), "r"(bits.y)
                   : "memory");
    } else if constexpr (kBytes == 4) {
      asm volatile("st.global.u32 [%0], %1;" ::"l"(target), "r"(bits) : "memory");
    } else if constexpr (kBytes == 2) {
      asm volatile("st.global.u16 [%0], %1;" ::"l"(target), "h"(bits) : "memory");
    } else {
      asm volatile("st.global.u8 [%0], %1;" ::"l"(target), "h"(bits) : "memory");
    }
  }
};

#endif  // __CUDACC__

#if !defined(__CUDACC_RTC__)

// Collects addresses, strides and lengths in bytes. value() is the largest access size that divides
// all of them.
struct CommonAlignment {
  uint64_t bits = kVecBytes;

  void add(int64_t bytes) { bits |= static_cast<uint64_t>(bytes); }
  void add(const void* address) { bits |= reinterpret_cast<uint64_t>(address); }
  int value() const { return static_cast<int>(bits & (~bits + 1)); }
};

#endif

}  // namespace precast
