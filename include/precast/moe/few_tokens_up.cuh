// SPDX-License-Identifier: Apache-2.0
// A mixture of experts for at most eight tokens: routing, first product and SwiGLU
// (few_tokens.cuh).
//
// Threads  a CTA has a tile of eight rows of `up` and eight of `gate` at a time, each of its eight
//          warps every eighth step of 128 bytes of their columns. The warps' sums are added in
//          shared memory in the order of warps, so the order of additions depends on `hidden`
//          alone. The accumulators of a lane hold `up` and `gate` of the same numbers.
// Traffic  reads fc1 of the experts that tokens have once; every CTA reads x and the routing
// Measured 2026-11-27 on an H200, e4m3, 256 experts [512, 2048], eight tokens, without PDL: 42.8 us
//          for 122 MB. What limits it: docs/decisions.md
#pragma once

#include "precast/core/math.cuh"
#include "precast/moe/few_tokens.cuh"

namespace precast {

#if defined(__CUDACC__)

// Where a warp is in its steps: tiles of the CTA, and steps of a tile.
template <typename W>
class FewUpCursor {
 public:
  __device__ __forceinline__ FewUpCursor(const MoeFewTokensParams& p, const FewTokensRoute& route,
                                         int step)
      : step_(step), tile_(blockIdx.x) {
    find_tile(p, route);
  }

  __device__ __forceinline__ int step() const { return step_; }

  __device__ __forceinline__ void load(const MoeFewTokensParams& p, FewStep& to) const {
    load_step<W>(to, low_ + step_ * kFewStepBytes, high_ + step_ * kFewStepBytes);
    if constexpr (FewMma<W>::kIsScaled) {
      to.scale[0] = load_scalar(low_scale_ + step_);
      to.scale[1] = load_scalar(high_scale_ + step_);
    }
  }

  // Returns false behind the last tile. `steps` are those of a tile.
  __device__ __forceinline__ bool advance(const MoeFewTokensParams& p, const FewTokensRoute& route,
                                          int first_step, int steps) {
    step_ += kFewWarps;
    if (step_ < steps) return true;
    step_ = first_step;
    tile_ += gridDim.x;
    return find_tile(p, route);
  }

 private:
  __device__ __forceinline__ bool find_tile(const MoeFewTokensParams& p,
                                            const FewTokensRoute& route) {
    const int tiles = p.inter / (kFewRows / 2);
    const int at = tile_ / tiles;
    if (at >= route.count) return false;
    const int lane = threadIdx.x % kWarpSize, tile = tile_ - at * tiles;
    const int64_t expert = route.experts[at], bytes = int64_t(p.hidden) * sizeof(W);
    const int row = tile * p.tile_rows + lane / 4;
    const char* base = static_cast<const char*>(p.fc1) + expert * 2 * p.inter * bytes;
    const int column = lane % 4 * kVecBytes;
    low_ = base + (p.up_row + row) * bytes + column;
    high_ = base + (p.gate_row + row) * bytes + column;
    if constexpr (FewMma<W>::kIsScaled) {
      const int groups = p.hidden / kExpertGroup, rows = p.inter / kExpertGroup;
      const int group = tile * (kFewRows / 2) / kExpertGroup;
      const float* scale = p.fc1_scale + (expert * 2 * rows + group) * groups;
      low_scale_ = scale + (p.gate_first ? rows * groups : 0);
      high_scale_ = scale + (p.gate_first ? 0 : rows * groups);
    }
    return true;
  }

  const char* low_;
  const char* high_;
  const float* low_scale_;
  const float* high_scale_;
  int step_;
  int tile_;
};

// Writes x to shared memory: blocks of 64 bytes of the eight tokens, quantised if W is e4m3.
template <typename T, typename W>
__device__ __forceinline__ void stage_tokens(const MoeFewTokensParams& p, char* to, float* scales) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  constexpr int kSize = Vec<T>::kSize;
  constexpr int kBatch = 4;
  const T* x = static_cast<const T*>(p.x);
  if constexpr (FewMma<W>::kIsScaled) {
    constexpr int kLanes = kExpertGroup / kSize, kAtOnce = kWarpSize / kLanes;
    const int groups = p.hidden / kExpertGroup, units = p.tokens * groups;
    constexpr int kStride = kFewWarps * kAtOnce;
    for (int begin = warp * kAtOnce; begin < units; begin += kBatch * kStride) {
      Vec<T> loaded[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int unit = begin + i * kStride + lane / kLanes;
        loaded[i] = unit < units ? load_vec(x + unit * kExpertGroup + lane % kLanes * kSize)
                                 : zero_vec<T>();
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int unit = begin + i * kStride + lane / kLanes;
        float numbers[kSize], scale;
        unpack(loaded[i], numbers);
        const uint2 codes = quantize_group(numbers, scale);
        if (unit >= units) continue;
        const int token = unit / groups, group = unit - token * groups;
        const int byte = group * kExpertGroup + lane % kLanes * kSize;
        *reinterpret_cast<uint2*>(to + (byte / 64 * kFewTokens + token) * 64 + byte % 64) = codes;
        if (lane % kLanes == 0) scales[group * kFewTokens + token] = scale;
      }
    }
  } else {
    const int vecs = p.hidden / kSize, units = p.tokens * vecs;
    for (int begin = threadIdx.x; begin < units; begin += kBatch * kFewThreads) {
      Vec<T> loaded[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int unit = begin + i * kFewThreads;
        if (unit < units) loaded[i] = load_vec(x + int64_t(unit) * kSize);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int unit = begin + i * kFewThreads;
        if (unit >= units) continue;
        const int token = unit / vecs, byte = (unit - token * vecs) * kVecBytes;
        *reinterpret_cast<uint4*>(to + (byte / 64 * kFewTokens + token) * 64 + byte % 64) =
            loaded[i].bits;
      }
    }
  }
}

// The type of h: what is quantised only later stays fp32.
template <typename T, typename W>
struct FewActivation {
  using Type = T;
};
template <typename T>
struct FewActivation<T, e4m3> {
  using Type = f32;
};

// The bytes of tokens in shared memory, behind which their scales stand.
template <typename W>
PRECAST_HOST_DEVICE inline int few_token_bytes(int hidden) {
  return kFewTokens * hidden * static_cast<int>(sizeof(W));
}

template <typename T, typename W>
__global__ __launch_bounds__(kFewThreads, 2) void MoeFewTokensUpKernel(
    const __grid_constant__ MoeFewTokensParams p) {
  using H = typename FewActivation<T, W>::Type;
  extern __shared__ uint4 few_tokens_shared[];
  __shared__ FewTokensRoute route;
  __shared__ float4 partial[2][kFewWarps][kWarpSize];  // accumulators of the warps
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  char* tokens = reinterpret_cast<char*>(few_tokens_shared);
  float* scales = reinterpret_cast<float*>(tokens + few_token_bytes<W>(p.hidden));  // [group, 8]

  wait_on_dependent_grids();
  // Why here: MoeFewTokensDownKernel reads the routing and its weights without a wait of its own.
  launch_dependent_grids();
  find_route<T>(p, route);

  const int steps = p.hidden * static_cast<int>(sizeof(W)) / kFewStepBytes;  // of a tile
  const int tiles = route.count * (p.inter / (kFewRows / 2));
  const int own_tiles = (tiles + static_cast<int>(gridDim.x - blockIdx.x) - 1) / gridDim.x;
  const int own_steps = (steps - warp + kFewWarps - 1) / kFewWarps;
  const int total = warp < steps ? own_tiles * own_steps : 0;

  FewStep in_flight[kFewDepth];
  FewUpCursor<W> ahead(p, route, warp);
#pragma unroll
  for (int i = 0; i < kFewDepth; ++i) {
    if (i >= total) continue;
    ahead.load(p, in_flight[i]);
    ahead.advance(p, route, warp, steps);
  }
  stage_tokens<T, W>(p, tokens, scales);
  __syncthreads();

  float sum[4] = {};
  int step = warp, tile = blockIdx.x, parity = 0;
  // Adds up the sums of the warps, and writes h of a tile.
  const auto finish_tile = [&] {
    partial[parity][warp][lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = 0.0f;
    __syncthreads();
    if (threadIdx.x < kFewRows / 2 * kFewTokens) {
      const int row = threadIdx.x / kFewTokens, token = threadIdx.x % kFewTokens;
      const int each = p.inter / (kFewRows / 2), at = tile / each;
      const float* from =
          reinterpret_cast<const float*>(&partial[parity][0][row * 4 + token / 2]) + token % 2;
      float up = 0.0f, gate = 0.0f;
#pragma unroll
      for (int w = 0; w < kFewWarps; ++w) {
        up += from[w * kWarpSize * 4];
        gate += from[w * kWarpSize * 4 + 2];
      }
      up = to_float(from_float<T>(up));
      gate = to_float(from_float<T>(gate));
      const int pair = route.pair[at][token];
      if (pair != kNoPair) {
        const int column = (tile - at * each) * (kFewRows / 2) + row;
        static_cast<H*>(p.h)[int64_t(pair) * p.inter + column] = from_float<H>(silu(gate) * up);
      }
    }
    // The next tile has the other half, which all threads have read before this barrier.
    parity ^= 1;
    tile += gridDim.x;
  };

  if (total == 0) {
    for (int i = 0; i < own_tiles; ++i) finish_tile();
    return;
  }
  for (int begin = 0; begin < total; begin += kFewDepth) {
#pragma unroll
    for (int i = 0; i < kFewDepth; ++i) {
      if (begin + i >= total) break;
      uint4 token[2];
      float2 of_tokens = make_float2(0.0f, 0.0f);
      const bool exists = lane / 4 < p.tokens;
      const uint4* from = few_tokens_shared + step * 2 * kWarpSize + lane;
      token[0] = exists ? from[0] : make_uint4(0u, 0u, 0u, 0u);
      token[1] = exists ? from[kWarpSize] : make_uint4(0u, 0u, 0u, 0u);
      if constexpr (FewMma<W>::kIsScaled) {
        of_tokens = *reinterpret_cast<const float2*>(scales + step * kFewTokens + lane % 4 * 2);
      }
      multiply_step<W>(in_flight[i], token, of_tokens, sum);
      if (begin + i + kFewDepth < total) {
        ahead.load(p, in_flight[i]);
        ahead.advance(p, route, warp, steps);
      }
      step += kFewWarps;
      if (step >= steps) {
        step = warp;
        finish_tile();
      }
    }
  }
}

#if !defined(__CUDACC_RTC__)

template <typename T, typename W>
cudaError_t launch_moe_few_tokens_up(const MoeFewTokensParams& p, bool enable_pdl,
                                     cudaStream_t stream) {
  int shared = few_token_bytes<W>(p.hidden);
  if (FewMma<W>::kIsScaled) shared += p.hidden / kExpertGroup * kFewTokens * 4;
  const auto kernel = MoeFewTokensUpKernel<T, W>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  return launch(kernel, dim3(few_up_ctas(p, kFewRows / 2)), dim3(kFewThreads), enable_pdl, stream,
                p, shared);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
