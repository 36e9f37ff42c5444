// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies from global to shared memory (cp.async, compute capability 8.0 and up). A
// thread commits its copies in groups and waits for the groups in the same order.
#pragma once

#include "precast/core/types.cuh"

namespace precast {

#if defined(__CUDACC__)

// Starts a copy of 16 bytes to a shared address, bypassing L1. If `exists` is false, it writes
// zeros and reads nothing. Both addresses must be multiples of 16.
__device__ __forceinline__ void cp_async(uint32_t target, const void* source, bool exists) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(exists ? 16 : 0)
               : "memory");
}

// The L2 policy of copies: the default, or evict_first for data that is read once.
template <bool kReadOnce>
struct CopyPolicy {};
template <>
struct CopyPolicy<true> {
  uint64_t word;

  __device__ __forceinline__ CopyPolicy() {
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(word));
  }
};

__device__ __forceinline__ void cp_async(uint32_t target, const void* source, bool exists,
                                         const CopyPolicy<false>&) {
  cp_async(target, source, exists);
}

__device__ __forceinline__ void cp_async(uint32_t target, const void* source, bool exists,
                                         const CopyPolicy<true>& policy) {
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(target),
      "l"(source), "r"(exists ? 16 : 0), "l"(policy.word)
      : "memory");
}

// Commits the copies started since the last commit as a group, which may be empty.
__device__ __forceinline__ void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all groups of the thread but the last `kOpen` have arrived. Other threads see the
// data after a barrier.
template <int kOpen>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kOpen) : "memory");
}

// Starts a copy without a condition and without a prefetch of neighbouring data.
__device__ __forceinline__ void cp_async(uint32_t target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

// Starts a copy of the first `bytes` of 16, which may be none; zeros follow them.
__device__ __forceinline__ void cp_async_part(uint32_t target, const void* source, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(bytes)
               : "memory");
}

// Starts a copy of one word. If `exists` is false, it writes zero and reads nothing.
__device__ __forceinline__ void cp_async_word(uint32_t target, const void* source, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source),
               "r"(exists ? 4 : 0)
               : "memory");
}

// Waits for all copies of the thread, committed or not.
__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

#endif  // __CUDACC__

}  // namespace precast
