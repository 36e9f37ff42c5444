// SPDX-License-Identifier: Apache-2.0
// Top-k of rows that fit in the shared memory of their CTAs.
//
// Each thread divides its elements into groups. Radix selection finds, in each CTA, the share-th
// largest of the group maxima, share = k / CTAs. The smallest of these over the CTAs is the
// threshold: at least k elements reach it, and in most rows not many more do. Neighbouring vectors
// lie in different CTAs, so that all CTAs see similar elements whatever the order of the row.
//
// Measured 2026-11-21 on an H200, f32, rows of 128256: 1 row with k 50 takes 6.8 us, and 15.0 us
// when streamed; 28 rows with k 2048 13.4 and 15.7. 1024 threads took up to 0.9 us more than 512.
#pragma once

#include "precast/core/cp_async.cuh"
#include "precast/core/shared_address.cuh"
#include "precast/topk/bucket_sort.cuh"
#include "precast/topk/streaming.cuh"

namespace precast {

constexpr int kResidentThreads = 512;  // of a CTA
constexpr int kMaxItemsOfThread = 64;  // one bit of a mask each

#if defined(__CUDACC__)

// Element-wise maxima of packed words; NaN if either element is NaN.
__device__ __forceinline__ uint32_t max_words(f32, uint32_t a, uint32_t b) {
  uint32_t result;
  asm("max.NaN.f32 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
__device__ __forceinline__ uint32_t max_words(f16, uint32_t a, uint32_t b) {
  uint32_t result;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
__device__ __forceinline__ uint32_t max_words(bf16, uint32_t a, uint32_t b) {
  uint32_t result;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

template <typename T>
__device__ __forceinline__ uint32_t max_word(const Vec<T>& v) {
  return max_words(T(), max_words(T(), v.bits.x, v.bits.y), max_words(T(), v.bits.z, v.bits.w));
}

// Returns the key of the largest element of a word.
template <typename T>
__device__ __forceinline__ uint32_t max_key_of_word(uint32_t word) {
  if constexpr (sizeof(T) == 4) {
    return to_ordered_key<T>(word);
  } else {
    return max(to_ordered_key<T>(word & 0xffffu), to_ordered_key<T>(word >> 16));
  }
}

// Replaces the elements whose bit is not set by -inf.
template <typename T>
__device__ __forceinline__ Vec<T> mask_items(const Vec<T>& v, uint32_t bits) {
  constexpr uint32_t kLowest = 1u << (KeyTraits<T>::kBits - 1) | KeyTraits<T>::kInfinity;
  uint32_t words[4] = {v.bits.x, v.bits.y, v.bits.z, v.bits.w};
#pragma unroll
  for (int i = 0; i < Vec<T>::kSize; ++i) {
    constexpr int kWordItems = Vec<T>::kSize / 4;
    constexpr uint32_t kItemMask = kWordItems == 1 ? 0xffffffffu : 0xffffu;
    const int shift = i % kWordItems * 16;
    if (!(bits >> i & 1)) {
      words[i / kWordItems] = (words[i / kWordItems] & ~(kItemMask << shift)) | kLowest << shift;
    }
  }
  return {make_uint4(words[0], words[1], words[2], words[3])};
}

// A CTA's vectors of a row in shared memory. Each thread owns every blockDim.x-th vector.
template <typename T>
struct ResidentPart {
  static constexpr int kVecSize = Vec<T>::kSize;

  const TopKParams& p;
  const Window<T>& window;
  TopKStorage& s;
  Vec<T>* thread_vecs;  // the thread's first vector
  int num_thread_vecs;
  int first_vec;  // index in the window
  int vec_stride;

  __device__ __forceinline__ ResidentPart(const TopKParams& params, const Window<T>& row_window,
                                          TopKStorage& shared, Vec<T>* data, int ctas)
      : p(params), window(row_window), s(shared), thread_vecs(data + threadIdx.x) {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    first_vec = (warp * ctas + static_cast<int>(cluster_rank())) * kWarpSize + lane;
    vec_stride = ctas * static_cast<int>(blockDim.x);
    num_thread_vecs = first_vec < window.num_vecs
                          ? (window.num_vecs - first_vec + vec_stride - 1) / vec_stride
                          : 0;
  }

  __device__ __forceinline__ Vec<T>& vec(int i) const {
    return thread_vecs[i * static_cast<int>(blockDim.x)];
  }

  __device__ __forceinline__ void start_load() const {
    const T* const source = window.base + int64_t(first_vec) * kVecSize;
#pragma unroll 4
    for (int i = 0; i < num_thread_vecs; ++i) {
      if (first_vec + i * vec_stride < window.full_vecs) {
        cp_async(shared_address(&vec(i)), source + int64_t(i) * vec_stride * kVecSize);
      } else {
        vec(i) = window.load_tail();
      }
    }
  }

  // Returns a mask of the thread's elements that lie in the window.
  __device__ __forceinline__ uint64_t valid_mask() const {
    if (num_thread_vecs == 0) return 0;
    int unused_bits = 64 - num_thread_vecs * kVecSize;
    if (first_vec + (num_thread_vecs - 1) * vec_stride == window.num_vecs - 1) {
      unused_bits += window.num_vecs * kVecSize - window.lead_items - window.length;
    }
    const uint64_t bits = ~uint64_t(0) >> unused_bits;
    return first_vec == 0 ? bits & ~uint64_t(0) << window.lead_items : bits;
  }

  // Waits for the copies, and replaces elements outside of the window by -inf. Only the first and
  // the last vector may have such elements.
  __device__ __forceinline__ void finish_load() const {
    constexpr uint32_t kAllBits = (1u << kVecSize) - 1;
    cp_async_wait_all();
    if (num_thread_vecs == 0) return;
    const uint64_t bits = valid_mask();
    const uint32_t first_bits = bits & kAllBits,
                   last_bits = bits >> (num_thread_vecs - 1) * kVecSize & kAllBits;
    if (first_bits != kAllBits) vec(0) = mask_items(vec(0), first_bits);
    if (last_bits != kAllBits) {
      vec(num_thread_vecs - 1) = mask_items(vec(num_thread_vecs - 1), last_bits);
    }
  }

  // Calls f with the key of the largest element of each group.
  template <typename F>
  __device__ __forceinline__ void for_each_group(const F& f) const {
#pragma unroll 1
    for (int i = 0; i < num_thread_vecs;) {
      const int end = min(i + p.vecs_per_group, num_thread_vecs);
      uint32_t word = max_word<T>(vec(i));
#pragma unroll 4
      for (++i; i < end; ++i) word = max_words(T(), word, max_word<T>(vec(i)));
      f(max_key_of_word<T>(word));
    }
  }

  // Returns a mask of the thread's elements at or above the threshold.
  __device__ __forceinline__ uint64_t at_least_threshold(uint32_t threshold_key) const {
    const float bound = comparison_bound<T>(threshold_key);
    uint64_t mask = 0;
#pragma unroll 4
    for (int i = num_thread_vecs - 1; i >= 0; --i) {
      const Vec<T> v = vec(i);
      uint32_t below_mask = 0;
#pragma unroll
      for (int j = kVecSize - 1; j >= 0; --j) {
        const float difference = to_number(T(), item_bits(v, j)) - bound;
        below_mask = __funnelshift_l(__float_as_uint(difference), below_mask, 1);  // the sign bit
      }
      mask = mask << kVecSize | (~below_mask & ((1u << kVecSize) - 1));
    }
    return mask & valid_mask();  // -inf outside of the window may reach the threshold
  }

  // Returns the thread's i-th element as a candidate.
  __device__ __forceinline__ uint64_t candidate(int i) const {
    const auto* const items =
        reinterpret_cast<const typename KeyTraits<T>::Word*>(&vec(i / kVecSize));
    const int index =
        (first_vec + i / kVecSize * vec_stride) * kVecSize + i % kVecSize - window.lead_items;
    return make_candidate(to_ordered_key<T>(items[i % kVecSize]),
                          p.prefer_last ? index : kMaxColumns - 1 - index);
  }

  // Calls f with the candidate of each set bit.
  template <typename F>
  __device__ __forceinline__ void for_each_candidate(uint64_t mask, const F& f) const {
#pragma unroll 1
    for (; mask != 0; mask &= mask - 1) f(candidate(__ffsll(mask) - 1));
  }

  // Clears the bits of candidates below `lower_bound`.
  __device__ __forceinline__ uint64_t drop_below(uint64_t mask, uint64_t lower_bound) const {
    uint64_t kept = 0;
#pragma unroll 1
    for (; mask != 0; mask &= mask - 1) {
      if (candidate(__ffsll(mask) - 1) >= lower_bound) kept |= mask & -mask;
    }
    return kept;
  }
};

// Stores candidates one after the other to the list of the first CTA.
struct StoreToFirstCta {
  uint64_t*& to;

  __device__ __forceinline__ void operator()(uint64_t x) const { store_in_cta(to++, 0, x); }
};

// Counts groups by their top digit, and finds the thread's largest key.
struct CountTopDigit {
  uint32_t* histogram;
  int shift;
  uint32_t& thread_max;

  __device__ __forceinline__ void operator()(uint32_t key) const {
    thread_max = max(thread_max, key);
    atomicAdd(&histogram[key >> shift], 1u);
  }
};

// Visits the groups as candidates, for radix_select().
template <typename T>
struct ForEachGroup {
  const ResidentPart<T>& part;
  uint32_t& thread_max;

  template <int kKeyBits>
  __device__ __forceinline__ void count_top_digit(uint32_t* histogram) const {
    part.for_each_group(CountTopDigit{histogram, kKeyBits - kDigitBits, thread_max});
    const uint32_t warp_max = __reduce_max_sync(0xffffffffu, thread_max);
    if (threadIdx.x % kWarpSize == 0) atomicMax(&part.s.max_key, warp_max);
  }

  template <typename F>
  struct OfKey {
    const F& f;
    __device__ __forceinline__ void operator()(uint32_t key) const { f(make_candidate(key, 0)); }
  };
  template <typename F>
  __device__ __forceinline__ void operator()(const F& f) const {
    part.for_each_group(OfKey<F>{f});
  }
};

// Visits the elements of a mask as candidates, for radix_select().
template <typename T>
struct ForEachAtLeast {
  const ResidentPart<T>& part;
  uint64_t mask;

  template <int kKeyBits>
  __device__ __forceinline__ void count_top_digit(uint32_t* histogram) const {
    constexpr int kShift = kKeyBits + kIndexBits - kDigitBits;
    (*this)(CountDigit{histogram, 0, kKeyBits + kIndexBits, kShift, kNumBins - 1});
  }

  template <typename F>
  __device__ __forceinline__ void operator()(const F& f) const {
    part.for_each_candidate(mask, f);
  }
};

// Returns the smallest threshold of all CTAs, and the largest key of the row.
template <typename T>
__device__ __forceinline__ uint2 find_threshold(const ResidentPart<T>& part, int ctas,
                                                uint32_t& thread_max, int& buffer) {
  constexpr int kKeyBits = KeyTraits<T>::kBits;
  TopKStorage& s = part.s;
  const uint32_t share = (part.p.k + ctas - 1) / ctas;
  RadixThreshold threshold = initial_threshold<kKeyBits>(share);
  radix_select<kKeyBits, 1>(threshold, s, ForEachGroup<T>{part, thread_max}, share,
                            part.p.enough_groups, 1, buffer, kIndexBits);
  uint32_t threshold_key =
      threshold.count == 0 ? 0 : static_cast<uint32_t>(threshold.lower_bound >> kIndexBits);
  uint32_t max_key = s.max_key;
  if (ctas > 1) {
    cluster_wait();  // all CTAs have started
    if (threadIdx.x < ctas) {
      store_in_cta(&s.cta_thresholds[cluster_rank()], threadIdx.x, threshold_key);
      store_in_cta(&s.cta_max_keys[cluster_rank()], threadIdx.x, max_key);
    }
    cluster_sync(ctas);
    const int rank = threadIdx.x % ctas;
    threshold_key = __reduce_min_sync(0xffffffffu, s.cta_thresholds[rank]);
    max_key = __reduce_max_sync(0xffffffffu, s.cta_max_keys[rank]);
  }
  return make_uint2(max(threshold_key, min_ordered_key<T>()), max_key);
}

// Returns the number of bits in the masks of all threads, and in `before` the number of those
// before this thread's. All threads of the cluster call it.
__device__ __forceinline__ uint32_t count_and_scan_cluster(TopKStorage& s, uint64_t mask, int ctas,
                                                           uint32_t& before) {
  const int lane = threadIdx.x % kWarpSize, rank = cluster_rank();
  const uint32_t count = __popcll(mask);
  uint32_t prefix_sum = count;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, prefix_sum, distance);
    if (lane >= distance) prefix_sum += other;
  }
  uint32_t base = 0;
  if (lane == kWarpSize - 1 && prefix_sum != 0) base = atomicAdd(&s.num_kept, prefix_sum);
  before = __shfl_sync(0xffffffffu, base, kWarpSize - 1) + prefix_sum - count;
  __syncthreads();
  const uint32_t total = s.num_kept;
  if (ctas == 1) return total;
  if (threadIdx.x < ctas) store_in_cta(&s.cta_counts[rank], threadIdx.x, total);
  cluster_sync(ctas);
  const uint32_t cta_count = lane < ctas ? s.cta_counts[lane] : 0;
  before += warp_sum(lane < rank ? cta_count : 0u);
  return warp_sum(cta_count);
}

// Gathers what may be among the k largest in the list of the first CTA, and returns how many
// candidates these are. Sets `bin_map` for their range; `buffer` as in radix_select(). All threads
// of the cluster call it.
template <typename T>
__device__ __forceinline__ uint32_t gather_candidates(const ResidentPart<T>& part, uint64_t* list,
                                                      int ctas, BinMap& bin_map, int& buffer) {
  constexpr int kKeyBits = KeyTraits<T>::kBits;
  TopKStorage& s = part.s;
  const uint32_t capacity = part.p.list_capacity;
  uint32_t thread_max = 0, before;
  const uint2 bounds = find_threshold(part, ctas, thread_max, buffer);
  uint32_t threshold_key = bounds.x;
  uint64_t mask = thread_max >= threshold_key ? part.at_least_threshold(threshold_key) : 0;
  uint32_t total = count_and_scan_cluster(s, mask, ctas, before);
  if (total > capacity) {
    align_buffers(s, buffer);
    __syncthreads();  // all threads have read num_kept
    if (threadIdx.x == 0) s.num_kept = 0;
    RadixThreshold threshold = initial_threshold<kKeyBits>(part.p.k);
    radix_select<kKeyBits, kMaxCtasOfArch>(threshold, s, ForEachAtLeast<T>{part, mask}, part.p.k,
                                           capacity, ctas, buffer);
    threshold_key = static_cast<uint32_t>(threshold.lower_bound >> kIndexBits);
    mask = part.drop_below(mask, threshold.lower_bound);
    total = count_and_scan_cluster(s, mask, ctas, before);
  }
  constexpr uint32_t kLowBits = kKeyBits == 32 ? 0 : (1u << (32 - kKeyBits) % 32) - 1;
  bin_map = make_bin_map(bounds.y << (32 - kKeyBits) | kLowBits, threshold_key << (32 - kKeyBits),
                         kKeyBits + kIndexBits);
  uint64_t* to = list + before;
  part.for_each_candidate(mask, StoreToFirstCta{to});
  cluster_sync(ctas);
  return total;
}

#endif  // __CUDACC__

}  // namespace precast
