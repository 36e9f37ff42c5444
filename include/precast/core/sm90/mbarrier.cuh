// SPDX-License-Identifier: Apache-2.0
// mbarriers: barriers in shared memory on which asynchronous stores and copies complete. They need
// compute capability 9.0; below it the functions do nothing.
#pragma once

#include "precast/core/shared_address.cuh"

namespace precast {

#if defined(__CUDACC__)

// Initialises an mbarrier. One thread calls it; other threads may use the mbarrier after
// fence_mbarrier_init() and a barrier.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
#endif
}

__device__ __forceinline__ void fence_mbarrier_init() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Sets how many bytes complete the current phase of the mbarrier. One thread calls it.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
#endif
}

// Waits for the phase of the mbarrier with this parity: 0, 1, 0, ...
__device__ __forceinline__ void mbarrier_wait_parity(uint64_t* barrier, uint32_t parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
#endif
}

#endif  // __CUDACC__

}  // namespace precast
