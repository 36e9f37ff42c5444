// SPDX-License-Identifier: Apache-2.0
// Kernel launch, and programmatic dependent launch (PDL) on both of its sides.
//
// With PDL a kernel may start while the previous kernel of the stream still runs. Every thread
// calls wait_on_dependent_grids() before it accesses global memory, so that results never depend on
// PDL; only the launch itself overlaps. Before that call there are hints only: prefetches, and
// loads that choose what to prefetch (prefetch_low_word()). The one exception reads data that the
// kernel before the previous one wrote, and explains why it may (TensorQuantKernel). Two kernels
// that know of each other may overlap as a whole (Overlap). PDL needs compute capability 9.0.
#pragma once

#include "precast/core/overlap.cuh"
#include "precast/core/types.cuh"

#if !defined(__CUDACC_RTC__)
#include <cuda_runtime_api.h>
#endif

namespace precast {

#if defined(__CUDACC__)

// Blocks until all previous grids have finished and their writes are visible. The "memory" clobber
// keeps loads from moving above it.
__device__ __forceinline__ void wait_on_dependent_grids() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next grid start once every CTA of this grid has called it or exited. It is safe at any
// point, because the next grid itself waits for the end of this one.
__device__ __forceinline__ void launch_dependent_grids() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// What a kernel calls first that may overlap its neighbour. A kernel that does something before it
// waits calls launch_next_grid() there, and wait_on_previous_grid() later.
__device__ __forceinline__ void launch_next_grid(Overlap overlap) {
  if (overlap != Overlap::with_next) launch_dependent_grids();
}

__device__ __forceinline__ void wait_on_previous_grid(Overlap overlap) {
  if (overlap != Overlap::with_previous) wait_on_dependent_grids();
  // Now what the next grid reads is in memory.
  if (overlap == Overlap::with_next) launch_dependent_grids();
}

// What it calls last. One thread of the grid that waits is enough to let the grid end later.
__device__ __forceinline__ void end_behind_previous_grid(Overlap overlap) {
  if (overlap == Overlap::with_previous && blockIdx.x == 0 && threadIdx.x == 0) {
    wait_on_dependent_grids();
  }
}

// About as many CTAs as a GPU holds at once. Later CTAs start after the previous grid has ended.
constexpr uint32_t kCtasThatMayOverlap = 1024;

// Whether prefetches of this CTA may overlap the end of the previous grid. `cta` is its index in
// the order in which CTAs start.
__device__ __forceinline__ bool may_overlap_previous_grid(uint32_t cta) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return cta < kCtasThatMayOverlap;
#else
  return false;
#endif
}

__device__ __forceinline__ bool may_overlap_previous_grid() {
  return may_overlap_previous_grid(blockIdx.x);
}

#endif  // __CUDACC__

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)

#if !defined(PRECAST_SM)
#error "precast/core/launch.cuh: define PRECAST_SM as the target's number, -DPRECAST_SM=90"
#endif

constexpr bool kTargetHasPdl = PRECAST_SM >= 90;

// Launches `kernel(params)` on `stream` of the current device. More than 48 KB of dynamic shared
// memory must have been allowed before. `enable_pdl` has no effect if the target has no PDL.
// Returns the error of the launch; errors of the execution surface later, as with any launch.
template <typename Params>
cudaError_t launch(void (*kernel)(Params), dim3 grid, dim3 block, bool enable_pdl,
                   cudaStream_t stream, const Params& params, int dynamic_smem = 0) {
  cudaLaunchAttribute pdl = {};
  pdl.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  pdl.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  config.dynamicSmemBytes = static_cast<size_t>(dynamic_smem);
  config.attrs = &pdl;
  config.numAttrs = kTargetHasPdl && enable_pdl ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params);
}

#endif

}  // namespace precast
