// SPDX-License-Identifier: Apache-2.0
// The windows of rows that top-k reads, at any address, in tiles of 16 elements a thread.
#pragma once

#include "precast/core/rows.cuh"
#include "precast/core/vec.cuh"
#include "precast/topk/radix_select.cuh"

namespace precast {

constexpr int kMinSortCapacity = 256;  // list capacity that sorting needs at least

enum class TopKMode : int { values, ragged, paged };
enum class TopKOrder : int { any, by_value, by_place };

struct TopKParams {
  const void* input;  // [rows, size]
  int64_t stride;     // elements between rows
  uint32_t rows;
  int32_t size;
  int32_t k;
  TopKMode mode;
  TopKOrder order;
  bool prefer_last;           // of equal elements, the last rather than the first are selected
  const int32_t* lengths;     // [rows], or null: `size`; with a compress_ratio of requests
  const int32_t* row_starts;  // [rows], or null: 0
  void* values;               // [rows, k], or null
  int64_t* indices;           // [rows, k]
  int32_t* out;               // [rows, k]
  int32_t* raw;               // [rows, k], or null: indices within the window
  const int32_t* offsets;     // [rows], or null: 0
  const int32_t* table;       // [batch, pages]
  int64_t table_stride;
  const int32_t* row_to_batch;  // [rows], or null: row i uses batch i
  const int32_t* page_starts;   // [rows], or null: 0
  int32_t page_bits;            // log2 of the page size
  FastDivmod next_n;            // rows of a request, whose length is that of its last row
  int32_t compress_ratio;       // tokens of an element, or 0: lengths are those of rows
  int32_t list_capacity;  // candidates; a row of several CTAs has a second list behind the first
  uint32_t max_bucket_sorted;  // candidates that can be sorted with a second list
  // For rows that fit in shared memory (topk/resident.cuh):
  int32_t vecs_per_group;
  uint32_t enough_groups;  // groups of a CTA that may reach the threshold
};

#if defined(__CUDACC__)

constexpr int kItemsPerThread = 16;  // of a tile
constexpr int kSampledPerThread = 8;
constexpr int kMinTilesToSample = 4;           // for one CTA a row
constexpr int kMinTilesToSampleInCluster = 2;  // for each CTA of a cluster

template <typename T>
struct Tile {
  static constexpr int kVecs = kItemsPerThread / Vec<T>::kSize;
  Vec<T> vecs[kVecs];
};

template <typename T>
__device__ __forceinline__ Tile<T> zero_tile() {
  Tile<T> x;
#pragma unroll
  for (int j = 0; j < Tile<T>::kVecs; ++j) x.vecs[j] = zero_vec<T>();
  return x;
}

// Does the same as load_vec(), but bypasses L1. Why: on an H200, 256 rows of 128256 fp32 take 44
// us, and 47 us through L1.
template <typename T>
__device__ __forceinline__ Vec<T> load_streaming(const T* source) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(source)
               : "memory");
  return Vec<T>{v};
}

// Returns the elements of a row's window, which may be more than the row has. Row t of the next_n
// rows of a request ends next_n - 1 - t tokens before the request does.
__device__ __forceinline__ int window_length(const TopKParams& p, uint32_t row) {
  if (p.compress_ratio == 0) return p.lengths[row];
  const uint32_t request = p.next_n.divide(row);
  const int64_t behind = int64_t(request + 1) * p.next_n.value - 1 - row;
  const int64_t tokens = p.lengths[request] - behind;
  return tokens > 0 ? static_cast<int>(tokens) / p.compress_ratio : 0;
}

// The window of a row, and this CTA's part of it, as vectors at multiples of 16 bytes. The first
// and the last vector may hold elements outside of the window. Elements before the window are read,
// because the aligned vector lies in the memory of the row. Elements behind it are not, because the
// memory may end there.
template <typename T>
struct Window {
  const T* base;   // of vector 0
  int lead_items;  // elements of vector 0 before the window
  int length;
  int num_vecs;
  int full_vecs;  // vectors that end in the window
  int first_vec;  // this CTA has the vectors from first_vec up to end_vec
  int end_vec;

  __device__ __forceinline__ Window(const TopKParams& p, uint32_t row, int ctas) {
    int start = 0;
    length = p.size;
    if (p.lengths != nullptr) {
      if (p.row_starts != nullptr) start = min(max(p.row_starts[row], 0), p.size);
      length = max(min(window_length(p, row), p.size - start), 0);
    }
    const T* first = static_cast<const T*>(p.input) + int64_t(row) * p.stride + start;
    const uint64_t address = reinterpret_cast<uint64_t>(first);
    base = reinterpret_cast<const T*>(address & ~uint64_t(kVecBytes - 1));
    lead_items = static_cast<int>(first - base);
    num_vecs = (lead_items + length + Vec<T>::kSize - 1) / Vec<T>::kSize;
    full_vecs = (lead_items + length) / Vec<T>::kSize;
    const int share = (num_vecs + ctas - 1) / ctas;
    first_vec = min(static_cast<int>(cluster_rank()) * share, num_vecs);
    end_vec = min(first_vec + share, num_vecs);
  }

  __device__ __forceinline__ int tiles() const {
    const int tile_vecs = Tile<T>::kVecs * blockDim.x;
    return (end_vec - first_vec + tile_vecs - 1) / tile_vecs;
  }

  // Returns the index of the thread's j-th vector of a tile.
  __device__ __forceinline__ int vec(int tile, int j) const {
    return first_vec + (tile * Tile<T>::kVecs + j) * static_cast<int>(blockDim.x) + threadIdx.x;
  }

  // Loads a tile of a part that is not empty. Vectors behind the end of the part repeat another
  // vector of the row.
  __device__ __forceinline__ void load(int tile, Tile<T>& x) const {
    const int last = min(end_vec, full_vecs) - 1;
    if (last >= 0) {
#pragma unroll
      for (int j = 0; j < Tile<T>::kVecs; ++j) {
        x.vecs[j] = load_streaming(base + int64_t(min(vec(tile, j), last)) * Vec<T>::kSize);
      }
    } else {
      x = zero_tile<T>();
    }
    if (end_vec > full_vecs && tile == tiles() - 1) {
#pragma unroll
      for (int j = 0; j < Tile<T>::kVecs; ++j) {
        if (vec(tile, j) == full_vecs) x.vecs[j] = load_tail();
      }
    }
  }

  // Loads the last vector if it does not end in the window.
  __device__ __forceinline__ Vec<T> load_tail() const {
    constexpr int kVecSize = Vec<T>::kSize;
    using Word = typename KeyTraits<T>::Word;
    const auto* const items = reinterpret_cast<const Word*>(base) + int64_t(full_vecs) * kVecSize;
    const int count = lead_items + length - full_vecs * kVecSize;
    uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      if (i < count) words[i * sizeof(T) / 4] |= uint32_t(items[i]) << i * sizeof(T) % 4 * 8;
    }
    return {make_uint4(words[0], words[1], words[2], words[3])};
  }

  // Prefetches a tile into L2.
  __device__ __forceinline__ void prefetch(int tile) const {
    constexpr int kVecsPerLine = 128 / kVecBytes;
    const int tile_vecs = Tile<T>::kVecs * blockDim.x;
    const int vec_index =
        first_vec + tile * tile_vecs + static_cast<int>(threadIdx.x) * kVecsPerLine;
    if (tile >= 0 && static_cast<int>(threadIdx.x) * kVecsPerLine < tile_vecs &&
        vec_index < end_vec) {
      prefetch_to_l2(base + int64_t(vec_index) * Vec<T>::kSize);
    }
  }

  // Prefetches all vectors of the CTA into L2, where neighbouring warps' vectors belong to
  // different CTAs.
  __device__ __forceinline__ void prefetch_all(int ctas) const {
    constexpr int kVecsPerLine = 128 / kVecBytes;
    constexpr int kLines = kWarpSize / kVecsPerLine;  // 128-byte lines of a warp
    const int step = ctas * static_cast<int>(blockDim.x);
    const int warp = threadIdx.x / kLines, line = threadIdx.x % kLines;
    int vec_index =
        (warp * ctas + static_cast<int>(cluster_rank())) * kWarpSize + line * kVecsPerLine;
    for (; vec_index < num_vecs; vec_index += kVecsPerLine * step) {
      prefetch_to_l2(base + int64_t(vec_index) * Vec<T>::kSize);
    }
  }

  // Whether a sample pays off. The result is the same in all CTAs.
  __device__ __forceinline__ bool may_be_sampled(int ctas, int k) const {
    const int min_tiles = ctas == 1 ? kMinTilesToSample : kMinTilesToSampleInCluster;
    return length / ctas >= min_tiles * kItemsPerThread * static_cast<int>(blockDim.x) - 4096 &&
           k <= length / 8;
  }

  // Loads the sample, kSampledPerThread elements of each thread spread over the window, and returns
  // its mask.
  __device__ __forceinline__ uint32_t load_sample(Tile<T>& x) const {
    constexpr int kVecs = kSampledPerThread / Vec<T>::kSize;
    const int warps = blockDim.x / kWarpSize;
    const int stride = (num_vecs - 2) / (kVecs * warps);
    const int first = 1 + threadIdx.x / kWarpSize * stride + threadIdx.x % kWarpSize;
    x = zero_tile<T>();
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      x.vecs[j] = load_vec(base + int64_t(first + j * warps * stride) * Vec<T>::kSize);
    }
    return (1u << kSampledPerThread) - 1;
  }

  // Returns a mask of the thread's elements of a tile that lie in the window.
  __device__ __forceinline__ uint32_t valid_mask(int tile) const {
    constexpr int kVecSize = Vec<T>::kSize;
    const int first = first_vec + tile * Tile<T>::kVecs * static_cast<int>(blockDim.x);
    const int end = first + Tile<T>::kVecs * static_cast<int>(blockDim.x);
    if (first * kVecSize >= lead_items && end <= end_vec && end * kVecSize <= lead_items + length) {
      return (1u << kItemsPerThread) - 1;
    }
    uint32_t mask = 0;
#pragma unroll
    for (int j = 0; j < Tile<T>::kVecs; ++j) {
      const int vec_index = vec(tile, j);
      if (vec_index >= end_vec) continue;
      const int index = vec_index * kVecSize - lead_items;
      uint32_t bits = (1u << kVecSize) - 1;
      if (index < 0) bits &= bits << -index;
      if (index + kVecSize > length) bits &= (1u << (length - index)) - 1;
      mask |= bits << (j * kVecSize);
    }
    return mask;
  }
};

__device__ __forceinline__ uint32_t item_bits(const Vec<f32>& v, int i) {
  return i == 0 ? v.bits.x : i == 1 ? v.bits.y : i == 2 ? v.bits.z : v.bits.w;
}

template <typename T>
__device__ __forceinline__ uint32_t item_bits(const Vec<T>& v, int i) {
  const int word = i / 2;
  const uint32_t pair = word == 0   ? v.bits.x
                        : word == 1 ? v.bits.y
                        : word == 2 ? v.bits.z
                                    : v.bits.w;
  return i % 2 == 0 ? pair & 0xffffu : pair >> 16;
}

// `i` must be a compile-time constant.
template <typename T>
__device__ __forceinline__ uint32_t item_bits(const Tile<T>& x, int i) {
  return item_bits(x.vecs[i / Vec<T>::kSize], i % Vec<T>::kSize);
}

// `i` may be a runtime value. Why a loop: registers cannot be indexed.
template <typename T>
__device__ __forceinline__ uint32_t item_bits_dynamic(const Tile<T>& x, int i) {
  constexpr int kVecSize = Vec<T>::kSize, kVecs = Tile<T>::kVecs;
  Vec<T> v = x.vecs[0];
#pragma unroll
  for (int j = 1; j < kVecs; ++j) {
    if (i / kVecSize == j) v = x.vecs[j];
  }
  return item_bits(v, i % kVecSize);
}

__device__ __forceinline__ float to_number(f32, uint32_t bits) { return __uint_as_float(bits); }
template <typename T>
__device__ __forceinline__ float to_number(T, uint32_t bits) {
  return unpack_pair(T(), bits).x;
}

// Returns a bound such that x - bound has no sign bit exactly if x has a key of at least
// `threshold_key`. A NaN minus the bound is a positive NaN.
template <typename T>
__device__ __forceinline__ float comparison_bound(uint32_t threshold_key) {
  const float number = to_number(T(), from_ordered_key<T>(threshold_key));
  return number == 0.0f ? __uint_as_float(0x80000001u) : number;  // -0.0 has the key of 0.0
}

// Returns a mask of the elements with keys of at least `threshold_key`; some others may be in it.
template <typename T>
__device__ __forceinline__ uint32_t at_least(const Tile<T>& x, uint32_t threshold_key) {
  const float bound = comparison_bound<T>(threshold_key);
  uint32_t below_mask = 0;
#pragma unroll
  for (int i = kItemsPerThread - 1; i >= 0; --i) {
    const float difference = to_number(T(), item_bits(x, i)) - bound;
    below_mask = __funnelshift_l(__float_as_uint(difference), below_mask, 1);  // the sign bit
  }
  return ~below_mask;
}

// Returns the key of -inf, which is the smallest of all elements.
template <typename T>
__device__ __forceinline__ uint32_t min_ordered_key() {
  constexpr uint32_t kSign = 1u << (KeyTraits<T>::kBits - 1);
  return to_ordered_key<T>(kSign | KeyTraits<T>::kInfinity);
}

#endif  // __CUDACC__

}  // namespace precast
