// SPDX-License-Identifier: Apache-2.0
// Rows of the vocabulary: how they are cut into slabs and groups, and how a slab is read.
//
// A row is cut into slabs of 1024 consecutive elements: lane l of the warp that holds a slab sees
// the elements 128 j + 4 l + c of it, c < 4, j < 8. There are 8 groups of equally many slabs, of
// which the last ones may be short or empty.
#pragma once

#include "precast/core/block.cuh"
#include "precast/core/math.cuh"
#include "precast/core/rows.cuh"
#include "precast/core/sm90/cluster_memory.cuh"
#include "precast/core/vec.cuh"

namespace precast {

constexpr int kSlab = 1024;
constexpr int kPerLane = kSlab / kWarpSize;
constexpr int kMaxSlabs = 1024;
constexpr int kMaxVocab = kMaxSlabs * kSlab;
constexpr int kGroups = 8;
constexpr int kMaxCtas = kGroups;
constexpr int kRowThreads = 512;  // of a CTA, at most

#if defined(__CUDACC__)

// The CTAs of a cluster are 1, 2, 4 or 8.
__device__ __forceinline__ int groups_of_cta() { return kGroups >> (31 - __clz(cluster_size())); }

#endif

// Rows to read, and how they are cut.
struct RowSource {
  const void* data;     // [rows, vocab]
  const void* indices;  // [outputs], or null: output i reads row i
  int64_t stride;       // elements
  uint32_t outputs;
  uint32_t rows;
  int vocab;
  int slabs;
  int slabs_of_group;
  bool wide_indices;  // int64, not int32
  bool aligned;       // rows start at 16-byte boundaries and hold whole vectors
};

// A number that may differ from row to row.
struct PerRow {
  const float* values;  // [rows], or null
  float value;

#if defined(__CUDACC__)
  __device__ __forceinline__ float operator[](int64_t row) const {
    return values == nullptr ? value : load_scalar(values + row);
  }
#endif
};

#if defined(__CUDACC__)

// int64 or int32.
__device__ __forceinline__ int64_t load_index(const void* indices, bool wide, int64_t at) {
  return wide ? static_cast<const int64_t*>(indices)[at] : static_cast<const int32_t*>(indices)[at];
}

__device__ __forceinline__ void store_index(void* indices, bool wide, int64_t at, int64_t value) {
  if (wide) {
    static_cast<int64_t*>(indices)[at] = value;
  } else {
    static_cast<int32_t*>(indices)[at] = static_cast<int32_t>(value);
  }
}

// The row of an output, or a number that is none's.
__device__ __forceinline__ int64_t row_of(const RowSource& p, uint32_t output) {
  return p.indices == nullptr ? output : load_index(p.indices, p.wide_indices, output);
}

// Four elements at an address that is a multiple of theirs.
__device__ __forceinline__ void load_four(const f32* source, float (&x)[4]) {
  unpack(load_vec(source), x);
}

template <typename T>
__device__ __forceinline__ void unpack_four(uint2 bits, float (&x)[4]) {
  const float2 low = unpack_pair(T(), bits.x), high = unpack_pair(T(), bits.y);
  x[0] = low.x;
  x[1] = low.y;
  x[2] = high.x;
  x[3] = high.y;
}

template <typename T>
__device__ __forceinline__ void load_four(const T* source, float (&x)[4]) {
  uint2 bits;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];"
               : "=r"(bits.x), "=r"(bits.y)
               : "l"(source)
               : "memory");
  unpack_four<T>(bits, x);
}

template <typename T>
__device__ __forceinline__ float load_number(const T* source) {
  if constexpr (sizeof(T) == 4) {
    return load_scalar(source);
  } else {
    return unpack_pair(T(), load_word(source)).x;
  }
}

// The elements of a slab of an aligned row that does not end in it.
template <typename T>
__device__ __forceinline__ void load_whole_slab(const T* row, int slab, float (&x)[kPerLane]) {
  const T* from = row + slab * kSlab + threadIdx.x % kWarpSize * 4;
#pragma unroll
  for (int j = 0; j < kPerLane / 4; ++j) {
    float four[4];
    load_four(from + j * 4 * kWarpSize, four);
#pragma unroll
    for (int c = 0; c < 4; ++c) x[4 * j + c] = four[c];
  }
}

// The elements of any slab; `missing` stands for those behind the row's end.
template <typename T>
__device__ __forceinline__ void load_slab(const T* row, const RowSource& p, int slab, float missing,
                                          float (&x)[kPerLane]) {
  if (p.aligned && (slab + 1) * kSlab <= p.vocab) {
    load_whole_slab(row, slab, x);
    return;
  }
  const int first = slab * kSlab + threadIdx.x % kWarpSize * 4;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int at = first + i / 4 * 4 * kWarpSize + i % 4;
    x[i] = at < p.vocab ? load_number(row + at) : missing;
  }
}

// Which element of the slab a lane's i-th is.
__device__ __forceinline__ int place_in_slab(int lane, int i) {
  return i / 4 * 4 * kWarpSize + lane * 4 + i % 4;
}

// Larger floats have larger keys.
__device__ __forceinline__ uint32_t to_key(float x) {
  const int bits = __float_as_int(x);
  return bits ^ (bits >> 31 | 0x80000000);
}

__device__ __forceinline__ float from_key(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

__device__ __forceinline__ float warp_max(float x) {
  return from_key(__reduce_max_sync(0xffffffffu, to_key(x)));
}

#endif  // __CUDACC__

}  // namespace precast
