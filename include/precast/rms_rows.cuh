// SPDX-License-Identifier: Apache-2.0
// Rows divided by their root mean square: the kernels of RMSNorm and of all that is fused with it.
//
//   x[r, c] = input[r, c]                         or, where the form adds a residual,
//   x[r, c] = input[r, c] + residual[r, c]        (fp32; residual[r, c] = round(x[r, c]))
//   y[r, c] = x[r, c] / sqrt(mean_c(x[r, c]^2) + eps) * (weight[c] + weight_bias)
//
// A form says what a row reads besides input, and what is done with y; rmsnorm.cuh has the plain
// one. It is a class of
//
//   T, Params               the element type of input; parameters derived from RmsRowsParams
//   kAddsResidual           `second` is the residual
//   kReadsSecond            a second operand of input's shape is loaded with the row; always true
//                           with a residual
//   kWeightMayBeNull        without weights, they are 1
//   second                  the row of the second operand
//   Form(params, position)  the row's pointers; reads nothing
//   start()                 reads what holds for the whole row, such as a scale
//   store<kAligned>(column, left, y, second)
//                           takes the eight values from `column` on, of which `left` or more exist
//
// Layout   input, residual  [rows, hidden]  T, any two row strides, unit column stride
//          weight           [hidden]        T, contiguous
//          An output may be input: each element is written by the thread that read it, after it
//          did.
// Threads  RmsRowsKernel keeps a row in registers, kVecs 16-byte vectors a thread. A row belongs to
//          a group of 1 to 32 lanes (short rows: several rows a CTA) or to a CTA. Lane l of a warp
//          takes vectors v with v % 32 == l % lanes.
//          RmsRowsLoopKernel takes what that cannot: rows beyond 2048 vectors, unaligned pointers
//          and strides, odd hidden sizes. A CTA walks its row twice, the second time in L2.
// Source   Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.
#pragma once

#include "precast/core/block.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/row_plan.cuh"
#include "precast/core/rows.cuh"
#include "precast/core/vec.cuh"

namespace precast {

struct RmsRowsParams {
  const void* input;   // [rows, hidden]
  const void* weight;  // [hidden]
  RowStrides input_strides;
  Rows rows;
  int hidden;
  float eps;
  float weight_bias;
  RowPlan plan;  // the launcher sets it
};

#if defined(__CUDACC__)

// The row's values of one vector: input, or input + second.
template <typename T, bool kAddsResidual>
struct RmsRowsElements {
  static constexpr int kSize = Vec<T>::kSize;
  float x[kSize];

  __device__ __forceinline__ RmsRowsElements(Vec<T> input, Vec<T> second) {
    unpack(input, x);
    if constexpr (kAddsResidual) {
      float r[kSize];
      unpack(second, r);
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

  __device__ __forceinline__ void scale(float rstd, Vec<T> weight, float weight_bias,
                                        float (&y)[kSize]) const {
    float w[kSize];
    unpack(weight, w);
#pragma unroll
    for (int i = 0; i < kSize; ++i) y[i] = x[i] * rstd * (w[i] + weight_bias);
  }
};

template <typename Form, bool kAligned>
__device__ __forceinline__ Vec<typename Form::T> load_weight(const typename Form::T* weight,
                                                             int column, int left) {
  using T = typename Form::T;
  if constexpr (Form::kWeightMayBeNull) {
    if (weight == nullptr) {
      float ones[Vec<T>::kSize];
#pragma unroll
      for (int i = 0; i < Vec<T>::kSize; ++i) ones[i] = 1.0f;
      return pack<T>(ones);
    }
  }
  return load<kAligned>(weight + column, left);
}

// Several vectors a thread with early weights: CTAs of 256 threads, and 40 registers, so that six
// of them share a multiprocessor. With 43 it was 9 % slower on H200.
constexpr int kEarlyWeightThreads = 256;

constexpr int rms_rows_max_threads(int vecs, bool early_weight) {
  return vecs > 1 && early_weight ? kEarlyWeightThreads : kMaxThreads;
}

// 0 leaves it to the compiler, which did best for two vectors a thread of the fused form.
constexpr int rms_rows_min_ctas(int vecs, bool reads_second, bool early_weight) {
  if (vecs == 1) return 1;
  return reads_second ? 0 : early_weight ? 6 : 1;
}

// kEarlyWeight: the weights are loaded with the row, into registers, rather than late from L1. It
// pays where latency counts, and for CTAs small enough that the registers cost no occupancy.
template <typename Form, int kVecs, bool kRowPerCta, bool kEarlyWeight>
__global__ __launch_bounds__(rms_rows_max_threads(kVecs, kEarlyWeight),
                             rms_rows_min_ctas(kVecs, Form::kReadsSecond, kEarlyWeight))  //
    void RmsRowsKernel(const __grid_constant__ typename Form::Params p) {
  using T = typename Form::T;
  using Elements = RmsRowsElements<T, Form::kAddsResidual>;
  constexpr bool kReadsSecond = Form::kReadsSecond;
  constexpr int kSize = Vec<T>::kSize;
  const int vecs = p.hidden / kSize;
  const int group_size = kRowPerCta ? blockDim.x : p.plan.lanes;
  const int rank = kRowPerCta ? threadIdx.x : threadIdx.x & (p.plan.lanes - 1);
  const uint32_t row = kRowPerCta ? blockIdx.x
                                  : blockIdx.x * (blockDim.x / p.plan.lanes) +
                                        static_cast<uint32_t>(threadIdx.x / p.plan.lanes);
  const bool row_exists = kRowPerCta || row < p.rows.count;

  const RowPosition position(p.rows, row);
  const T* input = position.in<T>(p.input, p.input_strides);  // [hidden]
  const T* weight = static_cast<const T*>(p.weight);          // [hidden]
  Form form(p, position);                                     // form.second: [hidden]

  if constexpr (kVecs == 1 || kReadsSecond) allow_next_grid();
  if (blockIdx.x < p.plan.prefetching_ctas) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int vec = rank + i * group_size;
      if (row_exists && vec < vecs) {
        prefetch_to_l2(input + vec * kSize);
        if constexpr (kReadsSecond) prefetch_to_l2(form.second + vec * kSize);
        if (!Form::kWeightMayBeNull || weight != nullptr) prefetch_to_l2(weight + vec * kSize);
      }
    }
  }
  wait_for_previous_grid();

  const L2Policy policy = read_policy(p.plan.evict_last);
  Vec<T> loaded[kVecs];  // [kVecs, kSize] of the row
  Vec<T> second[kVecs];  // [kVecs, kSize] of the row
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = rank + i * group_size;
    const bool exists = row_exists && vec < vecs;
    loaded[i] = exists ? load_vec(input + vec * kSize, policy) : zero_vec<T>();
    if constexpr (kReadsSecond) {
      second[i] = exists ? load_vec(form.second + vec * kSize, policy) : zero_vec<T>();
    }
  }
  Vec<T> early_weight[kVecs];  // [kVecs, kSize] of the row
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = rank + i * group_size;
    early_weight[i] = kEarlyWeight && vec < vecs
                          ? load_weight<Form, true>(weight, vec * kSize, kSize)
                          : zero_vec<T>();
  }
  form.start();
  // Why: measured on H200. The fused form, and short latency, want the next grid in before the
  // loads; a stream of many rows wants it behind them.
  if constexpr (kVecs > 1 && !kReadsSecond) allow_next_grid();

  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const Elements elements(loaded[i], second[i]);
    sum += elements.sum_of_squares();
    if constexpr (Form::kAddsResidual) {
      const int vec = rank + i * group_size;
      if (row_exists && vec < vecs) store_vec(form.second + vec * kSize, pack<T>(elements.x));
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
      const Elements elements(loaded[i], second[i]);
      const Vec<T> w =
          kEarlyWeight ? early_weight[i] : load_weight<Form, true>(weight, vec * kSize, kSize);
      float y[kSize];
      elements.scale(rstd, w, p.weight_bias, y);
      form.template store<true>(vec * kSize, kSize, y, second[i]);
    }
  }
}

template <typename Form, bool kAligned>
__global__ __launch_bounds__(kLoopThreads) void RmsRowsLoopKernel(const __grid_constant__
                                                                  typename Form::Params p) {
  using T = typename Form::T;
  constexpr int kSize = Vec<T>::kSize;
  const RowPosition position(p.rows, blockIdx.x);
  const T* input = position.in<T>(p.input, p.input_strides);  // [hidden]
  const T* weight = static_cast<const T*>(p.weight);          // [hidden]
  Form form(p, position);                                     // form.second: [hidden]

  allow_next_grid();
  wait_for_previous_grid();
  form.start();

  const auto second_at = [&](int column) {
    if constexpr (!Form::kReadsSecond)
      return zero_vec<T>();
    else
      return load<kAligned>(form.second + column, p.hidden - column);
  };
  const auto elements_at = [&](int column, Vec<T> second) {
    const Vec<T> x = load<kAligned>(input + column, p.hidden - column);
    return RmsRowsElements<T, Form::kAddsResidual>(x, second);
  };

  float sum = 0.0f;
  for (int column = threadIdx.x * kSize; column < p.hidden; column += blockDim.x * kSize) {
    const Vec<T> r = Form::kAddsResidual ? second_at(column) : zero_vec<T>();
    sum += elements_at(column, r).sum_of_squares();
  }
  __shared__ float scratch[kMaxWarps];
  const float rstd = rsqrtf(block_sum(sum, scratch) / p.hidden + p.eps);

  // Why: the fused sum is added again rather than read back, because memory holds it rounded.
  for (int column = threadIdx.x * kSize; column < p.hidden; column += blockDim.x * kSize) {
    const int left = p.hidden - column;
    const Vec<T> second = second_at(column);
    const RmsRowsElements<T, Form::kAddsResidual> elements = elements_at(column, second);
    const Vec<T> w = load_weight<Form, kAligned>(weight, column, left);
    if constexpr (Form::kAddsResidual) {
      store<kAligned>(form.second + column, pack<T>(elements.x), left);
    }
    float y[kSize];
    elements.scale(rstd, w, p.weight_bias, y);
    form.template store<kAligned>(column, left, y, second);
  }
}

#if !defined(__CUDACC_RTC__)

// What plan_rows() is told of a form: it moves [rows, hidden] `streams` times, and `aligned` says
// whether its own tensors are; input and weight are looked at here.
template <typename Form>
RowShape rms_rows_shape(const RmsRowsParams& p, int streams, bool in_place, bool aligned) {
  using T = typename Form::T;
  RowShape shape = {};
  shape.rows = p.rows.count;
  shape.hidden = p.hidden;
  shape.vec_size = Vec<T>::kSize;
  shape.streams = streams;
  shape.in_place = in_place;
  shape.aligned = aligned && p.hidden % Vec<T>::kSize == 0 &&
                  rows_are_vector_aligned<T>(p.weight, {}) &&
                  rows_are_vector_aligned<T>(p.input, p.input_strides);
  // Why: fused, one vector a thread was 2 % faster beyond L2, and two were 4 % faster within.
  shape.vecs_per_thread = Form::kReadsSecond && p.rows.count >= 4096 ? 1 : 2;
  return shape;
}

// Launches a form on every row on `stream`; there must be a row, and hidden must be positive.
template <typename Form>
cudaError_t launch_rms_rows(typename Form::Params p, const RowShape& shape, bool enable_pdl,
                            cudaStream_t stream) {
  p.plan = plan_rows(shape);
  const auto run = [&](void (*kernel)(typename Form::Params)) {
    return launch(kernel, dim3(p.plan.ctas), dim3(p.plan.threads), enable_pdl, stream, p);
  };
  switch (p.plan.kind) {
    case RowKernel::lanes:
      return run(RmsRowsKernel<Form, 1, false, true>);
    case RowKernel::cta_1:
      return run(RmsRowsKernel<Form, 1, true, true>);
    case RowKernel::cta_2:
      if constexpr (!Form::kReadsSecond) {
        if (p.plan.threads <= kEarlyWeightThreads) return run(RmsRowsKernel<Form, 2, true, true>);
      }
      return run(RmsRowsKernel<Form, 2, true, false>);
    case RowKernel::cta_4:
      break;
    case RowKernel::loop:
      return run(RmsRowsLoopKernel<Form, true>);
    case RowKernel::loop_elements:
      return run(RmsRowsLoopKernel<Form, false>);
  }
  return cudaErrorInvalidValue;
}

#endif

#endif  // __CUDACC__

}  // namespace precast
