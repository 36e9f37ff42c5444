// SPDX-License-Identifier: Apache-2.0
// What a GEMM for sm_90a gets whose weight has two rows for each column of the output, of which the
// second is a gate.
#pragma once

#include "precast/core/expert_functions.cuh"
#include "precast/gemm/sm90/params.cuh"

namespace precast {

// A problem whose outputs are functions of two sums. The bias is [weights, 2 * columns].
struct GatedGemmParams : GemmParams {
  ExpertFunction function;    // a gated one
  const float* swiglu_alpha;  // [weights], or null: 1; numbers of swiglu_bias
  const float* swiglu_beta;   // [weights], or null: 0
  const float* swiglu_limit;  // [weights], or null: infinity
};

// Those of block-scaled e4m3, where outputs are SwiGLU in e4m3 with new scales.
struct Sm90GatedParams : Sm90GemmParams {
  static constexpr bool kIsGated = true;
  static constexpr int kGatedRun = kFp8Block;  // rows of the weight before their gates

  float* out_scale;          // [columns / 128, tokens]
  int64_t out_scale_stride;  // of blocks of columns
  float eps;                 // the least maximum of a scale
};

}  // namespace precast
