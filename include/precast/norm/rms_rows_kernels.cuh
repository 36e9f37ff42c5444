// SPDX-License-Identifier: Apache-2.0
// The kernels of norm/rms_rows.cuh, which says what they compute, on what, and by which threads.
#pragma once

#include "precast/core/block.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/prefetch.cuh"
#include "precast/core/row_plan.cuh"
#include "precast/core/rows.cuh"
#include "precast/core/sm90/cluster.cuh"
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
  RowPlan plan;          // the launcher sets it
  float inverse_hidden;  // the launcher sets it
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
  if (vecs == 1) return kSmThreads / kMaxThreads;
  if (vecs == 4) return 5;
  return reads_second ? 0 : early_weight ? 3 : 1;
}

// kCluster: a cluster of CTAs has a row, and adds its squares in the order in which a CTA would.
//
// kEarlyWeight: the weights are loaded with the row, into registers, rather than late from L1. It
// pays where latency counts, where rows share them, and for CTAs small enough that the registers
// cost no occupancy.
template <typename Form, int kVecs, int kRows, bool kRowPerCta, bool kEarlyWeight,
          bool kCluster = false>
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
  // Why: with a step that is known, addresses of a thread's vectors differ by constants.
  const int step = kRowPerCta ? kWarpSize : p.plan.lanes;
  const uint32_t rank = kCluster ? cluster_rank() : 0u;
  const uint32_t thread = rank * blockDim.x + threadIdx.x;  // of those that have the row
  const int first = kRowPerCta ? thread / kWarpSize * kWarpSize * kVecs + thread % kWarpSize
                               : threadIdx.x & (p.plan.lanes - 1);
  const uint32_t group = kCluster     ? cluster_id()
                         : kRowPerCta ? blockIdx.x
                                      : row_of_lane_group(p.plan);
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

  if constexpr (kCluster) cluster_arrive();
  if constexpr (kVecs == 1 || kReadsSecond) allow_next_grid();
  if ((kCluster ? group : blockIdx.x) < p.plan.prefetching_ctas && rank == 0) {
    const int bytes = p.hidden * static_cast<int>(sizeof(T));
    if (kRowPerCta ? threadIdx.x == 0 : first == 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (row_exists[r]) {
          prefetch_bytes_to_l2(input[r], bytes);
          if constexpr (kReadsSecond) prefetch_bytes_to_l2(form[r].second, bytes);
        }
      }
    }
    if (threadIdx.x == kWarpSize && blockIdx.x < kSharedPrefetches) {
      if (!Form::kWeightMayBeNull || weight != nullptr) prefetch_bytes_to_l2(weight, bytes);
      form[0].prefetch();
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
      const int vec = first + i * step;
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
    const int vec = first + i * step;
    early_weight[i] = kEarlyWeight && vec < vecs
                          ? load_weight<Form, true>(weight, vec * kSize, kSize)
                          : zero_vec<T>();
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) form[r].start();
  // Why: measured on H200. The fused form, and short latency, want the next grid in before the
  // loads; a stream of many rows wants it behind them. It is here for all, since ptxas moves no
  // load across: it put those of weights and scales behind arithmetic on the row, so that a thread
  // waited for memory twice, and 1024 rows of 4096 took fused_add_rmsnorm_quant 9 % longer.
  allow_next_grid();

  float rstd[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const Elements elements(loaded[r][i], second[r][i]);
      sum += elements.sum_of_squares();
      if constexpr (Form::kAddsResidual) {
        const int vec = first + i * step;
        if (row_exists[r] && vec < vecs) {
          store_vec(form[r].second + vec * kSize, pack<T>(elements.x));
        }
      }
    }
    if constexpr (kRowPerCta) {
      if constexpr (kCluster) {
        __shared__ uint32_t scratch[kMaxWarps];
        sum = cluster_sum(sum, scratch);
      } else {
        __shared__ float scratch[kMaxWarps];
        sum = block_sum(sum, scratch);
      }
    } else {
      sum = warp_sum(sum, p.plan.lanes);
    }
    // Why: behind the branches of a division ptxas unpacks the row again. Else it would keep the
    // ten vectors as fp32 numbers, and spill.
    const float mean = kVecs * kRows == 10 ? sum / p.hidden : sum * p.inverse_hidden;
    rstd[r] = rsqrtf(mean + p.eps);
  }

  if constexpr (Form::kStoresByWarps) {
    static_assert(kRows == 1, "such a form has one row a group");
    int columns[kVecs];
    float y[kVecs][kSize];
    Vec<T> w[kVecs];
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int vec = first + i * step;
      columns[i] = row_exists[0] && vec < vecs ? vec * kSize : -1;
      w[i] = early_weight[i];
      if (!kEarlyWeight && vec < vecs) w[i] = load_weight<Form, true>(weight, vec * kSize, kSize);
    }
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const Elements elements(loaded[0][i], second[0][i]);
      elements.template scale<Form>(rstd[0], w[i], p.weight_bias, y[i]);
    }
    form[0].store_by_warps(columns, y);
    return;
  }
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = first + i * step;
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
    if constexpr (!Form::kReadsSecond) {
      return zero_vec<T>();
    } else
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
  const float rstd = rsqrtf(block_sum(sum, scratch) * p.inverse_hidden + p.eps);

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

#endif  // __CUDACC__

}  // namespace precast
