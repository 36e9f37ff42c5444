// SPDX-License-Identifier: Apache-2.0
// The weighted sum of the rows that the experts of a token computed.
//
//   out[t, c] = round(sum_s weight[t, s] * (x[r, c] * scale[e] + bias[e, c]))
//
//   over the slots s of the token whose r = rows[t, s] is a row of x, in their order; e is
//   row_experts[r]. A token without such slots gets zeros.
//
// Layout   x            [x_rows, columns]   T, rows at multiples of 16 bytes
//          rows         [tokens, slots]     int32, contiguous
//          weight       [tokens, slots]     fp32, contiguous
//          bias         [experts, columns]  O, contiguous
//          scale        [experts]           fp32
//          row_experts  [x_rows]            int32; read where there is a scale or a bias
//          out          [tokens, columns]   O, rows at multiples of 16 bytes
// Threads  one thread adds up 8 columns of a token; it loads eight slots before it adds the first
// Traffic  reads a row of x for each slot, writes out once
// Source   definition
#pragma once

#include "precast/core/items.cuh"
#include "precast/core/launch.cuh"
#include "precast/moe/expert_rows.cuh"

namespace precast {

struct MoeUnpermuteParams {
  const void* x;               // [x_rows, columns]
  TokenSlots slots;            // [tokens, slots], rows of x
  const float* weight;         // [tokens, slots] or null: 1
  const void* bias;            // [experts, columns] or null
  const float* scale;          // [experts] or null: 1
  const int32_t* row_experts;  // [x_rows], or null without scale and bias
  void* out;                   // [tokens, columns]
  int64_t x_stride;            // elements
  int64_t out_stride;
  uint32_t tokens;
  int experts;
  int64_t columns;  // a multiple of 8
  Items items;      // set by the launcher
};

#if defined(__CUDACC__)

template <typename T, typename O>
__global__ __launch_bounds__(kItemThreads) void MoeUnpermuteKernel(
    const __grid_constant__ MoeUnpermuteParams p) {
  constexpr int kSize = Vec<T>::kSize;
  static_assert(kSize == 8 && Vec<O>::kSize == 8, "16-bit types");
  const uint32_t item = blockIdx.x * kItemThreads + threadIdx.x;
  if (item >= p.items.count) return;
  const ItemPosition at(p.items, item, kSize);
  const T* x = static_cast<const T*>(p.x) + at.column;  // + row * x_stride
  const float* weight = p.weight + int64_t(at.row) * p.slots.count;

  launch_dependent_grids();
  wait_on_dependent_grids();

  float sum[kSize] = {};
  for (int first = 0; first < p.slots.count; first += kSlotsAtOnce) {
    int32_t rows[kSlotsAtOnce];
    load_slots(p.slots, at.row, first, rows);
    Vec<T> loaded[kSlotsAtOnce];
    float factors[kSlotsAtOnce];
#pragma unroll
    for (int i = 0; i < kSlotsAtOnce; ++i) {
      if (rows[i] < 0) continue;
      loaded[i] = load_vec(x + int64_t(rows[i]) * p.x_stride);
      factors[i] = p.weight != nullptr ? load_scalar(weight + first + i) : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < kSlotsAtOnce; ++i) {
      if (rows[i] < 0) continue;
      float y[kSize];
      unpack(loaded[i], y);
      if (p.row_experts != nullptr) {
        const uint32_t expert = static_cast<uint32_t>(load_number(p.row_experts + rows[i]));
        // A caller's number that is no expert must not fault.
        const int64_t known = expert < static_cast<uint32_t>(p.experts) ? expert : 0;
        if (p.scale != nullptr) {
          const float scale = load_scalar(p.scale + known);
#pragma unroll
          for (int j = 0; j < kSize; ++j) y[j] *= scale;
        }
        if (p.bias != nullptr) {
          float bias[kSize];
          unpack(load_vec(static_cast<const O*>(p.bias) + known * p.columns + at.column), bias);
#pragma unroll
          for (int j = 0; j < kSize; ++j) y[j] += bias[j];
        }
      }
#pragma unroll
      for (int j = 0; j < kSize; ++j) sum[j] = fmaf(factors[i], y[j], sum[j]);
    }
  }
  store_vec(static_cast<O*>(p.out) + at.row * p.out_stride + at.column, pack<O>(sum));
}

#if !defined(__CUDACC_RTC__)

// Launches the sums on `stream`, unless there are none. Returns cudaErrorInvalidValue if `out` has
// more than 2^32 items of 8 columns.
template <typename T, typename O>
cudaError_t launch_moe_unpermute(MoeUnpermuteParams p, bool enable_pdl, cudaStream_t stream) {
  if (p.tokens == 0 || p.columns == 0) return cudaSuccess;
  const ItemPlan plan = plan_items(p.tokens, p.columns, Vec<T>::kSize);
  if (!plan.fits) return cudaErrorInvalidValue;
  p.items = plan.items;
  if (p.scale == nullptr && p.bias == nullptr) p.row_experts = nullptr;
  return launch(MoeUnpermuteKernel<T, O>, dim3(plan.ctas), dim3(kItemThreads), enable_pdl, stream,
                p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
