// SPDX-License-Identifier: Apache-2.0
// Distributed shared memory: loads, stores and atomics in the shared memory of other CTAs of a
// cluster. If the target has no clusters, a cluster is one CTA and the same functions work.
//
// A CTA may write to the shared memory of another only between two barriers of the cluster.
#pragma once

#include "precast/core/shared_address.cuh"
#include "precast/core/sm90/cluster.cuh"

namespace precast {

#if defined(__CUDACC__)

// A barrier of the cluster with `ctas` CTAs; a barrier of the CTA if there is only one.
__device__ __forceinline__ void cluster_sync(int ctas) {
  if (ctas == 1) {
    __syncthreads();
    return;
  }
  cluster_arrive();
  cluster_wait();
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ uint32_t address_in_cta(const void* target, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(shared_address(target)), "r"(rank));
  return address;
}
#endif

// Stores to the variable of CTA `rank` that has the address of `target`.
__device__ __forceinline__ void store_in_cta(uint32_t* target, int rank, uint32_t value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address_in_cta(target, rank)), "r"(value)
               : "memory");
#else
  *target = value;
#endif
}

__device__ __forceinline__ void store_in_cta(float2* target, int rank, float2 value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address_in_cta(target, rank)),
               "f"(value.x), "f"(value.y)
               : "memory");
#else
  *target = value;
#endif
}

__device__ __forceinline__ void store_in_cta(uint64_t* target, int rank, uint64_t value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address_in_cta(target, rank)), "l"(value)
               : "memory");
#else
  *target = value;
#endif
}

// Loads two words from CTA `rank`, at a multiple of 8 bytes.
__device__ __forceinline__ uint2 load_pair_from_cta(const uint32_t* source, int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint2 value;
  asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "r"(address_in_cta(source, rank))
               : "memory");
  return value;
#else
  return *reinterpret_cast<const uint2*>(source);
#endif
}

// Adds to the variable of CTA `rank` and returns its previous value.
__device__ __forceinline__ uint32_t atomic_add_in_cta(uint32_t* target, int rank, uint32_t value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t before;
  asm volatile("atom.shared::cluster.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(address_in_cta(target, rank)), "r"(value)
               : "memory");
  return before;
#else
  return atomicAdd(target, value);
#endif
}

// Stores that complete on an mbarrier of the destination CTA (st.async). That CTA sees the data
// once it has waited for the bytes; no cluster barrier is needed. In a grid without clusters they
// are illegal instructions, unlike the other functions here.
__device__ __forceinline__ void store_async(float2* target, uint64_t* barrier, int rank,
                                            float2 value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
          address_in_cta(target, rank)),
      "r"(__float_as_uint(value.x)), "r"(__float_as_uint(value.y)),
      "r"(address_in_cta(barrier, rank))
      : "memory");
#endif
}

__device__ __forceinline__ void store_async(uint32_t* target, uint64_t* barrier, int rank,
                                            uint32_t value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                   address_in_cta(target, rank)),
               "r"(value), "r"(address_in_cta(barrier, rank))
               : "memory");
#endif
}

__device__ __forceinline__ void store_async(uint4* target, uint64_t* barrier, int rank,
                                            uint4 value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address_in_cta(target, rank)),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(address_in_cta(barrier, rank))
      : "memory");
#endif
}

#endif  // __CUDACC__

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)

constexpr bool kTargetHasClusters = PRECAST_SM >= 90;

#endif

}  // namespace precast
