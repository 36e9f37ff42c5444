// SPDX-License-Identifier: Apache-2.0
// The results of top-k: how a candidate is stored, and in which order.
#pragma once

#include "precast/topk/window.cuh"

namespace precast {

#if defined(__CUDACC__)

// Writes the results of a row.
template <typename T>
struct ResultWriter {
  const TopKParams& p;
  int64_t first;
  const int32_t* pages;
  int32_t offset;

  __device__ __forceinline__ ResultWriter(const TopKParams& params, uint32_t row) : p(params) {
    first = int64_t(row) * p.k;
    pages = nullptr;
    offset = 0;
    if (p.mode == TopKMode::ragged && p.offsets != nullptr) offset = p.offsets[row];
    if (p.mode == TopKMode::paged) {
      const int64_t batch = p.row_to_batch == nullptr ? row : p.row_to_batch[row];
      pages = p.table + batch * p.table_stride;
      if (p.page_starts != nullptr) pages += p.page_starts[row];
    }
  }

  __device__ __forceinline__ void put(int i, uint64_t x) const {
    const int rank = static_cast<int>(x & (kMaxColumns - 1));
    const int index = p.prefer_last ? rank : kMaxColumns - 1 - rank;
    if (p.mode == TopKMode::values) {
      p.indices[first + i] = index;
    } else {
      store_index(i, index);
    }
    if (p.values != nullptr) {
      store_value(i, from_ordered_key<T>(static_cast<uint32_t>(x >> kIndexBits)));
    }
  }

  __device__ __forceinline__ void store_value(int i, uint32_t bits) const {
    using Word = typename KeyTraits<T>::Word;
    static_cast<Word*>(p.values)[first + i] = static_cast<Word>(bits);
  }

  // Stores an index of the window; a negative one means that there is none.
  __device__ __forceinline__ void store_index(int i, int index) const {
    int32_t result = -1;
    if (index >= 0) {
      result = index + offset;
      if (pages != nullptr) {
        const int32_t page = pages[index >> p.page_bits];
        result = (page << p.page_bits) + (index & ((1 << p.page_bits) - 1));
      }
    }
    p.out[first + i] = result;
    if (p.raw != nullptr) p.raw[first + i] = index;
  }
};

// Sort keys: to_sort_key() maps candidates to integers whose descending order is the requested
// order, and from_sort_key() maps them back.
template <int kKeyBits>
__device__ __forceinline__ uint64_t to_sort_key(const TopKParams& p, uint64_t x) {
  if (p.prefer_last) x ^= kMaxColumns - 1;  // the lowest index ranks highest now
  if (p.order == TopKOrder::by_value) return x;
  return (x & (kMaxColumns - 1)) << kKeyBits | x >> kIndexBits;
}

template <int kKeyBits>
__device__ __forceinline__ uint64_t from_sort_key(const TopKParams& p, uint64_t x) {
  if (p.order == TopKOrder::by_place) {
    x = (x & ((uint64_t(1) << kKeyBits) - 1)) << kIndexBits | x >> kKeyBits;
  }
  return p.prefer_last ? x ^ (kMaxColumns - 1) : x;
}

// Stores sort keys as results.
template <typename T>
struct StoreOrdered {
  const ResultWriter<T>& results;

  __device__ __forceinline__ void operator()(uint32_t i, uint64_t x) const {
    results.put(static_cast<int>(i), from_sort_key<KeyTraits<T>::kBits>(results.p, x));
  }
};

// Writes the results from `begin` to `end` of a window that has no more than k elements: all its
// indices, then -1, and zeros for values that do not exist. All threads call it.
template <typename T>
__device__ __forceinline__ void write_all_indices(const ResultWriter<T>& results,
                                                  const Window<T>& window, int begin, int end) {
  using Word = typename KeyTraits<T>::Word;
  const auto* const items = reinterpret_cast<const Word*>(window.base) + window.lead_items;
  for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += blockDim.x) {
    const bool exists = i < window.length;
    results.store_index(i, exists ? i : -1);
    if (results.p.values == nullptr) continue;
    results.store_value(i, exists ? from_ordered_key<T>(to_ordered_key<T>(items[i])) : 0);
  }
}

#endif  // __CUDACC__

}  // namespace precast
