// SPDX-License-Identifier: Apache-2.0
// Block scales from a linear layout into tiles of 128x4 (quantize/scale_layout.cuh).
//
// Layout   input  [experts, rows, columns]  T of 1 or 2 bytes, contiguous
//          out    [experts, tiles of 128 rows, tiles of 4 columns, 32, 4, 4]  T; padding is zero
// Threads  one thread takes 16 bytes of each of the four rows that are neighbours in a tile, so
//          that it also writes 16 bytes. Four lanes read 64 bytes of a row (for large tensors eight
//          lanes 128), and eight lanes write 128 bytes of a tile.
// Traffic  reads input once, writes out once
// Source   cuBLAS, "1D block scaling factors layout"
#pragma once

#include "precast/core/launch.cuh"
#include "precast/core/rows.cuh"
#include "precast/core/vec.cuh"
#include "precast/quantize/scale_layout.cuh"

namespace precast {

constexpr int kScaleLanesPerRow = 4;  // lanes of a CTA that share a row
// The lanes for tensors of more than kLargeScaleBytes. On an H200 [1048576, 448] took 226 us
// instead of 234, [1048576, 128] 65.9 instead of 68.6 and [131072, 448] 30.4 instead of 31.2; but
// [262144, 128], a smaller tensor, 18.1 instead of 17.8.
constexpr int kLargeScaleLanesPerRow = 8;
constexpr uint64_t kLargeScaleBytes = uint64_t(1) << 25;
constexpr int kScaleRows = 4;  // rows of a thread, 32 apart

struct BlockScaleParams {
  const void* input;  // [experts, rows, columns]
  void* out;          // [experts, padded rows, padded columns]
  uint32_t experts;
  uint32_t rows;
  uint32_t columns;
  uint32_t tile_rows;           // of an expert; set by the launcher
  uint32_t tile_columns;        // of an expert; set by the launcher
  FastDivmod chunks_per_row;    // chunks of a row of tiles that a CTA takes; set by the launcher
  FastDivmod tile_rows_divmod;  // tile_rows; set by the launcher
};

#if defined(__CUDACC__)

template <typename T>
__device__ __forceinline__ T load_element(const T* source) {
  unsigned short bits;
  if constexpr (sizeof(T) == 1) {
    asm volatile("ld.global.u8 %0, [%1];" : "=h"(bits) : "l"(source) : "memory");
  } else {
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(bits) : "l"(source) : "memory");
  }
  return static_cast<T>(bits);
}

// T is an unsigned integer: scales are moved as bits. kAligned: rows are whole vectors.
template <typename T, bool kAligned, int kLanes>
__global__ __launch_bounds__(32 * kLanes) void BlockScaleInterleaveKernel(
    const __grid_constant__ BlockScaleParams p) {
  constexpr int kColumns = Vec<T>::kSize;
  constexpr int kTiles = kColumns / 4;
  constexpr int kWords = sizeof(T);  // words of a row in a tile
  // index over the tiles of 128 rows of all experts
  const uint32_t row_tile = p.chunks_per_row.divide(blockIdx.x);
  const uint32_t chunk = blockIdx.x - row_tile * p.chunks_per_row.value;
  const uint32_t expert = p.tile_rows_divmod.divide(row_tile);
  const uint32_t row_in_tile = threadIdx.x / kLanes;  // of the thread's first row
  const uint32_t row = (row_tile - expert * p.tile_rows) * 128 + row_in_tile;
  const uint32_t column = (chunk * kLanes + threadIdx.x % kLanes) * kColumns;
  const T* input = static_cast<const T*>(p.input) + (uint64_t(expert) * p.rows + row) * p.columns +
                   column;  // [kColumns]
  T* out = static_cast<T*>(p.out) + (uint64_t(row_tile) * p.tile_columns + column / 4) * 512 +
           row_in_tile * (4 * kScaleRows);

  launch_dependent_grids();
  const uint64_t step = uint64_t(32) * p.columns;  // between the rows of the thread
  // One lane prefetches for all lanes of a row. Why: several requests for a line cost more than the
  // prefetch gains.
  if (may_overlap_previous_grid() && threadIdx.x % kLanes == 0) {
#pragma unroll
    for (int i = 0; i < kScaleRows; ++i) {
      if (row + 32 * i < p.rows) prefetch_to_l2(input + i * step);
    }
  }
  wait_on_dependent_grids();

  const L2Policy policy = read_policy(true);
  uint32_t words[kScaleRows][4] = {};
#pragma unroll
  for (int i = 0; i < kScaleRows; ++i) {
    if (row + 32 * i >= p.rows) continue;
    if constexpr (kAligned) {
      if (column >= p.columns) continue;
      const uint4 bits = load_vec(input + i * step, policy).bits;
      words[i][0] = bits.x, words[i][1] = bits.y, words[i][2] = bits.z, words[i][3] = bits.w;
    } else {
      constexpr int kPerWord = 4 / sizeof(T);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        if (column + j < p.columns) {
          words[i][j / kPerWord] |= uint32_t(load_element(input + i * step + j))
                                    << (j % kPerWord * 8 * sizeof(T));
        }
      }
    }
  }
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    if (column / 4 + t >= p.tile_columns) return;
    uint32_t of_tile[kScaleRows * kWords];
#pragma unroll
    for (int i = 0; i < kScaleRows * kWords; ++i) {
      of_tile[i] = words[i / kWords][t * kWords + i % kWords];
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint4 bits =
          make_uint4(of_tile[4 * i], of_tile[4 * i + 1], of_tile[4 * i + 2], of_tile[4 * i + 3]);
      store_vec(out + t * 512 + i * kColumns, Vec<T>{bits});
    }
  }
}

#if !defined(__CUDACC_RTC__)

// Launches the kernel on `stream`, unless there are no scales. `out` must be aligned to 16 bytes.
// Returns cudaErrorInvalidValue if there are 2^31 tiles or more.
template <typename T>
cudaError_t launch_block_scale_interleave(BlockScaleParams p, bool enable_pdl,
                                          cudaStream_t stream) {
  if (p.experts == 0 || p.rows == 0 || p.columns == 0) return cudaSuccess;
  p.tile_rows = (p.rows - 1) / 128 + 1;
  p.tile_columns = (p.columns - 1) / 4 + 1;
  const bool aligned = reinterpret_cast<uint64_t>(p.input) % kVecBytes == 0 &&
                       p.columns * sizeof(T) % kVecBytes == 0;
  const uint64_t row_tiles = uint64_t(p.experts) * p.tile_rows;
  const uint64_t row_bytes = uint64_t(p.columns) * sizeof(T);
  const bool many = aligned && row_bytes >= kLargeScaleLanesPerRow * kVecBytes &&
                    row_tiles * 128 * row_bytes > kLargeScaleBytes;
  const int lanes = many ? kLargeScaleLanesPerRow : kScaleLanesPerRow;
  const uint32_t chunk = lanes * Vec<T>::kSize / 4;  // in tiles
  const uint64_t chunks = (p.tile_columns - 1) / chunk + 1;
  if (row_tiles > 0x7fffffffu / chunks) return cudaErrorInvalidValue;
  p.chunks_per_row = FastDivmod(static_cast<uint32_t>(chunks));
  p.tile_rows_divmod = FastDivmod(p.tile_rows);
  const auto kernel = many      ? BlockScaleInterleaveKernel<T, true, kLargeScaleLanesPerRow>
                      : aligned ? BlockScaleInterleaveKernel<T, true, kScaleLanesPerRow>
                                : BlockScaleInterleaveKernel<T, false, kScaleLanesPerRow>;
  const dim3 ctas(static_cast<uint32_t>(row_tiles * chunks));
  return launch(kernel, ctas, dim3(32 * lanes), enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
