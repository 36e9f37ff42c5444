// SPDX-License-Identifier: Apache-2.0
// Clusters of CTAs, which see each other's shared memory: from compute capability 9.0 on.
#pragma once

#include "precast/core/block.cuh"
#include "precast/core/launch.cuh"

namespace precast {

#if defined(__CUDACC__)

// Halves of a barrier of all threads of the cluster. What was written to shared memory before
// cluster_arrive() is seen behind cluster_wait().
__device__ __forceinline__ void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Writes x where CTA `cta` of the cluster has `target`, an address in shared memory.
__device__ __forceinline__ void store_in_cluster(float* target, int cta, float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const uint32_t here = static_cast<uint32_t>(__cvta_generic_to_shared(target));
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(cta));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(x) : "memory");
#endif
}

// This CTA's number in its cluster, how many the cluster has, and the cluster's number in the grid.
struct ClusterPosition {
  uint32_t cta = 0;
  uint32_t ctas = 1;
  uint32_t cluster = 0;

  __device__ __forceinline__ static ClusterPosition here() {
    ClusterPosition position;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(position.cta));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(position.ctas));
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(position.cluster));
#endif
    return position;
  }
};

// As block_sum(), over the CTAs of a cluster, of up to kMaxWarps warps together, in the same order.
// All threads of the cluster must have called cluster_arrive() once before.
__device__ __forceinline__ float cluster_sum(float x, const ClusterPosition& position,
                                             float (&scratch)[kMaxWarps]) {
  const int lane = threadIdx.x % kWarpSize;
  const int warps = blockDim.x / kWarpSize;
  x = warp_sum(x);
  cluster_wait();  // the other CTAs have started: their shared memory is there
  if (lane < position.ctas) {
    store_in_cluster(&scratch[position.cta * warps + threadIdx.x / kWarpSize], lane, x);
  }
  cluster_arrive();
  cluster_wait();
  return warp_sum(lane < warps * position.ctas ? scratch[lane] : 0.0f);
}

#endif  // __CUDACC__

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)

// Measured on compute capability 9.0, and taken to hold for what followed it in data centres.
constexpr bool kTargetHasClusters = PRECAST_SM >= 90 && PRECAST_SM < 120;

// As launch(), in clusters of `ctas` CTAs, 8 at most.
template <typename Params>
cudaError_t launch_clusters(void (*kernel)(Params), uint32_t clusters, uint32_t ctas, dim3 block,
                            bool enable_pdl, cudaStream_t stream, const Params& params) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = ctas;
  attributes[0].val.clusterDim.y = 1;
  attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(clusters * ctas);
  config.blockDim = block;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = enable_pdl ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, params);
}

#endif

}  // namespace precast
