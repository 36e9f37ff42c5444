// SPDX-License-Identifier: Apache-2.0
// Cooperative grids: all CTAs are resident at once and share a barrier.
#pragma once

#include "precast/core/launch.cuh"

#if defined(__CUDACC__)
#include <cooperative_groups.h>
#endif

namespace precast {

#if defined(__CUDACC__)

// A barrier of all threads of a grid that launch_cooperative() started. Its counter belongs to the
// launch, so that launches in several streams and replays of a graph do not interfere.
__device__ __forceinline__ void grid_sync() { cooperative_groups::this_grid().sync(); }

#endif

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)

// Does the same as launch(), cooperatively and with `dynamic_smem` bytes of shared memory. Returns
// cudaErrorCooperativeLaunchTooLarge, and clears it, if the device cannot hold all CTAs.
template <typename Params>
cudaError_t launch_cooperative(void (*kernel)(Params), dim3 grid, dim3 block, int dynamic_smem,
                               bool enable_pdl, cudaStream_t stream, const Params& params) {
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic_smem);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = static_cast<size_t>(dynamic_smem);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = kTargetHasPdl && enable_pdl ? 2 : 1;
  const cudaError_t launched = cudaLaunchKernelEx(&config, kernel, params);
  if (launched == cudaErrorCooperativeLaunchTooLarge) cudaGetLastError();
  return launched;
}

#endif

}  // namespace precast
