// SPDX-License-Identifier: Apache-2.0
// A mixture of experts for at most eight tokens: second product and weighted sum (few_tokens.cuh).
//
// Threads  a CTA has 16 columns of out. Each of its eight warps multiplies the rows of every eighth
//          expert; with fewer slots than eight, `splits` warps share an expert, each every
//          splits-th step of 128 bytes. Then a thread adds up the slots of a token. So the order of
//          additions depends on `inter` and on the slots alone.
// Traffic  reads fc2 of the experts that tokens have once; every CTA reads h and the routing. With
//          PDL, the first weights are loaded while MoeFewTokensUpKernel still runs.
// Measured 2026-11-27 on an H200, e4m3, 256 experts [512, 2048], eight tokens, without PDL: 34.7 us
//          for 61 MB
#pragma once

#include "precast/moe/few_tokens.cuh"

namespace precast {

#if defined(__CUDACC__)

// Steps of a warp that are prefetched into L2 behind those in flight.
constexpr int kFewPrefetch = 8;

// Where a warp is in its steps: experts, and steps of an expert.
template <typename W>
class FewDownCursor {
 public:
  __device__ __forceinline__ FewDownCursor(const MoeFewTokensParams& p, const FewTokensRoute& route,
                                           int at, int first)
      : at_(at), step_(first) {
    find_expert(p, route);
  }

  __device__ __forceinline__ void load(FewStep& to) const {
    load_step<W>(to, row_ + step_ * kFewStepBytes, row_ + half_ + step_ * kFewStepBytes);
    if constexpr (FewMma<W>::kIsScaled) to.scale[0] = to.scale[1] = load_scalar(scale_ + step_);
  }

  // Prefetches the step. Half of the lanes have a line each.
  __device__ __forceinline__ void prefetch() const {
    const int lane = threadIdx.x % kWarpSize;
    const char* line = row_ + step_ * kFewStepBytes - lane % 4 * kVecBytes;
    if (lane % 4 < 2) prefetch_to_l2(lane % 4 == 0 ? line : line + half_);
  }

  __device__ __forceinline__ void advance(const MoeFewTokensParams& p, const FewTokensRoute& route,
                                          int first, int steps) {
    step_ += p.splits;
    if (step_ < steps) return;
    step_ = first;
    at_ += kFewWarps / p.splits;
    find_expert(p, route);
  }

 private:
  __device__ __forceinline__ void find_expert(const MoeFewTokensParams& p,
                                              const FewTokensRoute& route) {
    if (at_ >= route.count) return;
    const int lane = threadIdx.x % kWarpSize;
    const int64_t expert = route.experts[at_], bytes = int64_t(p.inter) * sizeof(W);
    const int row = blockIdx.x * kFewRows;
    row_ = static_cast<const char*>(p.fc2) + (expert * p.hidden + row + lane / 4) * bytes +
           lane % 4 * kVecBytes;
    half_ = kFewRows / 2 * bytes;
    if constexpr (FewMma<W>::kIsScaled) {
      const int rows = p.hidden / kExpertGroup;
      scale_ = p.fc2_scale + (expert * rows + row / kExpertGroup) * (p.inter / kExpertGroup);
    }
  }

  const char* row_;
  int64_t half_;  // bytes from a row to that of the other half
  const float* scale_;
  int at_;
  int step_;
};

// A row of activations in shared memory is longer by this, so that rows begin in other banks.
constexpr int kFewRowPadding = 64;
static_assert(kFewRowPadding % kVecBytes == 0 && kExpertGroup % kVecBytes == 0,
              "rows of activations, and the scales behind them, begin at vectors");

template <typename W>
PRECAST_HOST_DEVICE inline int few_row_bytes(int inter) {
  return inter * static_cast<int>(sizeof(W)) + kFewRowPadding;
}

// Writes h to shared memory, quantised if W is e4m3: the rows of pairs that are the first with
// their expert.
template <typename T, typename W>
__device__ __forceinline__ void stage_activations(const MoeFewTokensParams& p,
                                                  const FewTokensRoute& route, char* to,
                                                  float* scales) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int pairs = p.tokens * p.slots, stride = few_row_bytes<W>(p.inter);
  // Why no more: the registers are full of weights.
  constexpr int kBatch = FewMma<W>::kIsScaled ? 2 : 4;
  const auto is_first = [&](int pair) {
    const int at = route.index[pair];
    return at >= 0 && route.pair[at][pair / p.slots] == pair;
  };
  if constexpr (FewMma<W>::kIsScaled) {
    constexpr int kLanes = kExpertGroup / 8, kAtOnce = kWarpSize / kLanes;
    constexpr int kStride = kFewWarps * kAtOnce;
    const int groups = p.inter / kExpertGroup, units = pairs * groups;
    const float* h = static_cast<const float*>(p.h);
    for (int begin = warp * kAtOnce; begin < units; begin += kBatch * kStride) {
      Vec<f32> loaded[kBatch][2];
      bool exists[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int unit = begin + i * kStride + lane / kLanes;
        exists[i] = unit < units && is_first(unit / groups);
        const float* from = h + unit * kExpertGroup + lane % kLanes * 8;
        loaded[i][0] = exists[i] ? load_vec(from) : zero_vec<f32>();
        loaded[i][1] = exists[i] ? load_vec(from + 4) : zero_vec<f32>();
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int unit = begin + i * kStride + lane / kLanes;
        float low[4], high[4], scale;
        unpack(loaded[i][0], low);
        unpack(loaded[i][1], high);
        const float x[8] = {low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]};
        const uint2 codes = quantize_group(x, scale);
        if (!exists[i]) continue;
        const int pair = unit / groups, group = unit - pair * groups;
        const int byte = group * kExpertGroup + lane % kLanes * 8;
        *reinterpret_cast<uint2*>(to + pair * stride + byte) = codes;
        if (lane % kLanes == 0) scales[unit] = scale;
      }
    }
  } else {
    const int vecs = p.inter / Vec<T>::kSize, units = pairs * vecs;
    const T* h = static_cast<const T*>(p.h);
    for (int begin = threadIdx.x; begin < units; begin += kBatch * kFewThreads) {
      Vec<T> loaded[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int unit = begin + i * kFewThreads;
        const bool exists = unit < units && is_first(unit / vecs);
        loaded[i] = exists ? load_vec(h + int64_t(unit) * Vec<T>::kSize) : zero_vec<T>();
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int unit = begin + i * kFewThreads;
        if (unit >= units) continue;
        const int pair = unit / vecs, at = unit - pair * vecs;
        *reinterpret_cast<uint4*>(to + pair * stride + at * kVecBytes) = loaded[i].bits;
      }
    }
  }
}

template <typename T, typename W>
__global__ __launch_bounds__(kFewThreads, 2) void MoeFewTokensDownKernel(
    const __grid_constant__ MoeFewTokensParams p) {
  extern __shared__ uint4 few_tokens_shared[];
  __shared__ FewTokensRoute route;
  __shared__ float results[kMaxFewPairs][kFewRows];  // of splits and pairs
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int stride = few_row_bytes<W>(p.inter), groups = p.inter / kExpertGroup;
  char* rows = reinterpret_cast<char*>(few_tokens_shared);
  float* scales = reinterpret_cast<float*>(rows + p.tokens * p.slots * stride);  // [pair, group]

  launch_dependent_grids();
  // Why no wait yet: what comes before MoeFewTokensUpKernel has written the routing and the
  // weights, and that kernel has waited for it before it let this one start.
  find_route<T>(p, route);
  const int steps = p.inter * static_cast<int>(sizeof(W)) / kFewStepBytes;  // of an expert
  const int stride_at = kFewWarps / p.splits, first_at = warp / p.splits;
  const int first_step = warp % p.splits;
  const int total = (route.count - first_at + stride_at - 1) / stride_at *
                    ((steps - first_step + p.splits - 1) / p.splits);
  FewStep in_flight[kFewDepth];
  FewDownCursor<W> ahead(p, route, first_at, first_step);
#pragma unroll
  for (int i = 0; i < kFewDepth; ++i) {
    if (i >= total) continue;
    ahead.load(in_flight[i]);
    ahead.advance(p, route, first_step, steps);
  }
  if (may_overlap_previous_grid()) {
    FewDownCursor<W> further = ahead;
    for (int i = kFewDepth; i < kFewDepth + kFewPrefetch && i < total; ++i) {
      further.prefetch();
      further.advance(p, route, first_step, steps);
    }
  }

  wait_on_dependent_grids();
  stage_activations<T, W>(p, route, rows, scales);
  __syncthreads();

  float sum[4] = {};
  int step = first_step, at = first_at;
  float (*own_results)[kFewRows] = results + first_step * p.tokens * p.slots;
  for (int begin = 0; begin < total; begin += kFewDepth) {
#pragma unroll
    for (int i = 0; i < kFewDepth; ++i) {
      if (begin + i >= total) break;
      const int pair = route.pair[at][lane / 4];
      uint4 token[2];
      token[0] = token[1] = make_uint4(0u, 0u, 0u, 0u);
      if (pair != kNoPair) {
        const char* from = rows + pair * stride + step * kFewStepBytes + lane % 4 * kVecBytes;
        token[0] = *reinterpret_cast<const uint4*>(from);
        token[1] = *reinterpret_cast<const uint4*>(from + kFewStepBytes / 2);
      }
      static_assert(alignof(FewTokensRoute) >= sizeof(int2) && kFewTokens % 2 == 0,
                    "the pairs of two tokens are one aligned word");
      const int2 of_sum = *reinterpret_cast<const int2*>(&route.pair[at][lane % 4 * 2]);
      float2 of_tokens = make_float2(0.0f, 0.0f);
      if constexpr (FewMma<W>::kIsScaled) {
        if (of_sum.x != kNoPair) of_tokens.x = scales[of_sum.x * groups + step];
        if (of_sum.y != kNoPair) of_tokens.y = scales[of_sum.y * groups + step];
      }
      multiply_step<W>(in_flight[i], token, of_tokens, sum);
      if (begin + i + kFewDepth < total) {
        ahead.load(in_flight[i]);
        ahead.advance(p, route, first_step, steps);
      }
      step += p.splits;
      if (step < steps) continue;
      if (of_sum.x != kNoPair) {
        own_results[of_sum.x][lane / 4] = sum[0];
        own_results[of_sum.x][lane / 4 + 8] = sum[2];
      }
      if (of_sum.y != kNoPair) {
        own_results[of_sum.y][lane / 4] = sum[1];
        own_results[of_sum.y][lane / 4 + 8] = sum[3];
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[j] = 0.0f;
      step = first_step;
      at += stride_at;
    }
  }
  __syncthreads();

  const int token = threadIdx.x / kFewRows, row = threadIdx.x % kFewRows;
  if (token >= p.tokens) return;
  float out = 0.0f;
  for (int slot = 0; slot < p.slots; ++slot) {
    const int pair = token * p.slots + slot, index = route.index[pair];
    if (index < 0) continue;
    const float (*of_splits)[kFewRows] = results + route.pair[index][token];
    float sum_of_splits = of_splits[0][row];
    for (int split = 1; split < p.splits; ++split) {
      sum_of_splits += of_splits[split * p.tokens * p.slots][row];
    }
    out = fmaf(route.weights[pair], to_float(from_float<T>(sum_of_splits)), out);
  }
  static_cast<T*>(p.out)[int64_t(token) * p.hidden + blockIdx.x * kFewRows + row] =
      from_float<T>(out);
}

#if !defined(__CUDACC_RTC__)

template <typename T, typename W>
cudaError_t launch_moe_few_tokens_down(const MoeFewTokensParams& p, bool enable_pdl,
                                       cudaStream_t stream) {
  int row = few_row_bytes<W>(p.inter);
  if (FewMma<W>::kIsScaled) row += p.inter / kExpertGroup * 4;
  const int shared = p.tokens * p.slots * row;
  const auto kernel = MoeFewTokensDownKernel<T, W>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  return launch(kernel, dim3(p.hidden / kFewRows), dim3(kFewThreads), enable_pdl, stream, p,
                shared);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
