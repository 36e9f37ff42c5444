// SPDX-License-Identifier: Apache-2.0
// The tiles of GEMM with a weight of 4 bits for sm_90a, and which of them a problem takes. Rows are
// columns of the weight, which is unpacked into registers, the first operand of the tensor cores;
// columns are tokens.
//
// A stage holds 128 of the depth: the tokens in two panels of 64, as TMA swizzles them; the words
// of the weight, a band of 16 rows after the other; and its scales, 64 rows after the other.
#pragma once

#include "precast/gemm/sm90/tile.cuh"
#include "precast/gemm/w4_weight.cuh"

namespace precast {

// The index is that of W4Choice::tile, which tests know. A stage of {64, 16} has as many bytes
// of tokens as of the weight, and L2 has to deliver both: so tiles of few tokens have 128 columns
// of the weight. Measured 2026-11-27 on an H200 with gpt-oss's layers: tiles of 192 and 256 tokens
// won nowhere but with 128 tokens for each of 128 experts (6 %) and with groups of exactly 256 (4
// %).
constexpr Sm90TileShape kW4Tiles[] = {
    {16, 8, true, 6},  {128, 8, true, 2}, {128, 16, true, 2},
    {64, 32, true, 3}, {64, 64, true, 2}, {128, 128, true, 1},
};
// The tile of gemm/sm90/w4_few.cuh, without the stages of the others.
constexpr int kW4FewTile = 0;

struct W4Family {
  // Bytes by which a stage has 128 of the depth.
  static constexpr int kTiles = sizeof(kW4Tiles) / sizeof(kW4Tiles[0]), kElementBytes = 1;
  static constexpr const Sm90TileShape& tile(int index) { return kW4Tiles[index]; }
};
using W4Choice = Sm90GemmChoice<W4Family>;

// The most rows of a call, and columns of all of them, for which the first tile is chosen. Measured
// 2026-11-27 on an H200 with MXFP4 and gpt-oss's first product: 4, 8, 16 and 32 rows
// take 15.8, 26.9, 48.1 and 88.8 us, and with the second tile 19.9, 34.0, 47.8 and 81.6. Four rows
// of half as many columns take 9.3 and 19.5.
constexpr int kW4FewRows = 16;
constexpr int64_t kW4FewRowColumns = kW4FewRows * 5888;

// The tokens of a group, on average, up to which each tile from the second on but the last is
// chosen, from the measurement of tiles. A larger tile unpacks its weight for more tokens, but
// multiplies more that no group has.
constexpr int kW4MostTokens[W4Family::kTiles - 2] = {6, 10, 24, 48};

constexpr W4Choice choose_w4_gemm(int rows, int columns, int tokens_of_group) {
  if (rows <= kW4FewRows && int64_t(rows) * columns <= kW4FewRowColumns) {
    return {kW4FewTile, 0, 0.0};
  }
  int tile = kW4FewTile + 1;
  while (tile + 1 < W4Family::kTiles && tokens_of_group > kW4MostTokens[tile - 1]) ++tile;
  return {tile, 0, 0.0};
}

static_assert(choose_w4_gemm(16, 5888, 1).tile == 0 && choose_w4_gemm(16, 2944, 16).tile == 0);
static_assert(choose_w4_gemm(17, 2944, 1).tile == 1 && choose_w4_gemm(16, 6016, 1).tile == 1);
static_assert(choose_w4_gemm(32, 64, 6).tile == 1 && choose_w4_gemm(32, 64, 7).tile == 2);
static_assert(choose_w4_gemm(64, 64, 48).tile == 4 && choose_w4_gemm(64, 64, 49).tile == 5);

#if defined(PRECAST_SM)

// `WeightType` is the format of the weight.
template <typename WeightType, int kRowsOf, int kColumnsOf, int kCtas>
struct W4Tile : Sm90GemmTile<kRowsOf, kColumnsOf, true, 0, 0, kCtas> {
  using Base = Sm90GemmTile<kRowsOf, kColumnsOf, true, 0, 0, kCtas>;
  using Weight = WeightType;
  static constexpr int kBuffers = 0;
  // wgmma takes as long for 8 and 16 tokens as for 32, mma does not.
  static constexpr bool kUsesMma = kColumnsOf <= 16;
  static constexpr int kPanelDepth = 64, kPanels = kW4Depth / kPanelDepth;
  static constexpr int kPanelBytes = kColumnsOf * Base::kRowBytes;
  static constexpr int kTokenBytes = kPanels * kPanelBytes;
  static constexpr int kBandBytes = kW4BandColumns * kW4Depth / 2;
  static constexpr int kWeightBytes = kRowsOf / kW4BandColumns * kBandBytes;
  static constexpr int kScaleOffset = kTokenBytes + kWeightBytes;
  static constexpr int kScaleBytes = kRowsOf / kW4Columns * kW4ScaleBytes<Weight>;
  // Panels begin at multiples of 1 KiB, where the swizzle does.
  static constexpr int kStageBytes = (kScaleOffset + kScaleBytes + 1023) / 1024 * 1024;
  static constexpr int kFitting = (Base::kSharedBytes - 64) / (kStageBytes + 16);
  static constexpr int kStages = kFitting < Base::kMostStages ? kFitting : Base::kMostStages;
  static_assert(kStages >= 3, "a stage is full, one is read, one is on its way");
};

#endif  // PRECAST_SM

}  // namespace precast
