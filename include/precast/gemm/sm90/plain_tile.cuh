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
constexpr int plain_tile_buffer_bytes(int rows, int outputs, int buffers) {
  return buffers * (rows < 128 ? 4 : 8) * 16 * store_box_columns(outputs) * 2;
}
// What a tile writes of so many rows of the weight.
constexpr int plain_tile_outputs(int weights, bool is_gated) {
  return is_gated ? weights / 2 : weights;
}
template <int kRows, int kColumns, int kCtas, int kOutputs, int kBuffers>
constexpr int kStagesBesideBuffers =
    Sm90GemmTile<kRows, kColumns, false, 0, plain_tile_buffer_bytes(kRows, kOutputs, kBuffers),
                 kCtas>::kStages;
// Two buffers for each warp, unless they take the place of a stage. Those that a tile does not
// write equally often would be written again before TMA has read them. Columns that end in a box
// have one buffer, or none if it would take the place of a stage.
template <int kRows, int kColumns, bool kIsSwapped, int kCtas, int kOutputs>
constexpr int kStoreBuffers = kIsSwapped ? 0
                              : kOutputs % store_box_columns(kOutputs) != 0
                                  ? (kStagesBesideBuffers<kRows, kColumns, kCtas, kOutputs, 0> ==
                                     kStagesBesideBuffers<kRows, kColumns, kCtas, kOutputs, 1>)
                              : kOutputs / store_box_columns(kOutputs) % 2 != 0 ? 1
                              : kStagesBesideBuffers<kRows, kColumns, kCtas, kOutputs, 1> ==
                                      kStagesBesideBuffers<kRows, kColumns, kCtas, kOutputs, 2>
                                  ? 2
                                  : 1;

// If it is gated, kWeights are the columns of its outputs, each of two rows of the weight.
template <int kRowsOf, int kColumnsOf, bool kIsSwapped, int kCtas, bool kIsGated = false,
          int kOutputs = plain_tile_outputs(kColumnsOf, kIsGated),
          int kBuffersOf = kStoreBuffers<kRowsOf, kColumnsOf, kIsSwapped, kCtas, kOutputs>>
struct PlainTile : Sm90GemmTile<kRowsOf, kColumnsOf, kIsSwapped, 0,
                                plain_tile_buffer_bytes(kRowsOf, kOutputs, kBuffersOf), kCtas> {
  // What a warp writes at a time.
  using Box = StoreBox<store_box_columns(kOutputs)>;
  static constexpr int kBuffers = kBuffersOf;
  static constexpr int kWeights = plain_tile_outputs(kIsSwapped ? kRowsOf : kColumnsOf, kIsGated);
  // Three CTAs of an SM have too few registers for a second accumulator of 64 columns.
  static constexpr bool kOverlaps =
      fp8_tile_overlaps(kRowsOf, kColumnsOf) && (kCtas < 3 || kColumnsOf < 64);
  // A row-major weight is copied by panels of 128 bytes of columns; wgmma of 8 bits has none.
  static constexpr bool kTakesRowMajorB = !kIsGated && kWeights % kPanelColumns == 0;
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
