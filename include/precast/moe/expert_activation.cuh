// SPDX-License-Identifier: Apache-2.0
// The function between the two products of an expert, with its biases and, for FP8, quantisation.
//
//   y[r, c] = x[r, c] * scale[e] + bias[e, c],  e = row_experts[r], r < rows of experts
//   h[r, c] = act(y[r, columns + c], y[r, c])   gated: the first half of y is up, the second gate
//   h[r, c] = act(y[r, c])                      otherwise
//   out     = round(h), or e4m3 codes of h * quant_scale, or codes with a scale for 128 columns
//
// Layout   x            [rows, inputs]          T, rows at multiples of 16 bytes
//          bias         [experts, inputs]       f16 or bf16, contiguous
//          offsets      [experts + 1]           int32; rows from offsets[experts] on are skipped
//          row_experts  [rows]                  int32
//          scale, swiglu_alpha, beta, limit     [experts] fp32
//          out          [rows, columns]         T or e4m3, rows at multiples of 16 bytes
//          out_scale    [rows, columns / 128]   fp32 at any strides
// Threads  one thread computes 8 columns; with a scale for each 128, 16 lanes share one
// Traffic  reads x once, writes out and scales once
// Source   Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202; So et al., Primer,
//          arXiv:2109.08668 (relu2); OpenAI, gpt-oss model card, arXiv:2508.10925 (alpha, beta,
//          limit)
#pragma once

#include "precast/core/items.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/math.cuh"
#include "precast/core/quant.cuh"
#include "precast/moe/expert_rows.cuh"

namespace precast {

constexpr int kExpertColumns = 8;  // of a thread

// The values are those of ActivationType in python/precast/_ops/moe/enums.py.
enum class ExpertFunction : int {
  gelu = 0,
  relu = 1,
  silu = 2,
  swiglu = 3,
  geglu = 4,
  swiglu_bias = 5,
  relu2 = 6,
  geglu_tanh = 8,
  identity = 9,
};

enum class ExpertOutput : int { numbers, codes, scaled_codes };

PRECAST_HOST_DEVICE constexpr bool is_gated(ExpertFunction function) {
  return function == ExpertFunction::swiglu || function == ExpertFunction::geglu ||
         function == ExpertFunction::swiglu_bias || function == ExpertFunction::geglu_tanh;
}

struct ExpertActivationParams {
  const void* x;               // [rows, inputs]
  const void* bias;            // [experts, inputs] or null
  const int32_t* offsets;      // [experts + 1]
  const int32_t* row_experts;  // [rows]
  const float* scale;          // [experts] or null: 1
  const float* alpha;          // [experts] or null: 1
  const float* beta;           // [experts] or null: 0
  const float* limit;          // [experts] or null: infinity
  const float* quant_scale;    // [1] or [experts]; of codes
  void* out;                   // [rows, columns]
  float* out_scale;            // [rows, columns / 128]; of scaled codes
  int64_t x_stride;            // elements
  int64_t out_stride;
  int64_t scale_row_stride;
  int64_t scale_group_stride;
  uint32_t rows;
  int experts;
  int64_t columns;  // a multiple of 8, of 128 for scaled codes
  ExpertFunction function;
  DType bias_type;           // f16 or bf16
  bool quant_scale_is_each;  // whether each expert has one
  Items items;               // set by the launcher
};

#if defined(__CUDACC__)

// The numbers of one expert.
struct ExpertNumbers {
  float scale = 1.0f, alpha = 1.0f, beta = 0.0f, limit = -negative_infinity();
  int expert = 0;

  __device__ __forceinline__ ExpertNumbers(const ExpertActivationParams& p, uint32_t row) {
    const bool differs = p.bias != nullptr || p.scale != nullptr || p.alpha != nullptr ||
                         p.beta != nullptr || p.limit != nullptr || p.quant_scale_is_each;
    if (!differs) return;
    expert = load_number(p.row_experts + row);
    // A caller's number that is no expert must not fault.
    if (static_cast<uint32_t>(expert) >= static_cast<uint32_t>(p.experts)) expert = 0;
    if (p.scale != nullptr) scale = load_scalar(p.scale + expert);
    if (p.alpha != nullptr) alpha = load_scalar(p.alpha + expert);
    if (p.beta != nullptr) beta = load_scalar(p.beta + expert);
    if (p.limit != nullptr) limit = load_scalar(p.limit + expert);
  }
};

// Eight columns of y.
template <typename T>
__device__ __forceinline__ void load_biased(const ExpertActivationParams& p,
                                            const ExpertNumbers& numbers, const T* x,
                                            int64_t inputs, int64_t column,
                                            float (&y)[kExpertColumns]) {
  unpack(load_vec(x + column), y);
#pragma unroll
  for (int i = 0; i < kExpertColumns; ++i) y[i] *= numbers.scale;
  if (p.bias == nullptr) return;
  const int64_t at = numbers.expert * inputs + column;
  float bias[kExpertColumns];
  if (p.bias_type == DType::f16) {
    unpack(load_vec(static_cast<const f16*>(p.bias) + at), bias);
  } else {
    unpack(load_vec(static_cast<const bf16*>(p.bias) + at), bias);
  }
#pragma unroll
  for (int i = 0; i < kExpertColumns; ++i) y[i] += bias[i];
}

// Calls f for each of the columns of y; NaN stays NaN in every function.
template <typename F>
__device__ __forceinline__ void map_columns(float (&y)[kExpertColumns], const F& f) {
#pragma unroll
  for (int i = 0; i < kExpertColumns; ++i) y[i] = f(y[i], i);
}

__device__ __forceinline__ void apply_gated(ExpertFunction function, const ExpertNumbers& numbers,
                                            const float (&up)[kExpertColumns],
                                            float (&gate)[kExpertColumns]) {
  switch (function) {
    case ExpertFunction::geglu:
      return map_columns(gate, [&](float g, int i) { return gelu(g) * up[i]; });
    case ExpertFunction::geglu_tanh:
      return map_columns(gate, [&](float g, int i) { return gelu_tanh(g) * up[i]; });
    case ExpertFunction::swiglu_bias: {
      const float limit = numbers.limit;
      return map_columns(gate, [&](float g, int i) {
        const float x = g > limit ? limit : g;
        const float below = up[i] > limit ? limit : up[i];
        const float u = below < -limit ? -limit : below;
        return x * sigmoid(numbers.alpha * x) * (u + numbers.beta);
      });
    }
    default:
      return map_columns(gate, [&](float g, int i) { return silu(g) * up[i]; });
  }
}

__device__ __forceinline__ void apply_plain(ExpertFunction function, float (&y)[kExpertColumns]) {
  switch (function) {
    case ExpertFunction::gelu:
      return map_columns(y, [](float x, int) { return gelu(x); });
    case ExpertFunction::relu:
      return map_columns(y, [](float x, int) { return x < 0.0f ? 0.0f : x; });
    case ExpertFunction::relu2:
      return map_columns(y, [](float x, int) { return x < 0.0f ? 0.0f : x * x; });
    case ExpertFunction::silu:
      return map_columns(y, [](float x, int) { return silu(x); });
    default:
      return;
  }
}

template <typename T, bool kGated, ExpertOutput kOutput>
__global__ __launch_bounds__(kItemThreads) void ExpertActivationKernel(
    const __grid_constant__ ExpertActivationParams p) {
  constexpr int kLanes = kExpertGroup / kExpertColumns;
  const uint32_t item = blockIdx.x * kItemThreads + threadIdx.x;
  const bool is_item = item < p.items.count;
  const int lane = threadIdx.x % kLanes;
  const ItemPosition at(p.items, is_item ? item : lane, kExpertColumns);
  const int64_t inputs = kGated ? 2 * p.columns : p.columns;
  const T* x = static_cast<const T*>(p.x) + at.row * p.x_stride;  // [inputs]

  launch_dependent_grids();
  wait_on_dependent_grids();

  // Why no return yet: all lanes of a group, which is of one row, take part in the shuffles.
  const bool exists = is_item && static_cast<int>(at.row) < load_number(p.offsets + p.experts);
  float y[kExpertColumns] = {};
  int expert = 0;
  if (exists) {
    const ExpertNumbers numbers(p, at.row);
    expert = numbers.expert;
    if constexpr (kGated) {
      float up[kExpertColumns];
      load_biased(p, numbers, x, inputs, at.column, up);
      load_biased(p, numbers, x, inputs, p.columns + at.column, y);
      apply_gated(p.function, numbers, up, y);
    } else {
      load_biased(p, numbers, x, inputs, at.column, y);
      apply_plain(p.function, y);
    }
  }
  const int64_t to = at.row * p.out_stride + at.column;
  if constexpr (kOutput == ExpertOutput::numbers) {
    if (exists) store_vec(static_cast<T*>(p.out) + to, pack<T>(y));
  } else if constexpr (kOutput == ExpertOutput::codes) {
    if (!exists) return;
    const float by = load_scalar(p.quant_scale + (p.quant_scale_is_each ? expert : 0));
    store_codes<e4m3, true>(static_cast<e4m3*>(p.out) + to, y, by, kExpertColumns);
  } else {
    const QuantScale scale =
        quant_scale<e4m3>(warp_max(amax_bits(y), kLanes), kExpertEps, ScaleFormat::numbers);
    if (!exists) return;
    store_codes<e4m3, true>(static_cast<e4m3*>(p.out) + to, y, scale.reciprocal, kExpertColumns);
    if (lane == 0) {
      p.out_scale[at.row * p.scale_row_stride + at.column / kExpertGroup * p.scale_group_stride] =
          scale.scale;
    }
  }
}

#if !defined(__CUDACC_RTC__)

// Launches the function on `stream`, unless there is nothing to do. Returns cudaErrorInvalidValue
// if `out` has more than 2^32 items of 8 columns.
template <typename T>
cudaError_t launch_expert_activation(ExpertActivationParams p, ExpertOutput output, bool enable_pdl,
                                     cudaStream_t stream) {
  if (p.rows == 0 || p.columns == 0 || p.experts == 0) return cudaSuccess;
  const ItemPlan plan = plan_items(p.rows, p.columns, kExpertColumns);
  if (!plan.fits) return cudaErrorInvalidValue;
  p.items = plan.items;
  const bool gated = is_gated(p.function);
  const auto run = [&](void (*kernel)(ExpertActivationParams)) {
    return launch(kernel, dim3(plan.ctas), dim3(kItemThreads), enable_pdl, stream, p);
  };
  switch (output) {
    case ExpertOutput::numbers:
      return run(gated ? ExpertActivationKernel<T, true, ExpertOutput::numbers>
                       : ExpertActivationKernel<T, false, ExpertOutput::numbers>);
    case ExpertOutput::codes:
      return run(gated ? ExpertActivationKernel<T, true, ExpertOutput::codes>
                       : ExpertActivationKernel<T, false, ExpertOutput::codes>);
    case ExpertOutput::scaled_codes:
      return run(gated ? ExpertActivationKernel<T, true, ExpertOutput::scaled_codes>
                       : ExpertActivationKernel<T, false, ExpertOutput::scaled_codes>);
  }
  return cudaErrorInvalidValue;
}

#endif

#endif  // __CUDACC__

}  // namespace precast
