// SPDX-License-Identifier: Apache-2.0
// The tile of block-scaled GEMM for sm_90a whose outputs are functions of two sums, and how the
// CTAs of a cluster share operands: the model of choose.cuh decides.
#pragma once

#include "precast/gemm/sm90/choose.cuh"

namespace precast {

// Tokens, and rows of the weight: a block of 128 columns, and that of their gates.
constexpr Sm90TileShape kGatedBlocksTile = {128, 2 * kFp8Block, false};

// A warpgroup has as many sums as one of the tile of 256 tokens, so its blocks and tiles take as
// long.
struct GatedBlocksCosts : Fp8GemmCosts {
  static constexpr int kLike = 13;
  static_assert(kFp8Tiles[kLike].rows == 256 && kFp8Tiles[kLike].columns == 128, "kLike");
  double consumer[1] = {Fp8GemmCosts::consumer[kLike]};
  double tile[1] = {Fp8GemmCosts::tile[kLike]};
};

struct GatedBlocksFamily : Sm90GemmFamily {
  using Costs = GatedBlocksCosts;
  using FewCosts = Costs;
  static constexpr int kTiles = 1, kElementBytes = 1;
  static constexpr const Sm90TileShape& tile(int) { return kGatedBlocksTile; }
};
using GatedBlocksChoice = Sm90GemmChoice<GatedBlocksFamily>;

}  // namespace precast
