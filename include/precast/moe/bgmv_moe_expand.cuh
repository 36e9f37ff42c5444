// SPDX-License-Identifier: Apache-2.0
// The second product of low-rank adapters in a mixture of experts: from the rank to the output.
//
//   d[p, c] = sum_r B[s, lora, expert][c, r] * x[s, p, r]                            fp32
//   of pairs:   y[p, start_s + c] = d[p, c]
//   of tokens:  y[t, start_s + c] = y[t, start_s + c] + sum_p weights[p] * d[p, c]   in the order
//               of p over the pairs of token t; an output of T is overwritten with the rounded sum
//   Pairs without weights (lora_pairs.cuh) are not read, and their rows not written, but for an
//   output of T, of which every row is.
//
// Layout   x            [slices, pairs, rank]  T, contiguous
//          B            [features, rank]       T, contiguous, at a multiple of 16 bytes
//          y            [rows, columns]        fp32 or T, any row stride
//          token_pairs  [tokens, 32]           int32 or null: how many pairs a token has, and up to
//                                              31 of them, in any order
// Threads  a CTA computes a tile of columns of one row of y. It finds the pairs of its token: in
//          token_pairs, or by reading all of sorted_token_ids. A column has as many lanes as a row
//          of B has vectors; loads of four pairs, or of four columns, are in flight at once.
// Traffic  reads B once for each pair, which is nearly all of it
// Overlap  behind BgmvMoeShrinkKernel, which lets it start when all that comes before both has
//          ended, it looks up its pairs and brings B to L2 before it waits for x
// Order    the pairs of a token are sorted, and one thread adds them up: equal arguments give equal
//          bits, whatever the grid, and whichever other tokens there are. A token with more pairs
//          than fit in a list goes through sorted_token_ids in parts, for each of its columns.
// Source   Chen et al., Punica: Multi-Tenant LoRA Serving, arXiv:2310.18547, section 4
#pragma once

#include "precast/core/launch.cuh"
#include "precast/core/vec.cuh"
#include "precast/core/warp.cuh"
#include "precast/moe/lora_pairs.cuh"

namespace precast {

constexpr int kTokenPairsRow = 32;  // int32 of token_pairs for each token, 128 bytes
constexpr int kMaxTokenPairs = kTokenPairsRow - 1;
// CTAs that keep every GPU busy; with more tiles than that, a CTA takes several.
constexpr int64_t kExpandCtas = 2048;

struct BgmvMoeExpandParams {
  LoraPairs pairs;
  LoraWeights weights;    // B
  const void* x;          // [slices, pairs, rank]
  const float* scales;    // [pairs], the weights of the routing
  const int64_t* starts;  // [slices], or null: side by side from first_column
  int32_t* token_pairs;   // [tokens, kTokenPairsRow], zero at first, or null
  void* y;                // [rows, columns]
  int64_t y_stride;       // of rows, in elements
  int64_t columns;
  int64_t first_column;
  int64_t features;        // columns that a slice has
  int64_t columns_of_cta;  // set by the launcher
  int rank;                // a multiple of 8
  int lane_bits;           // a column has 2^lane_bits lanes; set by the launcher
  uint32_t slices;
  bool overwrites;     // of tokens: y has the type T
  bool per_pair;       // rows of y are those of pairs
  bool behind_shrink;  // the grid before makes x, and ids and weights are older than both
};

#if defined(__CUDACC__)

// What a CTA adds up: for each pair its two operands and its weight, in the order of the pairs.
template <typename T>
struct ExpandTerms {
  int count;
  uint32_t found[kMaxTokenPairs];  // pairs, in any order
  const T* b[kMaxTokenPairs];      // [features, rank], or null
  const T* x[kMaxTokenPairs];      // [rank]
  float scale[kMaxTokenPairs];
};

// Writes the pairs of a token with an adapter to its row of token_pairs.
__global__ __launch_bounds__(kLoraThreads) void TokenPairsKernel(
    const __grid_constant__ BgmvMoeExpandParams p) {
  const uint32_t pair = blockIdx.x * kLoraThreads + threadIdx.x;
  launch_dependent_grids();
  wait_on_dependent_grids();
  if (pair >= p.pairs.pairs) return;
  const int64_t token = p.pairs.tokens_of[pair];
  if (lora_of(p.pairs, p.weights, token) < 0) return;
  int32_t* row = p.token_pairs + token * kTokenPairsRow;
  const int at = atomicAdd(row, 1);
  if (at < kMaxTokenPairs) row[1 + at] = static_cast<int32_t>(pair);
}

// Finds the pairs from `begin` to `end` of a token. Returns their number; those that fit in the
// list are in it. All threads of the CTA call it.
template <typename T>
__device__ __forceinline__ int find_pairs(const BgmvMoeExpandParams& p, int64_t token,
                                          uint32_t begin, uint32_t end, ExpandTerms<T>& terms) {
  if (threadIdx.x == 0) terms.count = 0;
  __syncthreads();
  for (uint32_t pair = begin + threadIdx.x; pair < end; pair += kLoraThreads) {
    if (p.pairs.tokens_of[pair] != token) continue;
    const int at = atomicAdd(&terms.count, 1);
    if (at < kMaxTokenPairs) terms.found[at] = pair;
  }
  __syncthreads();
  return terms.count;
}

// Sorts the pairs of the list and looks up their operands. All threads of the CTA call it.
template <typename T, bool kOfTokens>
__device__ __forceinline__ void look_up_terms(const BgmvMoeExpandParams& p, uint32_t slice,
                                              int64_t lora, int count, ExpandTerms<T>& terms) {
  const int at = threadIdx.x;
  if (at < count) {
    const uint32_t pair = terms.found[at];
    int place = 0;
    for (int i = 0; i < count; ++i) place += terms.found[i] < pair;
    const T* b = weights_of<T>(p.weights, slice, lora, p.pairs.experts_of[pair]);
    terms.b[place] = b;
    terms.x[place] = static_cast<const T*>(p.x) + (int64_t(slice) * p.pairs.pairs + pair) * p.rank;
    terms.scale[place] = kOfTokens && b != nullptr ? load_scalar(p.scales + pair) : 1.0f;
  }
  __syncthreads();
}

// Adds the terms of the list to the sums of kColumns columns, those of this lane.
template <int kPairs, int kColumns, typename T>
__device__ __forceinline__ void add_terms(const BgmvMoeExpandParams& p, const ExpandTerms<T>& terms,
                                          int count, int64_t column, int64_t end, int step,
                                          float (&sum)[kColumns]) {
  const int lanes = 1 << p.lane_bits, lane = threadIdx.x & (lanes - 1);
  for (int first = 0; first < count; first += kPairs) {
    for (int r = lane * kLoraVector; r < p.rank; r += lanes * kLoraVector) {
      Vec<T> inputs[kPairs], weights[kPairs][kColumns];
      float scale[kPairs];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const T* b = first + i < count ? terms.b[first + i] : nullptr;
        scale[i] = b != nullptr ? terms.scale[first + i] : 0.0f;
        inputs[i] = b != nullptr ? load_vec(terms.x[first + i] + r) : zero_vec<T>();
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          const int64_t at = column + j * step;
          const bool exists = b != nullptr && at < end;
          weights[i][j] = exists ? load_vec(b + at * p.rank + r) : zero_vec<T>();
        }
      }
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        float input[kLoraVector];
        unpack(inputs[i], input);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          float weight[kLoraVector];
          unpack(weights[i][j], weight);
          sum[j] = fmaf(scale[i], dot(weight, input), sum[j]);
        }
      }
    }
  }
}

// Brings the columns from `begin` to `end` of the list's matrices to L2.
template <typename T>
__device__ __forceinline__ void prefetch_terms(const BgmvMoeExpandParams& p,
                                               const ExpandTerms<T>& terms, int count,
                                               int64_t begin, int64_t end) {
  constexpr int kLine = 128 / sizeof(T);
  const int lines = static_cast<int>(((end - begin) * p.rank - 1) / kLine + 1);
  for (int i = threadIdx.x; i < count * lines; i += kLoraThreads) {
    const T* b = terms.b[i / lines];
    if (b != nullptr) prefetch_to_l2(b + begin * p.rank + i % lines * kLine);
  }
}

// kOfTokens: rows of y are those of tokens; they are added to if O is fp32, else overwritten.
template <typename T, typename O, bool kOfTokens>
__global__ __launch_bounds__(kLoraThreads, kExpandCtasPerSm) void BgmvMoeExpandKernel(
    const __grid_constant__ BgmvMoeExpandParams p) {
  static_assert(Vec<T>::kSize == kLoraVector, "16-bit types");
  constexpr bool kOverwrites = sizeof(O) == 2;
  constexpr int kPairs = kOfTokens ? 4 : 1, kColumns = kOfTokens ? 1 : 4;
  __shared__ ExpandTerms<T> terms;
  const uint32_t row = blockIdx.x, slice = blockIdx.z;

  launch_dependent_grids();
  if (!kOverwrites || !p.behind_shrink) wait_on_dependent_grids();

  const int64_t token = kOfTokens ? int64_t(row) : p.pairs.tokens_of[row];
  const int64_t lora = lora_of(p.pairs, p.weights, token);
  if (lora < 0 && !kOverwrites) return;
  int count = 0;
  if (!kOfTokens) {
    count = 1;
    if (threadIdx.x == 0) terms.found[0] = row;
  } else if (lora >= 0 && p.token_pairs != nullptr) {
    const int32_t* known = p.token_pairs + token * kTokenPairsRow;
    count = known[0];
    const int listed = min(count, kMaxTokenPairs), at = threadIdx.x;
    if (at < listed) terms.found[at] = known[1 + at];
  } else if (lora >= 0) {
    count = find_pairs(p, token, 0, p.pairs.pairs, terms);
  }
  if (count == 0 && !kOverwrites) return;
  const bool fits = count <= kMaxTokenPairs;
  __syncthreads();
  if (fits) look_up_terms<T, kOfTokens>(p, slice, lora, count, terms);
  if (!kOfTokens && terms.b[0] == nullptr) return;
  const int64_t begin = blockIdx.y * p.columns_of_cta;
  const int64_t end = min(begin + p.columns_of_cta, p.features);
  if (kOverwrites && p.behind_shrink) {
    const uint32_t cta = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    if (fits && may_overlap_previous_grid(cta)) prefetch_terms(p, terms, count, begin, end);
    wait_on_dependent_grids();
  }

  const int groups = kLoraThreads >> p.lane_bits, group = threadIdx.x >> p.lane_bits;
  const bool is_first_lane = (threadIdx.x & ((1 << p.lane_bits) - 1)) == 0;
  const int64_t start = p.starts != nullptr ? p.starts[slice] : p.first_column + slice * p.features;
  O* y = static_cast<O*>(p.y) + int64_t(row) * p.y_stride;  // [columns]
  for (int64_t base = begin; base < end; base += groups * kColumns) {
    const int64_t column = base + group;  // and every groups-th after it
    float sum[kColumns] = {};
    if (fits) {
      add_terms<kPairs>(p, terms, count, column, end, groups, sum);
    } else {
      for (uint32_t at = 0; at < p.pairs.pairs; at += kMaxTokenPairs) {
        const uint32_t last = min(at + kMaxTokenPairs, p.pairs.pairs);
        const int found = find_pairs(p, token, at, last, terms);
        look_up_terms<T, kOfTokens>(p, slice, lora, found, terms);
        add_terms<kPairs>(p, terms, found, column, end, groups, sum);
      }
    }
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const float total = warp_sum(sum[j], 1 << p.lane_bits);
      const int64_t at = column + j * groups;
      // A start of the caller's that is out of range must not fault.
      const int64_t target = start + at;
      if (!is_first_lane || at >= end || target < 0 || target >= p.columns) continue;
      y[target] = from_float<O>(kOfTokens && !kOverwrites ? to_float(y[target]) + total : total);
    }
  }
}

#if !defined(__CUDACC_RTC__)

// Launches the products on `stream`. There must be pairs, rows, features and slices, of which at
// most 65535, and a rank that is a multiple of 8.
template <typename T>
cudaError_t launch_bgmv_moe_expand(BgmvMoeExpandParams p, bool enable_pdl, cudaStream_t stream) {
  while ((kLoraVector << p.lane_bits) < p.rank && (1 << p.lane_bits) < kWarpSize) ++p.lane_bits;
  const dim3 threads(kLoraThreads);
  if (p.token_pairs != nullptr) {
    const dim3 ctas((p.pairs.pairs - 1) / kLoraThreads + 1);
    const cudaError_t error = launch(TokenPairsKernel, ctas, threads, enable_pdl, stream, p);
    if (error != cudaSuccess) return error;
  }
  const int64_t rows = p.per_pair ? p.pairs.pairs : p.pairs.tokens;
  const int64_t step = (kLoraThreads >> p.lane_bits) * (p.per_pair ? 4 : 1);
  const int64_t steps = (p.features - 1) / step + 1;
  int64_t passes = rows * p.slices * steps / kExpandCtas;
  passes = passes < 1 ? 1 : passes > steps ? steps : passes;
  if (passes < (steps - 1) / 65535 + 1) passes = (steps - 1) / 65535 + 1;
  p.columns_of_cta = passes * step;
  const dim3 grid(static_cast<uint32_t>(rows),
                  static_cast<uint32_t>((p.features - 1) / p.columns_of_cta + 1), p.slices);
  const auto kernel = p.per_pair     ? BgmvMoeExpandKernel<T, f32, false>
                      : p.overwrites ? BgmvMoeExpandKernel<T, T, true>
                                     : BgmvMoeExpandKernel<T, f32, true>;
  return launch(kernel, grid, threads, enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
