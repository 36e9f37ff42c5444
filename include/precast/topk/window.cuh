// SPDX-License-Identifier: Apache-2.0
// What top-k reads: windows of rows at any address, in tiles of 16 elements a thread.
#pragma once

#include "precast/core/vec.cuh"
#include "precast/topk/radix_select.cuh"

namespace precast {

constexpr int kMaxTopK = 8192;
constexpr int kLeastSorted = 256;  // room that sorting takes

enum class TopKMode : int { values, ragged, paged };
enum class TopKOrder : int { any, by_value, by_place };

struct TopKParams {
  const void* input;  // [rows, size]
  int64_t stride;     // elements
  uint32_t rows;
  int32_t size;
  int32_t k;
  TopKMode mode;
  TopKOrder order;
  bool last_first;            // of equal elements the last are chosen
  const int32_t* lengths;     // [rows], or null: size
  const int32_t* row_starts;  // [rows], or null: 0
  void* values;               // [rows, k]
  int64_t* indices;           // [rows, k]
  int32_t* out;               // [rows, k]
  int32_t* raw;               // [rows, k], or null: positions in the window
  const int32_t* offsets;     // [rows]
  const int32_t* table;       // [batch, pages]
  int64_t table_stride;
  const int32_t* row_to_batch;  // [rows], or null: each its own
  const int32_t* page_starts;   // [rows], or null: 0
  int32_t page_bits;            // log2 of the page size
  int32_t room;                 // of a list; a row of several CTAs has one more, behind each one's
  uint32_t most;                // candidates that can be ordered by way of a second list
  // Of rows that shared memory holds (topk/resident.cuh):
  int32_t group;    // vectors
  uint32_t enough;  // groups of a CTA that may reach the floor
};

#if defined(__CUDACC__)

constexpr int kItems = 16;                      // of a thread and tile
constexpr int kSampled = 8;                     // of a thread
constexpr int kLeastTilesToSample = 4;          // by a CTA that is alone
constexpr int kLeastTilesToSampleTogether = 2;  // each CTA

template <typename T>
struct Tile {
  static constexpr int kVecs = kItems / Vec<T>::kSize;
  Vec<T> vecs[kVecs];
};

template <typename T>
__device__ __forceinline__ Tile<T> no_tile() {
  Tile<T> x;
#pragma unroll
  for (int j = 0; j < Tile<T>::kVecs; ++j) x.vecs[j] = zero_vec<T>();
  return x;
}

// As load_vec(), past L1. Why: on H200 256 rows of 128256 fp32 take 44 us, and 47 through L1.
template <typename T>
__device__ __forceinline__ Vec<T> load_once(const T* source) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(source)
               : "memory");
  return Vec<T>{v};
}

// The window of a row, and the part of this CTA: vectors at multiples of 16 bytes, the first and
// the last of which may hold elements of neither. Those before the window lie in the memory that
// holds the row, as vectors are aligned; those behind it are not read, as that may end there.
template <typename T>
struct Window {
  const T* base;  // of vector 0
  int lead;       // elements of vector 0 before the window
  int length;
  int vecs;
  int full;  // vectors that end in the window
  int from;  // vectors of this CTA
  int to;

  __device__ __forceinline__ Window(const TopKParams& p, uint32_t row, int ctas) {
    int start = 0;
    length = p.size;
    if (p.lengths != nullptr) {
      if (p.row_starts != nullptr) start = min(max(p.row_starts[row], 0), p.size);
      length = max(min(p.lengths[row], p.size - start), 0);
    }
    const T* first = static_cast<const T*>(p.input) + int64_t(row) * p.stride + start;
    const uint64_t address = reinterpret_cast<uint64_t>(first);
    base = reinterpret_cast<const T*>(address & ~uint64_t(kVecBytes - 1));
    lead = static_cast<int>(first - base);
    vecs = (lead + length + Vec<T>::kSize - 1) / Vec<T>::kSize;
    full = (lead + length) / Vec<T>::kSize;
    const int share = (vecs + ctas - 1) / ctas;
    from = min(static_cast<int>(cluster_rank()) * share, vecs);
    to = min(from + share, vecs);
  }

  __device__ __forceinline__ int tiles() const {
    const int each = Tile<T>::kVecs * blockDim.x;
    return (to - from + each - 1) / each;
  }

  // The number of the thread's j-th vector of a tile.
  __device__ __forceinline__ int vec(int tile, int j) const {
    return from + (tile * Tile<T>::kVecs + j) * static_cast<int>(blockDim.x) + threadIdx.x;
  }

  // A tile of a part that is not empty; behind its end another vector of the row again.
  __device__ __forceinline__ void load(int tile, Tile<T>& x) const {
    const int last = min(to, full) - 1;
    if (last >= 0) {
#pragma unroll
      for (int j = 0; j < Tile<T>::kVecs; ++j) {
        x.vecs[j] = load_once(base + int64_t(min(vec(tile, j), last)) * Vec<T>::kSize);
      }
    } else {
      x = no_tile<T>();
    }
    if (to > full && tile == tiles() - 1) {
#pragma unroll
      for (int j = 0; j < Tile<T>::kVecs; ++j) {
        if (vec(tile, j) == full) x.vecs[j] = load_rest();
      }
    }
  }

  // The last vector, where it does not end in the window.
  __device__ __forceinline__ Vec<T> load_rest() const {
    constexpr int kEach = Vec<T>::kSize;
    using Word = typename Keys<T>::Word;
    const auto* const items = reinterpret_cast<const Word*>(base) + int64_t(full) * kEach;
    const int count = lead + length - full * kEach;
    uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (i < count) words[i * sizeof(T) / 4] |= uint32_t(items[i]) << i * sizeof(T) % 4 * 8;
    }
    return {make_uint4(words[0], words[1], words[2], words[3])};
  }

  // Asks for a tile in L2.
  __device__ __forceinline__ void prefetch(int tile) const {
    constexpr int kVecsOfLine = 128 / kVecBytes;
    const int each = Tile<T>::kVecs * blockDim.x;
    const int at = from + tile * each + static_cast<int>(threadIdx.x) * kVecsOfLine;
    if (tile >= 0 && static_cast<int>(threadIdx.x) * kVecsOfLine < each && at < to) {
      prefetch_to_l2(base + int64_t(at) * Vec<T>::kSize);
    }
  }

  // Asks for all of the CTA's vectors where neighbours lie in different CTAs.
  __device__ __forceinline__ void prefetch_all(int ctas) const {
    constexpr int kVecsOfLine = 128 / kVecBytes;
    constexpr int kLines = kWarpSize / kVecsOfLine;  // of a warp
    const int step = ctas * static_cast<int>(blockDim.x);
    const int warp = threadIdx.x / kLines, line = threadIdx.x % kLines;
    int at = (warp * ctas + static_cast<int>(cluster_rank())) * kWarpSize + line * kVecsOfLine;
    for (; at < vecs; at += kVecsOfLine * step) {
      prefetch_to_l2(base + int64_t(at) * Vec<T>::kSize);
    }
  }

  // Whether a sample pays, the same for all CTAs.
  __device__ __forceinline__ bool may_be_sampled(int ctas, int k) const {
    const int least = ctas == 1 ? kLeastTilesToSample : kLeastTilesToSampleTogether;
    return length / ctas >= least * kItems * static_cast<int>(blockDim.x) - 4096 && k <= length / 8;
  }

  // The first kSampled elements of a tile, from all over a window that may be sampled; their bits.
  __device__ __forceinline__ uint32_t load_sample(Tile<T>& x) const {
    constexpr int kVecs = kSampled / Vec<T>::kSize;
    const int warps = blockDim.x / kWarpSize;
    const int stride = (vecs - 2) / (kVecs * warps);
    const int first = 1 + threadIdx.x / kWarpSize * stride + threadIdx.x % kWarpSize;
    x = no_tile<T>();
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      x.vecs[j] = load_vec(base + int64_t(first + j * warps * stride) * Vec<T>::kSize);
    }
    return (1u << kSampled) - 1;
  }

  // Which of the thread's elements of a tile exist, a bit each.
  __device__ __forceinline__ uint32_t present(int tile) const {
    constexpr int kEach = Vec<T>::kSize;
    const int first = from + tile * Tile<T>::kVecs * static_cast<int>(blockDim.x);
    const int end = first + Tile<T>::kVecs * static_cast<int>(blockDim.x);
    if (first * kEach >= lead && end <= to && end * kEach <= lead + length) {
      return (1u << kItems) - 1;
    }
    uint32_t mask = 0;
#pragma unroll
    for (int j = 0; j < Tile<T>::kVecs; ++j) {
      const int at = vec(tile, j);
      if (at >= to) continue;
      const int place = at * kEach - lead;
      uint32_t bits = (1u << kEach) - 1;
      if (place < 0) bits &= bits << -place;
      if (place + kEach > length) bits &= (1u << (length - place)) - 1;
      mask |= bits << (j * kEach);
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

// `i`: known when compiled.
template <typename T>
__device__ __forceinline__ uint32_t item_bits(const Tile<T>& x, int i) {
  return item_bits(x.vecs[i / Vec<T>::kSize], i % Vec<T>::kSize);
}

// `i`: any. Why: registers have no addresses.
template <typename T>
__device__ __forceinline__ uint32_t item_bits_at(const Tile<T>& x, int i) {
  constexpr int kEach = Vec<T>::kSize, kVecs = Tile<T>::kVecs;
  Vec<T> v = x.vecs[0];
#pragma unroll
  for (int j = 1; j < kVecs; ++j) {
    if (i / kEach == j) v = x.vecs[j];
  }
  return item_bits(v, i % kEach);
}

__device__ __forceinline__ float number_of(f32, uint32_t bits) { return __uint_as_float(bits); }
template <typename T>
__device__ __forceinline__ float number_of(T, uint32_t bits) {
  return unpack_pair(T(), bits).x;
}

// What numbers with a key of `floor` or more are not apart from by a negative number; NaN is apart
// from all by a positive NaN.
template <typename T>
__device__ __forceinline__ float bound_of(uint32_t floor) {
  const float number = number_of(T(), bits_of<T>(floor));
  return number == 0.0f ? __uint_as_float(0x80000001u) : number;  // -0.0 reaches 0.0
}

// Which elements have a key of `floor` or more, and at most some others.
template <typename T>
__device__ __forceinline__ uint32_t reaching(const Tile<T>& x, uint32_t floor) {
  const float bound = bound_of<T>(floor);
  uint32_t below = 0;
#pragma unroll
  for (int i = kItems - 1; i >= 0; --i) {
    const float apart = number_of(T(), item_bits(x, i)) - bound;
    below = __funnelshift_l(__float_as_uint(apart), below, 1);  // its sign
  }
  return ~below;
}

// Key of -inf: no element has a smaller one.
template <typename T>
__device__ __forceinline__ uint32_t lowest_key() {
  constexpr uint32_t kSign = 1u << (Keys<T>::kBits - 1);
  return key_of<T>(kSign | Keys<T>::kInfinity);
}

#endif  // __CUDACC__

}  // namespace precast
