// SPDX-License-Identifier: Apache-2.0
// Gated activations: the gate is the first half of the last dimension.
//
//   out[r, c] = round(act(input[r, c]) * input[r, columns + c]), all in fp32
//
// Layout   input  [rows, 2 * columns]  T (16-bit), any two row strides, unit column stride
//          out    [rows, columns]      T, the same
// Threads  one thread takes 1 or 4 items of 16 bytes of `out`, a CTA's width apart.
// Traffic  reads input once, writes out once.
// Source   Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.
#pragma once

#include "precast/core/items.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/math.cuh"
#include "precast/core/rows.cuh"
#include "precast/core/vec.cuh"

namespace precast {

enum class Activation { silu, gelu, gelu_tanh };

struct ActAndMulParams {
  const void* input;  // [rows, 2 * columns]
  void* out;          // [rows, columns]
  RowStrides input_strides;
  RowStrides out_strides;
  Rows rows;
  int64_t columns;
  Items items;  // the launcher sets it
};

#if defined(__CUDACC__)

template <Activation kActivation>
__device__ __forceinline__ float activate(float x) {
  if constexpr (kActivation == Activation::silu) return silu(x);
  if constexpr (kActivation == Activation::gelu) return gelu(x);
  return gelu_tanh(x);
}

template <typename T, Activation kActivation, int kItems, bool kAligned>
__global__ __launch_bounds__(256) void ActAndMulKernel(const __grid_constant__ ActAndMulParams p) {
  constexpr int kSize = Vec<T>::kSize;
  const uint32_t first = blockIdx.x * (blockDim.x * kItems) + threadIdx.x;

  allow_next_grid();
  wait_for_previous_grid();

  Vec<T> gates[kItems];  // [kItems, kSize]
  Vec<T> ups[kItems];    // [kItems, kSize]
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t item = first + i * blockDim.x;
    if (item < p.items.count) {
      const ItemPosition at(p.items, item, kSize);
      const T* row = RowPosition(p.rows, at.row).in<T>(p.input, p.input_strides);  // [2 * columns]
      const int left = p.columns - at.column;
      gates[i] = load<kAligned>(row + at.column, left);
      ups[i] = load<kAligned>(row + p.columns + at.column, left);
    }
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t item = first + i * blockDim.x;
    if (item < p.items.count) {
      const ItemPosition at(p.items, item, kSize);
      T* row = RowPosition(p.rows, at.row).in<T>(p.out, p.out_strides);  // [columns]
      float gate[kSize], up[kSize];
      unpack(gates[i], gate);
      unpack(ups[i], up);
#pragma unroll
      for (int j = 0; j < kSize; ++j) gate[j] = activate<kActivation>(gate[j]) * up[j];
      store<kAligned>(row + at.column, pack<T>(gate), p.columns - at.column);
    }
  }
}

#if !defined(__CUDACC_RTC__)

// Launches the activation on `stream`; nothing for an empty tensor. cudaErrorInvalidValue if `out`
// has more than 2^32 items of 16 bytes.
template <typename T, Activation kActivation>
cudaError_t launch_act_and_mul(ActAndMulParams p, bool enable_pdl, cudaStream_t stream) {
  if (p.rows.count == 0 || p.columns == 0) return cudaSuccess;
  const ItemPlan plan = plan_items(p.rows.count, p.columns, Vec<T>::kSize);
  if (!plan.fits) return cudaErrorInvalidValue;
  p.items = plan.items;
  const bool aligned = p.columns % Vec<T>::kSize == 0 &&
                       rows_are_vector_aligned<T>(p.input, p.input_strides) &&
                       rows_are_vector_aligned<T>(p.out, p.out_strides);
  const auto run = [&](void (*kernel)(ActAndMulParams)) {
    return launch(kernel, dim3(plan.ctas), dim3(plan.threads), enable_pdl, stream, p);
  };
  if (!aligned) {
    return run(plan.per_thread == 1 ? ActAndMulKernel<T, kActivation, 1, false>
                                    : ActAndMulKernel<T, kActivation, 4, false>);
  }
  return run(plan.per_thread == 1 ? ActAndMulKernel<T, kActivation, 1, true>
                                  : ActAndMulKernel<T, kActivation, 4, true>);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
