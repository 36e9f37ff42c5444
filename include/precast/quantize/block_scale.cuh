// SPDX-License-Identifier: Apache-2.0
// Block scales from a linear layout into tiles of 128x4 (quantize/scale_layout.cuh).
//
// Layout   input  [experts, rows, columns]  T of 1 or 2 bytes, contiguous
//          out    [experts, tiles of 128 rows, tiles of 4 columns, 32, 4, 4]  T; padding is zero
// Threads  one thread takes 16 bytes of each of the four rows that lie side by side in a tile, so
//          that it writes 16 bytes, too; four lanes read 64 bytes of a row, of much data eight 128,
//          and eight write 128 bytes of a tile.
// Traffic  reads input once, writes out once.
// Source   cuBLAS, "1D block scaling factors layout".
#pragma once

#include "precast/core/launch.cuh"
#include "precast/core/rows.cuh"
#include "precast/core/vec.cuh"
#include "precast/quantize/scale_layout.cuh"

namespace precast {

constexpr int kScaleLanes = 4;  // that share a row of a CTA's
// The same of more than kManyScaleBytes. On H200 [1048576, 448] took 226 us instead of 234,
// [1048576, 128] 65.9 instead of 68.6 and [131072, 448] 30.4 instead of 31.2; [262144, 128], which
// is not more, 18.1 instead of 17.8.
constexpr int kManyScaleLanes = 8;
constexpr uint64_t kManyScaleBytes = uint64_t(1) << 25;
constexpr int kScaleRows = 4;  // of a thread, 32 apart

struct BlockScaleParams {
  const void* input;  // [experts, rows, columns]
  void* out;          // [experts, padded rows, padded columns]
  uint32_t experts;
  uint32_t rows;
  uint32_t columns;
  uint32_t tile_rows;      // of an expert; the launcher sets it
  uint32_t tile_columns;   // of an expert; the launcher sets it
  Divisor chunks_per_row;  // of what a CTA takes of them; the launcher sets it
  Divisor tile_rows_of;    // tile_rows as a divisor; the launcher sets it
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
  constexpr int kWords = sizeof(T);                           // of a row in a tile
  const uint32_t band = p.chunks_per_row.divide(blockIdx.x);  // of 128 rows, of all experts
  const uint32_t chunk = blockIdx.x - band * p.chunks_per_row.value;
  const uint32_t expert = p.tile_rows_of.divide(band);
  const uint32_t place = threadIdx.x / kLanes;  // in a tile, of the thread's rows
  const uint32_t row = (band - expert * p.tile_rows) * 128 + place;
  const uint32_t column = (chunk * kLanes + threadIdx.x % kLanes) * kColumns;
  const T* input = static_cast<const T*>(p.input) + (uint64_t(expert) * p.rows + row) * p.columns +
                   column;  // [kColumns]
  T* out = static_cast<T*>(p.out) + (uint64_t(band) * p.tile_columns + column / 4) * 512 +
           place * (4 * kScaleRows);

  allow_next_grid();
  const uint64_t step = uint64_t(32) * p.columns;  // from one row of the thread to the next
  // One lane asks for what all lanes of a row read. Why: asking several times for a line costs more
  // than the prefetch gains.
  if (may_overlap_previous_grid() && threadIdx.x % kLanes == 0) {
#pragma unroll
    for (int i = 0; i < kScaleRows; ++i) {
      if (row + 32 * i < p.rows) prefetch_to_l2(input + i * step);
    }
  }
  wait_for_previous_grid();

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

// Launches it on `stream`; nothing where there is no scale. `out` is aligned to 16 bytes.
// cudaErrorInvalidValue if there are 2^31 tiles or more.
template <typename T>
cudaError_t launch_block_scale_interleave(BlockScaleParams p, bool enable_pdl,
                                          cudaStream_t stream) {
  if (p.experts == 0 || p.rows == 0 || p.columns == 0) return cudaSuccess;
  p.tile_rows = (p.rows - 1) / 128 + 1;
  p.tile_columns = (p.columns - 1) / 4 + 1;
  const bool aligned = reinterpret_cast<uint64_t>(p.input) % kVecBytes == 0 &&
                       p.columns * sizeof(T) % kVecBytes == 0;
  const uint64_t bands = uint64_t(p.experts) * p.tile_rows;
  const uint64_t row_bytes = uint64_t(p.columns) * sizeof(T);
  const bool many = aligned && row_bytes >= kManyScaleLanes * kVecBytes &&
                    bands * 128 * row_bytes > kManyScaleBytes;
  const int lanes = many ? kManyScaleLanes : kScaleLanes;
  const uint32_t chunk = lanes * Vec<T>::kSize / 4;  // tiles
  const uint64_t chunks = (p.tile_columns - 1) / chunk + 1;
  if (bands > 0x7fffffffu / chunks) return cudaErrorInvalidValue;
  p.chunks_per_row = Divisor(static_cast<uint32_t>(chunks));
  p.tile_rows_of = Divisor(p.tile_rows);
  const auto kernel = many      ? BlockScaleInterleaveKernel<T, true, kManyScaleLanes>
                      : aligned ? BlockScaleInterleaveKernel<T, true, kScaleLanes>
                                : BlockScaleInterleaveKernel<T, false, kScaleLanes>;
  const dim3 ctas(static_cast<uint32_t>(bands * chunks));
  return launch(kernel, ctas, dim3(32 * lanes), enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
