// SPDX-License-Identifier: Apache-2.0
// Copies from global to shared memory that a thread starts and waits for in groups, in the order in
// which it closed them (compute capability 8.0 and up).
#pragma once

#include "precast/core/types.cuh"

namespace precast {

#if defined(__CUDACC__)

// Starts a copy of 16 bytes to a shared address, past L1; zeros where `exists` is false, and then
// nothing is read. Both addresses are multiples of 16.
__device__ __forceinline__ void copy_async(uint32_t target, const void* source, bool exists) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(exists ? 16 : 0)
               : "memory");
}

// How copies are kept in L2: as other reads, or as what is read once, which leaves it first.
template <bool kReadOnce>
struct CopyPolicy {};
template <>
struct CopyPolicy<true> {
  uint64_t word;

  __device__ __forceinline__ CopyPolicy() {
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(word));
  }
};

__device__ __forceinline__ void copy_async(uint32_t target, const void* source, bool exists,
                                           const CopyPolicy<false>&) {
  copy_async(target, source, exists);
}

__device__ __forceinline__ void copy_async(uint32_t target, const void* source, bool exists,
                                           const CopyPolicy<true>& policy) {
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(target),
      "l"(source), "r"(exists ? 16 : 0), "l"(policy.word)
      : "memory");
}

// Closes the group of the copies started since the last one; a group may be empty.
__device__ __forceinline__ void close_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all of the thread's groups but the last `kOpen` have arrived. Other threads see them
// after a barrier.
template <int kOpen>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kOpen) : "memory");
}

// Starts a copy without a condition, and without a wish for what lies beside it.
__device__ __forceinline__ void copy_async(uint32_t target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

// Waits for all copies of the thread, whether in groups or not.
__device__ __forceinline__ void wait_for_all_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

#endif  // __CUDACC__

}  // namespace precast
