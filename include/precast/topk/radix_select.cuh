// SPDX-License-Identifier: Apache-2.0
// A list of candidates in shared memory, and what finds the largest of them.
//
// A candidate is its element's ordered key over its rank among equal ones: all differ, so the k
// largest are one set. They are cut by radix selection from the top, 11 bits a level, over one list
// or the lists of a cluster.
#pragma once

#include "precast/core/block.cuh"
#include "precast/core/sm90/cluster_memory.cuh"

namespace precast {

constexpr int kPlaceBits = 20;
constexpr int kMaxPlaces = 1 << kPlaceBits;
constexpr int kDigitBits = 11;
constexpr int kBins = 1 << kDigitBits;
constexpr int kMostCtas = 8;  // of a row
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kMostCtasOfArch = 1;
#else
constexpr int kMostCtasOfArch = kMostCtas;
#endif
constexpr int kLeastThreads = 512;

#if defined(__CUDACC__)

struct alignas(16) ListShared {
  uint32_t histogram[2][kBins];  // in turn: other CTAs read one while the next is filled
  uint32_t warp_sums[kMaxWarps];
  uint32_t warp_most[kMaxWarps];
  uint32_t added[3];
  uint32_t digit;
  uint32_t above;  // candidates of larger digits
  uint32_t held;   // of the digit
  uint32_t kept;
  uint32_t highest;
  uint32_t lowest;
  uint32_t base;
  uint32_t forwarded;          // to this CTA
  uint32_t floors[kMostCtas];  // of all CTAs
  uint32_t mosts[kMostCtas];
  uint32_t counts[kMostCtas];
};

// Ordered keys of a type: larger elements have larger keys, -0.0 that of 0.0, all NaN the largest.
template <int kBits>
__device__ __forceinline__ uint32_t ordered_key(uint32_t bits, uint32_t infinity) {
  constexpr uint32_t kSign = 1u << (kBits - 1);
  constexpr uint32_t kAll = kSign | (kSign - 1);
  const uint32_t magnitude = bits & (kSign - 1);
  const uint32_t key = bits & kSign ? ~bits & kAll : bits | kSign;
  return magnitude > infinity ? kAll : magnitude == 0 ? kSign : key;
}

template <typename T>
struct Keys;
template <>
struct Keys<f32> {
  using Word = uint32_t;
  static constexpr int kBits = 32;
  static constexpr uint32_t kInfinity = 0x7f800000u;
};
template <>
struct Keys<f16> {
  using Word = unsigned short;
  static constexpr int kBits = 16;
  static constexpr uint32_t kInfinity = 0x7c00u;
};
template <>
struct Keys<bf16> {
  using Word = unsigned short;
  static constexpr int kBits = 16;
  static constexpr uint32_t kInfinity = 0x7f80u;
};

template <typename T>
__device__ __forceinline__ uint32_t key_of(uint32_t bits) {
  if constexpr (Keys<T>::kBits == 32) {
    const float x = __uint_as_float(bits) + 0.0f;  // of -0.0: 0.0
    const uint32_t sum = __float_as_uint(x);
    const uint32_t key = sum ^ (uint32_t(int32_t(sum) >> 31) | 0x80000000u);
    return x == x ? key : 0xffffffffu;
  } else {
    return ordered_key<Keys<T>::kBits>(bits, Keys<T>::kInfinity);
  }
}

// The bits of the element that has this key.
template <typename T>
__device__ __forceinline__ uint32_t bits_of(uint32_t key) {
  constexpr uint32_t kSign = 1u << (Keys<T>::kBits - 1);
  return key & kSign ? key & (kSign - 1) : ~key & (kSign | (kSign - 1));
}

__device__ __forceinline__ uint64_t candidate_of(uint32_t key, uint32_t rank) {
  return uint64_t(key) << kPlaceBits | rank;
}

constexpr uint32_t kSpoilt = 1u << 24;

// Candidates from `edge` up, `count` of them in all CTAs; the k-th largest is the need-th of those
// that equal the edge but for the lowest `shift` bits.
struct Cut {
  uint64_t edge;
  uint32_t count;
  uint32_t need;
  int shift;
};

template <int kKeyBits>
__device__ __forceinline__ Cut uncut(uint32_t k) {
  return {0, 0, k, kKeyBits + kPlaceBits};
}

// All threads: finds among the bins of all CTAs, at most kCtas, the one that holds the need-th
// largest, or that there are not so many.
template <int kCtas>
__device__ __forceinline__ void find_bin(ListShared& s, int turn, int ctas, uint32_t need) {
  constexpr int kMostEach = kBins / kLeastThreads;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int each = kBins / blockDim.x;
  const int first = kBins - 1 - static_cast<int>(threadIdx.x) * each;  // and down
  uint32_t held[kMostEach], sum = 0;
#pragma unroll
  for (int i = 0; i < kMostEach; i += 2) {
    const uint32_t* bins = &s.histogram[turn][first - i - 1];
    uint2 pairs[kCtas];
#pragma unroll
    for (int rank = 0; rank < kCtas; ++rank) {
      pairs[rank] = make_uint2(0, 0);
      if (i >= each || rank >= ctas) continue;
      pairs[rank] =
          kCtas == 1 ? *reinterpret_cast<const uint2*>(bins) : load_pair_from_cta(bins, rank);
    }
    held[i] = held[i + 1] = 0;
#pragma unroll
    for (int rank = 0; rank < kCtas; ++rank) {
      held[i] += pairs[rank].y;
      held[i + 1] += pairs[rank].x;
    }
    sum += held[i] + held[i + 1];
  }
  uint32_t up_to = sum;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, up_to, distance);
    if (lane >= distance) up_to += other;
  }
  if (lane == kWarpSize - 1) s.warp_sums[warp] = up_to;
  __syncthreads();
  up_to += warp_sum(lane < warp ? s.warp_sums[lane] : 0u);
  uint32_t above = up_to - sum;
  if (threadIdx.x == blockDim.x - 1 && up_to < need) s.held = 0;
  if (above < need && need <= up_to) {
    bool found = false;
#pragma unroll
    for (int i = 0; i < kMostEach; ++i) {
      if (found) continue;
      found = above + held[i] >= need;
      if (found) {
        s.digit = first - i;
        s.above = above;
        s.held = held[i];
      }
      above += held[i];
    }
  }
  __syncthreads();
}

// Counts candidates by a digit, those of a prefix. Why no lambda: those are not always inlined.
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

// The candidates of a list.
struct EachOfList {
  const uint64_t* list;
  uint32_t size;

  // Counts them by the digit on top.
  template <int kKeyBits>
  __device__ __forceinline__ void count_top(uint32_t* histogram) const {
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) {
      atomicAdd(&histogram[list[i] >> (kKeyBits + kPlaceBits - kDigitBits)], 1u);
    }
  }

  template <typename F>
  __device__ __forceinline__ void operator()(const F& f) const {
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) f(list[i]);
  }
};

// All threads of the cluster: goes on from `cut`, or uncut<kKeyBits>(k), to the k largest and up to
// limit - k more. A count of 0: there are fewer than k, or a CTA has added kSpoilt to the bin on
// top. each(f) calls f(candidate) for those of the thread. `turn` starts at 0 and goes on with each
// level of the kernel; the histogram of that turn is all zero, and after it that of the next. Goes
// no further than to the digits above the lowest `stop` bits.
template <int kKeyBits, int kCtas, typename Each>
__device__ __forceinline__ void go_on(Cut& cut, ListShared& s, const Each& each, uint32_t k,
                                      uint32_t limit, int ctas, int& turn, int stop = 0) {
#pragma unroll 1
  do {
    const int end = cut.shift > kPlaceBits ? kPlaceBits : 0;
    const int low = cut.shift - min(kDigitBits, cut.shift - end);
    if (cut.shift == kKeyBits + kPlaceBits) {
      each.template count_top<kKeyBits>(s.histogram[turn]);
    } else {
      each(CountDigit{s.histogram[turn], cut.edge >> cut.shift, cut.shift, low,
                      (1u << (cut.shift - low)) - 1});
    }
    cluster_barrier(kCtas == 1 ? 1 : ctas);
    // Nobody reads the other one any more.
#pragma unroll 1
    for (int i = threadIdx.x; i < kBins; i += blockDim.x) s.histogram[turn ^ 1][i] = 0;
    find_bin<kCtas>(s, turn, ctas, cut.need);
    turn ^= 1;
    if (s.held == 0 || s.held >= kSpoilt) {
      cut.count = 0;
      return;
    }
    cut.shift = low;
    cut.edge |= uint64_t(s.digit) << low;
    cut.need -= s.above;
    cut.count = k - cut.need + s.held;
  } while (cut.count > limit && cut.shift > stop);
}

// All lanes: those with `mine` store theirs one behind the other.
__device__ __forceinline__ void append(uint64_t*& to, uint64_t x, bool mine) {
  const uint32_t all = __ballot_sync(0xffffffffu, mine);
  const uint32_t below = (1u << threadIdx.x % kWarpSize) - 1;
  if (mine) to[__popc(all & below)] = x;
  to += __popc(all);
}

// All threads: moves what is not below `edge` to the front, in any order. How many that is.
__device__ __forceinline__ uint32_t compact(ListShared& s, uint64_t* list, uint32_t size,
                                            uint64_t edge) {
  constexpr int kBatch = 4;
  const int lane = threadIdx.x % kWarpSize;
  __syncthreads();
  if (threadIdx.x == 0) s.kept = 0;
#pragma unroll 1
  for (uint32_t start = 0; start < size; start += kBatch * blockDim.x) {
    uint64_t x[kBatch];
    uint32_t mine = 0;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint32_t at = start + i * blockDim.x + threadIdx.x;
      x[i] = at < size ? list[at] : 0;
      mine |= uint32_t(x[i] >= edge && at < size) << i;
    }
    // All have read what is written below: at most as many as were read.
    __syncthreads();
    const uint32_t sum = warp_sum(static_cast<uint32_t>(__popc(mine)));
    if (sum == 0) continue;
    uint32_t base = 0;
    if (lane == 0) base = atomicAdd(&s.kept, sum);
    uint64_t* to = list + __shfl_sync(0xffffffffu, base, 0);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) append(to, x[i], mine >> i & 1);
  }
  __syncthreads();
  return s.kept;
}

#endif  // __CUDACC__

}  // namespace precast
