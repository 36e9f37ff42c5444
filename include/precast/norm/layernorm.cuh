// SPDX-License-Identifier: Apache-2.0
// LayerNorm with 16-bit output, or with fp8 output by one given scale.
//
//   m[r]      = mean_c(input[r, c]),  v[r] = mean_c((input[r, c] - m[r])^2)
//   y[r, c]   = (input[r, c] - m[r]) / sqrt(v[r] + eps) * gamma[c] + beta[c]
//   out[r, c] = round(y[r, c]), or sat(y[r, c] * (1 / scale)) for fp8 (norm/rmsnorm_quant.cuh)
//
// All arithmetic is fp32. The variance is computed around the mean in a second pass over registers,
// so that a large mean causes no cancellation.
//
// Layout   input, out   [rows, hidden]  T (16-bit), contiguous; out may be input, or is fp8
//          gamma, beta  [hidden]        fp32, contiguous
//          scale        [1]             fp32, for fp8
// Threads  as in norm/rmsnorm.cuh: a group of lanes keeps one row in registers, or a CTA two rows;
//          a CTA loops over its row element by element, three times (all but the first from L2), if
//          the row is unaligned or longer than 2048 vectors.
// Traffic  reads input once, writes out once
// Source   Ba, Kiros and Hinton, Layer Normalization, arXiv:1607.06450
// Measured 2026-11-21 on an H200, bf16, 16384 x 8192, with shares of the elementwise ceiling of the
//          same run: 4229 GB/s, 0.96; to e4m3 96.7 us, 0.94.
#pragma once

#include "precast/core/block.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/prefetch.cuh"
#include "precast/core/row_plan.cuh"
#include "precast/core/rows.cuh"
#include "precast/core/store.cuh"
#include "precast/core/vec.cuh"

namespace precast {

struct LayerNormParams {
  const void* input;   // [rows, hidden]
  const float* gamma;  // [hidden]
  const float* beta;   // [hidden]
  void* out;           // [rows, hidden]
  uint32_t rows;
  int hidden;
  float eps;
  RowPlan plan;        // set by the launcher
  const float* scale;  // [1], for fp8
};

#if defined(__CUDACC__)

// Loads the parameters of one vector of T, which are two vectors of fp32.
template <bool kAligned>
__device__ __forceinline__ void load_parameters(const float* source, int count, float (&x)[8]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float quarter[4];
    unpack(
        kAligned ? load_vec(source + 4 * half) : load_elements(source + 4 * half, count - 4 * half),
        quarter);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[4 * half + i] = quarter[i];
  }
}

__device__ __forceinline__ float sum_of(const float (&x)[8]) {
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

// Returns the sum of squared differences from `mean` over the first `count` elements.
__device__ __forceinline__ float squared_distance(const float (&x)[8], float mean, int count) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float d = i < count ? x[i] - mean : 0.0f;
    sum += d * d;
  }
  return sum;
}

__device__ __forceinline__ void normalize(const float (&x)[8], float mean, float rstd,
                                          const float (&gamma)[8], const float (&beta)[8],
                                          float (&y)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = (x[i] - mean) * rstd * gamma[i] + beta[i];
}

// Multiplies beta by the multiplier of fp8, which rstd includes, too. Why: this saves a product for
// each element.
template <typename Out>
__device__ __forceinline__ void scale_beta(float multiplier, float (&beta)[8]) {
  if constexpr (sizeof(Out) == 1) {
#pragma unroll
    for (int i = 0; i < 8; ++i) beta[i] *= multiplier;
  }
}

// A larger multiplier could make rstd or beta infinite, and turn zeros into NaN. With this limit
// everything except numbers within 4e-16 of 0 saturates.
constexpr float kMaxMultiplier = 0x1p60f;

template <typename Out>
__device__ __forceinline__ float load_multiplier(const LayerNormParams& p) {
  if constexpr (sizeof(Out) == 1) {
    const float multiplier = 1.0f / load_scalar(p.scale);
    return multiplier > kMaxMultiplier ? kMaxMultiplier : multiplier;  // a NaN is kept
  }
  return 1.0f;
}

// Makes the compiler unpack `vec` again. Why: otherwise it keeps eight fp32 numbers from one pass
// over registers to the next, in twice the registers.
template <typename T>
__device__ __forceinline__ void force_repack(Vec<T>& vec) {
  asm volatile("" : "+r"(vec.bits.x), "+r"(vec.bits.y), "+r"(vec.bits.z), "+r"(vec.bits.w));
}

// With several vectors a thread may use 64 registers.
constexpr int layernorm_max_threads(int vecs) { return vecs == 4 ? kMaxThreads / 2 : kMaxThreads; }

// A group of threads processes kRows rows at a time, which share the parameters and the barriers.
template <typename T, typename Out, int kVecs, int kRows, bool kRowPerCta>
__global__ __launch_bounds__(layernorm_max_threads(kVecs),
                             kMaxThreads / layernorm_max_threads(kVecs)) void  //
    LayerNormKernel(const __grid_constant__ LayerNormParams p) {
  constexpr int kSize = Vec<T>::kSize;
  const int vecs = p.hidden / kSize;
  const int group_size = kRowPerCta ? blockDim.x : p.plan.lanes;
  const int rank = kRowPerCta ? threadIdx.x : threadIdx.x & (p.plan.lanes - 1);
  const uint32_t group = kRowPerCta ? blockIdx.x : row_of_lane_group(p.plan);
  const uint32_t row = group * kRows;
  const int64_t offset = static_cast<int64_t>(row) * p.hidden;
  const T* input = static_cast<const T*>(p.input) + offset;  // [kRows, hidden]
  Out* out = static_cast<Out*>(p.out) + offset;              // [kRows, hidden]
  __shared__ float scratch[2][kRows][kMaxWarps];
  const auto row_exists = [&](int r) { return (kRowPerCta && kRows == 1) || row + r < p.rows; };
  const auto group_sum = [&](float (&x)[kRows], float (&row_scratch)[kRows][kMaxWarps]) {
    if constexpr (kRowPerCta) {
      block_sum(x, row_scratch);
    } else {
#pragma unroll
      for (int r = 0; r < kRows; ++r) x[r] = warp_sum(x[r], p.plan.lanes);
    }
  };

  launch_dependent_grids();
  if (blockIdx.x < p.plan.prefetching_ctas) {
    if (rank == 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (row_exists(r)) prefetch_bytes_to_l2(input + r * p.hidden, p.hidden * int(sizeof(T)));
      }
    }
    if (threadIdx.x == kWarpSize && blockIdx.x < kSharedPrefetches) {
      prefetch_bytes_to_l2(p.gamma, p.hidden * int(sizeof(float)));
      prefetch_bytes_to_l2(p.beta, p.hidden * int(sizeof(float)));
    }
  }
  wait_on_dependent_grids();

  const L2Policy policy = read_policy(p.plan.evict_last);
  Vec<T> loaded[kRows][kVecs];  // [kRows, kVecs, kSize]
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int vec = rank + i * group_size;
      loaded[r][i] = row_exists(r) && vec < vecs
                         ? load_vec(input + r * p.hidden + vec * kSize, policy)
                         : zero_vec<T>();
    }
  }
  const float multiplier = load_multiplier<Out>(p);

  float mean[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    mean[r] = 0.0f;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      float x[kSize];
      unpack(loaded[r][i], x);
      mean[r] += sum_of(x);
    }
  }
  group_sum(mean, scratch[0]);
#pragma unroll
  for (int r = 0; r < kRows; ++r) mean[r] /= p.hidden;

  // Why: launches with one vector a thread are bound by latency, so its parameters are loaded
  // before the second sum, whose barrier hides them. With more vectors it is better to read them
  // late, from L1, than to keep them in registers.
  float gamma[kSize], beta[kSize];
  if (kVecs == 1 && rank < vecs) {
    load_parameters<true>(p.gamma + rank * kSize, kSize, gamma);
    load_parameters<true>(p.beta + rank * kSize, kSize, beta);
  }

  float rstd[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    rstd[r] = 0.0f;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      if (rank + i * group_size < vecs) {
        force_repack(loaded[r][i]);
        float x[kSize];
        unpack(loaded[r][i], x);
        rstd[r] += squared_distance(x, mean[r], kSize);
      }
    }
  }
  group_sum(rstd, scratch[1]);
#pragma unroll
  for (int r = 0; r < kRows; ++r) rstd[r] = rsqrtf(rstd[r] / p.hidden + p.eps) * multiplier;

#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = rank + i * group_size;
    if (vec >= vecs || !row_exists(0)) break;
    if (kVecs > 1) {
      load_parameters<true>(p.gamma + vec * kSize, kSize, gamma);
      load_parameters<true>(p.beta + vec * kSize, kSize, beta);
    }
    scale_beta<Out>(multiplier, beta);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!row_exists(r)) break;
      force_repack(loaded[r][i]);
      float x[kSize];
      unpack(loaded[r][i], x);
      float y[kSize];
      normalize(x, mean[r], rstd[r], gamma, beta, y);
      store_rounded<true>(out + r * p.hidden + vec * kSize, y, kSize);
    }
  }
}

template <typename T, typename Out>
__global__ __launch_bounds__(kLoopThreads) void LayerNormLoopKernel(
    const __grid_constant__ LayerNormParams p) {
  constexpr int kSize = Vec<T>::kSize;
  const int64_t offset = static_cast<int64_t>(blockIdx.x) * p.hidden;
  const T* input = static_cast<const T*>(p.input) + offset;  // [hidden]
  Out* out = static_cast<Out*>(p.out) + offset;              // [hidden]
  const int stride = blockDim.x * kSize;
  __shared__ float scratch[2][kMaxWarps];

  launch_dependent_grids();
  wait_on_dependent_grids();

  const float multiplier = load_multiplier<Out>(p);
  float x[kSize];
  float sum = 0.0f;
  for (int column = threadIdx.x * kSize; column < p.hidden; column += stride) {
    unpack(load_elements(input + column, p.hidden - column), x);
    sum += sum_of(x);
  }
  const float mean = block_sum(sum, scratch[0]) / p.hidden;

  float squares = 0.0f;
  for (int column = threadIdx.x * kSize; column < p.hidden; column += stride) {
    unpack(load_elements(input + column, p.hidden - column), x);
    squares += squared_distance(x, mean, p.hidden - column);
  }
  const float rstd = rsqrtf(block_sum(squares, scratch[1]) / p.hidden + p.eps) * multiplier;

  for (int column = threadIdx.x * kSize; column < p.hidden; column += stride) {
    const int left = p.hidden - column;
    float gamma[kSize], beta[kSize];
    unpack(load_elements(input + column, left), x);
    load_parameters<false>(p.gamma + column, left, gamma);
    load_parameters<false>(p.beta + column, left, beta);
    scale_beta<Out>(multiplier, beta);
    float y[kSize];
    normalize(x, mean, rstd, gamma, beta, y);
    store_rounded<false>(out + column, y, left);
  }
}

#if !defined(__CUDACC_RTC__)

// Launches LayerNorm of every row on `stream`, unless the tensor is empty.
template <typename T, typename Out>
cudaError_t launch_layernorm(LayerNormParams p, bool enable_pdl, cudaStream_t stream) {
  if (p.rows == 0 || p.hidden == 0) return cudaSuccess;
  const bool aligned = p.hidden % Vec<T>::kSize == 0 && rows_are_vector_aligned<T>(p.input, {}) &&
                       rows_are_vector_aligned<Out>(p.out, {}, kStoreBytes<Out>) &&
                       rows_are_vector_aligned<float>(p.gamma, {}) &&
                       rows_are_vector_aligned<float>(p.beta, {});
  RowShape shape = {};
  shape.rows = p.rows;
  shape.hidden = p.hidden;
  shape.vec_size = Vec<T>::kSize;
  shape.streams = 2;
  shape.in_place = p.out == p.input;
  shape.aligned = aligned;
  // Why: for 1024 rows of 4096, two vectors a thread took 6.1 us and four 8.4; for 16384 rows of
  // 8192 four took 102 us and two 121 (H200, bf16 to e4m3).
  shape.vecs_per_thread = p.rows >= 4096 ? 4 : 2;
  shape.prefetches_rows = true;
  p.plan = plan_rows(shape);
  const auto run = [&](void (*kernel)(LayerNormParams), uint32_t ctas) {
    return launch(kernel, dim3(ctas), dim3(p.plan.threads), enable_pdl, stream, p);
  };
  const uint32_t pairs = (p.rows - 1) / 2 + 1;
  switch (p.plan.kind) {
    case RowKernel::lanes:
      return run(LayerNormKernel<T, Out, 1, 1, false>, p.plan.ctas);
    case RowKernel::cta_1:
      return run(LayerNormKernel<T, Out, 1, 1, true>, p.plan.ctas);
    case RowKernel::cta_2:
      return run(LayerNormKernel<T, Out, 2, 2, true>, pairs);
    case RowKernel::cta_4:
      return run(LayerNormKernel<T, Out, 4, 2, true>, pairs);
    case RowKernel::loop:
    case RowKernel::loop_elements:
      return run(LayerNormLoopKernel<T, Out>, p.plan.ctas);
  }
  return cudaErrorInvalidValue;
}

#endif

#endif  // __CUDACC__

}  // namespace precast
