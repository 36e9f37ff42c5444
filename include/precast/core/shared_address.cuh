// SPDX-License-Identifier: Apache-2.0
// Conversion of pointers to the 32-bit shared-memory addresses of PTX.
#pragma once

#include "precast/core/types.cuh"

namespace precast {

#if defined(__CUDACC__)

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

#endif  // __CUDACC__

}  // namespace precast
