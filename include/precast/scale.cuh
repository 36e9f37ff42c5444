// SPDX-License-Identifier: Apache-2.0
// Multiplication by a number.
//
//   out[r, c] = round(input[r, c] * factor), the product in fp32
//
// Layout   input, out  [rows, columns]  T, any two row strides, unit column stride; a contiguous
//          tensor of any rank is one row. out may be input.
// Threads  one thread takes 1 or 4 items of 16 bytes, a CTA's width apart (core/items.cuh).
// Traffic  reads input once, writes out once.
// Source   definition.
#pragma once

#include "precast/core/items.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/rows.cuh"
#include "precast/core/vec.cuh"

namespace precast {

struct ScaleParams {
  const void* input;  // [rows, columns]
  void* out;          // [rows, columns]
  RowStrides input_strides;
  RowStrides out_strides;
  Rows rows;
  int64_t columns;
  Items items;  // the launcher sets it
  float factor;
};

#if defined(__CUDACC__)

template <typename T, int kItems, bool kAligned>
__global__ __launch_bounds__(256) void ScaleKernel(const __grid_constant__ ScaleParams p) {
  constexpr int kSize = Vec<T>::kSize;
  const uint32_t first = blockIdx.x * (blockDim.x * kItems) + threadIdx.x;

  allow_next_grid();
  wait_for_previous_grid();

  Vec<T> vecs[kItems];  // [kItems, kSize]
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t item = first + i * blockDim.x;
    if (item < p.items.count) {
      const ItemPosition at(p.items, item, kSize);
      const T* row = RowPosition(p.rows, at.row).in<T>(p.input, p.input_strides);  // [columns]
      vecs[i] = load<kAligned>(row + at.column, p.columns - at.column);
    }
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t item = first + i * blockDim.x;
    if (item < p.items.count) {
      const ItemPosition at(p.items, item, kSize);
      T* row = RowPosition(p.rows, at.row).in<T>(p.out, p.out_strides);  // [columns]
      float x[kSize];
      unpack(vecs[i], x);
#pragma unroll
      for (int j = 0; j < kSize; ++j) x[j] *= p.factor;
      store<kAligned>(row + at.column, pack<T>(x), p.columns - at.column);
    }
  }
}

#if !defined(__CUDACC_RTC__)

// Launches the product on `stream`; nothing for an empty tensor. cudaErrorInvalidValue if the
// tensor has more than 2^32 items of 16 bytes.
template <typename T>
cudaError_t launch_scale(ScaleParams p, bool enable_pdl, cudaStream_t stream) {
  if (p.rows.count == 0 || p.columns == 0) return cudaSuccess;
  const ItemPlan plan = plan_items(p.rows.count, p.columns, Vec<T>::kSize);
  if (!plan.fits) return cudaErrorInvalidValue;
  p.items = plan.items;
  const bool aligned = rows_are_vector_aligned<T>(p.input, p.input_strides) &&
                       rows_are_vector_aligned<T>(p.out, p.out_strides);
  const auto run = [&](void (*kernel)(ScaleParams)) {
    return launch(kernel, dim3(plan.ctas), dim3(plan.threads), enable_pdl, stream, p);
  };
  if (!aligned)
    return run(plan.per_thread == 1 ? ScaleKernel<T, 1, false> : ScaleKernel<T, 4, false>);
  return run(plan.per_thread == 1 ? ScaleKernel<T, 1, true> : ScaleKernel<T, 4, true>);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
