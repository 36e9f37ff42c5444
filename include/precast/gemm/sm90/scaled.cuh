// SPDX-License-Identifier: Apache-2.0
// GEMM of e4m3 operands with scales of rows for sm_90a: gemm/sm90/plain.cuh.
//
// Tensor cores keep about 14 bits of a sum of products of 8 bits (core/sm90/wgmma.cuh). So sums are
// those of several accumulators, each of 512 of the depth, which are added up in fp32.
//
// Source   definition; DeepSeek-V3, arXiv:2412.19437, section 3.5.2, for the accumulation
#pragma once

#include "precast/gemm/sm90/plain.cuh"
#include "precast/gemm/sm90/scaled_choose.cuh"

namespace precast {

#if defined(__CUDACC__)

// The bias has the type of the output.
template <typename OutType>
struct ScaledGemmTypes {
  using Operand = e4m3;
  using Bias = OutType;
  using Out = OutType;
  using Family = ScaledGemmFamily;
  static constexpr bool kHasScales = true;
  static constexpr int kPromotedStages = 4;  // of 128 of the depth
};

#endif  // __CUDACC__

}  // namespace precast
