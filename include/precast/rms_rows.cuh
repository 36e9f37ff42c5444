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
//   kAddsWeightBias         there is a weight_bias, else it is not looked at
//   kVecsOfSomeRows, kVecsOfManyRows
//                           vectors a thread where a CTA has a row: 1, 2, or without second 4
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
//          a group of 1 to 32 lanes (short rows: several rows a CTA, and where there are many of
//          them two rows and up to five vectors a lane) or to a CTA. Lane l of a warp takes
//          vectors v with v % lanes == l % lanes.
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

  template <typename Form>
  __device__ __forceinline__ void scale(float rstd, Vec<T> weight, float weight_bias,
                                        float (&y)[kSize]) const {
    float w[kSize];
    unpack(weight, w);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      y[i] = x[i] * rstd * (Form::kAddsWeightBias ? w[i] + weight_bias : w[i]);
    }
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

// -- launch bounds --------------------------------------------------------------------------------
// Measured on H200, as all of these numbers.

// Threads that a multiprocessor holds.
#if defined(__CUDA_ARCH__) && \
    (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1100)
constexpr int kSmThreads = 1536;
#else
constexpr int kSmThreads = 2048;
#endif

constexpr int kLanesThreads = 128;
constexpr int kEarlyWeightThreads = 512;
constexpr int kFourVecsThreads = 256;

constexpr int rms_rows_max_threads(int vecs, bool row_per_cta, bool early_weight) {
  if (!row_per_cta) return kLanesThreads;
  if (vecs == 4) return kFourVecsThreads;
  return vecs > 1 && early_weight ? kEarlyWeightThreads : kMaxThreads;
}

// Early weights get 40 registers (with 43 it was 9 % slower), four vectors 48: with 40 they spill,
// which costs 8 %. One vector a lane gets 32 (with 34 rmsnorm_sigmoid_gate was 5 % slower), two 64,
// more 96 (with 68 and 100 fused_rmsnorm_silu was 3 and 22 % slower). 0 leaves it to the compiler,
// which did best for two vectors a thread of the fused form.
constexpr int rms_rows_min_ctas(int vecs, bool row_per_cta, bool reads_second, bool early_weight) {
  if (!row_per_cta) return vecs == 1 ? kSmThreads / kLanesThreads : vecs == 2 ? 8 : 5;
  if (vecs == 1) return 1;
  if (vecs == 4) return 5;
  return reads_second ? 0 : early_weight ? 3 : 1;
}

// kEarlyWeight: the weights are loaded with the row, into registers, rather than late from L1. It
// pays where latency counts, where rows share them, and for CTAs small enough that the registers
// cost no occupancy.
template <typename Form, int kVecs, int kRows, bool kRowPerCta, bool kEarlyWeight>
__global__ __launch_bounds__(rms_rows_max_threads(kVecs, kRowPerCta, kEarlyWeight),
                             rms_rows_min_ctas(kVecs, kRowPerCta, Form::kReadsSecond,
                                               kEarlyWeight))  //
    void RmsRowsKernel(const __grid_constant__ typename Form::Params p) {
  static_assert(!kRowPerCta || kRows == 1, "a CTA has one row");
  using T = typename Form::T;
  using Elements = RmsRowsElements<T, Form::kAddsResidual>;
  constexpr bool kReadsSecond = Form::kReadsSecond;
  constexpr int kSize = Vec<T>::kSize;
  const int vecs = p.hidden / kSize;
  const int group_size = kRowPerCta ? blockDim.x : p.plan.lanes;
  const int rank = kRowPerCta ? threadIdx.x : threadIdx.x & (p.plan.lanes - 1);
  const uint32_t group = kRowPerCta ? blockIdx.x
                                    : blockIdx.x * (blockDim.x / p.plan.lanes) +
                                          static_cast<uint32_t>(threadIdx.x / p.plan.lanes);
  const T* weight = static_cast<const T*>(p.weight);  // [hidden]
  bool row_exists[kRows];
  const T* input[kRows];  // [kRows, hidden]
  Form form[kRows];       // form[r].second: [hidden]
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const uint32_t row = group * kRows + r;
    const RowPosition position(p.rows, row);
    row_exists[r] = kRowPerCta || row < p.rows.count;
    input[r] = position.in<T>(p.input, p.input_strides);
    form[r] = Form(p, position);
  }

  if constexpr (kVecs == 1 || kReadsSecond) allow_next_grid();
  if (blockIdx.x < p.plan.prefetching_ctas) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int vec = rank + i * group_size;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (row_exists[r] && vec < vecs) {
          prefetch_to_l2(input[r] + vec * kSize);
          if constexpr (kReadsSecond) prefetch_to_l2(form[r].second + vec * kSize);
        }
      }
      if (row_exists[0] && vec < vecs && (!Form::kWeightMayBeNull || weight != nullptr)) {
        prefetch_to_l2(weight + vec * kSize);
      }
    }
  }
  wait_for_previous_grid();

  const L2Policy policy = read_policy(p.plan.evict_last);
  Vec<T> loaded[kRows][kVecs];  // [kRows, kVecs, kSize]
  Vec<T> second[kRows][kVecs];  // [kRows, kVecs, kSize]
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int vec = rank + i * group_size;
      const bool exists = row_exists[r] && vec < vecs;
      loaded[r][i] = exists ? load_vec(input[r] + vec * kSize, policy) : zero_vec<T>();
      if constexpr (kReadsSecond) {
        second[r][i] = exists ? load_vec(form[r].second + vec * kSize, policy) : zero_vec<T>();
      }
    }
  }
  Vec<T> early_weight[kVecs];  // [kVecs, kSize]
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = rank + i * group_size;
    early_weight[i] = kEarlyWeight && vec < vecs
                          ? load_weight<Form, true>(weight, vec * kSize, kSize)
                          : zero_vec<T>();
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) form[r].start();
  // Why: measured on H200. The fused form, and short latency, want the next grid in before the
  // loads; a stream of many rows wants it behind them.
  if constexpr (kVecs > 1 && !kReadsSecond) allow_next_grid();

  float rstd[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const Elements elements(loaded[r][i], second[r][i]);
      sum += elements.sum_of_squares();
      if constexpr (Form::kAddsResidual) {
        const int vec = rank + i * group_size;
        if (row_exists[r] && vec < vecs) {
          store_vec(form[r].second + vec * kSize, pack<T>(elements.x));
        }
      }
    }
    if constexpr (kRowPerCta) {
      __shared__ float scratch[kMaxWarps];
      sum = block_sum(sum, scratch);
    } else {
      sum = warp_sum(sum, p.plan.lanes);
    }
    rstd[r] = rsqrtf(sum / p.hidden + p.eps);
  }

#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = rank + i * group_size;
    if (vec < vecs) {
      const Vec<T> w =
          kEarlyWeight ? early_weight[i] : load_weight<Form, true>(weight, vec * kSize, kSize);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (row_exists[r]) {
          const Elements elements(loaded[r][i], second[r][i]);
          float y[kSize];
          elements.template scale<Form>(rstd[r], w, p.weight_bias, y);
          form[r].template store<true>(vec * kSize, kSize, y, second[r][i]);
        }
      }
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
    elements.template scale<Form>(rstd, w, p.weight_bias, y);
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
  shape.vecs_per_thread = p.rows.count >= 4096 ? Form::kVecsOfManyRows : Form::kVecsOfSomeRows;
  // Why: rows of 7168 as 896 threads leave a multiprocessor's last 256 idle: 4 % (7 bytes an
  // element).
  const int vecs = (p.hidden + Vec<T>::kSize - 1) / Vec<T>::kSize;
  const int idle = kSmThreads % round_up(vecs, kWarpSize);
  if (shape.vecs_per_thread == 1 && idle > 160) shape.vecs_per_thread = 2;
  if (p.hidden > 4 * kFourVecsThreads * Vec<T>::kSize && shape.vecs_per_thread == 4) {
    shape.vecs_per_thread = 2;
  }
  // Why: without a second operand, 64 rows of 4096 took 1.6 us by two vectors a thread and 1.9 us
  // by one; one row took 1.3 and 1.1.
  shape.few_rows_too = !Form::kReadsSecond && p.rows.count > 16;
  return shape;
}

// Several vectors a lane, for many rows of up to 160 vectors.
struct LanesPlan {
  int vecs = 0;  // a lane; 0 where such lanes do not suit
  int lanes = 0;
};

// The fewest idle lanes, then the most vectors a lane. Why: with a CTA or one vector a lane for
// each row, fused_rmsnorm_silu had 0.24 of the elementwise ceiling on rows of 320 and 0.75 on rows
// of 128 (H200, bf16); with these 0.88 and 0.90. Two operands of 128 are at 0.97 by one vector a
// lane.
inline LanesPlan plan_lanes(const RowShape& shape) {
  LanesPlan best;
  const int vecs = shape.hidden / shape.vec_size;
  const bool fills_the_gpu = uint64_t(shape.rows) * vecs >= 1u << 19;
  if (!shape.aligned || !fills_the_gpu) return best;
  int one_each = 1;  // lanes, were they to take a vector each
  while (one_each < vecs) one_each *= 2;
  for (const int per_lane : {5, 3, 2}) {
    int lanes = 4;
    while (lanes * per_lane < vecs) lanes *= 2;
    if (lanes > kWarpSize || lanes * per_lane > one_each) continue;
    if (best.vecs == 0 || lanes * per_lane < best.lanes * best.vecs) {
      best.vecs = per_lane;
      best.lanes = lanes;
    }
  }
  return best;
}

// Launches a form on every row on `stream`; there must be a row, and hidden must be positive.
template <typename Form>
cudaError_t launch_rms_rows(typename Form::Params p, const RowShape& shape, bool enable_pdl,
                            cudaStream_t stream) {
  p.plan = plan_rows(shape);
  const auto run = [&](void (*kernel)(typename Form::Params)) {
    return launch(kernel, dim3(p.plan.ctas), dim3(p.plan.threads), enable_pdl, stream, p);
  };
  if constexpr (!Form::kReadsSecond) {
    const LanesPlan several = plan_lanes(shape);
    if (several.vecs > 0) {
      constexpr int kRows = 2;
      const uint32_t rows_per_cta = kLanesThreads / several.lanes * kRows;
      p.plan.threads = kLanesThreads;
      p.plan.lanes = several.lanes;
      p.plan.ctas = (shape.rows - 1) / rows_per_cta + 1;
      return run(several.vecs == 2   ? RmsRowsKernel<Form, 2, kRows, false, true>
                 : several.vecs == 3 ? RmsRowsKernel<Form, 3, kRows, false, true>
                                     : RmsRowsKernel<Form, 5, kRows, false, true>);
    }
  }
  switch (p.plan.kind) {
    case RowKernel::lanes:
      return run(RmsRowsKernel<Form, 1, 1, false, true>);
    case RowKernel::cta_1:
      return run(RmsRowsKernel<Form, 1, 1, true, true>);
    case RowKernel::cta_2:
      // Why: many rows in CTAs of more than 256 threads did better without: 125 us against 129.
      if constexpr (!Form::kReadsSecond) {
        const int most = shape.rows <= 256 ? kEarlyWeightThreads : kEarlyWeightThreads / 2;
        if (p.plan.threads <= most) return run(RmsRowsKernel<Form, 2, 1, true, true>);
      }
      return run(RmsRowsKernel<Form, 2, 1, true, false>);
    case RowKernel::cta_4:
      if constexpr (Form::kVecsOfManyRows == 4) return run(RmsRowsKernel<Form, 4, 1, true, false>);
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
