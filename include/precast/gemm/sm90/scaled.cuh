// SPDX-License-Identifier: Apache-2.0
// GEMM of e4m3 operands with scales of rows for sm_90a: gemm/sm90/plain.cuh.
//
// Source   definition
#pragma once

#include "precast/gemm/sm90/block_sums.cuh"
#include "precast/gemm/sm90/plain.cuh"
#include "precast/gemm/sm90/plain_epilogue.cuh"
#include "precast/gemm/sm90/scaled_choose.cuh"

namespace precast {

#if defined(__CUDACC__)

// The bias has the type of the output.
template <typename OutType>
struct ScaledGemmTypes {
  using Problem = GemmParams;
  using Operand = e4m3;
  using Bias = OutType;
  using Out = OutType;
  using Family = ScaledGemmFamily;
  template <typename Tile, typename Barriers, typename>
  using TileSums = BlockSums<Tile, Barriers, UnitFactors>;
  template <typename Tile>
  using Epilogue = PlainEpilogue<ScaledGemmTypes, Tile>;
  static constexpr bool kHasScales = true, kHasSumsOfBlocks = true;
  static constexpr bool kIsGated = false;
};

#endif  // __CUDACC__

}  // namespace precast
