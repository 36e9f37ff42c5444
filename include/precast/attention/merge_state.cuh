// SPDX-License-Identifier: Apache-2.0
// Merges attention states: outputs v_i of attention over disjoint sets of keys, with the s_in
// s_i (LSE, base 2) of their softmax denominators.
//
//   s = log2(sum_i 2^s_i)   v = sum_i 2^(s_i - s) v_i   in fp32, relative to the largest s_i
//
// A state without keys has s_i = -inf. Its v_i counts as 0, whatever it holds. If no state has
// keys, v = 0 and s = -inf.
//
// Layout   v  [tokens, (states,) heads, dim]  T, any strides, unit stride in dim
//          s  [tokens, (states,) heads]       f32, any strides
//          The outputs have no states dimension. Those of merge_state may be its first or its
//          second input.
// Threads  One thread takes 16 bytes of a row (a token and head). A row belongs to one CTA, so all
// of
//          its threads have read s before one of them writes s in place. If there are many states,
//          groups of threads take every n-th state, and their sums are added in order in shared
//          memory. The number of groups depends on the number of states and the dimension only, so
//          that the bits of a token do not depend on other tokens.
// Traffic  Each state is read once, the result is written once.
// Source   Ye et al., FlashInfer, arXiv:2501.01005; Milakov and Gimelshein, arXiv:1805.02867.
// Measured 2026-11-21 on an H200, bf16, 32 heads of 128. Two states of 16384 tokens: 95.4 us, which
//          is 4288 GB/s or 0.98 of the elementwise ceiling of the same run; in place 96.2 us. Two
//          states of 64 tokens: 1.7 us. 32 states of 2048 tokens: 132.9 us, 4232 GB/s. 64 states of
//          one token: 2.1 us.
#pragma once

#include "precast/core/launch.cuh"
#include "precast/core/math.cuh"
#include "precast/core/rows.cuh"
#include "precast/core/vec.cuh"

namespace precast {

// The states of all rows (tokens times heads). Strides are in elements.
struct StateRows {
  const void* v = nullptr;
  const float* s = nullptr;
  RowStrides v_strides, s_strides;  // outer: tokens, inner: heads
};

// The merged states of all rows.
struct MergedRows {
  void* v = nullptr;
  float* s = nullptr;
  RowStrides v_strides, s_strides;
};

// How rows and states are distributed over threads.
struct MergePlan {
  FastDivmod group_threads;  // threads that take one state of a row together, 16 bytes each
  FastDivmod row_threads;    // threads of a row; the last threads of a CTA may have no row
  uint32_t cta_rows = 1;
  uint32_t groups = 1;  // groups of threads of a row, each with its own states
};

struct MergeStateParams {
  StateRows a, b;
  MergedRows out;
  const uint8_t* mask = nullptr;  // [tokens], 0: the token is not changed
  Rows rows;
  int64_t columns = 0;
  MergePlan plan;   // the launcher sets it
  bool evict_last;  // the launcher sets it
  bool in_place;    // the launcher sets it
};

struct MergeStatesParams {
  StateRows in;  // those of state 0
  MergedRows out;
  int64_t v_state_stride = 0, s_state_stride = 0;
  int32_t states = 0;
  Rows rows;
  int64_t columns = 0;
  MergePlan plan;  // the launcher sets it
};

// Why not 256: on H200 that takes 3 % longer, for large merges and for small ones.
constexpr int kMergeThreads = 128;
constexpr uint32_t kMaxGroups = 16;

// States that a thread has in flight. Why they depend on the number of states only: see Threads.
constexpr int states_in_flight(int states) { return states <= 2 ? 2 : states <= 4 ? 4 : 8; }

#if defined(__CUDACC__)

// The weight of a state: 2^(s - s_max), or 0 for a state without keys.
__device__ __forceinline__ float state_weight(float s, float s_max) {
  return s == negative_infinity() ? 0.0f : fast_exp2(s - s_max);
}

// log2(sum_exp * 2^s_max).
__device__ __forceinline__ float merged_lse(float sum_exp, float s_max) {
  return s_max == negative_infinity() ? s_max : s_max + log2f(sum_exp);
}

// The row of a thread.
struct MergePosition {
  uint32_t row;
  uint32_t thread;  // its index among the threads of the row
  bool exists;

  __device__ __forceinline__ MergePosition(const MergePlan& plan, const Rows& rows) {
    const uint32_t cta_row = plan.row_threads.divide(threadIdx.x);
    thread = threadIdx.x - cta_row * plan.row_threads.value;
    const uint64_t number = uint64_t(blockIdx.x) * plan.cta_rows + cta_row;
    exists = cta_row < plan.cta_rows && number < rows.count;
    row = exists ? static_cast<uint32_t>(number) : 0;
  }
};

// sum += weight * vec
template <typename T>
__device__ __forceinline__ void add_weighted(float (&sum)[Vec<T>::kSize], float weight,
                                             Vec<T> vec) {
  float x[Vec<T>::kSize];
  unpack(vec, x);
#pragma unroll
  for (int i = 0; i < Vec<T>::kSize; ++i) {
    // Why the test: the v of a state without keys may be NaN, and 0 * NaN is NaN.
    sum[i] = weight == 0.0f ? sum[i] : sum[i] + weight * x[i];
  }
}

// Merges two states.
template <typename T, bool kAligned>
__global__ __launch_bounds__(kMergeThreads) void MergeStateKernel(
    const __grid_constant__ MergeStateParams p) {
  constexpr int kSize = Vec<T>::kSize;
  const MergePosition at(p.plan, p.rows);
  const RowPosition row(p.rows, at.row);
  const T* v_a = row.in<T>(p.a.v, p.a.v_strides);    // [columns]
  const T* v_b = row.in<T>(p.b.v, p.b.v_strides);    // [columns]
  T* v = row.in<T>(p.out.v, p.out.v_strides);        // [columns]
  const int64_t first = int64_t(at.thread) * kSize;  // column

  launch_dependent_grids();
  if (at.exists && may_overlap_previous_grid()) {
    prefetch_to_l2(v_a + first);
    prefetch_to_l2(v_b + first);
  }
  wait_on_dependent_grids();

  const L2Policy policy = read_policy(p.evict_last);
  bool merges = at.exists;
  float s_a = 0.0f, s_b = 0.0f;
  Vec<T> a = zero_vec<T>(), b = zero_vec<T>();
  if (merges) {
    a = load<kAligned>(v_a + first, p.columns - first, policy);
    b = load<kAligned>(v_b + first, p.columns - first, policy);
    s_a = load_scalar(row.in<float>(p.a.s, p.a.s_strides));
    s_b = load_scalar(row.in<float>(p.b.s, p.b.s_strides));
    if (p.mask != nullptr) merges = p.mask[row.outer] != 0;
  }
  if (p.in_place) __syncthreads();  // Why: s is s_a or s_b, which all threads of the row read.
  if (!merges) return;
  const float s_max = max_or_nan(s_a, s_b);
  float weight_a = state_weight(s_a, s_max), weight_b = state_weight(s_b, s_max);
  const float sum_exp = weight_a + weight_b;
  if (at.thread == 0) {
    *row.in<float>(p.out.s, p.out.s_strides) = merged_lse(sum_exp, s_max);
  }
  const float factor = sum_exp == 0.0f ? 0.0f : 1.0f / sum_exp;
  weight_a *= factor;
  weight_b *= factor;
  for (int64_t column = first;;) {
    float sum[kSize] = {};
    add_weighted<T>(sum, weight_a, a);
    add_weighted<T>(sum, weight_b, b);
    store<kAligned>(v + column, pack<T>(sum), p.columns - column);
    column += int64_t(p.plan.row_threads.value) * kSize;
    if (column >= p.columns) break;
    a = load<kAligned>(v_a + column, p.columns - column, policy);
    b = load<kAligned>(v_b + column, p.columns - column, policy);
  }
}

// The weighted sum of states, relative to the largest s so far.
template <typename T>
struct StateSum {
  static constexpr int kSize = Vec<T>::kSize;
  float s_max = negative_infinity();
  float sum_exp = 0.0f;
  float acc_v[kSize] = {};

  // Rescales to `s_new`, if that is larger.
  __device__ __forceinline__ void rescale(float s_new) {
    const float new_max = max_or_nan(s_max, s_new);
    const float factor = state_weight(s_max, new_max);
    s_max = new_max;
    sum_exp *= factor;
#pragma unroll
    for (int i = 0; i < kSize; ++i) acc_v[i] *= factor;
  }
};

// Merges p.states states. A thread has kInFlight of them in flight.
template <typename T, bool kAligned, int kInFlight>
__global__ __launch_bounds__(kMergeThreads) void MergeStatesKernel(
    const __grid_constant__ MergeStatesParams p) {
  constexpr int kSize = Vec<T>::kSize;
  __shared__ float partial[kSize + 2][kMergeThreads];  // acc_v, sum_exp, s_max of each thread
  const MergePosition at(p.plan, p.rows);
  const RowPosition row(p.rows, at.row);
  const T* v = row.in<T>(p.in.v, p.in.v_strides);          // [states, columns]
  const float* s = row.in<float>(p.in.s, p.in.s_strides);  // [states]
  T* out = row.in<T>(p.out.v, p.out.v_strides);            // [columns]
  const uint32_t group_threads = p.plan.group_threads.value;
  const uint32_t group = p.plan.group_threads.divide(at.thread);
  const uint32_t vec_idx = at.thread - group * group_threads;
  const int groups = p.plan.groups;

  launch_dependent_grids();
  if (at.exists && may_overlap_previous_grid()) {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int state = group + i * groups;
      if (state < p.states) prefetch_to_l2(v + state * p.v_state_stride + int64_t(vec_idx) * kSize);
    }
  }
  wait_on_dependent_grids();

  const L2Policy policy = read_policy(true);
  for (int64_t column = int64_t(vec_idx) * kSize;; column += int64_t(group_threads) * kSize) {
    StateSum<T> merged;
    for (int first = group; at.exists && first < p.states; first += kInFlight * groups) {
      Vec<T> vecs[kInFlight];
      float s_in[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int state = first + i * groups;
        vecs[i] = zero_vec<T>();
        s_in[i] = negative_infinity();
        if (state < p.states) {
          const T* from = v + state * p.v_state_stride + column;
          vecs[i] = load<kAligned>(from, p.columns - column, policy);
          s_in[i] = load_scalar(s + state * p.s_state_stride);
        }
      }
      float s_max = s_in[0];
#pragma unroll
      for (int i = 1; i < kInFlight; ++i) s_max = max_or_nan(s_max, s_in[i]);
      merged.rescale(s_max);
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const float weight = state_weight(s_in[i], merged.s_max);
        merged.sum_exp += weight;
        add_weighted<T>(merged.acc_v, weight, vecs[i]);
      }
    }
    if (groups > 1) {  // Only rows that a group covers in one round have several groups.
#pragma unroll
      for (int i = 0; i < kSize; ++i) partial[i][threadIdx.x] = merged.acc_v[i];
      partial[kSize][threadIdx.x] = merged.sum_exp;
      partial[kSize + 1][threadIdx.x] = merged.s_max;
      __syncthreads();
      if (group > 0 || !at.exists) return;
      for (int i = 1; i < groups; ++i) {
        const uint32_t other = threadIdx.x + i * group_threads;
        merged.rescale(partial[kSize + 1][other]);
        const float weight = state_weight(partial[kSize + 1][other], merged.s_max);
        merged.sum_exp += weight * partial[kSize][other];
#pragma unroll
        for (int j = 0; j < kSize; ++j) merged.acc_v[j] += weight * partial[j][other];
      }
    }
    if (!at.exists) return;
    if (column == 0) {
      *row.in<float>(p.out.s, p.out.s_strides) = merged_lse(merged.sum_exp, merged.s_max);
    }
    const float factor = merged.sum_exp == 0.0f ? 0.0f : 1.0f / merged.sum_exp;
#pragma unroll
    for (int i = 0; i < kSize; ++i) merged.acc_v[i] *= factor;
    store<kAligned>(out + column, pack<T>(merged.acc_v), p.columns - column);
    if (column + int64_t(group_threads) * kSize >= p.columns) return;
  }
}

#if !defined(__CUDACC_RTC__)

// For merge_state() `states` is 0.
inline MergePlan plan_merge(int64_t columns, int vec_size, int states) {
  MergePlan plan;
  const int64_t vecs = (columns + vec_size - 1) / vec_size;
  const int64_t threads = vecs < kMergeThreads ? vecs : kMergeThreads;
  if (vecs == threads) {
    while (plan.groups < kMaxGroups && 2 * plan.groups * threads <= kMergeThreads &&
           int(plan.groups) * states_in_flight(states) < states) {
      plan.groups *= 2;
    }
  }
  plan.group_threads = FastDivmod(static_cast<uint32_t>(threads));
  plan.row_threads = FastDivmod(static_cast<uint32_t>(threads * plan.groups));
  plan.cta_rows = kMergeThreads / plan.row_threads.value;
  return plan;
}

template <typename T>
bool state_is_aligned(const void* v, const RowStrides& strides, int64_t columns) {
  return rows_are_vector_aligned<T>(v, strides) && columns % Vec<T>::kSize == 0;
}

inline dim3 merge_grid(const Rows& rows, const MergePlan& plan) {
  return dim3((rows.count - 1) / plan.cta_rows + 1);
}

// Launches the merge of two states on `stream`. Without rows or columns it launches nothing.
template <typename T>
cudaError_t launch_merge_state(MergeStateParams p, bool enable_pdl, cudaStream_t stream) {
  if (p.rows.count == 0 || p.columns == 0) return cudaSuccess;
  p.plan = plan_merge(p.columns, Vec<T>::kSize, 0);
  p.in_place = p.out.s == p.a.s || p.out.s == p.b.s;
  p.evict_last = reads_evict_last(int64_t(p.rows.count) * p.columns * sizeof(T) * 3,
                                  p.out.v == p.a.v || p.out.v == p.b.v);
  const bool aligned = state_is_aligned<T>(p.a.v, p.a.v_strides, p.columns) &&
                       state_is_aligned<T>(p.b.v, p.b.v_strides, p.columns) &&
                       state_is_aligned<T>(p.out.v, p.out.v_strides, p.columns);
  const auto kernel = aligned ? MergeStateKernel<T, true> : MergeStateKernel<T, false>;
  return launch(kernel, merge_grid(p.rows, p.plan), dim3(kMergeThreads), enable_pdl, stream, p);
}

// Launches the merge of any number of states on `stream`. With none, v = 0 and s = -inf.
template <typename T>
cudaError_t launch_merge_states(MergeStatesParams p, bool enable_pdl, cudaStream_t stream) {
  if (p.rows.count == 0 || p.columns == 0) return cudaSuccess;
  p.plan = plan_merge(p.columns, Vec<T>::kSize, p.states);
  const bool aligned = state_is_aligned<T>(p.in.v, p.in.v_strides, p.columns) &&
                       state_is_aligned<T>(p.out.v, p.out.v_strides, p.columns) &&
                       p.v_state_stride % Vec<T>::kSize == 0;
  auto kernel = MergeStatesKernel<T, false, 4>;
  if (aligned) {
    const int in_flight = states_in_flight(p.states);
    kernel = in_flight == 2   ? MergeStatesKernel<T, true, 2>
             : in_flight == 4 ? MergeStatesKernel<T, true, 4>
                              : MergeStatesKernel<T, true, 8>;
  }
  return launch(kernel, merge_grid(p.rows, p.plan), dim3(kMergeThreads), enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
