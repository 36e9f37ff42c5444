// SPDX-License-Identifier: Apache-2.0
// The kernels of norm/rmsnorm_rows.cuh, which describes the formula, the layouts and the threads.
#pragma once

#include "precast/core/block.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/prefetch.cuh"
#include "precast/core/row_plan.cuh"
#include "precast/core/rows.cuh"
#include "precast/core/sm90/cluster.cuh"
#include "precast/core/vec.cuh"

namespace precast {

struct RmsNormRowsParams {
  const void* input;   // [rows, hidden]
  const void* weight;  // [hidden]
  RowStrides input_strides;
  Rows rows;
  int hidden;
  float eps;
  float weight_bias;
  RowPlan plan;          // set by the launcher
  float inverse_hidden;  // set by the launcher
};

#if defined(__CUDACC__)

// The values of one vector of the row: input, or input + second.
template <typename T, bool kAddsResidual>
struct RmsNormElements {
  static constexpr int kSize = Vec<T>::kSize;
  float x[kSize];

  __device__ __forceinline__ RmsNormElements(Vec<T> input, Vec<T> second) {
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

  template <typename Epilogue>
  __device__ __forceinline__ void scale(float rstd, Vec<T> weight, float weight_bias,
                                        float (&y)[kSize]) const {
    float w[kSize];
    unpack(weight, w);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      y[i] = x[i] * rstd * (Epilogue::kAddsWeightBias ? w[i] + weight_bias : w[i]);
    }
  }
};

template <typename Epilogue, bool kAligned>
__device__ __forceinline__ Vec<typename Epilogue::T> load_weight(const typename Epilogue::T* weight,
                                                                 int column, int left) {
  using T = typename Epilogue::T;
  if constexpr (Epilogue::kWeightMayBeNull) {
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
// These numbers were measured on an H200.

// Threads that a multiprocessor can hold.
#if defined(__CUDA_ARCH__) && \
    (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1100)
constexpr int kSmThreads = 1536;
#else
constexpr int kSmThreads = 2048;
#endif

constexpr int kLanesThreads = 128;
constexpr int kEarlyWeightThreads = 512;
constexpr int kFourVecsThreads = 256;

constexpr int rmsnorm_max_threads(int vecs, bool row_per_cta, bool early_weight) {
  if (!row_per_cta) return kLanesThreads;
  if (vecs == 4) return kFourVecsThreads;
  return vecs > 1 && early_weight ? kEarlyWeightThreads : kMaxThreads;
}

// With early weights a thread gets 40 registers (with 43 it was 9 % slower), with four vectors 48:
// with 40 they spill, which costs 8 %. One vector a lane gets 32 (with 34 rmsnorm_sigmoid_gate was
// 5 % slower), two 64, more 96 (with 68 and 100 fused_rmsnorm_silu was 3 and 22 % slower). 0 leaves
// the choice to the compiler, which was best for two vectors a thread with a second operand.
constexpr int rmsnorm_min_ctas(int vecs, bool row_per_cta, bool reads_second, bool early_weight) {
  if (!row_per_cta) return vecs == 1 ? kSmThreads / kLanesThreads : vecs == 2 ? 8 : 5;
  if (vecs == 1) return kSmThreads / kMaxThreads;
  if (vecs == 4) return 5;
  return reads_second ? 0 : early_weight ? 3 : 1;
}

// kCluster: a cluster of CTAs shares a row, and sums its squares in the same order as one CTA
// would.
//
// kEarlyWeight: the weights are loaded into registers together with the row, rather than late from
// L1. This pays off if the launch is bound by latency, if rows share the weights, and for CTAs
// small enough that the registers do not reduce occupancy.
template <typename Epilogue, int kVecs, int kRows, bool kRowPerCta, bool kEarlyWeight,
          bool kCluster = false>
__global__ __launch_bounds__(rmsnorm_max_threads(kVecs, kRowPerCta, kEarlyWeight),
                             rmsnorm_min_ctas(kVecs, kRowPerCta, Epilogue::kReadsSecond,
                                              kEarlyWeight))  //
    void RmsNormKernel(const __grid_constant__ typename Epilogue::Params p) {
  static_assert(!kRowPerCta || kRows == 1, "a CTA has one row");
  using T = typename Epilogue::T;
  using Elements = RmsNormElements<T, Epilogue::kAddsResidual>;
  constexpr bool kReadsSecond = Epilogue::kReadsSecond;
  constexpr int kSize = Vec<T>::kSize;
  const int vecs = p.hidden / kSize;
  // Why: with a compile-time stride the addresses of a thread's vectors differ by constants.
  const int step = kRowPerCta ? kWarpSize : p.plan.lanes;
  const uint32_t rank = kCluster ? cluster_rank() : 0u;
  const uint32_t thread = rank * blockDim.x + threadIdx.x;  // among the threads of the row
  const int first = kRowPerCta ? thread / kWarpSize * kWarpSize * kVecs + thread % kWarpSize
                               : threadIdx.x & (p.plan.lanes - 1);
  const uint32_t group = kCluster     ? cluster_id()
                         : kRowPerCta ? blockIdx.x
                                      : row_of_lane_group(p.plan);
  const T* weight = static_cast<const T*>(p.weight);  // [hidden]
  bool row_exists[kRows];
  const T* input[kRows];     // [kRows, hidden]
  Epilogue epilogue[kRows];  // epilogue[r].second: [hidden]
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const uint32_t row = group * kRows + r;
    const RowPosition position(p.rows, row);
    row_exists[r] = kRowPerCta || row < p.rows.count;
    input[r] = position.in<T>(p.input, p.input_strides);
    epilogue[r] = Epilogue(p, position);
  }

  if constexpr (kCluster) cluster_arrive();
  if constexpr (kVecs == 1 || kReadsSecond) launch_dependent_grids();
  if ((kCluster ? group : blockIdx.x) < p.plan.prefetching_ctas && rank == 0) {
    const int bytes = p.hidden * static_cast<int>(sizeof(T));
    if (kRowPerCta ? threadIdx.x == 0 : first == 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (row_exists[r]) {
          prefetch_bytes_to_l2(input[r], bytes);
          if constexpr (kReadsSecond) prefetch_bytes_to_l2(epilogue[r].second, bytes);
        }
      }
    }
    if (threadIdx.x == kWarpSize && blockIdx.x < kSharedPrefetches) {
      if (!Epilogue::kWeightMayBeNull || weight != nullptr) prefetch_bytes_to_l2(weight, bytes);
      epilogue[0].prefetch();
    }
  }
  wait_on_dependent_grids();

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
        second[r][i] = exists ? load_vec(epilogue[r].second + vec * kSize, policy) : zero_vec<T>();
      }
    }
  }
  Vec<T> early_weight[kVecs];  // [kVecs, kSize]
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = first + i * step;
    early_weight[i] = kEarlyWeight && vec < vecs
                          ? load_weight<Epilogue, true>(weight, vec * kSize, kSize)
                          : zero_vec<T>();
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) epilogue[r].load_scalars();
  // Why here, as measured on an H200: launches with a residual, and short launches, are faster if
  // the next grid starts before the loads; launches of many rows if it starts after them. The
  // second call is here for all, because ptxas moves no load across it: it moved the loads of
  // weights and scales behind the arithmetic on the row, so that a thread waited for memory twice,
  // and fused_add_rmsnorm_quant of 1024 rows of 4096 took 9 % longer.
  launch_dependent_grids();

  float rstd[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const Elements elements(loaded[r][i], second[r][i]);
      sum += elements.sum_of_squares();
      if constexpr (Epilogue::kAddsResidual) {
        const int vec = first + i * step;
        if (row_exists[r] && vec < vecs) {
          store_vec(epilogue[r].second + vec * kSize, pack<T>(elements.x));
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
    // Why the division: behind its branches ptxas unpacks the row again. Otherwise it would keep
    // the ten vectors as fp32 numbers, and spill.
    const float mean = kVecs * kRows == 10 ? sum / p.hidden : sum * p.inverse_hidden;
    rstd[r] = rsqrtf(mean + p.eps);
  }

  if constexpr (Epilogue::kStoresWholeWarp) {
    static_assert(kRows == 1, "such an epilogue has one row a group");
    int columns[kVecs];
    float y[kVecs][kSize];
    Vec<T> w[kVecs];
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int vec = first + i * step;
      columns[i] = row_exists[0] && vec < vecs ? vec * kSize : -1;
      w[i] = early_weight[i];
      if (!kEarlyWeight && vec < vecs) {
        w[i] = load_weight<Epilogue, true>(weight, vec * kSize, kSize);
      }
    }
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const Elements elements(loaded[0][i], second[0][i]);
      elements.template scale<Epilogue>(rstd[0], w[i], p.weight_bias, y[i]);
    }
    epilogue[0].store_warp(columns, y);
    return;
  }
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = first + i * step;
    if (vec < vecs) {
      const Vec<T> w =
          kEarlyWeight ? early_weight[i] : load_weight<Epilogue, true>(weight, vec * kSize, kSize);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (row_exists[r]) {
          const Elements elements(loaded[r][i], second[r][i]);
          float y[kSize];
          elements.template scale<Epilogue>(rstd[r], w, p.weight_bias, y);
          epilogue[r].template store<true>(vec * kSize, kSize, y, second[r][i]);
        }
      }
    }
  }
}

template <typename Epilogue, bool kAligned>
__global__ __launch_bounds__(kLoopThreads) void RmsNormLoopKernel(const __grid_constant__
                                                                  typename Epilogue::Params p) {
  using T = typename Epilogue::T;
  constexpr int kSize = Vec<T>::kSize;
  const RowPosition position(p.rows, blockIdx.x);
  const T* input = position.in<T>(p.input, p.input_strides);  // [hidden]
  const T* weight = static_cast<const T*>(p.weight);          // [hidden]
  Epilogue epilogue(p, position);                             // epilogue.second: [hidden]

  launch_dependent_grids();
  wait_on_dependent_grids();
  epilogue.load_scalars();

  const auto second_at = [&](int column) {
    if constexpr (!Epilogue::kReadsSecond) {
      return zero_vec<T>();
    } else
      return load<kAligned>(epilogue.second + column, p.hidden - column);
  };
  const auto elements_at = [&](int column, Vec<T> second) {
    const Vec<T> x = load<kAligned>(input + column, p.hidden - column);
    return RmsNormElements<T, Epilogue::kAddsResidual>(x, second);
  };

  float sum = 0.0f;
  for (int column = threadIdx.x * kSize; column < p.hidden; column += blockDim.x * kSize) {
    const Vec<T> r = Epilogue::kAddsResidual ? second_at(column) : zero_vec<T>();
    sum += elements_at(column, r).sum_of_squares();
  }
  __shared__ float scratch[kMaxWarps];
  const float rstd = rsqrtf(block_sum(sum, scratch) * p.inverse_hidden + p.eps);

  // Why the sum is computed again rather than read back: memory holds it rounded.
  for (int column = threadIdx.x * kSize; column < p.hidden; column += blockDim.x * kSize) {
    const int left = p.hidden - column;
    const Vec<T> second = second_at(column);
    const RmsNormElements<T, Epilogue::kAddsResidual> elements = elements_at(column, second);
    const Vec<T> w = load_weight<Epilogue, kAligned>(weight, column, left);
    if constexpr (Epilogue::kAddsResidual) {
      store<kAligned>(epilogue.second + column, pack<T>(elements.x), left);
    }
    float y[kSize];
    elements.template scale<Epilogue>(rstd, w, p.weight_bias, y);
    epilogue.template store<kAligned>(column, left, y, second);
  }
}

#endif  // __CUDACC__

}  // namespace precast
