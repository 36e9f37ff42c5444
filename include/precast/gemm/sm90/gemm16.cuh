// SPDX-License-Identifier: Apache-2.0
// GEMM of 16-bit operands for sm_90a: gemm/sm90/plain.cuh without scales.
//
// Source   definition
#pragma once

#include "precast/gemm/sm90/depth_sums.cuh"
#include "precast/gemm/sm90/gemm16_choose.cuh"
#include "precast/gemm/sm90/plain.cuh"
#include "precast/gemm/sm90/plain_epilogue.cuh"

namespace precast {

#if defined(__CUDACC__)

// The bias has the type of the operands.
template <typename T, typename OutType>
struct Gemm16Types {
  using Problem = GemmParams;
  using Operand = T;
  using Bias = T;
  using Out = OutType;
  using Family = Gemm16Family;
  template <typename Tile, typename Barriers, typename Params>
  using TileSums = DepthSums<T, Tile, Barriers, Params>;
  template <typename Tile>
  using Epilogue = PlainEpilogue<Gemm16Types, Tile>;
  static constexpr bool kHasScales = false, kHasSumsOfBlocks = false;
  static constexpr bool kIsGated = false;
};

#endif  // __CUDACC__

}  // namespace precast
