// SPDX-License-Identifier: Apache-2.0
// Rows over the vocabulary: their division into tiles and chunks, and the loads of a tile.
//
// A row is divided into tiles of 1024 consecutive elements. One warp processes a tile; its lane l
// holds the elements 128 j + 4 l + c of the tile, for c < 4 and j < 8. The tiles form 8 chunks with
// equally many tiles each, except that the last chunks may be short or empty.
#pragma once

#include "precast/core/block.cuh"
#include "precast/core/math.cuh"
#include "precast/core/rows.cuh"
#include "precast/core/sm90/cluster_memory.cuh"
#include "precast/core/vec.cuh"

namespace precast {

constexpr int kTileSize = 1024;
constexpr int kItemsPerLane = kTileSize / kWarpSize;
constexpr int kMaxTiles = 1024;
constexpr int kMaxVocabSize = kMaxTiles * kTileSize;
constexpr int kNumChunks = 8;
constexpr int kMaxSamplerCtas = kNumChunks;
constexpr int kMaxThreadsPerCta = 512;  // an upper bound

#if defined(__CUDACC__)

// The clusters have 1, 2, 4 or 8 CTAs, so that each CTA has the same number of chunks.
__device__ __forceinline__ int chunks_per_cta() {
  return kNumChunks >> (31 - __clz(cluster_size()));
}

#endif

// The rows that a launch reads.
struct RowSource {
  const void* data;     // [num_rows, vocab_size]
  const void* indices;  // [num_outputs], or null: output i reads row i
  int64_t stride;       // elements between rows
  uint32_t num_outputs;
  uint32_t num_rows;
  int vocab_size;
  int num_tiles;
  int tiles_per_chunk;
  bool int64_indices;  // int64 rather than int32
  bool aligned;        // every row starts at a multiple of 16 bytes and holds whole 16-byte vectors
};

// A scalar parameter that may have one value for each row.
struct PerRowScalar {
  const float* values;  // [num_rows], or null: `value` is that of all rows
  float value;

#if defined(__CUDACC__)
  __device__ __forceinline__ float operator[](int64_t row) const {
    return values == nullptr ? value : load_scalar(values + row);
  }
#endif
};

#if defined(__CUDACC__)

// Index tensors hold int64 or int32 numbers.
__device__ __forceinline__ int64_t load_index(const void* indices, bool is_int64, int64_t index) {
  return is_int64 ? static_cast<const int64_t*>(indices)[index]
                  : static_cast<const int32_t*>(indices)[index];
}

__device__ __forceinline__ void store_index(void* indices, bool is_int64, int64_t index,
                                            int64_t value) {
  if (is_int64) {
    static_cast<int64_t*>(indices)[index] = value;
  } else {
    static_cast<int32_t*>(indices)[index] = static_cast<int32_t>(value);
  }
}

// Returns the row that an output reads. The index is not checked: it may lie outside the rows.
__device__ __forceinline__ int64_t row_index_of(const RowSource& p, uint32_t output) {
  return p.indices == nullptr ? output : load_index(p.indices, p.int64_indices, output);
}

// Loads four elements from an address that is a multiple of their size.
__device__ __forceinline__ void load_vec4(const f32* source, float (&x)[4]) {
  unpack(load_vec(source), x);
}

template <typename T>
__device__ __forceinline__ void unpack_vec4(uint2 bits, float (&x)[4]) {
  const float2 low = unpack_pair(T(), bits.x), high = unpack_pair(T(), bits.y);
  x[0] = low.x;
  x[1] = low.y;
  x[2] = high.x;
  x[3] = high.y;
}

template <typename T>
__device__ __forceinline__ void load_vec4(const T* source, float (&x)[4]) {
  uint2 bits;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];"
               : "=r"(bits.x), "=r"(bits.y)
               : "l"(source)
               : "memory");
  unpack_vec4<T>(bits, x);
}

template <typename T>
__device__ __forceinline__ float load_as_float(const T* source) {
  if constexpr (sizeof(T) == 4) {
    return load_scalar(source);
  } else {
    return unpack_pair(T(), load_word(source)).x;
  }
}

// Loads a tile that lies in an aligned row as a whole.
template <typename T>
__device__ __forceinline__ void load_full_tile(const T* row, int tile, float (&x)[kItemsPerLane]) {
  const T* from = row + tile * kTileSize + threadIdx.x % kWarpSize * 4;
#pragma unroll
  for (int j = 0; j < kItemsPerLane / 4; ++j) {
    float four[4];
    load_vec4(from + j * 4 * kWarpSize, four);
#pragma unroll
    for (int c = 0; c < 4; ++c) x[4 * j + c] = four[c];
  }
}

// Loads any tile of a row; elements behind the end of the row become `fill_value`.
template <typename T>
__device__ __forceinline__ void load_tile(const T* row, const RowSource& p, int tile,
                                          float fill_value, float (&x)[kItemsPerLane]) {
  if (p.aligned && (tile + 1) * kTileSize <= p.vocab_size) {
    load_full_tile(row, tile, x);
    return;
  }
  const int first = tile * kTileSize + threadIdx.x % kWarpSize * 4;
#pragma unroll
  for (int i = 0; i < kItemsPerLane; ++i) {
    const int index = first + i / 4 * 4 * kWarpSize + i % 4;
    x[i] = index < p.vocab_size ? load_as_float(row + index) : fill_value;
  }
}

// Returns the index within the tile of a lane's i-th element.
__device__ __forceinline__ int index_in_tile(int lane, int i) {
  return i / 4 * 4 * kWarpSize + lane * 4 + i % 4;
}

// Maps floats to unsigned keys of the same order, as radix sorts do.
__device__ __forceinline__ uint32_t to_ordered_key(float x) {
  const int bits = __float_as_int(x);
  return bits ^ (bits >> 31 | 0x80000000);
}

__device__ __forceinline__ float from_ordered_key(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

__device__ __forceinline__ float warp_max(float x) {
  return from_ordered_key(__reduce_max_sync(0xffffffffu, to_ordered_key(x)));
}

#endif  // __CUDACC__

}  // namespace precast
