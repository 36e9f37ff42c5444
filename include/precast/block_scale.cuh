// SPDX-License-Identifier: Apache-2.0
// Block scales from a linear layout into tiles of 128x4 (core/scale_layout.cuh).
//
// Layout   input  [experts, rows, columns]  T of 1 or 2 bytes, contiguous
//          out    [experts, tiles of 128 rows, tiles of 4 columns, 32, 4, 4]  T; padding is zero
// Threads  one thread takes 32 columns of a row: whole sectors of both, and in each of its 8 stores
//          a warp writes 32 words of one tile that lie side by side.
// Traffic  reads input once, writes out once.
// Source   cuBLAS, "1D block scaling factors layout".
#pragma once

#include "precast/core/launch.cuh"
#include "precast/core/rows.cuh"
#include "precast/core/scale_layout.cuh"
#include "precast/core/vec.cuh"

namespace precast {

constexpr int kScaleThreads = 128;  // a CTA takes the rows of a tile
constexpr int kScaleTiles = 8;      // side by side that a thread writes to

struct BlockScaleParams {
  const void* input;  // [experts, rows, columns]
  void* out;          // [experts, padded rows, padded columns]
  uint32_t experts;
  uint32_t rows;
  uint32_t columns;
  uint32_t tile_rows;      // of an expert; the launcher sets it
  uint32_t tile_columns;   // of an expert; the launcher sets it
  Divisor chunks_per_row;  // of 8 tiles; the launcher sets it
  Divisor tile_rows_of;    // tile_rows as a divisor; the launcher sets it
  bool aligned;            // the launcher sets it
};

#if defined(__CUDACC__)

// Four elements as words: one for bytes, two for 16-bit types.
template <typename T>
struct FourElements {
  static constexpr int kWords = sizeof(T);
  uint32_t words[kWords];
};

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

template <typename T>
__device__ __forceinline__ void store_four(T* target, const FourElements<T>& four) {
  if constexpr (sizeof(T) == 1) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(target), "r"(four.words[0]) : "memory");
  } else {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(target), "r"(four.words[0]),
                 "r"(four.words[1])
                 : "memory");
  }
}

// T is an unsigned integer: scales are moved as bits.
template <typename T>
__global__ __launch_bounds__(kScaleThreads) void BlockScaleInterleaveKernel(
    const __grid_constant__ BlockScaleParams p) {
  constexpr int kColumns = 4 * kScaleTiles;
  constexpr int kVecs = kColumns * sizeof(T) / kVecBytes;
  const uint32_t band = p.chunks_per_row.divide(blockIdx.x);  // of 128 rows, of all experts
  const uint32_t chunk = blockIdx.x - band * p.chunks_per_row.value;
  const uint32_t expert = p.tile_rows_of.divide(band);
  const uint32_t word = threadIdx.x;  // of a tile
  const uint32_t row = (band - expert * p.tile_rows) * 128 + word % 4 * 32 + word / 4;
  const uint32_t column = chunk * kColumns;
  const bool in_rows = row < p.rows;
  const T* input = static_cast<const T*>(p.input) + (uint64_t(expert) * p.rows + row) * p.columns +
                   column;  // [kColumns]
  T* out = static_cast<T*>(p.out) + (uint64_t(band) * p.tile_columns + chunk * kScaleTiles) * 512 +
           word * 4;

  allow_next_grid();
  wait_for_previous_grid();

  FourElements<T> fours[kScaleTiles] = {};
  if (in_rows && p.aligned && column + kColumns <= p.columns) {
    Vec<T> vecs[kVecs];
#pragma unroll
    for (int i = 0; i < kVecs; ++i) vecs[i] = load_vec(input + i * (kVecBytes / sizeof(T)));
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const uint32_t words[4] = {vecs[i].bits.x, vecs[i].bits.y, vecs[i].bits.z, vecs[i].bits.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = 4 * i + j;
        fours[at / FourElements<T>::kWords].words[at % FourElements<T>::kWords] = words[j];
      }
    }
  } else if (in_rows) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (column + i < p.columns) {
        constexpr int kPerWord = 4 / sizeof(T);
        fours[i / 4].words[i % 4 / kPerWord] |= uint32_t(load_element(input + i))
                                                << (i % kPerWord * 8 * sizeof(T));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kScaleTiles; ++i) {
    if (chunk * kScaleTiles + i < p.tile_columns) store_four(out + i * 512, fours[i]);
  }
}

#if !defined(__CUDACC_RTC__)

// Launches it on `stream`; nothing where there is no scale. `out` is aligned to 8 bytes.
// cudaErrorInvalidValue if there are 2^31 tiles or more.
template <typename T>
cudaError_t launch_block_scale_interleave(BlockScaleParams p, bool enable_pdl,
                                          cudaStream_t stream) {
  if (p.experts == 0 || p.rows == 0 || p.columns == 0) return cudaSuccess;
  p.tile_rows = (p.rows - 1) / 128 + 1;
  p.tile_columns = (p.columns - 1) / 4 + 1;
  const uint64_t chunks = (p.tile_columns - 1) / kScaleTiles + 1;
  const uint64_t bands = uint64_t(p.experts) * p.tile_rows;
  if (bands > 0x7fffffffu / chunks) return cudaErrorInvalidValue;
  p.chunks_per_row = Divisor(static_cast<uint32_t>(chunks));
  p.tile_rows_of = Divisor(p.tile_rows);
  p.aligned = reinterpret_cast<uint64_t>(p.input) % kVecBytes == 0 &&
              p.columns * sizeof(T) % kVecBytes == 0;
  const dim3 ctas(static_cast<uint32_t>(bands * chunks));
  return launch(BlockScaleInterleaveKernel<T>, ctas, dim3(kScaleThreads), enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
