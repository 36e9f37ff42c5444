// SPDX-License-Identifier: Apache-2.0
// Top-k for a k whose results one CTA cannot sort in shared memory.
//
//   1. Radix selection over the window finds the k-th largest candidate.
//   2. The selected candidates, as sort keys, are divided by rank: part i holds those from
//      i * kMaxSorted on. A CTA a part finds the two sort keys that bound it, again by radix
//      selection.
//   3. The CTA gathers its part in shared memory, sorts it and stores it.
//
// Traffic  Each CTA reads the window once for each digit of the three selections, at most 16 times,
//          and after the first time from L2. No CTA waits for another, and no memory is needed
//          besides the results.
#pragma once

#include "precast/topk/bucket_sort.cuh"
#include "precast/topk/results.cuh"
#include "precast/topk/streaming.cuh"

namespace precast {

constexpr int kLargeKThreads = 512;  // with 1024, sm80 spills

#if defined(__CUDACC__)

// Visits the candidates of a window, for radix_select().
template <typename T>
struct ForEachInWindow {
  const TopKParams& p;
  const Window<T>& window;

  template <typename F>
  __device__ __forceinline__ void operator()(const F& f) const {
    const int tiles = window.tiles();
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      Tile<T> x;
      window.load(tile, x);
#pragma unroll 1
      for (uint32_t remaining = window.valid_mask(tile); remaining != 0;
           remaining &= remaining - 1) {
        f(candidate_at(p, window, x, tile, __ffs(remaining) - 1));
      }
    }
  }

  template <int kKeyBits>
  __device__ __forceinline__ void count_top_digit(uint32_t* histogram) const {
    constexpr int kBits = kKeyBits + kIndexBits;
    (*this)(CountDigit{histogram, 0, kBits, kBits - kDigitBits, kNumBins - 1});
  }
};

// Visits the candidates at or above `lower_bound` as sort keys, for radix_select().
template <typename T>
struct ForEachSelected {
  static constexpr int kKeyBits = KeyTraits<T>::kBits;

  ForEachInWindow<T> candidates;
  uint64_t lower_bound;

  template <typename F>
  struct AsSortKey {
    const ForEachSelected& selected;
    const F& f;

    __device__ __forceinline__ void operator()(uint64_t x) const {
      if (x >= selected.lower_bound) f(to_sort_key<kKeyBits>(selected.candidates.p, x));
    }
  };

  template <typename F>
  __device__ __forceinline__ void operator()(const F& f) const {
    candidates(AsSortKey<F>{*this, f});
  }

  template <int kBits>
  __device__ __forceinline__ void count_top_digit(uint32_t* histogram) const {
    constexpr int kAllBits = kBits + kIndexBits;
    (*this)(CountDigit{histogram, 0, kAllBits, kAllBits - kDigitBits, kNumBins - 1});
  }
};

// Appends the sort keys from `first` to `last`, both included, to a list.
struct AppendBetween {
  uint64_t first, last;
  uint64_t* list;
  uint32_t& count;

  __device__ __forceinline__ void operator()(uint64_t x) const {
    if (first <= x && x <= last) list[atomicAdd(&count, 1u)] = x;
  }
};

// Stores the sort keys of a part as results.
template <typename T>
struct StorePart {
  const ResultWriter<T>& results;
  uint32_t begin;

  __device__ __forceinline__ void operator()(uint32_t i, uint64_t x) const {
    StoreOrdered<T>{results}(begin + i, x);
  }
};

// Returns the rank-th largest of the integers that for_each visits. All threads call it.
template <typename T, typename ForEach>
__device__ __forceinline__ uint64_t find_rank(TopKStorage& s, const ForEach& for_each,
                                              uint32_t rank, int& buffer) {
  constexpr int kKeyBits = KeyTraits<T>::kBits;
  RadixThreshold threshold = initial_threshold<kKeyBits>(rank);
  radix_select<kKeyBits, 1>(threshold, s, for_each, rank, rank, 1, buffer);
  return threshold.lower_bound;
}

// The CTA of one part of a row. `shared` holds TopKStorage and the list.
template <typename T>
__device__ __forceinline__ void top_k_part(const TopKParams& p, uint64_t* shared) {
  TopKStorage& s = *reinterpret_cast<TopKStorage*>(shared);
  uint64_t* const list = shared + sizeof(TopKStorage) / sizeof(uint64_t);
  const uint32_t parts = (p.k + kMaxSorted - 1) / kMaxSorted;
  const uint32_t row = blockIdx.x / parts;
  const uint32_t begin = blockIdx.x % parts * kMaxSorted;
  const uint32_t end = min(begin + kMaxSorted, uint32_t(p.k));
#pragma unroll 1
  for (int i = threadIdx.x; i < kNumBins; i += blockDim.x) s.histogram[0][i] = 0;
  if (threadIdx.x == 0) s.num_kept = 0;
  wait_on_dependent_grids();
  launch_dependent_grids();
  const Window<T> window(p, row, 1);
  const ResultWriter<T> results(p, row);
  if (p.mode != TopKMode::values && window.length <= p.k) {
    write_all_indices(results, window, begin, end);
    return;
  }
  __syncthreads();
  int buffer = 0;
  const ForEachInWindow<T> candidates = {p, window};
  const ForEachSelected<T> selected = {candidates, find_rank<T>(s, candidates, p.k, buffer)};
  const uint64_t first = find_rank<T>(s, selected, end, buffer);
  const uint64_t last = begin == 0 ? ~uint64_t(0) : find_rank<T>(s, selected, begin, buffer) - 1;
  selected(AppendBetween{first, last, list, s.num_kept});
  __syncthreads();
  bucket_sort(s, list, end - begin, KeyTraits<T>::kBits + kIndexBits, StorePart<T>{results, begin});
}

template <typename T>
__global__ void __launch_bounds__(kLargeKThreads, 1) TopKLargeKernel(TopKParams p) {
  extern __shared__ uint64_t shared[];
  top_k_part<T>(p, shared);
}

#endif  // __CUDACC__

}  // namespace precast
