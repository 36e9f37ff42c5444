// SPDX-License-Identifier: Apache-2.0
// Thread-block clusters: CTAs that are resident together, access each other's shared memory and
// share a barrier. They need compute capability 9.0; below it every CTA is a cluster of its own.
#pragma once

#include "precast/core/block.cuh"
#include "precast/core/launch.cuh"

namespace precast {

#if defined(__CUDACC__)

// The number of CTAs in the cluster.
__device__ __forceinline__ uint32_t cluster_size() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
#else
  return 1u;
#endif
}

// The index of this CTA in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return 0u;
#endif
}

// The index of the cluster in the grid.
__device__ __forceinline__ uint32_t cluster_id() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t number;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(number));
  return number;
#else
  return blockIdx.x;
#endif
}

// The two halves of a barrier of all threads of a cluster. All threads must call both in turn.
// Writes to shared memory before the first half are visible after the second.
__device__ __forceinline__ void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

// The first half if only shared memory must be visible after the second. It does not wait for
// writes to global memory.
__device__ __forceinline__ void cluster_arrive_shared() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "fence.release.sync_restrict::shared::cta.cluster;\n"
      "barrier.cluster.arrive.relaxed.aligned;" ::
          : "memory");
#endif
}

// The first half if no memory needs to be visible after the second. It only signals that this CTA
// has started.
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// Stores to the variable of CTA `rank` that has the address of `target`. That CTA must have started
// and must not have exited, so a cluster barrier is needed before and after.
__device__ __forceinline__ void store_in_cluster(uint32_t* target, uint32_t rank, uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(target));
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
#else
  *target = x;
#endif
}

// Does the same as block_sum() over the CTAs of a cluster, which have up to kMaxWarps warps
// together; the order of addition is the same. All threads of the cluster must have arrived once
// before.
__device__ __forceinline__ float cluster_sum(float x, uint32_t (&scratch)[kMaxWarps]) {
  const uint32_t lane = threadIdx.x % kWarpSize;
  const uint32_t warps = blockDim.x / kWarpSize, ctas = cluster_size();
  x = warp_sum(x);
  cluster_wait();  // the other CTAs have started, so that their shared memory exists
  if (lane < ctas) {
    store_in_cluster(&scratch[cluster_rank() * warps + threadIdx.x / kWarpSize], lane,
                     __float_as_uint(x));
  }
  cluster_arrive();
  cluster_wait();
  return warp_sum(lane < warps * ctas ? __uint_as_float(scratch[lane]) : 0.0f);
}

#endif  // __CUDACC__

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)

// The largest cluster that a launch here uses. More than 8 CTAs need the non-portable attribute,
// which data-centre GPUs support. Small clusters on other GPUs have not been measured.
constexpr int kMaxClusterSize = PRECAST_SM >= 90 && PRECAST_SM < 110 ? 16 : 1;

inline bool is_cluster_too_large(cudaError_t status) {
  return status == cudaErrorInvalidClusterSize || status == cudaErrorInvalidConfiguration;
}

// Does the same as launch(), in clusters of `ctas` CTAs with `shared` bytes of dynamic shared
// memory. The kernel's limit must have been raised if these exceed 48 KB. An error for which
// is_cluster_too_large() is true has been cleared.
template <typename Params>
cudaError_t launch_clusters(void (*kernel)(Params), dim3 grid, dim3 block, int ctas, size_t shared,
                            bool enable_pdl, cudaStream_t stream, const Params& params) {
  if (ctas > 8) {
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (status != cudaSuccess) return status;
  }
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = attributes;
  if (ctas > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(ctas), 1u, 1u};
  }
  if (kTargetHasPdl && enable_pdl) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  const cudaError_t launched = cudaLaunchKernelEx(&config, kernel, params);
  if (is_cluster_too_large(launched)) cudaGetLastError();
  return launched;
}

#endif

}  // namespace precast
