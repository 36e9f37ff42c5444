// SPDX-License-Identifier: Apache-2.0
// SwiGLU between the two grouped products of an FP8 mixture of experts, requantised to e4m3 with
// one scale for each 128 columns of a row.
//
//   y[r, c]      = silu(input[r, c]) * input[r, n + c]                    fp32
//   scale[g, r]  = max(max_{c in g} |y[r, c]|, eps) / 448
//   out[r, c]    = round(y[r, c] * (1 / scale[c / 128, r]))
//   for the rows r that belong to an expert: m_indices[r] >= 0; others are neither read nor written
//
// Layout   input      [rows, 2 * n]   T, any row stride in whole 16 bytes
//          m_indices  [rows]          int32, or null: every row belongs to an expert
//          out        [rows, n]       e4m3, any row stride in whole 8 bytes
//          scales     [n / 128, rows] f32, any distance of the groups: the layout that the second
//                                     product reads (scale_major_mode "MN")
// Threads  one thread takes 16 bytes of gate and 16 bytes of up; 16 neighbours share a group
// Traffic  reads the rows once, writes codes and scales once: 5 bytes and 4 / 128 for each y
// Source   DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv:2412.19437 (1 x 128 groups); the
//          layouts are those of DeepGEMM's grouped products
// Measured 2026-11-27 on an H200, bf16: [65536, 2 x 768] 59.4 us, [32768, 2 x 2048] 79.0 us, 0.97 of
//          the elementwise ceiling of the same run; [64, 2 x 2048] 2.4 us
#pragma once

#include "precast/core/items.cuh"
#include "precast/core/launch.cuh"
#include "precast/quantize/quant_input.cuh"

namespace precast {

constexpr int kMoeGroup = 128;  // columns that share a scale

struct MoeActivationParams {
  const void* input;         // [rows, 2 * n]
  const int32_t* m_indices;  // [rows], or null
  void* out;                 // [rows, n]
  float* scales;             // [n / 128, rows]
  int64_t input_stride;      // of rows, in elements
  int64_t out_stride;        // of rows, in elements
  int64_t scale_stride;      // of groups, in elements
  int64_t columns;           // n
  Items items;               // vectors of 8 columns
  float eps;
};

#if defined(__CUDACC__)

__device__ __forceinline__ bool belongs_to_expert(const int32_t* m_indices, uint32_t row) {
  if (m_indices == nullptr) return true;
  int32_t expert;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(expert) : "l"(m_indices + row) : "memory");
  return expert >= 0;
}

template <typename T>
__global__ __launch_bounds__(kItemThreads) void MoeActivationKernel(
    const __grid_constant__ MoeActivationParams p) {
  constexpr int kSize = Vec<T>::kSize;
  constexpr int kLanes = kMoeGroup / kSize;
  static_assert(kSize == 8, "a 16-bit type");
  const uint32_t item = blockIdx.x * kItemThreads + threadIdx.x;
  const bool exists = item < p.items.count;
  const ItemPosition at(p.items, exists ? item : 0u, kSize);
  const T* input = static_cast<const T*>(p.input) + at.row * p.input_stride + at.column;  // [8]

  launch_dependent_grids();
  wait_on_dependent_grids();

  // All lanes of a group have one row. Those without work still take part in the shuffles.
  const bool valid = exists && belongs_to_expert(p.m_indices, at.row);
  QuantVec<T, true> vec;
  vec.clear();
  const L2Policy policy = read_policy(p.m_indices == nullptr);
  if (valid) vec.template load_from<true>(input, p.columns, kSize, policy);
  vec.gate();
  const uint32_t amax = warp_max(vec.amax(), kLanes);
  if (!valid) return;
  const QuantScale scale = quant_scale<e4m3>(amax, p.eps, ScaleFormat::numbers);
  e4m3* out = static_cast<e4m3*>(p.out) + at.row * p.out_stride + at.column;  // [8]
  vec.template store_to<e4m3, true>(out, scale.reciprocal, kSize);
  if (threadIdx.x % kLanes == 0) {
    const int64_t group = at.column / kMoeGroup;
    asm volatile("st.global.f32 [%0], %1;" ::"l"(p.scales + group * p.scale_stride + at.row),
                 "f"(scale.scale)
                 : "memory");
  }
}

#if !defined(__CUDACC_RTC__)

// Launches the activation on `stream`; params.items must have at least one item, and the tensors
// the alignment that the layout says.
template <typename T>
cudaError_t launch_moe_activation(const MoeActivationParams& p, bool enable_pdl,
                                  cudaStream_t stream) {
  const dim3 grid((p.items.count - 1) / kItemThreads + 1);
  return launch(MoeActivationKernel<T>, grid, dim3(kItemThreads), enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
