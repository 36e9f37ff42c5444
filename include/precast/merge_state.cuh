// SPDX-License-Identifier: Apache-2.0
// Puts attention over parts of the keys together: outputs v_i with the logarithms s_i (base 2) of
// their denominators.
//
//   s = log2(sum_i 2^s_i)   v = sum_i 2^(s_i - s) v_i   in fp32, relative to the largest s_i
//
// A state that saw no key has s_i = -inf: its v_i counts as 0, whatever it holds, and of such
// states alone v = 0 and s = -inf.
//
// Layout   v  [tokens, (states,) heads, dim]  T, any strides, unit stride in dim
//          s  [tokens, (states,) heads]       f32, any strides
//          Outputs without states; those of merge_state may be the first or second state.
// Threads  one thread takes 16 bytes of a head's outputs, and a CTA whole heads, so that all of
// them
//          have read s before one writes it in place. Of many states, groups of threads take every
//          n-th; their results are put together in order in shared memory. How many depends on the
//          states and the dimension alone, so that a token's bits do not depend on the others.
// Traffic  reads each state once, writes the result once.
// Source   Ye et al., FlashInfer, arXiv:2501.01005; Milakov and Gimelshein, arXiv:1805.02867.
#pragma once

#include "precast/core/launch.cuh"
#include "precast/core/math.cuh"
#include "precast/core/rows.cuh"
#include "precast/core/vec.cuh"

namespace precast {

// Heads of all tokens as rows. Strides count elements.
struct StateRows {
  const void* v = nullptr;
  const float* s = nullptr;
  RowStrides v_strides, s_strides;  // outer: tokens, inner: heads
};

struct MergedRows {
  void* v = nullptr;
  float* s = nullptr;
  RowStrides v_strides, s_strides;
};

// How rows fall to the threads of CTAs.
struct MergePlan {
  Divisor row_items;    // of 16 bytes, the last may be partial
  Divisor row_threads;  // that share a row; some of a CTA's last may have none
  uint32_t cta_rows = 1;
  uint32_t groups = 1;  // of threads, that share a row's states
};

struct MergeStateParams {
  StateRows a, b;
  MergedRows out;
  const uint8_t* mask = nullptr;  // [tokens], 0: the token stays as it is
  Rows rows;
  int64_t columns = 0;
  MergePlan plan;   // the launcher sets it
  bool evict_last;  // the launcher sets it
};

struct MergeStatesParams {
  StateRows in;  // of state 0
  MergedRows out;
  int64_t v_state_stride = 0, s_state_stride = 0;
  int32_t states = 0;
  Rows rows;
  int64_t columns = 0;
  MergePlan plan;  // the launcher sets it
};

constexpr int kMergeThreads = 256;

#if defined(__CUDACC__)

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// The larger one; NaN if one of them is.
__device__ __forceinline__ float larger(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

// 2^(s - top), and 0 of a state without keys.
__device__ __forceinline__ float state_weight(float s, float top) {
  return s == minus_infinity() ? 0.0f : fast_exp2(s - top);
}

// The logarithm of a sum of `total` times 2^top.
__device__ __forceinline__ float merged_logarithm(float total, float top) {
  return top == minus_infinity() ? top : top + log2f(total);
}

// Which row and items a thread has.
struct MergePosition {
  uint32_t row;
  uint32_t thread;  // of the row's
  bool exists;

  __device__ __forceinline__ MergePosition(const MergePlan& plan, const Rows& rows) {
    const uint32_t of = plan.row_threads.divide(threadIdx.x);
    thread = threadIdx.x - of * plan.row_threads.value;
    const uint64_t number = uint64_t(blockIdx.x) * plan.cta_rows + of;
    exists = of < plan.cta_rows && number < rows.count;
    row = exists ? static_cast<uint32_t>(number) : 0;
  }
};

template <typename T>
__device__ __forceinline__ void add_weighted(float (&sum)[Vec<T>::kSize], float weight,
                                             Vec<T> vec) {
  float x[Vec<T>::kSize];
  unpack(vec, x);
#pragma unroll
  for (int i = 0; i < Vec<T>::kSize; ++i) {
    // Why: 0 times what a state without keys left there may be NaN.
    sum[i] = weight == 0.0f ? sum[i] : sum[i] + weight * x[i];
  }
}

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

  allow_next_grid();
  if (at.exists && may_overlap_previous_grid()) {
    prefetch_to_l2(v_a + first);
    prefetch_to_l2(v_b + first);
  }
  wait_for_previous_grid();

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
  __syncthreads();  // Why: s may be s_a or s_b, which all threads of a row read.
  if (!merges) return;
  const float top = larger(s_a, s_b);
  float weight_a = state_weight(s_a, top), weight_b = state_weight(s_b, top);
  const float total = weight_a + weight_b;
  if (at.thread == 0) {
    *row.in<float>(p.out.s, p.out.s_strides) = merged_logarithm(total, top);
  }
  const float factor = total == 0.0f ? 0.0f : 1.0f / total;
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

template <typename T, bool kAligned>
__global__ __launch_bounds__(kMergeThreads) void MergeStatesKernel(
    const __grid_constant__ MergeStatesParams p) {
  constexpr int kSize = Vec<T>::kSize;
  constexpr int kFloats = kSize + 2;
  __shared__ float partial[kFloats][kMergeThreads];
  const MergePosition at(p.plan, p.rows);
  const RowPosition row(p.rows, at.row);
  const T* v = row.in<T>(p.in.v, p.in.v_strides);          // [states, columns]
  const float* s = row.in<float>(p.in.s, p.in.s_strides);  // [states]
  T* out = row.in<T>(p.out.v, p.out.v_strides);            // [columns]
  // More than one group: then a row has no more items than threads of a group.
  const uint32_t group = p.plan.groups == 1 ? 0 : p.plan.row_items.divide(at.thread);
  const uint32_t item = at.thread - group * p.plan.row_items.value * (p.plan.groups > 1);
  const uint32_t step = p.plan.groups == 1 ? p.plan.row_threads.value : p.plan.row_items.value;

  allow_next_grid();
  wait_for_previous_grid();

  const L2Policy policy = read_policy(true);
  float top = minus_infinity();
  if (at.exists) {
    for (int i = group; i < p.states; i += p.plan.groups) {
      top = larger(top, load_scalar(s + i * p.s_state_stride));
    }
  }
  for (int64_t column = int64_t(item) * kSize;; column += int64_t(step) * kSize) {
    float sum[kSize] = {};
    float total = 0.0f;
    if (at.exists) {
#pragma unroll 4
      for (int i = group; i < p.states; i += p.plan.groups) {
        const T* from = v + i * p.v_state_stride + column;
        const Vec<T> vec = load<kAligned>(from, p.columns - column, policy);
        const float weight = state_weight(load_scalar(s + i * p.s_state_stride), top);
        total += weight;
        add_weighted<T>(sum, weight, vec);
      }
    }
    if (p.plan.groups > 1) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) partial[i][threadIdx.x] = sum[i];
      partial[kSize][threadIdx.x] = total;
      partial[kSize + 1][threadIdx.x] = top;
      __syncthreads();
      if (group > 0 || !at.exists) return;
      for (uint32_t i = 1; i < p.plan.groups; ++i) {
        top = larger(top, partial[kSize + 1][threadIdx.x + i * step]);
      }
      total = 0.0f;
#pragma unroll
      for (int j = 0; j < kSize; ++j) sum[j] = 0.0f;
      for (uint32_t i = 0; i < p.plan.groups; ++i) {
        const uint32_t from = threadIdx.x + i * step;
        const float weight = state_weight(partial[kSize + 1][from], top);
        if (weight == 0.0f) continue;
        total += weight * partial[kSize][from];
#pragma unroll
        for (int j = 0; j < kSize; ++j) sum[j] += weight * partial[j][from];
      }
    }
    if (!at.exists) return;
    if (column == 0) *row.in<float>(p.out.s, p.out.s_strides) = merged_logarithm(total, top);
    const float factor = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum[i] *= factor;
    store<kAligned>(out + column, pack<T>(sum), p.columns - column);
    if (column + int64_t(step) * kSize >= p.columns) return;
  }
}

#if !defined(__CUDACC_RTC__)

// `states` 0: a pair.
inline MergePlan plan_merge(int64_t columns, int vec_size, int states) {
  MergePlan plan;
  const int64_t items = (columns + vec_size - 1) / vec_size;
  const int64_t threads = items < kMergeThreads ? items : kMergeThreads;
  if (states >= 8 && items == threads) {
    const uint32_t most = states >= 32 ? 16 : 4;
    while (plan.groups < most && 2 * plan.groups * threads <= kMergeThreads) plan.groups *= 2;
  }
  plan.row_items = Divisor(static_cast<uint32_t>(threads));
  plan.row_threads = Divisor(static_cast<uint32_t>(threads * plan.groups));
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

// Launches the merge of two states on `stream`; nothing without rows or columns.
template <typename T>
cudaError_t launch_merge_state(MergeStateParams p, bool enable_pdl, cudaStream_t stream) {
  if (p.rows.count == 0 || p.columns == 0) return cudaSuccess;
  p.plan = plan_merge(p.columns, Vec<T>::kSize, 0);
  p.evict_last = reads_evict_last(int64_t(p.rows.count) * p.columns * sizeof(T) * 3,
                                  p.out.v == p.a.v || p.out.v == p.b.v);
  const bool aligned = state_is_aligned<T>(p.a.v, p.a.v_strides, p.columns) &&
                       state_is_aligned<T>(p.b.v, p.b.v_strides, p.columns) &&
                       state_is_aligned<T>(p.out.v, p.out.v_strides, p.columns);
  const auto kernel = aligned ? MergeStateKernel<T, true> : MergeStateKernel<T, false>;
  return launch(kernel, merge_grid(p.rows, p.plan), dim3(kMergeThreads), enable_pdl, stream, p);
}

// The same of any number of states: of none, v = 0 and s = -inf.
template <typename T>
cudaError_t launch_merge_states(MergeStatesParams p, bool enable_pdl, cudaStream_t stream) {
  if (p.rows.count == 0 || p.columns == 0) return cudaSuccess;
  p.plan = plan_merge(p.columns, Vec<T>::kSize, p.states);
  const bool aligned = state_is_aligned<T>(p.in.v, p.in.v_strides, p.columns) &&
                       state_is_aligned<T>(p.out.v, p.out.v_strides, p.columns) &&
                       p.v_state_stride % Vec<T>::kSize == 0;
  const auto kernel = aligned ? MergeStatesKernel<T, true> : MergeStatesKernel<T, false>;
  return launch(kernel, merge_grid(p.rows, p.plan), dim3(kMergeThreads), enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
