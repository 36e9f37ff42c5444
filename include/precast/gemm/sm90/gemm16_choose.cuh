// SPDX-License-Identifier: Apache-2.0
// The tiles that the GEMM of 16-bit operands for sm_90a is compiled for. The choice among them is
// that of choose.cuh, with costs of their own.
#pragma once

#include "precast/gemm/sm90/choose.cuh"

namespace precast {

// The index is that of Gemm16Choice::tile, which tests and tuning tables know.
constexpr Sm90TileShape kGemm16Tiles[] = {
    {128, 256, false}, {128, 192, false},  {128, 128, false}, {128, 64, true, 1},
    {64, 128, false},  {64, 64, true, 2},  {64, 32, true, 2}, {64, 16, true, 2},
    {64, 16, true, 3}, {64, 64, false},    {64, 192, false},  {128, 64, false},
    {64, 80, false},   {64, 48, false, 2}, {128, 160, false}, {128, 176, false},
};

struct Gemm16Family : Sm90GemmFamily {
  using Costs = Gemm16Costs;
  using FewCosts = Gemm16FewCosts;
  static constexpr int kTiles = sizeof(kGemm16Tiles) / sizeof(kGemm16Tiles[0]), kElementBytes = 2;
  static constexpr const Sm90TileShape& tile(int index) { return kGemm16Tiles[index]; }
};
using Gemm16Choice = Sm90GemmChoice<Gemm16Family>;

// Those of gated weights have the same numbers, so that tuning tables hold for both. A tile has
// half as many outputs as rows of the weight: whole boxes of 32 columns, and whole eights for each
// of two CTAs that share the weight.
struct GatedGemmFamily : Gemm16Family {
  using FewCosts = Costs;  // its products of few tokens were not measured
  static constexpr bool has_kernel(int index) { return tile(index).weights() % 64 == 0; }
};
using GatedGemmChoice = Sm90GemmChoice<GatedGemmFamily>;

}  // namespace precast
