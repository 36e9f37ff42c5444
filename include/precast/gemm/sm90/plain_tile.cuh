// SPDX-License-Identifier: Apache-2.0
// The tiles of GEMM without scales of blocks for sm_90a, and what the warps of a CTA share: the
// stages, as tile.cuh says, and a buffer of each consumer warp for its outputs.
#pragma once

#include "precast/gemm/sm90/store_boxes.cuh"
#include "precast/gemm/sm90/tile.cuh"

namespace precast {

// What a warp writes at a time.
using PlainBox = StoreBox<64>;

#if defined(PRECAST_SM)

// Of so many buffers for each consumer warp.
constexpr int plain_tile_buffer_bytes(int rows, int buffers) {
  return buffers * (rows < 128 ? 4 : 8) * PlainBox::kBytes;
}
template <int kRows, int kColumns, int kBuffers>
constexpr int kStagesBesideBuffers =
    Sm90GemmTile<kRows, kColumns, false, 0, plain_tile_buffer_bytes(kRows, kBuffers)>::kStages;
// What a tile writes of so many rows of the weight.
constexpr int plain_tile_outputs(int weights, bool is_gated) {
  return is_gated ? weights / 2 : weights;
}
// Two buffers for each warp, unless they take the place of a stage. Those that a tile does not
// write equally often would be written again before TMA has read them. None if boxes would not fill
// the columns that a tile writes.
template <int kRows, int kColumns, bool kIsSwapped, int kOutputs>
constexpr int kStoreBuffers =
    kIsSwapped || kOutputs % PlainBox::kColumns != 0                                       ? 0
    : kOutputs / PlainBox::kColumns % 2 != 0                                               ? 1
    : kStagesBesideBuffers<kRows, kColumns, 1> == kStagesBesideBuffers<kRows, kColumns, 2> ? 2
                                                                                           : 1;
template <int kRows, int kColumns, bool kIsSwapped, bool kIsGated>
constexpr int kPlainTileBuffers =
    kStoreBuffers<kRows, kColumns, kIsSwapped, plain_tile_outputs(kColumns, kIsGated)>;

// If it is gated, kWeights are the columns of its outputs, each of two rows of the weight.
template <int kRowsOf, int kColumnsOf, bool kIsSwapped, int kCtas, bool kIsGated = false>
struct PlainTile
    : Sm90GemmTile<kRowsOf, kColumnsOf, kIsSwapped, 0,
                   plain_tile_buffer_bytes(
                       kRowsOf, kPlainTileBuffers<kRowsOf, kColumnsOf, kIsSwapped, kIsGated>),
                   kCtas> {
  static constexpr int kBuffers = kPlainTileBuffers<kRowsOf, kColumnsOf, kIsSwapped, kIsGated>;
  static constexpr int kWeights = plain_tile_outputs(kIsSwapped ? kRowsOf : kColumnsOf, kIsGated);
  // Three CTAs of an SM have too few registers for a second accumulator of 64 columns.
  static constexpr bool kOverlaps =
      fp8_tile_overlaps(kRowsOf, kColumnsOf) && (kCtas < 3 || kColumnsOf < 64);
};

#endif  // PRECAST_SM

#if defined(__CUDACC__)

template <typename Tile, int kBuffers = Tile::kBuffers>
struct PlainStorage {
  unsigned char out[Tile::kConsumerWarps][kBuffers][PlainBox::kBytes];
  PipelineBarriers<Tile::kStages> stages;
};
template <typename Tile>
struct PlainStorage<Tile, 0> {
  PipelineBarriers<Tile::kStages> stages;
};

#endif  // __CUDACC__

}  // namespace precast
