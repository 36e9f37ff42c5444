// SPDX-License-Identifier: Apache-2.0
// The function between the two products of an expert, with its biases and, for FP8, quantisation.
//
//   y[r, c]         = input[r, c] * scale[e] + bias[e, c],  e = row_experts[r]      fp32
//   h[r, c]         = act(y[r, gate + c]) * y[r, up + c], or act(y[r, c]) without a gate
//   out[r, c]       = round(h[r, c]), or round(h[r, c] * quant_scale[e]), or with out_scale
//   out_scale[g, r] = max(max_{c in g} |h[r, c]|, eps) / 448
//   out[r, c]       = round(h[r, c] * (1 / out_scale[c / 128, r]))
//   where SwiGLU without scale and bias is
//   h[r, c]         = silu(input[r, gate + c]) * input[r, up + c]
//   for the rows r below offsets[experts] that belong to an expert, row_experts[r] >= 0; others are
//   neither read nor written
//
// Layout   input        [rows, inputs]         T; inputs is 2 * columns with a gate
//          bias         [experts, inputs]      f16 or bf16, contiguous
//          offsets      [experts + 1]          int32, or null: every row is below
//          row_experts  [rows]                 int32, or null: no row differs
//          scale, swiglu_alpha, beta, limit    [experts] fp32
//          out          [rows, columns]        T or e4m3; rows of all matrices at 16 bytes
//          out_scale    [columns / 128, rows]  fp32, any distance of the groups: the layout that
//                                              the second product reads (scale_major_mode "MN")
// Threads  one thread computes 8 columns; with a scale for each 128, 16 lanes share one
// Traffic  reads the rows once, writes out and scales once
// Source   core/expert_functions.cuh; DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv:2412.19437
//          (1 x 128 groups)
#pragma once

#include "precast/core/expert_functions.cuh"
#include "precast/core/items.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/quant.cuh"
#include "precast/moe/expert_rows.cuh"

namespace precast {

constexpr int kExpertColumns = 8;  // of a thread

enum class ExpertOutput : int { numbers, codes, scaled_codes };

struct MoeActivationParams {
  const void* input;           // [rows, inputs]
  const void* bias;            // [experts, inputs] or null
  const int32_t* offsets;      // [experts + 1] or null
  const int32_t* row_experts;  // [rows] or null; there if anything differs between experts
  const float* scale;          // [experts] or null: 1
  const float* alpha;          // [experts] or null: 1
  const float* beta;           // [experts] or null: 0
  const float* limit;          // [experts] or null: infinity
  const float* quant_scale;    // [1] or [experts]; of codes
  void* out;                   // [rows, columns]
  float* out_scale;            // [columns / 128, rows]; of scaled codes
  int64_t input_stride;        // of rows, in elements
  int64_t out_stride;          // of rows, in elements
  int64_t scale_stride;        // of groups, in elements
  int64_t columns;             // a multiple of 8, of 128 for scaled codes
  int64_t gate;                // the first column of the gate: 0 or `columns`; 0 if there is none
  int experts;
  ExpertFunction function;
  DType bias_type;           // f16 or bf16
  bool quant_scale_is_each;  // whether each expert has one
  float eps;                 // of scaled codes
  Items items;               // vectors of 8 columns of out
};

#if defined(__CUDACC__)

// What a kernel is compiled for. Why `swiglu` is one of them: it needs fewer registers than a
// function that is chosen at run time, and reads no numbers of experts.
enum class ExpertForm : int { swiglu, gated, plain };

// The numbers of one expert.
struct ExpertNumbers : SwigluNumbers {
  float scale = 1.0f;

  __device__ __forceinline__ ExpertNumbers(const MoeActivationParams& p, int expert) {
    if (p.scale != nullptr) scale = load_scalar(p.scale + expert);
    if (p.alpha != nullptr) alpha = load_scalar(p.alpha + expert);
    if (p.beta != nullptr) beta = load_scalar(p.beta + expert);
    if (p.limit != nullptr) limit = load_scalar(p.limit + expert);
  }
};

// Eight columns of y from those of the input.
template <typename T>
__device__ __forceinline__ void add_bias(const MoeActivationParams& p, const ExpertNumbers& numbers,
                                         int expert, int64_t inputs, int64_t column,
                                         const Vec<T>& loaded, float (&y)[kExpertColumns]) {
  unpack(loaded, y);
#pragma unroll
  for (int i = 0; i < kExpertColumns; ++i) y[i] *= numbers.scale;
  if (p.bias == nullptr) return;
  const int64_t at = expert * inputs + column;
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

__device__ __forceinline__ void apply_swiglu(const float (&up)[kExpertColumns],
                                             float (&gate)[kExpertColumns]) {
  map_columns(gate, [&](float g, int i) { return silu(g) * up[i]; });
}

__device__ __forceinline__ void apply_gated(ExpertFunction function, const ExpertNumbers& numbers,
                                            const float (&up)[kExpertColumns],
                                            float (&gate)[kExpertColumns]) {
  use_gated_function(function, numbers, [&](const auto& f) {
    map_columns(gate, [&](float g, int i) { return f(up[i], g); });
  });
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

// Eight columns of h, of which `column` is the first; the input has it at these places.
template <typename T, ExpertForm kForm>
__device__ __forceinline__ void compute_columns(const MoeActivationParams& p, int expert,
                                                const T* gates_from, const T* ups_from,
                                                int64_t column, float (&h)[kExpertColumns]) {
  // Marking lines evict_last pays off where every row is read.
  const L2Policy policy = read_policy(p.row_experts == nullptr && p.offsets == nullptr);
  if constexpr (kForm == ExpertForm::swiglu) {
    const Vec<T> gates = load_vec(gates_from, policy);
    const Vec<T> ups = load_vec(ups_from, policy);
    float up[kExpertColumns];
    unpack(gates, h);
    unpack(ups, up);
    apply_swiglu(up, h);
  } else if constexpr (kForm == ExpertForm::gated) {
    const Vec<T> gates = load_vec(gates_from, policy);
    const Vec<T> ups = load_vec(ups_from, policy);
    const ExpertNumbers numbers(p, expert);
    float up[kExpertColumns];
    add_bias(p, numbers, expert, 2 * p.columns, p.gate + column, gates, h);
    add_bias(p, numbers, expert, 2 * p.columns, p.columns - p.gate + column, ups, up);
    apply_gated(p.function, numbers, up, h);
  } else {
    const Vec<T> loaded = load_vec(gates_from, policy);
    const ExpertNumbers numbers(p, expert);
    add_bias(p, numbers, expert, p.columns, column, loaded, h);
    apply_plain(p.function, h);
  }
}

template <typename T, ExpertForm kForm, ExpertOutput kOutput>
__global__ __launch_bounds__(kItemThreads) void MoeActivationKernel(
    const __grid_constant__ MoeActivationParams p) {
  constexpr int kLanes = kExpertGroup / kExpertColumns;
  const uint32_t item = blockIdx.x * kItemThreads + threadIdx.x;
  const bool is_item = item < p.items.count;
  const int lane = threadIdx.x % kLanes;
  const ItemPosition at(p.items, is_item ? item : lane, kExpertColumns);
  const T* input = static_cast<const T*>(p.input) + at.row * p.input_stride + at.column;  // [8]

  const T *gates = input + p.gate, *ups = input + (p.columns - p.gate);
  // Why: the compiler would compute the addresses behind the wait, and so load later. Why not in
  // the other forms: they would need 40 registers.
  if constexpr (kForm == ExpertForm::swiglu) asm volatile("" : "+l"(gates), "+l"(ups));

  launch_dependent_grids();
  wait_on_dependent_grids();

  // Why no return yet: all lanes of a group, which is of one row, take part in the shuffles.
  bool exists = is_item;
  if (p.offsets != nullptr) {
    exists = exists && static_cast<int>(at.row) < load_number(p.offsets + p.experts);
  }
  int expert = 0;
  if (exists && p.row_experts != nullptr) {
    expert = load_number(p.row_experts + at.row);
    exists = expert >= 0;
    // A caller's number that is no expert must not fault.
    if (static_cast<uint32_t>(expert) >= static_cast<uint32_t>(p.experts)) expert = 0;
  }
  float h[kExpertColumns] = {};
  if (exists) compute_columns<T, kForm>(p, expert, gates, ups, at.column, h);
  const int64_t to = at.row * p.out_stride + at.column;
  if constexpr (kOutput == ExpertOutput::numbers) {
    if (exists) store_vec(static_cast<T*>(p.out) + to, pack<T>(h));
  } else if constexpr (kOutput == ExpertOutput::codes) {
    if (!exists) return;
    const float by = load_scalar(p.quant_scale + (p.quant_scale_is_each ? expert : 0));
    store_codes<e4m3, true>(static_cast<e4m3*>(p.out) + to, h, by, kExpertColumns);
  } else {
    const uint32_t amax = warp_max(amax_bits(h), kLanes);
    if (!exists) return;
    const QuantScale scale = quant_scale<e4m3>(amax, p.eps, ScaleFormat::numbers);
    store_codes<e4m3, true>(static_cast<e4m3*>(p.out) + to, h, scale.reciprocal, kExpertColumns);
    if (lane == 0) {
      const int64_t group = at.column / kExpertGroup;
      asm volatile("st.global.f32 [%0], %1;" ::"l"(p.out_scale + group * p.scale_stride + at.row),
                   "f"(scale.scale)
                   : "memory");
    }
  }
}

#if !defined(__CUDACC_RTC__)

// Launches the function on `stream`; params.items must have at least one item, and the tensors the
// alignment that the layout says.
template <typename T>
cudaError_t launch_moe_activation(const MoeActivationParams& p, ExpertOutput output,
                                  bool enable_pdl, cudaStream_t stream) {
  const dim3 grid((p.items.count - 1) / kItemThreads + 1);
  const bool differs = p.bias != nullptr || p.scale != nullptr;
  const bool is_swiglu = p.function == ExpertFunction::swiglu && !differs;
  const auto run = [&](auto form) {
    constexpr ExpertForm kForm = decltype(form)::value;
    const auto kernel =
        output == ExpertOutput::numbers ? MoeActivationKernel<T, kForm, ExpertOutput::numbers>
        : output == ExpertOutput::codes ? MoeActivationKernel<T, kForm, ExpertOutput::codes>
                                        : MoeActivationKernel<T, kForm, ExpertOutput::scaled_codes>;
    return launch(kernel, grid, dim3(kItemThreads), enable_pdl, stream, p);
  };
  if (is_swiglu) return run(std::integral_constant<ExpertForm, ExpertForm::swiglu>());
  if (is_gated(p.function)) return run(std::integral_constant<ExpertForm, ExpertForm::gated>());
  return run(std::integral_constant<ExpertForm, ExpertForm::plain>());
}

#endif

#endif  // __CUDACC__

}  // namespace precast
