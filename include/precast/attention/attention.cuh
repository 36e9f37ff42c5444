// SPDX-License-Identifier: Apache-2.0
// Attention (FlashAttention-2) with paged or ragged keys and values, for prefill and decode.
//
//   out[i, h] = sum_j softmax_j(logit(i, j)) v[j, h / group_size]
//   logit(i, j) = scale * q[i, h] . k[j, h / group_size], or -inf if the mask hides j from query i
//
// Layout   q, out   [tokens, heads, head_dim]              any two strides, unit stride in a row
//          k, v     [pages, page_size, kv_heads, head_dim] any three strides; or [tokens, ...]
//          lse      [tokens, heads]                        base 2
// Threads  A CTA iterates over the work tiles that the plan gives it (attention/scheduler.cuh) or
//          that it finds itself (attention/self_plan.cuh), and for each over its KV blocks
//          (attention/mainloop.cuh). Q is in shared memory, acc_o in registers; keys and values
//          pass through the stages of a cp.async pipeline (attention/kv_pipeline.cuh).
// Traffic  K and V are read once for every tile of packed queries, so once in decode.
// Source   Dao, FlashAttention-2, arXiv:2307.08691; Ye et al., FlashInfer, arXiv:2501.01005 for
//          packed heads, page tables and split-KV.
// Measured 2026-11-22 on an H200 where torch reads 4305 GB/s; bf16, 32 query and 8 KV heads of 128,
//          pages of 16. Decode: us and share of that ceiling, then the same with KV in e4m3, before
//          tiles had the rows of two KV heads (docs/performance.md has newer figures):
//            1 x 1024       6.8           6.9
//            1 x 8192      13.4          11.1
//            64 x 4096    247.9  1.01   135.9  0.92
//            64 x 16384   963.0  1.04   526.7  0.95
//            256 x 4096   964.5  1.04   532.8  0.94
//          Causal prefill: TFLOP/s paged and ragged, then the speed-up over FlashInfer's fa2:
//            1 x 1024, kBlockM 64            226  228    1.55  1.34
//            1 x 4096, kBlockM 128 below     382  359    1.39  1.27
//            1 x 16384                       395  366    1.16  1.06
//            1 x 32768                       387  361    1.12  1.03
//            8 x 2048                        350  328    1.18  1.05
//            32 x 512                        251  246    1.20  0.98
//          In prefill the tensor cores are busy 55 to 58 % of the time: the registers allow two
//          warps per SM sub-partition, and often neither of them issues MMAs.
#pragma once

#include "precast/attention/mainloop.cuh"
#include "precast/core/launch.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename Tile, typename Q, typename KV>
__global__ __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm) void AttentionKernel(
    const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) unsigned char attention_smem[];
  __shared__ AttentionSharedStorage<Tile> shared;
  static_assert(sizeof shared <= Tile::kStaticBytes, "AttentionSharedStorage fits");
  launch_next_grid(p.overlap);
  if constexpr (!Tile::kStartsEarly) wait_on_previous_grid(p.overlap);
  AttentionMainloop<Tile, Q, KV>(p, attention_smem, shared).run();
  end_behind_previous_grid(p.overlap);
}

#if !defined(__CUDACC_RTC__)

template <typename Tile, typename Q, typename KV>
cudaError_t launch_attention_tile(const AttentionParams& p, bool enable_pdl, cudaStream_t stream) {
  const auto kernel = AttentionKernel<Tile, Q, KV>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes);
  if (error != cudaSuccess) return error;
  return launch(kernel, dim3(p.schedule.shape.ctas), dim3(Tile::kThreads), enable_pdl, stream, p,
                Tile::kSharedBytes);
}

template <typename KV, int kDimQ, int kDimV, int kBlockM, bool kGeneral>
using TileOf =
    AttentionTile<kKvStageBytes<KV>, kDimQ, kDimV, kBlockM, kGeneral, KvFormat<KV>::kIsPacked>;

// Launches the tile whose BLOCK_M the plan was made for.
template <typename Q, typename KV, int kDimQ, int kDimV, bool kGeneral, int kIndex = 0>
cudaError_t launch_attention_block_m(const AttentionParams& p, bool enable_pdl,
                                     cudaStream_t stream) {
  if constexpr (kIndex < kNumAttentionTiles) {
    constexpr AttentionTileTraits kTile = kAttentionTiles[kIndex];
    if constexpr (kTile.head_dim_qk == kDimQ && kTile.head_dim_vo == kDimV &&
                  exists_for_target(kTile)) {
      if (p.schedule.shape.block_m == kTile.block_m) {
        using Tile = TileOf<KV, kDimQ, kDimV, kTile.block_m, kGeneral>;
        static_assert(!KvFormat<KV>::kIsPacked ||
                          Tile::kCtasPerSm >=
                              attention_ctas_per_sm(kKvStageBytes<KV>, kTile.block_m, kDimQ, kDimV),
                      "an SM holds the CTAs that a plan counts");
        return launch_attention_tile<Tile, Q, KV>(p, enable_pdl, stream);
      }
    }
    return launch_attention_block_m<Q, KV, kDimQ, kDimV, kGeneral, kIndex + 1>(p, enable_pdl,
                                                                               stream);
  } else {
    return cudaErrorInvalidValue;
  }
}

// Launches the kernel of the tile that the plan was made for.
template <typename Q, typename KV, int kDimQ, int kDimV>
cudaError_t launch_attention(const AttentionParams& p, bool enable_pdl, cudaStream_t stream) {
  if (p.schedule.shape.ctas == 0) return cudaSuccess;
  AttentionParams rescaled = p;
  rescaled.scale *= Fp8Rescale<KV>::kScale;
  rescaled.out_scale *= Fp8Rescale<KV>::kScale;
  if (p.plans_itself) {
    // Whoever chose it knows that nothing needs a general kernel.
    if (!is_plain(p) || p.schedule.shape.block_m != kDecodeBlockM) return cudaErrorInvalidValue;
    using Tile = TileOf<KV, kDimQ, kDimV, kDecodeBlockM, false>;
    return launch_attention_tile<SelfPlannedTile<Tile>, Q, KV>(rescaled, enable_pdl, stream);
  }
  if (is_plain(p)) {
    return launch_attention_block_m<Q, KV, kDimQ, kDimV, false>(rescaled, enable_pdl, stream);
  }
  return launch_attention_block_m<Q, KV, kDimQ, kDimV, true>(rescaled, enable_pdl, stream);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
