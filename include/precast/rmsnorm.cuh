// SPDX-License-Identifier: Apache-2.0
// RMSNorm, alone or fused with the addition of a residual.
//
//   x[r, c]   = input[r, c]                         (RmsNorm)
//   x[r, c]   = input[r, c] + residual[r, c]        (fused; residual[r, c] = round(x[r, c]))
//   out[r, c] = round(x[r, c] / sqrt(mean_c(x[r, c]^2) + eps) * (weight[c] + weight_bias))
//
// weight_bias is 0, or 1 for Gemma's form. All arithmetic is fp32, x included: the residual is
// rounded in memory only.
//
// Layout   input, residual, out  [rows, hidden]  T, any two row strides, unit column stride
//          weight                [hidden]        T, contiguous
//          out may be input: each element is written by the thread that read it, after it did.
// Threads  RmsNormKernel keeps a row in registers, kVecs 16-byte vectors a thread. A row belongs to
//          a group of 1 to 32 lanes (short rows: several rows a CTA) or to a CTA.
//          RmsNormLoopKernel takes what that cannot: rows beyond 2048 vectors, unaligned pointers
//          and strides, odd hidden sizes. A CTA walks its row twice, the second time in L2.
// Traffic  reads input (and residual) once, writes out (and residual) once.
// Source   Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.
// Measured 2026-11-21 on an H200, bf16, with shares of the elementwise ceilings of the same run
//          (4281 GB/s with one read and one write, 4390 GB/s with two reads and one write):
//          16384 x 4096   4239 GB/s  0.99 / 0.97    fused  4248 GB/s  0.99 / 0.97
//          16384 x 8192   4279 GB/s  1.00 / 0.97    fused  4290 GB/s  1.00 / 0.98
#pragma once

#include "precast/core/block.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/row_plan.cuh"
#include "precast/core/rows.cuh"
#include "precast/core/vec.cuh"

namespace precast {

struct RmsNormParams {
  const void* input;   // [rows, hidden]
  const void* weight;  // [hidden]
  void* residual;      // [rows, hidden], fused only
  void* out;           // [rows, hidden]
  RowStrides input_strides;
  RowStrides residual_strides;
  RowStrides out_strides;
  Rows rows;
  int hidden;
  float eps;
  float weight_bias;
  RowPlan plan;  // the launcher sets it
};

#if defined(__CUDACC__)

// The row's values of one vector: input, or input + residual.
template <typename T, bool kFused>
struct RmsNormElements {
  static constexpr int kSize = Vec<T>::kSize;
  float x[kSize];

  __device__ __forceinline__ RmsNormElements(Vec<T> input, Vec<T> residual) {
    unpack(input, x);
    if constexpr (kFused) {
      float r[kSize];
      unpack(residual, r);
#pragma unroll
      for (int i = 0; i < kSize; ++i) x[i] += r[i];
    }
  }

  __device__ __forceinline__ float sum_of_squares() const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum += x[i] * x[i];
    return sum;
  }

  __device__ __forceinline__ Vec<T> scaled(float rstd, Vec<T> weight, float weight_bias) const {
    float w[kSize];
    float y[kSize];
    unpack(weight, w);
#pragma unroll
    for (int i = 0; i < kSize; ++i) y[i] = x[i] * rstd * (w[i] + weight_bias);
    return pack<T>(y);
  }
};

// Several vectors a thread with early weights: CTAs of 256 threads, and 40 registers, so that six
// of them share a multiprocessor. With 43 it was 9 % slower on H200.
constexpr int kEarlyWeightThreads = 256;

constexpr int rmsnorm_max_threads(int vecs, bool early_weight) {
  return vecs > 1 && early_weight ? kEarlyWeightThreads : kMaxThreads;
}

// 0 leaves it to the compiler, which did best for two vectors a thread of the fused form.
constexpr int rmsnorm_min_ctas(int vecs, bool fused, bool early_weight) {
  if (vecs == 1) return 1;
  return fused ? 0 : early_weight ? 6 : 1;
}

// kEarlyWeight: the weights are loaded with the row, into registers, rather than late from L1. It
// pays where latency counts, and for CTAs small enough that the registers cost no occupancy.
template <typename T, int kVecs, bool kRowPerCta, bool kFused, bool kEarlyWeight>
__global__ __launch_bounds__(rmsnorm_max_threads(kVecs, kEarlyWeight),
                             rmsnorm_min_ctas(kVecs, kFused, kEarlyWeight))  //
    void RmsNormKernel(const __grid_constant__ RmsNormParams p) {
  using Elements = RmsNormElements<T, kFused>;
  constexpr int kSize = Vec<T>::kSize;
  const int vecs = p.hidden / kSize;
  const int group_size = kRowPerCta ? blockDim.x : p.plan.lanes;
  const int rank = kRowPerCta ? threadIdx.x : threadIdx.x & (p.plan.lanes - 1);
  const uint32_t row = kRowPerCta ? blockIdx.x
                                  : blockIdx.x * (blockDim.x / p.plan.lanes) +
                                        static_cast<uint32_t>(threadIdx.x / p.plan.lanes);
  const bool row_exists = kRowPerCta || row < p.rows.count;

  const RowPosition position(p.rows, row);
  const T* input = position.in<T>(p.input, p.input_strides);     // [hidden]
  T* residual = position.in<T>(p.residual, p.residual_strides);  // [hidden]
  T* out = position.in<T>(p.out, p.out_strides);                 // [hidden]
  const T* weight = static_cast<const T*>(p.weight);             // [hidden]

  if constexpr (kVecs == 1 || kFused) allow_next_grid();
  if (blockIdx.x < p.plan.prefetching_ctas) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int vec = rank + i * group_size;
      if (row_exists && vec < vecs) {
        prefetch_to_l2(input + vec * kSize);
        if constexpr (kFused) prefetch_to_l2(residual + vec * kSize);
        prefetch_to_l2(weight + vec * kSize);
      }
    }
  }
  wait_for_previous_grid();

  const L2Policy policy = read_policy(p.plan.evict_last);
  Vec<T> loaded[kVecs];  // [kVecs, kSize] of the row
  Vec<T> added[kVecs];   // [kVecs, kSize] of the row
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = rank + i * group_size;
    const bool exists = row_exists && vec < vecs;
    loaded[i] = exists ? load_vec(input + vec * kSize, policy) : zero_vec<T>();
    if constexpr (kFused) {
      added[i] = exists ? load_vec(residual + vec * kSize, policy) : zero_vec<T>();
    }
  }
  Vec<T> early_weight[kVecs];  // [kVecs, kSize] of the row
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = rank + i * group_size;
    early_weight[i] = kEarlyWeight && vec < vecs ? load_vec(weight + vec * kSize) : zero_vec<T>();
  }
  // Why: measured on H200. The fused form, and short latency, want the next grid in before the
  // loads; a stream of many rows wants it behind them.
  if constexpr (kVecs > 1 && !kFused) allow_next_grid();

  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const Elements elements(loaded[i], added[i]);
    sum += elements.sum_of_squares();
    if constexpr (kFused) {
      const int vec = rank + i * group_size;
      if (row_exists && vec < vecs) store_vec(residual + vec * kSize, pack<T>(elements.x));
    }
  }
  if constexpr (kRowPerCta) {
    __shared__ float scratch[kMaxWarps];
    sum = block_sum(sum, scratch);
  } else {
    sum = warp_sum(sum, p.plan.lanes);
  }
  const float rstd = rsqrtf(sum / p.hidden + p.eps);

#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = rank + i * group_size;
    if (row_exists && vec < vecs) {
      const Elements elements(loaded[i], added[i]);
      const Vec<T> w = kEarlyWeight ? early_weight[i] : load_vec(weight + vec * kSize);
      store_vec(out + vec * kSize, elements.scaled(rstd, w, p.weight_bias));
    }
  }
}

template <typename T, bool kAligned, bool kFused>
__global__ __launch_bounds__(kLoopThreads) void RmsNormLoopKernel(
    const __grid_constant__ RmsNormParams p) {
  constexpr int kSize = Vec<T>::kSize;
  const RowPosition position(p.rows, blockIdx.x);
  const T* input = position.in<T>(p.input, p.input_strides);     // [hidden]
  T* residual = position.in<T>(p.residual, p.residual_strides);  // [hidden]
  T* out = position.in<T>(p.out, p.out_strides);                 // [hidden]
  const T* weight = static_cast<const T*>(p.weight);             // [hidden]

  allow_next_grid();
  wait_for_previous_grid();

  const auto elements_at = [&](int column) {
    const Vec<T> x = load<kAligned>(input + column, p.hidden - column);
    Vec<T> r = zero_vec<T>();
    if constexpr (kFused) r = load<kAligned>(residual + column, p.hidden - column);
    return RmsNormElements<T, kFused>(x, r);
  };

  float sum = 0.0f;
  for (int column = threadIdx.x * kSize; column < p.hidden; column += blockDim.x * kSize) {
    sum += elements_at(column).sum_of_squares();
  }
  __shared__ float scratch[kMaxWarps];
  const float rstd = rsqrtf(block_sum(sum, scratch) / p.hidden + p.eps);

  // Why: the fused sum is added again rather than read back, because memory holds it rounded.
  for (int column = threadIdx.x * kSize; column < p.hidden; column += blockDim.x * kSize) {
    const int left = p.hidden - column;
    const RmsNormElements<T, kFused> elements = elements_at(column);
    const Vec<T> w = load<kAligned>(weight + column, left);
    if constexpr (kFused) store<kAligned>(residual + column, pack<T>(elements.x), left);
    store<kAligned>(out + column, elements.scaled(rstd, w, p.weight_bias), left);
  }
}

#if !defined(__CUDACC_RTC__)

// Launches RMSNorm of every row on `stream`; nothing for an empty tensor.
template <typename T, bool kFused>
cudaError_t launch_rmsnorm(RmsNormParams p, bool enable_pdl, cudaStream_t stream) {
  if (p.rows.count == 0 || p.hidden == 0) return cudaSuccess;
  const bool aligned = p.hidden % Vec<T>::kSize == 0 && rows_are_vector_aligned<T>(p.weight, {}) &&
                       rows_are_vector_aligned<T>(p.input, p.input_strides) &&
                       rows_are_vector_aligned<T>(p.residual, p.residual_strides) &&
                       rows_are_vector_aligned<T>(p.out, p.out_strides);
  RowShape shape = {};
  shape.rows = p.rows.count;
  shape.hidden = p.hidden;
  shape.vec_size = Vec<T>::kSize;
  shape.streams = kFused ? 4 : 2;
  shape.in_place = p.out == p.input;
  shape.aligned = aligned;
  // Why: fused, one vector a thread was 2 % faster beyond L2, and two were 4 % faster within.
  shape.vecs_per_thread = kFused && p.rows.count >= 4096 ? 1 : 2;
  p.plan = plan_rows(shape);
  const auto run = [&](void (*kernel)(RmsNormParams)) {
    return launch(kernel, dim3(p.plan.ctas), dim3(p.plan.threads), enable_pdl, stream, p);
  };
  switch (p.plan.kind) {
    case RowKernel::lanes:
      return run(RmsNormKernel<T, 1, false, kFused, true>);
    case RowKernel::cta_1:
      return run(RmsNormKernel<T, 1, true, kFused, true>);
    case RowKernel::cta_2:
      if constexpr (!kFused) {
        if (p.plan.threads <= kEarlyWeightThreads)
          return run(RmsNormKernel<T, 2, true, kFused, true>);
      }
      return run(RmsNormKernel<T, 2, true, kFused, false>);
    case RowKernel::cta_4:
      break;
    case RowKernel::loop:
      return run(RmsNormLoopKernel<T, true, kFused>);
    case RowKernel::loop_elements:
      return run(RmsNormLoopKernel<T, false, kFused>);
  }
  return cudaErrorInvalidValue;
}

#endif

#endif  // __CUDACC__

}  // namespace precast
