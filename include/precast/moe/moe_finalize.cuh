// SPDX-License-Identifier: Apache-2.0
// The end of a mixture of experts: each token gathers the rows of its experts and adds them up,
// weighted.
//
//   out[t, c] = round(sum_k weights[t, k] * input[rows[t, k], c])         fp32, in the order of k
//   where rows[t, k] is from 0 to count - 1; others, such as -1, add nothing; with scale or bias
//   input[r, c] * scale[e] + bias[e, c], e = row_experts[r], stands in the place of input[r, c]
//
// Layout   input        [count, columns]    T, rows at multiples of 16 bytes
//          rows         [tokens, topk]      int32   weights [tokens, topk] fp32
//          bias         [experts, columns]  O, contiguous
//          scale        [experts]           fp32
//          row_experts  [count]             int32; read where there is a scale or a bias
//          out          [tokens, columns]   O, rows at multiples of 16 bytes
// Threads  one thread computes 8 columns of out; the loads of four experts are in flight at once.
//          With many items of tokens with few rows here, one computes four times 8 columns of a
//          token, of one expert at once
// Traffic  reads topk rows and writes one for each token
// Source   Shazeer et al., Outrageously Large Neural Networks, arXiv:1701.06538, equation 1
// Measured 2026-11-27 on an H200, bf16, top-8: 4096 tokens of 7168 columns 121.9 us, 0.98 of the
//          elementwise ceiling of the same run; of 2048 columns 36.8 us, 0.93; 64 tokens 3.2 us.
//          2026-11-28, four vectors a thread: 16384 tokens of 7168 columns and one row 119 us, of
//          4096 columns and two rows 100 us
#pragma once

#include "precast/core/items.cuh"
#include "precast/core/launch.cuh"
#include "precast/moe/expert_rows.cuh"

namespace precast {

constexpr int kFinalizeBatch = 4;  // experts whose rows are loaded together
// Why: without the limit ptxas takes 32 registers, which hold the row of one expert, and adds it up
// before it loads the next.
constexpr int kFinalizeCtasPerSm = 5;
// Of a thread, where there are so many items that fewer threads still fill the GPU.
constexpr int kFinalizeVectors = 4;
constexpr int kFinalizeVectorCtasPerSm = 4;
constexpr uint32_t kFinalizeManyItems = 1u << 20;
// Of a token, on average: with eight, a thread with one vector has enough loads in flight.
constexpr int kFinalizeFewRows = 2;

struct MoeFinalizeParams {
  const void* input;           // [count, columns]
  TokenSlots slots;            // [tokens, topk], rows of input
  const float* weights;        // [tokens, topk] or null: 1
  const void* bias;            // [experts, columns] or null
  const float* scale;          // [experts] or null: 1
  const int32_t* row_experts;  // [count]; there with a scale or a bias
  void* out;                   // [tokens, columns]
  int64_t input_stride;        // of rows, in elements
  int64_t out_stride;          // of rows, in elements
  int experts;
  int64_t columns;  // a multiple of 8
  Items items;      // vectors of 8 columns of out
  int ranks;        // that a token's experts are spread over
};

#if defined(__CUDACC__)

// y = x * scale + bias of the expert of one row.
template <typename O>
__device__ __forceinline__ void scale_and_bias(const MoeFinalizeParams& p, int32_t row,
                                               int64_t column, float (&y)[8]) {
  const uint32_t expert = static_cast<uint32_t>(load_number(p.row_experts + row));
  // A caller's number that is no expert must not fault.
  const int64_t known = expert < static_cast<uint32_t>(p.experts) ? expert : 0;
  if (p.scale != nullptr) {
    const float scale = load_scalar(p.scale + known);
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] *= scale;
  }
  if (p.bias != nullptr) {
    float bias[8];
    unpack(load_vec(static_cast<const O*>(p.bias) + known * p.columns + column), bias);
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] += bias[i];
  }
}

template <typename T, typename O, bool kOfExperts>
__global__ __launch_bounds__(
    kItemThreads,
    kOfExperts
        ? 1
        : kFinalizeCtasPerSm) void MoeFinalizeKernel(const __grid_constant__ MoeFinalizeParams p) {
  constexpr int kSize = Vec<T>::kSize;
  static_assert(kSize == 8 && Vec<O>::kSize == 8, "16-bit types");
  const uint32_t item = blockIdx.x * kItemThreads + threadIdx.x;
  if (item >= p.items.count) return;
  const ItemPosition at(p.items, item, kSize);
  const T* input = static_cast<const T*>(p.input) + at.column;  // + row * input_stride
  const float* weights = p.weights + static_cast<int64_t>(at.row) * p.slots.count;

  launch_dependent_grids();
  wait_on_dependent_grids();

  float sum[kSize] = {};
  for (int begin = 0; begin < p.slots.count; begin += kFinalizeBatch) {
    int32_t rows[kFinalizeBatch];
    load_slots(p.slots, at.row, begin, rows);
    Vec<T> loaded[kFinalizeBatch];
    float weight[kFinalizeBatch];
#pragma unroll
    for (int k = 0; k < kFinalizeBatch; ++k) {
      const bool exists = rows[k] >= 0;
      weight[k] = !exists ? 0.0f : p.weights == nullptr ? 1.0f : load_scalar(weights + begin + k);
      loaded[k] = exists ? load_vec(input + rows[k] * p.input_stride) : zero_vec<T>();
    }
#pragma unroll
    for (int k = 0; k < kFinalizeBatch; ++k) {
      float x[kSize];
      unpack(loaded[k], x);
      // Rows that do not exist are zeros with the weight 0, which change no sum.
      if (kOfExperts && rows[k] >= 0) scale_and_bias<O>(p, rows[k], at.column, x);
#pragma unroll
      for (int i = 0; i < kSize; ++i) sum[i] = fmaf(weight[k], x[i], sum[i]);
    }
  }
  store_vec(static_cast<O*>(p.out) + at.row * p.out_stride + at.column, pack<O>(sum));
}

// The same without scale and bias for many items, which a thread computes kFinalizeVectors of: it
// loads them of one expert together. Why: a thread with one item of a token whose other experts are
// on other ranks has one load in flight, behind the load of its row's number.
template <typename T, typename O>
__global__ __launch_bounds__(kItemThreads, kFinalizeVectorCtasPerSm) void MoeFinalizeVectorsKernel(
    const __grid_constant__ MoeFinalizeParams p) {
  constexpr int kSize = Vec<T>::kSize;
  const uint32_t item = blockIdx.x * kItemThreads + threadIdx.x;
  if (item >= p.items.count) return;
  const ItemPosition at(p.items, item, kSize);
  const int64_t apart = p.columns / kFinalizeVectors;  // of a thread's vectors

  launch_dependent_grids();
  wait_on_dependent_grids();

  float sum[kFinalizeVectors][kSize] = {};
  for_each_slot(p.slots, at.row, [&](int64_t row, int slot) {
    const float* weights = p.weights + int64_t(at.row) * p.slots.count;
    const float weight = p.weights == nullptr ? 1.0f : load_scalar(weights + slot);
    const T* from = static_cast<const T*>(p.input) + row * p.input_stride + at.column;
    Vec<T> loaded[kFinalizeVectors];
#pragma unroll
    for (int i = 0; i < kFinalizeVectors; ++i) loaded[i] = load_vec(from + i * apart);
#pragma unroll
    for (int i = 0; i < kFinalizeVectors; ++i) {
      float x[kSize];
      unpack(loaded[i], x);
#pragma unroll
      for (int j = 0; j < kSize; ++j) sum[i][j] = fmaf(weight, x[j], sum[i][j]);
    }
  });
  O* out = static_cast<O*>(p.out) + at.row * p.out_stride + at.column;
#pragma unroll
  for (int i = 0; i < kFinalizeVectors; ++i) store_vec(out + i * apart, pack<O>(sum[i]));
}

#if !defined(__CUDACC_RTC__)

// Launches the sums on `stream`; params.items must have at least one item, and the tensors the
// alignment that the layout says.
template <typename T, typename O>
cudaError_t launch_moe_finalize(const MoeFinalizeParams& p, bool enable_pdl, cudaStream_t stream) {
  const bool of_experts = p.scale != nullptr || p.bias != nullptr;
  const bool has_few_rows = p.slots.count <= int64_t(kFinalizeFewRows) * p.ranks;
  if (!of_experts && has_few_rows && p.items.count >= kFinalizeManyItems &&
      p.items.per_row.value % kFinalizeVectors == 0) {
    MoeFinalizeParams vectors = p;
    vectors.items.per_row = FastDivmod(p.items.per_row.value / kFinalizeVectors);
    vectors.items.count = p.items.count / kFinalizeVectors;
    const dim3 ctas((vectors.items.count - 1) / kItemThreads + 1);
    return launch(MoeFinalizeVectorsKernel<T, O>, ctas, dim3(kItemThreads), enable_pdl, stream,
                  vectors);
  }
  const auto kernel = of_experts ? MoeFinalizeKernel<T, O, true> : MoeFinalizeKernel<T, O, false>;
  const dim3 grid((p.items.count - 1) / kItemThreads + 1);
  return launch(kernel, grid, dim3(kItemThreads), enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
