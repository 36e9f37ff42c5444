// SPDX-License-Identifier: Apache-2.0
// The layouts of the scales of a block-scaled matrix, which has one byte for each block of a row.
//
//   linear    [rows, columns]
//   128x4     tiles of 128 rows and 4 columns, row-major; within a tile the scale of row r and
//   column c
//             is at (r % 32) * 16 + (r / 32) * 4 + c
//   8x4       tiles of 8 rows and 4 columns, row-major, each row-major
//
// Tiles are whole: rows are padded to 128 or 8 and columns to 4, with zeros. Source: cuBLAS, "1D
// block scaling factors layout"; the 8x4 form is that of TensorRT-LLM.
#pragma once

#include "precast/core/rows.cuh"

namespace precast {

// The values are those of FlashInfer's SfLayout.
enum class SfLayout : int { tiles_128x4 = 0, tiles_8x4 = 1, linear = 2 };

struct ScaleLayout {
  SfLayout layout;
  FastDivmod per_row;  // columns of a linear layout, or tiles in a row of tiles
};

#if defined(__CUDACC__)

struct ScalePosition {
  uint32_t row;
  uint32_t column;

  // Returns the position of the scale with this index in memory.
  template <SfLayout kLayout>
  __device__ __forceinline__ static ScalePosition of(const ScaleLayout& l, uint32_t scale) {
    if constexpr (kLayout == SfLayout::linear) {
      const uint32_t row = l.per_row.divide(scale);
      return {row, scale - row * l.per_row.value};
    }
    const uint32_t tile = kLayout == SfLayout::tiles_128x4 ? scale >> 9 : scale >> 5;
    const uint32_t tile_row = l.per_row.divide(tile);
    return in_tile<kLayout>(tile_row, tile - tile_row * l.per_row.value, scale);
  }

  // The same for a known row and column of the tile.
  template <SfLayout kLayout>
  __device__ __forceinline__ static ScalePosition in_tile(uint32_t tile_row, uint32_t tile_column,
                                                          uint32_t scale) {
    const uint32_t word = scale >> 2;
    const uint32_t column = tile_column * 4 + (scale & 3u);
    if constexpr (kLayout == SfLayout::tiles_8x4) return {tile_row * 8 + (word & 7u), column};
    return {tile_row * 128 + (word & 3u) * 32 + (word >> 2 & 31u), column};
  }
};

// Returns the index in memory of the scale of a row and column.
__device__ __forceinline__ uint64_t scale_offset(const ScaleLayout& l, uint32_t row,
                                                 uint32_t column) {
  const uint64_t per_row = l.per_row.value;
  if (l.layout == SfLayout::linear) return row * per_row + column;
  if (l.layout == SfLayout::tiles_8x4) {
    return (row / 8 * per_row + column / 4) * 32 + row % 8 * 4 + column % 4;
  }
  return (row / 128 * per_row + column / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + column % 4;
}

#endif  // __CUDACC__

#if !defined(__CUDACC_RTC__)

inline int64_t round_up_to(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

inline int64_t padded_scale_rows(SfLayout layout, int64_t rows) {
  return layout == SfLayout::linear ? rows
                                    : round_up_to(rows, layout == SfLayout::tiles_8x4 ? 8 : 128);
}

inline int64_t padded_scale_columns(SfLayout layout, int64_t columns) {
  return layout == SfLayout::linear ? columns : round_up_to(columns, 4);
}

// Returns the size of the scales in bytes.
inline int64_t scale_bytes(SfLayout layout, int64_t rows, int64_t columns) {
  return padded_scale_rows(layout, rows) * padded_scale_columns(layout, columns);
}

// `columns` is the number of scales in a row. It must be positive.
inline ScaleLayout make_scale_layout(SfLayout layout, int64_t columns) {
  const int64_t per_row = layout == SfLayout::linear ? columns : round_up_to(columns, 4) / 4;
  return {layout, FastDivmod(static_cast<uint32_t>(per_row))};
}

#endif

}  // namespace precast
