// SPDX-License-Identifier: Apache-2.0
// mbarriers: barriers in shared memory on which asynchronous stores and copies complete. They need
// compute capability 9.0; below it the functions do nothing.
//
// A phase of an mbarrier completes when all its arrivals and all announced bytes have come. With
// -DPRECAST_DEBUG_BARRIERS a wait that takes longer than a second says who waited for what, and
// stops the kernel.
#pragma once

#include "precast/core/shared_address.cuh"

#if defined(__CUDACC__) && defined(PRECAST_DEBUG_BARRIERS)
#include <cstdio>
#endif

namespace precast {

#if defined(__CUDACC__)

// Initialises an mbarrier for phases of `arrivals` arrivals. One thread calls it; other threads may
// use the mbarrier after fence_mbarrier_init() and a barrier.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals = 1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
#endif
}

__device__ __forceinline__ void fence_mbarrier_init() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Arrives `count` times.
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier, uint32_t count = 1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(count)
               : "memory");
#endif
}

// Arrives, and sets how many bytes complete the current phase of the mbarrier. One thread calls it.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
#endif
}

// Arrives once the cp.async copies that this thread has started are complete.
__device__ __forceinline__ void cp_async_arrive(uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
#endif
}

// Arrives by one lane of the warp, which all 32 lanes call. Why in one piece: a test of the lane's
// number takes longer.
__device__ __forceinline__ void mbarrier_arrive_of_warp(uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred chosen;\n"
      "elect.sync _|chosen, 0xffffffff;\n"
      "@chosen mbarrier.arrive.shared::cta.b64 _, [%0];\n"
      "}" ::"r"(shared_address(barrier))
      : "memory");
#endif
}

// Arrives at the mbarrier of CTA `rank` of the cluster that has the address of `barrier`. That CTA
// must have initialised it and must not have exited, so cluster barriers stand before and after.
__device__ __forceinline__ void mbarrier_arrive_in_cta(uint64_t* barrier, uint32_t rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
#endif
}

// No CTA, and this one, which an arrival reaches sooner than by its rank.
constexpr int kNoCta = -1, kThisCta = 16;
static_assert(kThisCta == 16, "the PTX below has the number");

// The same if `rank` is that of a CTA, or at this one's if it is kThisCta. Without a branch. `zero`
// is 0, by which the arrival may depend on what must be read before.
__device__ __forceinline__ void mbarrier_arrive_in_cta_if(uint64_t* barrier, int rank,
                                                          int zero = 0) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred here, there;\n"
      ".reg .b32 own, remote;\n"
      "setp.eq.s32 here, %1, 16;\n"
      "setp.lt.u32 there, %1, 16;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "or.b32 own, %0, %2;\n"
      "or.b32 remote, remote, %2;\n"
      "@here mbarrier.arrive.shared::cta.b64 _, [own];\n"
      "@there mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(rank), "r"(zero)
      : "memory");
#endif
}

// Whether the phase of the mbarrier with this parity is complete; does not wait.
__device__ __forceinline__ bool mbarrier_test_parity(uint64_t* barrier, uint32_t parity) {
  uint32_t is_complete = 1;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(is_complete)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
#endif
  return is_complete != 0;
}

// Whether the phase of the mbarrier with this parity is complete; waits for it a limited time.
__device__ __forceinline__ bool mbarrier_try_wait_parity(uint64_t* barrier, uint32_t parity) {
  uint32_t is_complete = 1;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(is_complete)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
#endif
  return is_complete != 0;
}

// Waits for the phase of the mbarrier with this parity: 0, 1, 0, ... Parity 1 is complete from the
// start. `name` says in a debug build what was waited for.
__device__ __forceinline__ void mbarrier_wait_parity(uint64_t* barrier, uint32_t parity,
                                                     const char* name = "") {
#if defined(PRECAST_DEBUG_BARRIERS)
  for (const long long begin = clock64(); !mbarrier_try_wait_parity(barrier, parity);) {
    if (clock64() - begin < 2000000000ll) continue;
    printf("CTA %d, thread %d: waits for %s, mbarrier at %u, parity %u\n", blockIdx.x, threadIdx.x,
           name, shared_address(barrier), parity);
    __trap();
  }
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
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
