// SPDX-License-Identifier: Apache-2.0
// A mixture of experts for at most eight tokens with weights of e4m3 for sm_90a: what its two
// kernels share. They compute the same as those of moe/few_tokens.cuh with the same rounding.
//
// Weights are the rows of wgmma, the eight tokens its columns, so that no weight passes through a
// register. A stage of a kernel's pipeline has two blocks of 64 rows of weights and 128 of the
// depth, which TMA copies. A new accumulator for each block is scaled and added in fp32, as in
// gemm/sm90/block_sums.cuh.
//
// Threads  warps 0 to 3 multiply, warp 4 copies weights; the others prepare what weights are
//          multiplied by, as do all that have nothing else to do yet.
#pragma once

#include "precast/core/sm90/pipeline.cuh"
#include "precast/core/sm90/tensor_map.cuh"
#include "precast/core/sm90/warpgroup.cuh"
#include "precast/core/sm90/wgmma.cuh"
#include "precast/moe/few_tokens.cuh"

namespace precast {

#if defined(__CUDACC__)

constexpr int kFewTileRows = 64;  // of weights, of a tile and of an instruction
constexpr int kFewBlocks = 2;     // of kExpertGroup of the depth, of a stage
constexpr int kFewBlockBytes = kFewTileRows * kExpertGroup;
constexpr int kFewStageBytes = kFewBlocks * kFewBlockBytes;
constexpr int kFewTokenBytes = kFewTokens * kExpertGroup;  // of a block of tokens: one atom
constexpr int kFewConsumers = 4, kFewProducer = 4;         // warps; the index of a warp
constexpr int kFewMaxSharedSm90 = 227 * 1024 - 1024;       // of a CTA, less mbarriers and scales
static_assert(kFewTokenBytes == 1024 && kFewBlockBytes % 1024 == 0, "atoms of the swizzle");

struct FewTokensSm90Params {
  MoeFewTokensParams p;
  TensorMap weights;
};

// Where the numbers from `column` of a token's block lie in it.
__device__ __forceinline__ int few_token_offset(int token, int column) {
  return token * kExpertGroup + ((column / kVecBytes ^ token) * kVecBytes | column % kVecBytes);
}

using FewProducts = float[kFewBlocks][4];

// Multiplies the blocks of a stage at these shared addresses. The warps 0 to 3 must call it. If the
// stage has one block, products[1] is not defined.
__device__ __forceinline__ void multiply_stage(uint32_t weights, uint32_t tokens,
                                               FewProducts& products) {
  using Mma = Wgmma<e4m3, kFewTokens>;
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kFewBlocks; ++i) {
#pragma unroll
    for (int byte = 0; byte < kExpertGroup; byte += 32) {
      const uint64_t a = wgmma_descriptor(weights + i * kFewBlockBytes + byte, 1024);
      const uint64_t b = wgmma_descriptor(tokens + i * kFewTokenBytes + byte, 1024);
      if (byte == 0) {
        Mma::template new_ss<false>(products[i], a, b);
      } else {
        Mma::template add_ss<false>(products[i], a, b);
      }
    }
  }
  wgmma_commit_group();
  wgmma_wait_group<0>();
#pragma unroll
  for (int i = 0; i < kFewBlocks; ++i) keep_behind_wait(products[i]);
}

// Adds the products of a block to `sum`. `low` and `high` are the factors of a lane's first and
// second row, `of_tokens` those of its tokens.
__device__ __forceinline__ void add_products(const float (&products)[4], float low, float high,
                                             float2 of_tokens, float (&sum)[4]) {
  sum[0] = fmaf(products[0], low * of_tokens.x, sum[0]);
  sum[1] = fmaf(products[1], low * of_tokens.y, sum[1]);
  sum[2] = fmaf(products[2], high * of_tokens.x, sum[2]);
  sum[3] = fmaf(products[3], high * of_tokens.y, sum[3]);
}

#endif  // __CUDACC__

}  // namespace precast
