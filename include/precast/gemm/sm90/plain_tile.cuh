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
// Two buffers for each warp, unless they take the place of a stage. Those that a tile does not
// write equally often would be written again before TMA has read them. None if boxes would not fill
// the tile's columns.
template <int kRows, int kColumns, bool kIsSwapped>
constexpr int kStoreBuffers =
    kIsSwapped || kColumns % PlainBox::kColumns != 0                                       ? 0
    : kColumns / PlainBox::kColumns % 2 != 0                                               ? 1
    : kStagesBesideBuffers<kRows, kColumns, 1> == kStagesBesideBuffers<kRows, kColumns, 2> ? 2
                                                                                           : 1;

template <int kRowsOf, int kColumnsOf, bool kIsSwapped, int kCtas>
struct PlainTile
    : Sm90GemmTile<kRowsOf, kColumnsOf, kIsSwapped, 0,
                   plain_tile_buffer_bytes(kRowsOf, kStoreBuffers<kRowsOf, kColumnsOf, kIsSwapped>),
                   kCtas> {
  static constexpr int kBuffers = kStoreBuffers<kRowsOf, kColumnsOf, kIsSwapped>;
  // Three CTAs of an SM have too few registers for a second accumulator of 64 columns.
  static constexpr bool kOverlaps =
      fp8_tile_overlaps(kRowsOf, kColumnsOf) && (kCtas < 3 || kColumnsOf < 64);
  static_assert(kColumnsOf % PlainBox::kColumns == 0 || kBuffers == 0,
                "a row of boxes is a tile's");
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
