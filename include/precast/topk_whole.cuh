// SPDX-License-Identifier: Apache-2.0
// Rows that the shared memory of their CTAs holds as a whole: what reaches a floor is gathered.
//
// Each thread cuts its elements into groups. The share-th largest of the groups' maxima of a CTA,
// share = k / CTAs, is found by radix selection; the smallest of these of all CTAs is the floor: k
// elements at least reach it, and of most rows not many more. Neighbouring vectors lie in different
// CTAs, so that CTAs see the same, whatever the order of a row.
#pragma once

#include "precast/topk_order.cuh"
#include "precast/topk_part.cuh"

namespace precast {

#if defined(__CUDACC__)

// A copy of 16 bytes to shared memory; the thread itself waits for all of its copies.
__device__ __forceinline__ void start_copy(void* target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(target)),
               "l"(source)
               : "memory");
}

__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// The larger ones, as words of elements; NaN if one is.
__device__ __forceinline__ uint32_t larger(f32, uint32_t a, uint32_t b) {
  uint32_t most;
  asm("max.NaN.f32 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
}
__device__ __forceinline__ uint32_t larger(f16, uint32_t a, uint32_t b) {
  uint32_t most;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
}
__device__ __forceinline__ uint32_t larger(bf16, uint32_t a, uint32_t b) {
  uint32_t most;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
}

template <typename T>
__device__ __forceinline__ uint32_t largest_word(const Vec<T>& v) {
  return larger(T(), larger(T(), v.bits.x, v.bits.y), larger(T(), v.bits.z, v.bits.w));
}

// The key of the largest element of a word.
template <typename T>
__device__ __forceinline__ uint32_t largest_key(uint32_t word) {
  if constexpr (sizeof(T) == 4) {
    return key_of<T>(word);
  } else {
    return max(key_of<T>(word & 0xffffu), key_of<T>(word >> 16));
  }
}

// Sets elements of a vector to -inf: all but `count` from `first` on.
template <typename T>
__device__ __forceinline__ void keep_some(Vec<T>* v, int first, int count) {
  using Word = typename Keys<T>::Word;
  Word* const items = reinterpret_cast<Word*>(v);
#pragma unroll
  for (int i = 0; i < Vec<T>::kSize; ++i) {
    if (i < first || i >= first + count) {
      items[i] = static_cast<Word>(1u << (Keys<T>::kBits - 1) | Keys<T>::kInfinity);
    }
  }
}

// A CTA's vectors of a row in shared memory, each at the place of its thread.
template <typename T>
struct WholePart {
  const TopKParams& p;
  const Window<T>& window;
  ListShared& s;
  Vec<T>* own;  // the thread's first, blockDim.x to the next
  int mine;     // how many
  int first;    // numbers in the window
  int step;

  __device__ __forceinline__ WholePart(const TopKParams& params, const Window<T>& of,
                                       ListShared& shared, Vec<T>* data, int ctas)
      : p(params), window(of), s(shared), own(data + threadIdx.x) {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    first = (warp * ctas + static_cast<int>(cluster_rank())) * kWarpSize + lane;
    step = ctas * static_cast<int>(blockDim.x);
    mine = first < window.vecs ? (window.vecs - first + step - 1) / step : 0;
  }

  __device__ __forceinline__ void start() const {
    for (int i = 0; i < mine; ++i) {
      start_copy(own + i * blockDim.x,
                 window.base + int64_t(first + i * step) * Vec<T>::kSize);
    }
  }

  // Waits, and puts -inf in place of elements outside the window.
  __device__ __forceinline__ void finish() const {
    constexpr int kEach = Vec<T>::kSize;
    wait_for_copies();
    if (mine == 0) return;
    const int last = window.vecs - 1;
    const int end = window.lead + window.length - last * kEach;  // in the last vector
    if (first == 0 && window.lead > 0) keep_some(own, window.lead, kEach);
    if (end < kEach && first + (mine - 1) * step == last) {
      keep_some(own + (mine - 1) * blockDim.x, last == 0 ? window.lead : 0,
                last == 0 ? window.length : end);
    }
  }

  // Calls f with the key of the largest of each group.
  template <typename F>
  __device__ __forceinline__ void each_group(const F& f) const {
    for (int i = 0; i < mine;) {
      uint32_t word = largest_word<T>(own[i * blockDim.x]);
      const int end = min(i + p.group, mine);
      for (++i; i < end; ++i) word = larger(T(), word, largest_word<T>(own[i * blockDim.x]));
      f(largest_key<T>(word));
    }
  }

  // Bits of the thread's elements that reach `floor`, tile for tile.
  __device__ __forceinline__ uint64_t reaching_floor(uint32_t floor) const {
    constexpr int kVecs = Tile<T>::kVecs;
    constexpr int kEach = Vec<T>::kSize;
    uint64_t mask = 0;
    for (int i = 0; i < mine; i += kVecs) {
      Tile<T> x;
#pragma unroll
      for (int j = 0; j < kVecs; ++j) x.vecs[j] = own[min(i + j, mine - 1) * blockDim.x];
      uint32_t bits = reaching<T>(x, floor);
      bits &= i + kVecs <= mine ? (1u << kItems) - 1 : (1u << (mine - i) * kEach) - 1;
      mask |= uint64_t(bits) << i * kEach;
    }
    // Why again: -inf may reach the floor.
    const int last = window.vecs - 1;
    if (first == 0) mask &= ~uint64_t(0) << window.lead;
    if (mine > 0 && first + (mine - 1) * step == last) {
      const int after = (last + 1) * kEach - window.lead - window.length;
      mask &= ~uint64_t(0) >> (64 - mine * kEach + after);
    }
    return mask;
  }

  // The i-th of the thread's elements as a candidate.
  __device__ __forceinline__ uint64_t candidate(int i) const {
    constexpr int kEach = Vec<T>::kSize;
    using Word = typename Keys<T>::Word;
    const int place = (first + i / kEach * step) * kEach + i % kEach - window.lead;
    const Word item = reinterpret_cast<const Word*>(own + i / kEach * blockDim.x)[i % kEach];
    return candidate_of(key_of<T>(item), p.last_first ? place : kMaxPlaces - 1 - place);
  }
};

// Counts groups by the digit on top, and finds the largest key.
struct CountTop {
  uint32_t* histogram;
  int shift;
  uint32_t& most;

  __device__ __forceinline__ void operator()(uint32_t key) const {
    most = max(most, key);
    atomicAdd(&histogram[key >> shift], 1u);
  }
};

// Groups as candidates, for go_on().
template <typename T>
struct EachGroup {
  const WholePart<T>& part;
  uint32_t& most;

  template <int kKeyBits>
  __device__ __forceinline__ void count_top(uint32_t* histogram) const {
    part.each_group(CountTop{histogram, kKeyBits - kDigitBits, most});
    const uint32_t all = __reduce_max_sync(0xffffffffu, most);
    if (threadIdx.x % kWarpSize == 0) atomicMax(&part.s.highest, all);
  }

  template <typename F>
  struct OfKey {
    const F& f;
    __device__ __forceinline__ void operator()(uint32_t key) const { f(candidate_of(key, 0)); }
  };
  template <typename F>
  __device__ __forceinline__ void operator()(const F& f) const {
    part.each_group(OfKey<F>{f});
  }
};

// All threads of the cluster: gathers what reaches the floor in the list of the first CTA. How many
// that is; where there is no room for so many, nothing is gathered. `turn` as in go_on().
template <typename T>
__device__ __forceinline__ uint32_t gather_whole(const WholePart<T>& part, uint64_t* list, int ctas,
                                                 Binning& bin, int& turn) {
  constexpr int kKeyBits = Keys<T>::kBits;
  const TopKParams& p = part.p;
  ListShared& s = part.s;
  const int lane = threadIdx.x % kWarpSize, rank = cluster_rank();
  const uint32_t share = (p.k + ctas - 1) / ctas;
  uint32_t most = 0;
  Cut cut = uncut<kKeyBits>(share);
  go_on<kKeyBits, 1>(cut, s, EachGroup<T>{part, most}, share, p.enough, 1, turn, kPlaceBits);
  uint32_t floor = cut.count == 0 ? 0 : static_cast<uint32_t>(cut.edge >> kPlaceBits);
  uint32_t highest = s.highest;
  if (ctas > 1) {
    cluster_wait();  // all have started
    if (threadIdx.x < ctas) {
      store_in_cta(&s.floors[rank], threadIdx.x, floor);
      store_in_cta(&s.mosts[rank], threadIdx.x, highest);
    }
    cluster_barrier(ctas);
    floor = __reduce_min_sync(0xffffffffu, s.floors[lane % ctas]);
    highest = __reduce_max_sync(0xffffffffu, s.mosts[lane % ctas]);
  }
  floor = max(floor, lowest_key<T>());
  bin = binning_of(highest << (32 - kKeyBits) | ((uint64_t(1) << (32 - kKeyBits)) - 1),
                   floor << (32 - kKeyBits), kKeyBits + kPlaceBits);
  uint64_t mask = 0;
  if (most >= floor) mask = part.reaching_floor(floor);
  const uint32_t held = __popcll(mask);
  uint32_t up_to = held;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, up_to, distance);
    if (lane >= distance) up_to += other;
  }
  uint32_t base = 0;
  if (lane == kWarpSize - 1 && up_to != 0) base = atomicAdd(&s.gathered, up_to);
  base = __shfl_sync(0xffffffffu, base, kWarpSize - 1) + up_to - held;
  __syncthreads();
  uint32_t total = s.gathered;
  if (ctas > 1) {
    if (threadIdx.x < ctas) store_in_cta(&s.counts[rank], threadIdx.x, total);
    cluster_barrier(ctas);
    const uint32_t count = lane < ctas ? s.counts[lane] : 0;
    total = warp_sum(count);
    base += warp_sum(lane < rank ? count : 0u);
  }
  if (total <= uint32_t(p.whole_room)) {
    for (; mask != 0; mask &= mask - 1) {
      store_in_cta(list + base++, 0, part.candidate(__ffsll(mask) - 1));
    }
  }
  cluster_barrier(ctas);
  return total;
}

#endif  // __CUDACC__

}  // namespace precast
