// SPDX-License-Identifier: Apache-2.0
// The tiles of GEMM without scales of blocks for sm_90a, and what the warps of a CTA share: the
// stages, as tile.cuh says, and a buffer of each consumer warp for its outputs.
#pragma once

#include "precast/gemm/sm90/store_boxes.cuh"
#include "precast/gemm/sm90/tile.cuh"

namespace precast {

// Columns of a panel of a row-major weight of 16 bits.
constexpr int kPanelColumns = 64;

#if defined(PRECAST_SM)

// Of so many buffers for each consumer warp, which has a box of its 16 rows in each.
constexpr int plain_tile_buffer_bytes(int rows, int columns, int buffers) {
  return buffers * (rows < 128 ? 4 : 8) * 16 * store_box_columns(columns) * 2;
}
template <int kRows, int kColumns, int kBuffers>
constexpr int kStagesBesideBuffers =
    Sm90GemmTile<kRows, kColumns, false, 0,
                 plain_tile_buffer_bytes(kRows, kColumns, kBuffers)>::kStages;
// Two buffers for each warp, unless they take the place of a stage. Those that a tile does not
// write equally often would be written again before TMA has read them. None if boxes would not fill
// the tile's columns.
template <int kRows, int kColumns, bool kIsSwapped>
constexpr int kStoreBuffers =
    kIsSwapped || kColumns % store_box_columns(kColumns) != 0                              ? 0
    : kColumns / store_box_columns(kColumns) % 2 != 0                                      ? 1
    : kStagesBesideBuffers<kRows, kColumns, 1> == kStagesBesideBuffers<kRows, kColumns, 2> ? 2
                                                                                           : 1;

template <int kRowsOf, int kColumnsOf, bool kIsSwapped, int kCtas>
struct PlainTile
    : Sm90GemmTile<kRowsOf, kColumnsOf, kIsSwapped, 0,
                   plain_tile_buffer_bytes(kRowsOf, kColumnsOf,
                                           kStoreBuffers<kRowsOf, kColumnsOf, kIsSwapped>),
                   kCtas> {
  // What a warp writes at a time.
  using Box = StoreBox<store_box_columns(kColumnsOf)>;
  static constexpr int kBuffers = kStoreBuffers<kRowsOf, kColumnsOf, kIsSwapped>;
  // Three CTAs of an SM have too few registers for a second accumulator of 64 columns.
  static constexpr bool kOverlaps =
      fp8_tile_overlaps(kRowsOf, kColumnsOf) && (kCtas < 3 || kColumnsOf < 64);
  // A row-major weight is copied by panels of 128 bytes of columns; wgmma of 8 bits has none.
  static constexpr bool kTakesRowMajorB = PlainTile::kWeights % kPanelColumns == 0;
  static_assert(kColumnsOf % Box::kColumns == 0 || kBuffers == 0, "a row of boxes is a tile's");
};

#endif  // PRECAST_SM

#if defined(__CUDACC__)

template <typename Tile, int kBuffers = Tile::kBuffers>
struct PlainStorage {
  unsigned char out[Tile::kConsumerWarps][kBuffers][Tile::Box::kBytes];
  PipelineBarriers<Tile::kStages> stages;
};
template <typename Tile>
struct PlainStorage<Tile, 0> {
  PipelineBarriers<Tile::kStages> stages;
};

#endif  // __CUDACC__

}  // namespace precast
