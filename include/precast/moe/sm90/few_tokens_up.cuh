// SPDX-License-Identifier: Apache-2.0
// A mixture of experts for at most eight tokens with weights of e4m3 for sm_90a: routing, first
// product and SwiGLU (moe/sm90/few_tokens.cuh).
//
// Threads  a CTA has a tile of 32 rows of `up` and 32 of `gate` at a time. TMA brings them in turns
//          of eight, so that the accumulators of a lane hold `up` and `gate` of the same numbers.
// Sums     in the order of the depth, so that they depend on `hidden` alone
// Traffic  reads fc1 of the experts that tokens have once; every CTA reads x and the routing
// Measured 2026-11-28 on an H200, 128 experts [768, 2048], eight tokens, without PDL: 45.2 us for
//          163 MB
#pragma once

#include "precast/core/math.cuh"
#include "precast/moe/sm90/few_tokens.cuh"

namespace precast {

#if defined(__CUDACC__)

constexpr int kFewUpStages = 6;
constexpr int kFewUpColumns = kFewTileRows / 2;  // of h, of a tile
static_assert(kFewUpStages * kFewStageBytes + kMaxFewShared +
                      kMaxFewShared / kExpertGroup * int(sizeof(float)) +
                      int(sizeof(FewTokensRoute)) <=
                  kFewMaxSharedSm90,
              "every size that the binding takes has place");

// The bytes of tokens in shared memory: whole stages.
PRECAST_HOST_DEVICE inline int few_up_token_bytes(int hidden) {
  constexpr int kColumns = kFewBlocks * kExpertGroup;
  return (hidden + kColumns - 1) / kColumns * kColumns * kFewTokens;
}

// Writes x to shared memory, quantised: `to` has blocks of the eight tokens, `scales` is [block,
// token]. The warps but for the producer call it.
template <typename T>
__device__ __forceinline__ void stage_tokens_sm90(const MoeFewTokensParams& p, int warp, char* to,
                                                  float* scales) {
  constexpr int kSize = Vec<T>::kSize, kLanes = kExpertGroup / kSize;
  constexpr int kAtOnce = kWarpSize / kLanes, kBatch = 4;
  constexpr int kStride = (kFewWarps - 1) * kAtOnce;
  const int lane = threadIdx.x % kWarpSize, worker = warp < kFewProducer ? warp : warp - 1;
  const int groups = p.hidden / kExpertGroup, units = p.tokens * groups;
  const T* x = static_cast<const T*>(p.x);
  for (int begin = worker * kAtOnce; begin < units; begin += kBatch * kStride) {
    Vec<T> loaded[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int unit = begin + i * kStride + lane / kLanes;
      loaded[i] =
          unit < units ? load_vec(x + unit * kExpertGroup + lane % kLanes * kSize) : zero_vec<T>();
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int unit = begin + i * kStride + lane / kLanes;
      float numbers[kSize], scale;
      unpack(loaded[i], numbers);
      const uint2 codes = quantize_group(numbers, scale);
      if (unit >= units) continue;
      const int token = unit / groups, group = unit - token * groups;
      const int offset = group * kFewTokenBytes + few_token_offset(token, lane % kLanes * kSize);
      *reinterpret_cast<uint2*>(to + offset) = codes;
      if (lane % kLanes == 0) scales[group * kFewTokens + token] = scale;
    }
  }
}

template <typename T>
__global__ __launch_bounds__(kFewThreads, 1) void MoeFewTokensUpSm90Kernel(
    const __grid_constant__ FewTokensSm90Params params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char few_tokens_sm90_shared[];
  __shared__ FewTokensRoute route;
  __shared__ PipelineBarriers<kFewUpStages> stages;
  const MoeFewTokensParams& p = params.p;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / kWarpSize, 0);
  const int lane = threadIdx.x % kWarpSize;
  char* tokens = few_tokens_sm90_shared + kFewUpStages * kFewStageBytes;
  float* scales = reinterpret_cast<float*>(tokens + few_up_token_bytes(p.hidden));
  if (warp == kFewProducer) {
    stages.init_by_warp(1, kFewConsumers);
    fence_mbarrier_init();
    if (elect_lane()) prefetch_tensor_map(&params.weights);
  }

  wait_on_dependent_grids();
  // Why here: the second kernel reads the routing and its weights without a wait of its own.
  launch_dependent_grids();
  find_route<T>(p, route);

  const int tiles = p.inter / kFewUpColumns, items = route.count * tiles;
  const int blocks = p.hidden / kExpertGroup;
  const uint32_t weights = shared_address(few_tokens_sm90_shared);
  PipelineState<kFewUpStages> state;
  if (warp == kFewProducer) {
    if (!elect_lane()) return;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      const int at = item / tiles, tile = item - at * tiles, expert = route.experts[at];
      for (int block = 0; block < blocks; block += kFewBlocks) {
        const int count = min(kFewBlocks, blocks - block);
        uint64_t* full = &stages.full[state.stage];
        stages.wait_empty(state, "a stage of fc1 to be empty");
        mbarrier_arrive_expect_tx(full, count * kFewBlockBytes);
        for (int i = 0; i < count; ++i) {
          copy_box(weights + state.stage * kFewStageBytes + i * kFewBlockBytes, &params.weights,
                   full, (block + i) * kExpertGroup, 0, 0, tile * (kFewUpColumns / 8), expert);
        }
        state.advance();
      }
    }
    return;
  }
  stage_tokens_sm90<T>(p, warp, tokens, scales);
  fence_shared_for_async();
  named_barrier(1, kFewThreads - kWarpSize);
  if (warp > kFewProducer) return;

  const uint32_t token_address = shared_address(tokens);
  const int rows = p.inter / kExpertGroup;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int at = item / tiles, tile = item - at * tiles;
    const int group = tile * kFewUpColumns / kExpertGroup;
    // Of the rows that TMA brings first, and of the others.
    const float* low_scale = p.fc1_scale + (int64_t(route.experts[at]) * 2 * rows + group) * blocks;
    const float* high_scale = low_scale + rows * blocks;
    float sum[4] = {};
    for (int block = 0; block < blocks; block += kFewBlocks) {
      const int last = min(block + 1, blocks - 1);
      const float low[kFewBlocks] = {load_scalar(low_scale + block), load_scalar(low_scale + last)};
      const float high[kFewBlocks] = {load_scalar(high_scale + block),
                                      load_scalar(high_scale + last)};
      stages.wait_full(state, "a stage of fc1");
      FewProducts products;
      multiply_stage(weights + state.stage * kFewStageBytes, token_address + block * kFewTokenBytes,
                     products);
      mbarrier_arrive_of_warp(&stages.empty[state.stage]);
      state.advance();
#pragma unroll
      for (int i = 0; i < kFewBlocks; ++i) {
        if (i > 0 && block + i >= blocks) break;
        const float* of_tokens = scales + (block + i) * kFewTokens + lane % 4 * 2;
        add_products(products[i], low[i], high[i], *reinterpret_cast<const float2*>(of_tokens),
                     sum);
      }
    }
    const int column = tile * kFewUpColumns + warp * 8 + lane / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int pair = route.pair[at][lane % 4 * 2 + i];
      if (pair == kNoPair) continue;
      const float first = to_float(from_float<T>(sum[i]));
      const float second = to_float(from_float<T>(sum[2 + i]));
      const float h = p.gate_first ? silu(first) * second : silu(second) * first;
      static_cast<float*>(p.h)[int64_t(pair) * p.inter + column] = h;
    }
  }
#endif
}

#if !defined(__CUDACC_RTC__)

template <typename T>
cudaError_t launch_moe_few_tokens_up_sm90(const MoeFewTokensParams& p, bool enable_pdl,
                                          cudaStream_t stream) {
  FewTokensSm90Params params = {p, {}};
  const uint64_t row = p.hidden, half = p.gate_first ? p.up_row : p.gate_row;
  TensorMapShape shape;
  shape.dim(p.hidden, 0, kExpertGroup)
      .dim(8, row, 8)
      .dim(2, half * row, 2)
      .dim(p.inter / 8, p.tile_rows * row, kFewUpColumns / 8)
      .dim(p.experts, 2 * p.inter * row, 1);
  shape.l2_bytes = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  cudaError_t error = encode_tensor_map(params.weights, DType::e4m3, p.fc1, shape);
  if (error != cudaSuccess) return error;
  const int shared = kFewUpStages * kFewStageBytes + few_up_token_bytes(p.hidden) +
                     p.hidden / kExpertGroup * kFewTokens * static_cast<int>(sizeof(float));
  const auto kernel = MoeFewTokensUpSm90Kernel<T>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  return launch(kernel, dim3(few_up_ctas(p, kFewUpColumns)), dim3(kFewThreads), enable_pdl, stream,
                params, shared);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
