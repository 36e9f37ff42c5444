// SPDX-License-Identifier: Apache-2.0
// Tensors viewed as rows: element (r, c) is at base + outer * s.outer + inner * s.inner + c, where
// r = outer * inner_count + inner. This covers 2-D tensors with strided rows and 3-D tensors with
// two strides (heads inside a packed qkv). Offsets have 64 bits, row indices 32.
#pragma once

#include "precast/core/host_device.cuh"
#include "precast/core/types.cuh"
#include "precast/core/vec.cuh"

namespace precast {

// Computes n / divisor with one multiplication, exact for every 32-bit n: with m = floor((2^64 - 1)
// / d) + 1, n * m / 2^64 exceeds n / d by less than 1 / d.
struct FastDivmod {
  uint32_t value = 1;
  uint64_t reciprocal = 0;  // 0 stands for the divisor 1

  PRECAST_HOST_DEVICE FastDivmod() {}
  PRECAST_HOST_DEVICE explicit FastDivmod(uint32_t divisor)
      : value(divisor), reciprocal(divisor > 1 ? ~uint64_t(0) / divisor + 1 : 0) {}

#if defined(__CUDACC__)
  __device__ __forceinline__ uint32_t divide(uint32_t n) const {
    return reciprocal == 0 ? n : static_cast<uint32_t>(__umul64hi(n, reciprocal));
  }
#endif
};

struct RowStrides {
  int64_t outer = 0;  // elements
  int64_t inner = 0;  // elements
};

// The number of rows, and their division into outer and inner.
struct Rows {
  uint32_t count = 0;
  FastDivmod inner;  // rows of an outer step; equal to the count for a 2-D tensor
};

#if defined(__CUDACC__)

struct RowPosition {
  uint32_t outer;
  uint32_t inner;

  __device__ __forceinline__ RowPosition(const Rows& rows, uint32_t row) {
    outer = rows.inner.divide(row);
    inner = row - outer * rows.inner.value;
  }

  template <typename T>
  __device__ __forceinline__ const T* in(const void* base, const RowStrides& strides) const {
    return static_cast<const T*>(base) + offset(strides);
  }

  template <typename T>
  __device__ __forceinline__ T* in(void* base, const RowStrides& strides) const {
    return static_cast<T*>(base) + offset(strides);
  }

  __device__ __forceinline__ int64_t offset(const RowStrides& strides) const {
    return outer * strides.outer + inner * strides.inner;
  }
};

#endif  // __CUDACC__

#if !defined(__CUDACC_RTC__)

// Whether every row starts at a multiple of `alignment` bytes.
template <typename T>
bool rows_are_vector_aligned(const void* base, const RowStrides& strides,
                             int alignment = kVecBytes) {
  const int64_t bytes = sizeof(T);
  return reinterpret_cast<uint64_t>(base) % alignment == 0 &&
         strides.outer * bytes % alignment == 0 && strides.inner * bytes % alignment == 0;
}

#endif

}  // namespace precast
