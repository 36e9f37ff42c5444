// SPDX-License-Identifier: Apache-2.0
// A mixture of experts for at most eight tokens with weights of e4m3 for sm_90a: second product and
// weighted sum (moe/sm90/few_tokens.cuh).
//
// Threads  a cluster has 64 columns of out; each of its CTAs multiplies every n-th expert of them.
//          Warps behind the producer quantise h, each every fourth stage. There is one CTA where
//          one expert is all that tokens can have, or where two would not all have an SM.
// Sums     The results of pairs go to the CTA that has their columns, which adds up the slots of a
//          token in their order. So sums depend on `inter` and on the slots alone.
// Traffic  reads fc2 of the experts that tokens have once; the CTAs of each 64 columns read h once.
//          With PDL, the first stages are filled while the first kernel still runs.
// Measured 2026-11-28 on an H200, 128 experts [768, 2048], eight tokens, without PDL: 27.1 us for
//          81 MB
#pragma once

#include "precast/core/math.cuh"
#include "precast/core/sm90/cluster_memory.cuh"
#include "precast/moe/sm90/few_tokens.cuh"

namespace precast {

#if defined(__CUDACC__)

constexpr int kFewDownStages = 5;
constexpr int kFewLoaders = 4;  // warps
constexpr int kFewDownThreads = (kFewProducer + 1 + kFewLoaders) * kWarpSize;
static_assert(kFewDownThreads >= kFewThreads, "find_route()");
static_assert(kFewDownStages * (kFewStageBytes + kFewBlocks * kFewTokenBytes) +
                      kMaxFewPairs * kFewTileRows * int(sizeof(float)) +
                      int(sizeof(FewTokensRoute)) <=
                  kFewMaxSharedSm90,
              "every size that the binding takes has place");

// Writes h of an expert's tokens to a stage: `count` blocks of 128 columns from `block` on,
// quantised, to `to`, and their scales times those of the weights, which begin at `of_weights`, to
// `scales`. All lanes of a warp must call it.
__device__ __forceinline__ void stage_h(const MoeFewTokensParams& p,
                                        const int32_t (&pairs)[kFewTokens], int block, int count,
                                        const float* of_weights, char* to,
                                        float (&scales)[kFewBlocks][kFewTokens]) {
  constexpr int kBatch = 4;  // tokens
  const int lane = threadIdx.x % kWarpSize;
  const float* h = static_cast<const float*>(p.h);
  const int pair_of_lane = lane < kFewTokens ? pairs[lane] : kNoPair;
  uint32_t left = __ballot_sync(0xffffffffu, pair_of_lane != kNoPair);
  float weight_scales[kFewBlocks];
#pragma unroll
  for (int j = 0; j < kFewBlocks; ++j) {
    weight_scales[j] = j < count ? load_scalar(of_weights + j) : 0.0f;
  }
  while (left != 0u) {
    int tokens[kBatch];
    Vec<f32> loaded[kBatch][kFewBlocks];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      tokens[i] = __ffs(left) - 1;  // -1 if there is no further one
      left &= left - 1;
#pragma unroll
      for (int j = 0; j < kFewBlocks; ++j) {
        loaded[i][j] = zero_vec<f32>();
        if (tokens[i] < 0 || j >= count) continue;
        const int64_t row = int64_t(pairs[tokens[i]]) * p.inter;
        loaded[i][j] = load_vec(h + row + (block + j) * kExpertGroup + lane * 4);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (tokens[i] < 0) break;
#pragma unroll
      for (int j = 0; j < kFewBlocks; ++j) {
        if (j >= count) break;
        float x[4];
        unpack(loaded[i][j], x);
        const uint32_t amax = __reduce_max_sync(0xffffffffu, amax_bits(x));
        const QuantScale by = quant_scale<e4m3>(amax, kExpertEps, ScaleFormat::numbers);
        const float r = by.reciprocal;
        const int offset = j * kFewTokenBytes + few_token_offset(tokens[i], lane * 4);
        *reinterpret_cast<uint32_t*>(to + offset) =
            pack_fp8<e4m3>(x[0] * r, x[1] * r, x[2] * r, x[3] * r);
        if (lane == 0) scales[j][tokens[i]] = by.scale * weight_scales[j];
      }
    }
  }
}

template <typename T>
__global__ __launch_bounds__(kFewDownThreads, 1) void MoeFewTokensDownSm90Kernel(
    const __grid_constant__ FewTokensSm90Params params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char few_tokens_sm90_shared[];
  __shared__ FewTokensRoute route;
  __shared__ PipelineBarriers<kFewDownStages> stages;
  __shared__ uint64_t all_results;  // all of this CTA have come
  __shared__ alignas(8) float scales[kFewDownStages][kFewBlocks][kFewTokens];
  constexpr int kTokenBytes = kFewBlocks * kFewTokenBytes;  // of a stage
  const MoeFewTokensParams& p = params.p;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / kWarpSize, 0);
  const int lane = threadIdx.x % kWarpSize;
  char* activations = few_tokens_sm90_shared + kFewDownStages * kFewStageBytes;
  // [pair, columns of this CTA]
  float* results = reinterpret_cast<float*>(activations + kFewDownStages * kTokenBytes);
  if (warp == kFewProducer) {
    stages.init_by_warp(2, kFewConsumers);
    if (lane == 0) mbarrier_init(&all_results);
    fence_mbarrier_init();
    if (elect_lane()) prefetch_tensor_map(&params.weights);
  }

  launch_dependent_grids();
  // Why no wait yet: what comes before the first kernel has written the routing and the weights,
  // and that kernel has waited for it before it let this one start.
  find_route<T>(p, route);
  cluster_arrive_relaxed();  // this CTA has started, and its mbarriers are there
  const int own = threadIdx.x < p.tokens * p.slots ? route.index[threadIdx.x] : -1;
  const bool has_result = own >= 0 && route.pair[own][threadIdx.x / p.slots] == threadIdx.x;
  const int count = __syncthreads_count(has_result);

  const int ctas = static_cast<int>(cluster_size()), rank = static_cast<int>(cluster_rank());
  const int first_column = static_cast<int>(blockIdx.x) / ctas * kFewTileRows;
  const int columns = kFewTileRows / ctas;  // of this CTA
  const int blocks = p.inter / kExpertGroup;
  const int each = (blocks + kFewBlocks - 1) / kFewBlocks;  // stages of an expert
  const int experts = max(route.count - rank + ctas - 1, 0) / ctas;
  if (ctas > 1 && threadIdx.x == 0) mbarrier_arrive_expect_tx(&all_results, count * columns * 4);
  cluster_wait();
  if (warp < kFewConsumers) {
    const uint32_t weights = shared_address(few_tokens_sm90_shared);
    const uint32_t tokens = shared_address(activations);
    PipelineState<kFewDownStages> state;
    for (int i = 0; i < experts; ++i) {
      float sum[4] = {};
      for (int block = 0; block < blocks; block += kFewBlocks) {
        stages.wait_full(state, "a stage of fc2 and h");
        float2 factors[kFewBlocks];
#pragma unroll
        for (int j = 0; j < kFewBlocks; ++j) {
          factors[j] = *reinterpret_cast<const float2*>(&scales[state.stage][j][lane % 4 * 2]);
        }
        FewProducts products;
        multiply_stage(weights + state.stage * kFewStageBytes, tokens + state.stage * kTokenBytes,
                       products);
        mbarrier_arrive_of_warp(&stages.empty[state.stage]);
        state.advance();
#pragma unroll
        for (int j = 0; j < kFewBlocks; ++j) {
          if (j > 0 && block + j >= blocks) break;
          add_products(products[j], 1.0f, 1.0f, factors[j], sum);
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int pair = route.pair[rank + i * ctas][lane % 4 * 2 + j % 2];
        if (pair == kNoPair) continue;
        const int row = warp * 16 + lane / 4 + j / 2 * 8, owner = row / columns;
        float* result = results + pair * columns + row - owner * columns;
        if (ctas == 1) {
          *result = sum[j];
        } else {
          store_async(reinterpret_cast<uint32_t*>(result), &all_results, owner,
                      __float_as_uint(sum[j]));
        }
      }
    }
  } else if (warp == kFewProducer) {
    if (elect_lane()) {
      PipelineState<kFewDownStages> state;
      for (int i = 0; i < experts; ++i) {
        const int expert = route.experts[rank + i * ctas];
        for (int block = 0; block < blocks; block += kFewBlocks) {
          uint64_t* full = &stages.full[state.stage];
          stages.wait_empty(state, "a stage of fc2 to be empty");
          mbarrier_arrive_expect_tx(full, kFewStageBytes);
          copy_box(shared_address(few_tokens_sm90_shared) + state.stage * kFewStageBytes,
                   &params.weights, full, 0, first_column, block, expert);
          state.advance();
        }
      }
    }
    __syncwarp();
  } else {
    wait_on_dependent_grids();
    const int groups = p.hidden / kExpertGroup, total = experts * each;
    for (int number = warp - kFewProducer - 1; number < total; number += kFewLoaders) {
      const auto state = PipelineState<kFewDownStages>::after(number);
      const int i = number / each, block = (number - i * each) * kFewBlocks, at = rank + i * ctas;
      const int64_t scale_row = int64_t(route.experts[at]) * groups + first_column / kExpertGroup;
      stages.wait_empty(state, "a stage of h to be empty");
      stage_h(p, route.pair[at], block, min(kFewBlocks, blocks - block),
              p.fc2_scale + scale_row * blocks + block, activations + state.stage * kTokenBytes,
              scales[state.stage]);
      fence_shared_for_async();
      __syncwarp();
      mbarrier_arrive_of_warp(&stages.full[state.stage]);
    }
  }
  if (ctas == 1) {
    __syncthreads();
  } else {
    mbarrier_wait_parity(&all_results, 0, "the results of the cluster");
  }

  for (int unit = threadIdx.x; unit < p.tokens * columns; unit += kFewDownThreads) {
    const int token = unit / columns, column = unit - token * columns;
    float out = 0.0f;
    for (int slot = 0; slot < p.slots; ++slot) {
      const int pair = token * p.slots + slot, index = route.index[pair];
      if (index < 0) continue;
      const float sum = results[route.pair[index][token] * columns + column];
      out = fmaf(route.weights[pair], to_float(from_float<T>(sum)), out);
    }
    static_cast<T*>(p.out)[int64_t(token) * p.hidden + first_column + rank * columns + column] =
        from_float<T>(out);
  }
#endif
}

#if !defined(__CUDACC_RTC__)

// The CTAs of a cluster: as many as find place on the GPU, and have an expert.
inline int few_down_cluster(const MoeFewTokensParams& p) {
  const int tiles = p.hidden / kFewTileRows, experts = most_experts(p);
  int ctas = 1;
  while (ctas < 4 && 2 * ctas * tiles <= p.sms && 2 * ctas <= experts) ctas *= 2;
  return ctas;
}

template <typename T>
cudaError_t launch_moe_few_tokens_down_sm90(const MoeFewTokensParams& p, bool enable_pdl,
                                            cudaStream_t stream) {
  FewTokensSm90Params params = {p, {}};
  const uint64_t row = p.inter;
  TensorMapShape shape;
  shape.dim(kExpertGroup, 0, kExpertGroup)
      .dim(p.hidden, row, kFewTileRows)
      .dim(p.inter / kExpertGroup, kExpertGroup, kFewBlocks)
      .dim(p.experts, p.hidden * row, 1);
  shape.l2_bytes = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  cudaError_t error = encode_tensor_map(params.weights, DType::e4m3, p.fc2, shape);
  if (error != cudaSuccess) return error;
  const auto kernel = MoeFewTokensDownSm90Kernel<T>;
  const auto launch_in = [&](int ctas) {
    const int results = p.tokens * p.slots * (kFewTileRows / ctas);
    const int shared = kFewDownStages * (kFewStageBytes + kFewBlocks * kFewTokenBytes) +
                       results * static_cast<int>(sizeof(float));
    const cudaError_t failed =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (failed != cudaSuccess) return failed;
    return launch_clusters(kernel, dim3(p.hidden / kFewTileRows * ctas), dim3(kFewDownThreads),
                           ctas, shared, enable_pdl, stream, params);
  };
  const int ctas = few_down_cluster(p);
  error = launch_in(ctas);
  // A part of a GPU may have no room for a cluster.
  return ctas > 1 && is_cluster_too_large(error) ? launch_in(1) : error;
}

#endif

#endif  // __CUDACC__

}  // namespace precast
