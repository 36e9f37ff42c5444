// SPDX-License-Identifier: Apache-2.0
// The first product of low-rank adapters in a mixture of experts: to the rank.
//
//   y[s, p, r] = round(y[s, p, r] + sum_c A[s, lora, expert][r, c] * x[row, c])      fp32
//   row = the token of pair p, or p itself; y is not read where `accumulates` is false
//   Pairs without weights (lora_pairs.cuh) are neither read nor written.
//
// Layout   x  [rows, columns]        T, rows at multiples of 16 bytes
//          A  [rank, columns]        T, contiguous, at a multiple of 16 bytes
//          y  [slices, pairs, rank]  T, contiguous
// Threads  one warp computes two numbers of one pair, from every 32nd vector of both rows; a CTA
//          has four warps. The order of additions depends on nothing but `columns`.
// Traffic  reads A once for each pair, which is nearly all of it; pairs that follow each other and
//          have the same A find it in L2
// Source   Chen et al., Punica: Multi-Tenant LoRA Serving, arXiv:2310.18547, section 4
#pragma once

#include "precast/core/launch.cuh"
#include "precast/core/vec.cuh"
#include "precast/core/warp.cuh"
#include "precast/moe/lora_pairs.cuh"

namespace precast {

constexpr int kShrinkRows = 2;   // rows of A of a warp
constexpr int kShrinkBatch = 4;  // vectors of each row that a lane loads before it uses the first
constexpr int kShrinkRowsOfCta = kShrinkRows * kLoraThreads / kWarpSize;

struct BgmvMoeShrinkParams {
  LoraPairs pairs;
  LoraWeights weights;  // A
  const void* x;        // [rows, columns]
  void* y;              // [slices, pairs, rank]
  int64_t x_stride;     // of rows, in elements
  int64_t columns;      // a multiple of 8
  int rank;             // a multiple of 8
  uint32_t slices;
  bool per_pair_input;
  bool accumulates;
};

#if defined(__CUDACC__)

template <typename T>
__global__ __launch_bounds__(kLoraThreads, kShrinkCtasPerSm) void BgmvMoeShrinkKernel(
    const __grid_constant__ BgmvMoeShrinkParams p) {
  static_assert(Vec<T>::kSize == kLoraVector, "16-bit types");
  const uint32_t pair = blockIdx.x, slice = blockIdx.z;
  const int lane = threadIdx.x % kWarpSize;
  const int rank = blockIdx.y * kShrinkRowsOfCta + threadIdx.x / kWarpSize * kShrinkRows;

  wait_on_dependent_grids();
  // Why here: BgmvMoeExpandKernel reads what comes before both without a wait of its own.
  launch_dependent_grids();

  const int64_t token = load_index(p.pairs.tokens_of + pair);
  const int64_t expert = load_index(p.pairs.experts_of + pair);
  const int64_t lora = lora_of(p.pairs, p.weights, token);
  if (lora < 0) return;
  const T* a = weights_of<T>(p.weights, slice, lora, expert);  // [rank, columns]
  if (a == nullptr) return;
  a += rank * p.columns;
  const int64_t row = p.per_pair_input ? pair : token;
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;  // [columns]

  float sum[kShrinkRows] = {};
  constexpr int kStep = kWarpSize * kLoraVector;
  for (int64_t begin = lane * kLoraVector; begin < p.columns; begin += kShrinkBatch * kStep) {
    Vec<T> inputs[kShrinkBatch], weights[kShrinkBatch][kShrinkRows];
#pragma unroll
    for (int i = 0; i < kShrinkBatch; ++i) {
      const int64_t column = begin + i * kStep;
      const bool exists = column < p.columns;
      inputs[i] = exists ? load_vec(x + column) : zero_vec<T>();
#pragma unroll
      for (int r = 0; r < kShrinkRows; ++r) {
        weights[i][r] = exists ? load_vec(a + r * p.columns + column) : zero_vec<T>();
      }
    }
#pragma unroll
    for (int i = 0; i < kShrinkBatch; ++i) {
      float input[kLoraVector];
      unpack(inputs[i], input);
#pragma unroll
      for (int r = 0; r < kShrinkRows; ++r) {
        float weight[kLoraVector];
        unpack(weights[i][r], weight);
        sum[r] += dot(weight, input);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kShrinkRows; ++r) {
    const float total = warp_sum(sum[r]);
    if (lane != r) continue;
    T* y = static_cast<T*>(p.y) + (int64_t(slice) * p.pairs.pairs + pair) * p.rank + rank + r;
    *y = from_float<T>(p.accumulates ? to_float(*y) + total : total);
  }
}

#if !defined(__CUDACC_RTC__)

// Launches the products on `stream`. There must be pairs and slices, of which at most 65535, and a
// rank that is a multiple of 8.
template <typename T>
cudaError_t launch_bgmv_moe_shrink(const BgmvMoeShrinkParams& p, bool enable_pdl,
                                   cudaStream_t stream) {
  static_assert(kShrinkRowsOfCta == kLoraVector, "a CTA has 8 rows, of which every rank is a sum");
  const dim3 grid(p.pairs.pairs, p.rank / kShrinkRowsOfCta, p.slices);
  return launch(BgmvMoeShrinkKernel<T>, grid, dim3(kLoraThreads), enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
