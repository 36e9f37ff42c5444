// SPDX-License-Identifier: Apache-2.0
// The tiles that the GEMM of e4m3 operands with scales of rows is compiled for on sm_90a. The
// choice among them is that of choose.cuh, with costs of their own.
#pragma once

#include "precast/gemm/sm90/choose.cuh"

namespace precast {

// The index is that of ScaledGemmChoice::tile, which tests and tuning tables know.
constexpr Sm90TileShape kScaledGemmTiles[] = {
    {128, 192, false}, {128, 128, false},  {128, 64, false},  {128, 64, true, 1},
    {256, 128, false}, {64, 64, true, 2},  {64, 32, true, 2}, {64, 16, true, 2},
    {64, 16, true, 3}, {64, 64, false},    {64, 96, false},   {64, 128, false},
    {64, 80, false},   {64, 48, false, 2}, {128, 160, false}, {128, 176, false},
};

struct ScaledGemmFamily : Sm90GemmFamily {
  using Costs = ScaledGemmCosts;
  using FewCosts = ScaledGemmFewCosts;
  static constexpr int kTiles = sizeof(kScaledGemmTiles) / sizeof(kScaledGemmTiles[0]);
  static constexpr int kElementBytes = 1;
  static constexpr const Sm90TileShape& tile(int index) { return kScaledGemmTiles[index]; }
};
using ScaledGemmChoice = Sm90GemmChoice<ScaledGemmFamily>;

}  // namespace precast
