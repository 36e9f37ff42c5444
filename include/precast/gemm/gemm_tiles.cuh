// SPDX-License-Identifier: Apache-2.0
// The tiles of the GEMMs that run on every GPU, and which of them computes a problem.
//
// A CTA computes one tile of the output. It reads both operands 128 bytes of the depth at a time,
// which is a step: 64 numbers of 16 bits, or 128 of FP8, which is a block of block-scaled FP8.
#pragma once

#include "precast/gemm/fp8_params.cuh"

namespace precast {

struct GemmTileShape {
  int tokens, columns;
  int token_warps, column_warps;  // how warps divide the tile
  int stages;                     // steps in shared memory, of at most 99 KiB
  int ctas;                       // of a multiprocessor, which its registers must hold
};

// The index is the number that tests and benchmarks choose a tile by.
constexpr GemmTileShape kGemmTiles[] = {
    {128, 128, 2, 4, 3, 1},
    {64, 128, 2, 4, 3, 2},
    {32, 64, 2, 2, 4, 4},
    {16, 64, 1, 4, 4, 4},
};
constexpr int kNumGemmTiles = sizeof(kGemmTiles) / sizeof(kGemmTiles[0]);

constexpr int kGemmStepBytes = 128;

// A band of tiles: neighbouring CTAs compute `kGemmBand` tiles of tokens for a tile of columns, and
// then those for the next tile of columns. So what runs at a time reads few bytes from L2.
constexpr int kGemmBand = 8;

// How the tiles of a launch are numbered.
struct GemmGrid {
  int token_tiles;  // of a group, or of all groups where the device alone knows their sizes
  int column_tiles;
  int bands;  // of the token tiles

  constexpr GemmGrid(const GemmTileShape& tile, TokenGroups kind, int groups, int tokens,
                     int columns)
      // A range may begin in the middle of a tile, so each group may have one more.
      : token_tiles(ceil_div(tokens, tile.tokens) + (kind == TokenGroups::ranges ? groups : 0)),
        column_tiles(ceil_div(columns, tile.columns)),
        bands(ceil_div(token_tiles, kGemmBand)) {}

  // CTAs of one group, of which some of the last band have nothing to do.
  constexpr int64_t ctas() const { return int64_t(bands) * column_tiles * height(); }
  // Tiles of a band along the tokens.
  PRECAST_HOST_DEVICE constexpr int height() const {
    return token_tiles < kGemmBand ? token_tiles : kGemmBand;
  }
};

// The tile of a CTA, counted in tiles.
struct GridPlace {
  int group, token_tile, column_tile;
};

// CTAs are numbered group by group, band by band, and in a band column by column. Those behind the
// last token tile, in the last band, have nothing to do.
PRECAST_HOST_DEVICE constexpr GridPlace place_in_grid(const GemmGrid& grid, int cta) {
  const int height = grid.height(), of_band = height * grid.column_tiles;
  const int of_group = of_band * grid.bands;
  const int group = cta / of_group, in_group = cta - group * of_group;
  const int band = in_group / of_band, in_band = in_group - band * of_band;
  const int column_tile = in_band / height;
  return {group, band * height + in_band - column_tile * height, column_tile};
}

// The groups that a launch numbers tiles of one by one.
constexpr int groups_of_grid(TokenGroups kind, int groups) {
  return kind == TokenGroups::equal || kind == TokenGroups::counted ? groups : 1;
}

// The tile for groups of about `tokens` tokens: the smallest that has as many, and where they are
// more than it can hold, the largest one that gives each multiprocessor something to do.
constexpr int choose_gemm_tile(int groups, int tokens, int columns, int sms) {
  constexpr int kLast = kNumGemmTiles - 1;
  for (int tile = kLast; tile > 1; --tile) {
    if (tokens <= kGemmTiles[tile].tokens) return tile;
  }
  const int64_t tiles = int64_t(groups) * ceil_div(tokens, kGemmTiles[0].tokens) *
                        ceil_div(columns, kGemmTiles[0].columns);
  return tokens <= kGemmTiles[1].tokens || tiles < sms ? 1 : 0;
}

// A tile at compile time; a column of the weight takes so many bytes of a stage.
template <int kIndex, int kColumnBytes = kGemmStepBytes>
struct GemmTile {
  static constexpr GemmTileShape kShape = kGemmTiles[kIndex];
  static constexpr int kTokens = kShape.tokens, kColumns = kShape.columns;
  static constexpr int kStages = kShape.stages;
  static constexpr int kThreads = 32 * kShape.token_warps * kShape.column_warps;
  static constexpr int kColumnWarps = kShape.column_warps;
  static constexpr int kWarpTokens = kTokens / kShape.token_warps;
  static constexpr int kWarpColumns = kColumns / kShape.column_warps;
  static constexpr int kMmaM = kWarpTokens / 16, kMmaN = kWarpColumns / 8;  // MMAs of a warp
  static constexpr int kABytes = kTokens * kGemmStepBytes;
  static constexpr int kBBytes = kColumns * kColumnBytes;
  static constexpr int kStageBytes = kABytes + kBBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kMmaM >= 1 && kMmaN % 2 == 0, "a load of the weight has 16 columns");
  static_assert(kSharedBytes <= 99 * 1024, "the least shared memory of a CTA on any target");
  static_assert(kFp8Block % kTokens == 0, "tokens of one block have one weight");
  static_assert(kFp8Block % kColumns == 0, "the columns of a tile have one scale");
};

}  // namespace precast
