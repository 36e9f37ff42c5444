// SPDX-License-Identifier: Apache-2.0
// Loads of global memory that another grid may be writing: from L2, so that L1 holds no stale value
// for the loads that count. On the host they are plain loads.
#pragma once

#include "precast/core/host_device.cuh"
#include "precast/core/types.cuh"

namespace precast {

PRECAST_HOST_DEVICE inline int32_t load_relaxed(const int32_t* word) {
#if defined(__CUDA_ARCH__)
  int32_t value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
#else
  return *word;
#endif
}

// The same of a struct, 16 bytes at once. Its parts may be of different times.
template <typename T>
PRECAST_HOST_DEVICE inline T load_relaxed_struct(const T& source) {
#if defined(__CUDA_ARCH__)
  static_assert(sizeof(T) % 16 == 0 && alignof(T) >= 16, "loads of 16 bytes");
  union {
    uint32_t words[sizeof(T) / 4];
    T value;
  };
  const char* const from = reinterpret_cast<const char*>(&source);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 16); ++i) {
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[4 * i]), "=r"(words[4 * i + 1]), "=r"(words[4 * i + 2]),
                   "=r"(words[4 * i + 3])
                 : "l"(from + 16 * i)
                 : "memory");
  }
  return value;
#else
  return source;
#endif
}

}  // namespace precast
