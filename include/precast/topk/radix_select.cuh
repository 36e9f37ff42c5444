// SPDX-License-Identifier: Apache-2.0
// Candidates of a row in shared memory, and the radix selection of the k largest.
//
// A candidate holds the ordered key of its element in the upper bits and its rank among equal
// elements in the lower ones. So all candidates differ, and the k largest are one definite set.
// Radix selection goes from the top digit down, 11 bits a level, over one list or over the lists of
// a cluster.
#pragma once

#include "precast/core/block.cuh"
#include "precast/core/sm90/cluster_memory.cuh"

namespace precast {

constexpr int kIndexBits = 20;
constexpr int kMaxColumns = 1 << kIndexBits;
constexpr int kDigitBits = 11;
constexpr int kNumBins = 1 << kDigitBits;
constexpr int kMaxCtasPerRow = 8;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kMaxCtasOfArch = 1;
#else
constexpr int kMaxCtasOfArch = kMaxCtasPerRow;
#endif
constexpr int kMinThreads = 512;

#if defined(__CUDACC__)

struct alignas(16) TopKStorage {
  uint32_t histogram[2][kNumBins];  // two buffers: other CTAs read one while the next is filled
  uint32_t warp_sums[kMaxWarps];
  uint32_t warp_max_counts[kMaxWarps];
  uint32_t append_counts[3];
  uint32_t digit;
  uint32_t above_count;  // candidates with larger digits
  uint32_t bin_count;    // candidates with this digit
  uint32_t num_kept;
  uint32_t max_key;
  uint32_t min_key;
  uint32_t base_offset;
  uint32_t num_forwarded;                   // candidates that other CTAs have sent to this CTA
  uint32_t cta_thresholds[kMaxCtasPerRow];  // one of each CTA, like the two below
  uint32_t cta_max_keys[kMaxCtasPerRow];
  uint32_t cta_counts[kMaxCtasPerRow];
};

// Returns an ordered key: larger elements have larger keys, -0.0 has the key of 0.0, and every NaN
// has the largest key.
template <int kBits>
__device__ __forceinline__ uint32_t ordered_key(uint32_t bits, uint32_t infinity) {
  constexpr uint32_t kSign = 1u << (kBits - 1);
  constexpr uint32_t kAll = kSign | (kSign - 1);
  const uint32_t magnitude = bits & (kSign - 1);
  const uint32_t key = bits & kSign ? ~bits & kAll : bits | kSign;
  return magnitude > infinity ? kAll : magnitude == 0 ? kSign : key;
}

template <typename T>
struct KeyTraits;
template <>
struct KeyTraits<f32> {
  using Word = uint32_t;
  static constexpr int kBits = 32;
  static constexpr uint32_t kInfinity = 0x7f800000u;
};
template <>
struct KeyTraits<f16> {
  using Word = unsigned short;
  static constexpr int kBits = 16;
  static constexpr uint32_t kInfinity = 0x7c00u;
};
template <>
struct KeyTraits<bf16> {
  using Word = unsigned short;
  static constexpr int kBits = 16;
  static constexpr uint32_t kInfinity = 0x7f80u;
};

template <typename T>
__device__ __forceinline__ uint32_t to_ordered_key(uint32_t bits) {
  if constexpr (KeyTraits<T>::kBits == 32) {
    const float x = __uint_as_float(bits) + 0.0f;  // turns -0.0 into 0.0
    const uint32_t sum = __float_as_uint(x);
    const uint32_t key = sum ^ (uint32_t(int32_t(sum) >> 31) | 0x80000000u);
    return x == x ? key : 0xffffffffu;
  } else {
    return ordered_key<KeyTraits<T>::kBits>(bits, KeyTraits<T>::kInfinity);
  }
}

// Returns the bits of the element that has this key.
template <typename T>
__device__ __forceinline__ uint32_t from_ordered_key(uint32_t key) {
  constexpr uint32_t kSign = 1u << (KeyTraits<T>::kBits - 1);
  return key & kSign ? key & (kSign - 1) : ~key & (kSign | (kSign - 1));
}

__device__ __forceinline__ uint64_t make_candidate(uint32_t key, uint32_t rank) {
  return uint64_t(key) << kIndexBits | rank;
}

constexpr uint32_t kOverflow = 1u << 24;

// The state of a radix selection. All CTAs together have `count` candidates at or above
// `lower_bound`. The k-th largest candidate is number `rank_in_bin` of those that equal
// `lower_bound` apart from the lowest `shift` bits.
struct RadixThreshold {
  uint64_t lower_bound;
  uint32_t count;
  uint32_t rank_in_bin;
  int shift;
};

template <int kKeyBits>
__device__ __forceinline__ RadixThreshold initial_threshold(uint32_t k) {
  return {0, 0, k, kKeyBits + kIndexBits};
}

// Finds, over the histograms of all CTAs, the bin with the candidate of the target rank. Sets
// bin_count to 0 if there are fewer candidates. kCtas bounds the number of CTAs. All threads call
// it.
template <int kCtas>
__device__ __forceinline__ void find_bin(TopKStorage& s, int buffer, int ctas,
                                         uint32_t target_rank) {
  constexpr int kMaxBinsPerThread = kNumBins / kMinThreads;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int bins_per_thread = kNumBins / blockDim.x;
  // and downwards
  const int first = kNumBins - 1 - static_cast<int>(threadIdx.x) * bins_per_thread;
  uint32_t counts[kMaxBinsPerThread], sum = 0;
#pragma unroll
  for (int i = 0; i < kMaxBinsPerThread; i += 2) {
    const uint32_t* bins = &s.histogram[buffer][first - i - 1];
    uint2 pairs[kCtas];
#pragma unroll
    for (int cta = 0; cta < kCtas; ++cta) {
      pairs[cta] = make_uint2(0, 0);
      if (i >= bins_per_thread || cta >= ctas) continue;
      pairs[cta] =
          kCtas == 1 ? *reinterpret_cast<const uint2*>(bins) : load_pair_from_cta(bins, cta);
    }
    counts[i] = counts[i + 1] = 0;
#pragma unroll
    for (int cta = 0; cta < kCtas; ++cta) {
      counts[i] += pairs[cta].y;
      counts[i + 1] += pairs[cta].x;
    }
    sum += counts[i] + counts[i + 1];
  }
  uint32_t prefix_sum = sum;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, prefix_sum, distance);
    if (lane >= distance) prefix_sum += other;
  }
  if (lane == kWarpSize - 1) s.warp_sums[warp] = prefix_sum;
  __syncthreads();
  prefix_sum += warp_sum(lane < warp ? s.warp_sums[lane] : 0u);
  uint32_t above = prefix_sum - sum;
  if (threadIdx.x == blockDim.x - 1 && prefix_sum < target_rank) s.bin_count = 0;
  if (above < target_rank && target_rank <= prefix_sum) {
    bool found = false;
#pragma unroll
    for (int i = 0; i < kMaxBinsPerThread; ++i) {
      if (found) continue;
      found = above + counts[i] >= target_rank;
      if (found) {
        s.digit = first - i;
        s.above_count = above;
        s.bin_count = counts[i];
      }
      above += counts[i];
    }
  }
  __syncthreads();
}

// Counts the candidates with a prefix by their next digit. Why it is no lambda: lambdas are not
// always inlined.
struct CountDigit {
  uint32_t* histogram;
  uint64_t prefix;
  int shift;
  int low;
  uint32_t mask;

  __device__ __forceinline__ void operator()(uint64_t x) const {
    if (x >> shift == prefix) atomicAdd(&histogram[uint32_t(x >> low) & mask], 1u);
  }
};

// Visits the candidates of a list.
struct ForEachInList {
  const uint64_t* list;
  uint32_t size;

  // Counts the candidates by their top digit.
  template <int kKeyBits>
  __device__ __forceinline__ void count_top_digit(uint32_t* histogram) const {
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) {
      atomicAdd(&histogram[list[i] >> (kKeyBits + kIndexBits - kDigitBits)], 1u);
    }
  }

  template <typename F>
  __device__ __forceinline__ void operator()(const F& f) const {
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) f(list[i]);
  }
};

// Continues a radix selection, which starts with initial_threshold<kKeyBits>(k), until at most
// `limit` candidates remain or only the lowest `stop_shift` bits are left. A count of 0 as the
// result means that there are fewer than k candidates, or that a CTA has added kOverflow to the top
// bin. for_each(f) calls f(candidate) for the candidates of the thread. `buffer` starts at 0 and
// alternates with each level of the kernel; the histogram of the current buffer must be zero, and
// that of the next is zero afterwards. All threads of the cluster call it.
template <int kKeyBits, int kCtas, typename ForEach>
__device__ __forceinline__ void radix_select(RadixThreshold& threshold, TopKStorage& s,
                                             const ForEach& for_each, uint32_t k, uint32_t limit,
                                             int ctas, int& buffer, int stop_shift = 0) {
#pragma unroll 1
  do {
    const int end = threshold.shift > kIndexBits ? kIndexBits : 0;
    const int low = threshold.shift - min(kDigitBits, threshold.shift - end);
    if (threshold.shift == kKeyBits + kIndexBits) {
      for_each.template count_top_digit<kKeyBits>(s.histogram[buffer]);
    } else {
      for_each(CountDigit{s.histogram[buffer], threshold.lower_bound >> threshold.shift,
                          threshold.shift, low, (1u << (threshold.shift - low)) - 1});
    }
    cluster_sync(kCtas == 1 ? 1 : ctas);
    // No CTA reads the other buffer any more.
#pragma unroll 1
    for (int i = threadIdx.x; i < kNumBins; i += blockDim.x) s.histogram[buffer ^ 1][i] = 0;
    find_bin<kCtas>(s, buffer, ctas, threshold.rank_in_bin);
    buffer ^= 1;
    if (s.bin_count == 0 || s.bin_count >= kOverflow) {
      threshold.count = 0;
      return;
    }
    threshold.shift = low;
    threshold.lower_bound |= uint64_t(s.digit) << low;
    threshold.rank_in_bin -= s.above_count;
    threshold.count = k - threshold.rank_in_bin + s.bin_count;
  } while (threshold.count > limit && threshold.shift > stop_shift);
}

// Appends the items of the lanes with `is_stored`. All lanes of a warp call it.
__device__ __forceinline__ void warp_append(uint64_t*& to, uint64_t x, bool is_stored) {
  const uint32_t stored_mask = __ballot_sync(0xffffffffu, is_stored);
  const uint32_t lanes_below = (1u << threadIdx.x % kWarpSize) - 1;
  if (is_stored) to[__popc(stored_mask & lanes_below)] = x;
  to += __popc(stored_mask);
}

// Moves the candidates at or above `lower_bound` to the front of the list, in any order, and
// returns their number. All threads call it.
__device__ __forceinline__ uint32_t compact(TopKStorage& s, uint64_t* list, uint32_t size,
                                            uint64_t lower_bound) {
  constexpr int kBatch = 4;
  const int lane = threadIdx.x % kWarpSize;
  __syncthreads();
  if (threadIdx.x == 0) s.num_kept = 0;
#pragma unroll 1
  for (uint32_t start = 0; start < size; start += kBatch * blockDim.x) {
    uint64_t x[kBatch];
    uint32_t kept_mask = 0;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint32_t at = start + i * blockDim.x + threadIdx.x;
      x[i] = at < size ? list[at] : 0;
      kept_mask |= uint32_t(x[i] >= lower_bound && at < size) << i;
    }
    // The stores below overwrite only items that all threads have read by now.
    __syncthreads();
    const uint32_t sum = warp_sum(static_cast<uint32_t>(__popc(kept_mask)));
    if (sum == 0) continue;
    uint32_t base = 0;
    if (lane == 0) base = atomicAdd(&s.num_kept, sum);
    uint64_t* to = list + __shfl_sync(0xffffffffu, base, 0);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) warp_append(to, x[i], kept_mask >> i & 1);
  }
  __syncthreads();
  return s.num_kept;
}

#endif  // __CUDACC__

}  // namespace precast
