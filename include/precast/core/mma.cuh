// SPDX-License-Identifier: Apache-2.0
// Warp-level matrix multiplication: mma.m16n8k16 with 16-bit operands and fp32 accumulators, and
// the ldmatrix loads of its operands; transposition in registers.
//
// Lane l = 4 g + q holds these fragments; a register holds two numbers, the first in the low half:
//   A [16, 16]  a[0]: row g, columns 2 q and 2 q + 1    a[1]: row g + 8    a[2], a[3]: columns + 8
//   B [16, 8]   b[0]: rows 2 q and 2 q + 1, column g    b[1]: rows + 8
//   C [16, 8]   c[0], c[1]: row g, columns 2 q and 2 q + 1              c[2], c[3]: row g + 8
// So the packed accumulators of two neighbouring products are the A fragment of another product.
// All 32 lanes must call each function. Source: PTX ISA, "Matrix Fragments for mma.m16n8k16".
#pragma once

#include "precast/core/shared_address.cuh"
#include "precast/core/types.cuh"

namespace precast {

#if defined(__CUDACC__)

// Loads four 8 x 8 matrices of 16-bit numbers. Lane l passes the address of row l % 8 of matrix l /
// 8, 16 bytes, and gets row l / 4, columns 2 (l % 4) and 2 (l % 4) + 1 of each matrix.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// The same, transposed: a lane gets column l / 4, rows 2 (l % 4) and 2 (l % 4) + 1.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// Transposes a matrix of 8 x 8 16-bit numbers: a lane gives row l / 4, columns 2 (l % 4) and 2 (l %
// 4) + 1, and gets column l / 4, rows 2 (l % 4) and 2 (l % 4) + 1.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t x) {
  uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(x));
  return transposed;
}

// c += a * b
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1);
template <>
__device__ __forceinline__ void mma_m16n8k16<f16>(float (&c)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_m16n8k16<bf16>(float (&c)[4], const uint32_t (&a)[4],
                                                   uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif  // __CUDACC__

}  // namespace precast
