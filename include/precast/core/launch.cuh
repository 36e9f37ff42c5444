// SPDX-License-Identifier: Apache-2.0
// Kernel launch, and programmatic dependent launch (PDL) on both of its sides.
//
// With PDL a kernel may start while the kernel before it in the stream still runs. Every thread
// calls wait_for_previous_grid() before it touches global memory, so results never depend on it;
// what overlaps is the launch itself. Before it there are hints alone: prefetches, and numbers that
// say what to prefetch (guess_low_word()). The one exception reads what the kernel before the last
// wrote, and says why it may (TensorQuantKernel). PDL needs compute capability 9.0.
#pragma once

#include "precast/core/types.cuh"

#if !defined(__CUDACC_RTC__)
#include <cuda_runtime_api.h>
#endif

namespace precast {

#if defined(__CUDACC__)

// Blocks until the grids this one depends on have finished and their writes are visible. The
// "memory" clobber keeps loads from moving above it.
__device__ __forceinline__ void wait_for_previous_grid() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next grid start once every CTA of this one has called it or exited. Safe at any point:
// the next grid's own wait is for this grid's end.
__device__ __forceinline__ void allow_next_grid() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// About as many CTAs as a GPU holds at once: later ones start after the grid before has ended.
constexpr uint32_t kCtasThatMayOverlap = 1024;

// True if prefetching for this CTA may overlap the end of the grid before. `cta` counts them in the
// order in which they start.
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

// Launches `kernel(params)` on `stream` of the current device; more than 48 KB of dynamic shared
// memory must have been allowed before. `enable_pdl` is dropped where the
// target has no PDL. Returns the launch's own error; errors of the run surface later, as ever.
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
