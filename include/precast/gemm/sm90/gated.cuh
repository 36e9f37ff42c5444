// SPDX-License-Identifier: Apache-2.0
// GEMM of 16-bit operands for sm_90a whose weight has two rows for each column of the output, of
// which the second is a gate: gemm/sm90/plain.cuh with
//
//   out[t, n] = round(act(sum_k a[t, k] b[n, k] + bias[n],
//                         sum_k a[t, k] b[columns + n, k] + bias[columns + n]))
//
// for a function act(up, gate) of core/expert_functions.cuh, and a bias of each weight or none. The
// sums are not rounded.
//
// Measured 2026-11-27 on an H200, bf16, first products of Qwen3-30B (128 experts, 2 * 768 x 2048)
// with 64, 4096 and 16384 tokens: 177, 449 and 1401 us. The product alone takes 178, 475 and 1411,
// and with moe_activation 180, 521 and 1555.
//
// Source   Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202
#pragma once

#include "precast/gemm/sm90/depth_sums.cuh"
#include "precast/gemm/sm90/gated_epilogue.cuh"
#include "precast/gemm/sm90/gemm16_choose.cuh"
#include "precast/gemm/sm90/plain.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename T>
struct GatedGemmTypes {
  using Problem = GatedGemmParams;
  using Operand = T;
  using Bias = T;
  using Out = T;
  using Family = GatedGemmFamily;
  template <typename Tile, typename Barriers, typename Params>
  using TileSums = DepthSums<T, Tile, Barriers, Params>;
  template <typename Tile>
  using Epilogue = GatedEpilogue<GatedGemmTypes, Tile>;
  static constexpr bool kHasScales = false, kHasSumsOfBlocks = false;
  static constexpr bool kIsGated = true;
};

#endif  // __CUDACC__

}  // namespace precast
