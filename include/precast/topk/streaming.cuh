// SPDX-License-Identifier: Apache-2.0
// Top-k of rows that are streamed: each CTA reads its part of a row once, and keeps in its list
// what may be among the k largest.
#pragma once

#include "precast/topk/window.cuh"

namespace precast {

#if defined(__CUDACC__)

// Why: otherwise the compiler computes the candidates of all items ahead of a loop, and spills
// them.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Returns the thread's i-th element of a tile as a candidate.
template <typename T>
__device__ __forceinline__ uint64_t candidate_at(const TopKParams& p, const Window<T>& window,
                                                 const Tile<T>& x, int tile, int i) {
  constexpr int kVecSize = Vec<T>::kSize;
  const int index = window.vec(tile, i / kVecSize) * kVecSize + i % kVecSize - window.lead_items;
  const uint32_t key = to_ordered_key<T>(item_bits_dynamic(x, i));
  return make_candidate(key, p.prefer_last ? index : kMaxColumns - 1 - index);
}

// Visits the candidates of the list, and those of a tile that are not in the list yet.
template <typename T>
struct ForEachSeen {
  ForEachInList of_list;
  const TopKParams& p;
  const Window<T>& window;
  Tile<T> x;
  int tile;
  uint32_t mask;

  template <int kKeyBits>
  __device__ __forceinline__ void count_top_digit(uint32_t* histogram) const {
    of_list.template count_top_digit<kKeyBits>(histogram);
    if (mask == 0) return;
#pragma unroll
    for (int i = 0; i < kItemsPerThread; ++i) {
      const uint32_t digit = to_ordered_key<T>(opaque(item_bits(x, i))) >> (kKeyBits - kDigitBits);
      if (mask >> i & 1) atomicAdd(&histogram[digit], 1u);
    }
  }

  template <typename F>
  __device__ __forceinline__ void operator()(const F& f) const {
    of_list(f);
#pragma unroll 1
    for (uint32_t remaining = mask; remaining != 0; remaining &= remaining - 1) {
      f(candidate_at(p, window, x, tile, __ffs(remaining) - 1));
    }
  }
};

// Returns the number of bits in the masks of all threads, that of the warp, and that of the warps
// before it in some order. All threads call it.
__device__ __forceinline__ uint32_t count_and_scan(TopKStorage& s, int& counter, uint32_t mask,
                                                   uint32_t& warp_count, uint32_t& offset) {
  warp_count = warp_sum(static_cast<uint32_t>(__popc(mask)));
  offset = 0;
  if (warp_count != 0 && threadIdx.x % kWarpSize == 0) {
    offset = atomicAdd(&s.append_counts[counter], warp_count);
  }
  offset = __shfl_sync(0xffffffffu, offset, 0);
  __syncthreads();
  const uint32_t all = s.append_counts[counter];
  // All threads have read the previous counter, and one more barrier precedes its next use.
  if (threadIdx.x == 0) s.append_counts[counter == 0 ? 2 : counter - 1] = 0;
  counter = counter == 2 ? 0 : counter + 1;
  return all;
}

// Must be called before CTAs that have run different numbers of selections run one together. All
// threads call it.
__device__ __forceinline__ void align_buffers(TopKStorage& s, int& buffer) {
  if (buffer == 0) return;
#pragma unroll 1
  for (int i = threadIdx.x; i < kNumBins; i += blockDim.x) s.histogram[0][i] = 0;
  buffer = 0;
  __syncthreads();
}

// A CTA's part of a row, and the state of its selection.
template <typename T>
struct StreamedPart {
  const TopKParams& p;
  const Window<T>& window;
  TopKStorage& s;
  uint64_t* list;
  uint32_t size;
  uint32_t threshold_key;  // an ordered key
  bool accepts;            // further elements may reach the threshold
  int counter;
  int buffer;
  RadixThreshold threshold;  // of the last selection
  bool keeps_sampled;        // the lists hold what reached the threshold of the sample
  uint32_t total;            // with keeps_sampled: candidates of all CTAs
  uint32_t base_offset;      // with keeps_sampled: candidates of the CTAs before this one

  __device__ __forceinline__ uint32_t at_least_threshold(const Tile<T>& x, int tile) const {
    const uint32_t mask = accepts ? window.valid_mask(tile) : 0;
    return mask == 0 ? 0 : mask & at_least<T>(x, threshold_key);
  }

  // Selects the k largest of the list and of the tile's elements in `mask`, until at most `limit`
  // remain, and removes the others from both. All threads call it.
  template <int kCtas>
  __device__ __forceinline__ void select_down_to(uint32_t k, uint32_t limit, int ctas,
                                                 const Tile<T>& x, int tile, uint32_t& mask) {
    const ForEachSeen<T> for_each = {{list, size}, p, window, x, tile, mask};
    threshold = initial_threshold<KeyTraits<T>::kBits>(k);
    radix_select<KeyTraits<T>::kBits, kCtas>(threshold, s, for_each, k, limit, ctas, buffer);
    if (threshold.count == 0) return;
    size = compact(s, list, size, threshold.lower_bound);
#pragma unroll 1
    for (uint32_t remaining = mask; remaining != 0; remaining &= remaining - 1) {
      if (candidate_at(p, window, x, tile, __ffs(remaining) - 1) < threshold.lower_bound) {
        mask &= ~(remaining & -remaining);
      }
    }
    threshold_key = static_cast<uint32_t>(threshold.lower_bound >> kIndexBits);
    // Some elements that equal the threshold were dropped. Later ones rank below these.
    if ((threshold.lower_bound & (kMaxColumns - 1)) != 0) {
      accepts = threshold_key != to_ordered_key<T>(KeyTraits<T>::kInfinity + 1);
      threshold_key += accepts;
    }
  }

  // Appends the tile's elements in `mask` to the list at the offsets from count_and_scan(). All
  // threads call it.
  __device__ __forceinline__ void append_tile(const Tile<T>& x, int tile, uint32_t mask,
                                              uint32_t warp_count, uint32_t offset,
                                              uint32_t num_added) {
    if (warp_count != 0) {
      uint64_t* to = list + size + offset;
#pragma unroll 1
      for (uint32_t remaining = mask; __any_sync(0xffffffffu, remaining != 0);
           remaining &= remaining - 1) {
        warp_append(
            to, candidate_at(p, window, x, tile, (__ffs(remaining) - 1) & (kItemsPerThread - 1)),
            remaining != 0);
      }
    }
    size += num_added;
  }

  // Reads the part, and reduces the lists of all CTAs of the row to at most `limit` candidates.
  //
  // In a long part, a sample gives an estimate of the k-th largest element. A threshold somewhat
  // below it is tried first.
  __device__ __forceinline__ void select(uint32_t limit, int ctas) {
    bool uses_sample = window.may_be_sampled(ctas, p.k);
    if (uses_sample) {
      if (ctas > 1) cluster_arrive_relaxed();
      threshold_key = sample_threshold();
    }
    Tile<T> x;
    int tile = 0;
    uint32_t mask = 0;
#pragma unroll 1
    while (true) {
      bool fits = true;
      if (uses_sample) {
        fits = collect_above_threshold();
        if (exchange_counts(fits, ctas)) return;
        x = zero_tile<T>();  // Why: otherwise the previous tile occupies registers.
        mask = 0;
      } else {
        collect_all(x, tile, mask);
      }
      if (ctas > 1) align_buffers(s, buffer);
      if (!fits && threadIdx.x == 0) s.histogram[buffer][kNumBins - 1] = kOverflow;
      __syncthreads();
      select_down_to<kMaxCtasOfArch>(p.k, limit, ctas, x, tile, mask);
      if (!uses_sample || threshold.count != 0) break;
      size = 0;
      accepts = true;
      threshold_key = min_ordered_key<T>();
      // Selections of one CTA do not wait until other CTAs have read its histograms.
      cluster_sync(ctas);
      uses_sample = false;
    }
    uint32_t warp_count, offset;
    const uint32_t num_added = count_and_scan(s, counter, mask, warp_count, offset);
    append_tile(x, tile, mask, warp_count, offset, num_added);
    __syncthreads();
  }

  // Whether the lists of all CTAs together hold at least k candidates, and not more than can be
  // sorted at once. All threads call it.
  __device__ __forceinline__ bool exchange_counts(bool fits, int ctas) {
    total = fits ? size : kOverflow;
    base_offset = 0;
    if (ctas > 1) {
      const int rank = cluster_rank(), lane = threadIdx.x % kWarpSize;
      cluster_wait();  // pairs with the arrival in select(): all CTAs have started
      if (threadIdx.x < ctas) store_in_cta(&s.cta_counts[rank], threadIdx.x, total);
      cluster_sync(ctas);
      const uint32_t count = lane < ctas ? s.cta_counts[lane] : 0;
      total = warp_sum(count);
      base_offset = warp_sum(lane < rank ? count : 0u);
    }
    keeps_sampled = total >= uint32_t(p.k) && total <= p.max_bucket_sorted;
    return keeps_sampled;
  }

  // The order of the tiles. It is backwards if the last of equal elements are preferred, because
  // equal elements of later tiles then never rank higher.
  __device__ __forceinline__ int first_tile() const {
    return p.prefer_last ? window.tiles() - 1 : 0;
  }
  __device__ __forceinline__ int next_tile() const { return p.prefer_last ? -1 : 1; }

  // Appends what may be among the k largest to the list, except for the last tile, which it
  // returns.
  __device__ __forceinline__ void collect_all(Tile<T>& x, int& tile, uint32_t& mask) {
    uint32_t warp_count, offset;
    int remaining = window.tiles();
    x = zero_tile<T>();
    mask = 0;
    if (remaining == 0) return;
    Tile<T> next;
    tile = first_tile();
    window.load(tile, next);
#pragma unroll 1
    for (; remaining > 1; --remaining) {
      x = next;
      window.load(tile + next_tile(), next);
      mask = at_least_threshold(x, tile);
      uint32_t num_added = count_and_scan(s, counter, mask, warp_count, offset);
      if (size + num_added > uint32_t(p.list_capacity)) {
        select_down_to<1>(p.k, max(p.list_capacity / 2, p.k), 1, x, tile, mask);
        num_added = count_and_scan(s, counter, mask, warp_count, offset);
      }
      append_tile(x, tile, mask, warp_count, offset, num_added);
      tile += next_tile();
    }
    x = next;
    mask = at_least_threshold(x, tile);
  }

  // Appends all elements at or above the threshold to the list; no warp waits for another. Returns
  // false if they are too many.
  __device__ __forceinline__ bool collect_above_threshold() {
    size = 0;
    int remaining = window.tiles();
    if (remaining == 0) return true;
    int tile = first_tile();
    Tile<T> next;
    window.load(tile, next);
    if (threadIdx.x == 0) s.num_kept = 0;
    __syncthreads();
#pragma unroll 1
    for (; remaining > 0; --remaining, tile += next_tile()) {
      const Tile<T> x = next;
      // Why without a condition: a conditional load would need more registers.
      window.load(remaining > 1 ? tile + next_tile() : tile, next);
      const uint32_t mask = at_least_threshold(x, tile);
      const uint32_t warp_count = warp_sum(static_cast<uint32_t>(__popc(mask)));
      if (warp_count == 0) continue;
      uint32_t offset = 0;
      if (threadIdx.x % kWarpSize == 0) offset = atomicAdd(&s.num_kept, warp_count);
      offset = __shfl_sync(0xffffffffu, offset, 0);
      if (offset + warp_count <= uint32_t(p.list_capacity)) {
        append_tile(x, tile, mask, warp_count, offset, 0);
      }
    }
    __syncthreads();
    const bool fits = s.num_kept <= uint32_t(p.list_capacity);
    size = fits ? s.num_kept : 0;
    return fits;
  }

  // Returns a key that is very likely below that of the k-th largest element, and the same in all
  // CTAs. All threads call it.
  __device__ __forceinline__ uint32_t sample_threshold() {
    Tile<T> x;
    const uint32_t mask = window.load_sample(x);
    const float rate = float(kSampledPerThread * int(blockDim.x)) / float(window.length);
    const float expected = float(p.k) * rate;
    const uint32_t rank = static_cast<uint32_t>(expected + 4.0f * sqrtf(expected) + 8.0f);
    // A count that fills half of the list needs no further selection.
    const uint32_t enough =
        max(static_cast<uint32_t>(0.5f * float(p.list_capacity) * rate), rank + rank / 4);
    threshold = initial_threshold<KeyTraits<T>::kBits>(rank);
    const ForEachSeen<T> for_each = {{list, 0}, p, window, x, 0, mask};
    radix_select<KeyTraits<T>::kBits, 1>(threshold, s, for_each, rank, enough, 1, buffer,
                                         kIndexBits);
    return max(static_cast<uint32_t>(threshold.lower_bound >> kIndexBits), min_ordered_key<T>());
  }
};

#endif  // __CUDACC__

}  // namespace precast
