// SPDX-License-Identifier: Apache-2.0
// Stores of 8 x 8 matrices to shared memory, the counterpart of ldmatrix (core/mma.cuh); compute
// capability 9.0. Source: PTX ISA, "stmatrix".
#pragma once

#include "precast/core/types.cuh"

namespace precast {

#if defined(__CUDACC__)

// Stores four 8 x 8 matrices of 16-bit numbers. Lane l passes the address of row l % 8 of matrix l
// / 8, 16 bytes, and holds row l / 4, columns 2 (l % 4) and 2 (l % 4) + 1 of each matrix. All 32
// lanes call it.
__device__ __forceinline__ void stmatrix_x4(uint32_t row, const uint32_t (&r)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
#endif
}

#endif  // __CUDACC__

}  // namespace precast
