// SPDX-License-Identifier: Apache-2.0
// Rows that the shared memory of their CTAs holds as a whole: what reaches a floor is gathered.
//
// Each thread cuts its elements into groups. The share-th largest of the groups' maxima of a CTA,
// share = k / CTAs, is found by radix selection; the smallest of these of all CTAs is the floor: k
// elements at least reach it, and of most rows not many more. Neighbouring vectors lie in different
// CTAs, so that CTAs see the same, whatever the order of a row.
//
// Measured 2026-11-21 on an H200, f32, rows of 128256: 1 with k 50 takes 6.8 us, and 15.0 in tiles;
// 28 with k 2048 13.4 and 15.7. 1024 threads took up to 0.9 us more than 512.
#pragma once

#include "precast/core/cp_async.cuh"
#include "precast/core/shared_address.cuh"
#include "precast/topk/bucket_sort.cuh"
#include "precast/topk/streaming.cuh"

namespace precast {

constexpr int kWholeThreads = 512;  // of a CTA
constexpr int kMostOfThread = 64;   // elements: a bit each

#if defined(__CUDACC__)

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

// A vector with -inf in place of elements whose bit is not set.
template <typename T>
__device__ __forceinline__ Vec<T> only(const Vec<T>& v, uint32_t bits) {
  constexpr uint32_t kLowest = 1u << (Keys<T>::kBits - 1) | Keys<T>::kInfinity;
  uint32_t words[4] = {v.bits.x, v.bits.y, v.bits.z, v.bits.w};
#pragma unroll
  for (int i = 0; i < Vec<T>::kSize; ++i) {
    constexpr int kEach = Vec<T>::kSize / 4;  // of a word
    constexpr uint32_t kItem = kEach == 1 ? 0xffffffffu : 0xffffu;
    const int at = i % kEach * 16;
    if (!(bits >> i & 1)) words[i / kEach] = (words[i / kEach] & ~(kItem << at)) | kLowest << at;
  }
  return {make_uint4(words[0], words[1], words[2], words[3])};
}

// A CTA's vectors of a row in shared memory, each at the place of its thread.
template <typename T>
struct WholePart {
  static constexpr int kEach = Vec<T>::kSize;

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

  __device__ __forceinline__ Vec<T>& vec(int i) const {
    return own[i * static_cast<int>(blockDim.x)];
  }

  __device__ __forceinline__ void start() const {
    const T* const source = window.base + int64_t(first) * kEach;
#pragma unroll 4
    for (int i = 0; i < mine; ++i) {
      if (first + i * step < window.full) {
        copy_async(shared_address(&vec(i)), source + int64_t(i) * step * kEach);
      } else {
        vec(i) = window.load_rest();
      }
    }
  }

  // Which of the thread's elements lie in the window, a bit each.
  __device__ __forceinline__ uint64_t present() const {
    if (mine == 0) return 0;
    int behind = 64 - mine * kEach;
    if (first + (mine - 1) * step == window.vecs - 1) {
      behind += window.vecs * kEach - window.lead - window.length;
    }
    const uint64_t bits = ~uint64_t(0) >> behind;
    return first == 0 ? bits & ~uint64_t(0) << window.lead : bits;
  }

  // Waits, and puts -inf in place of elements outside the window, all in the first or last vector.
  __device__ __forceinline__ void finish() const {
    constexpr uint32_t kAll = (1u << kEach) - 1;
    wait_for_all_copies();
    if (mine == 0) return;
    const uint64_t bits = present();
    const uint32_t of_first = bits & kAll, of_last = bits >> (mine - 1) * kEach & kAll;
    if (of_first != kAll) vec(0) = only(vec(0), of_first);
    if (of_last != kAll) vec(mine - 1) = only(vec(mine - 1), of_last);
  }

  // Calls f with the key of the largest of each group.
  template <typename F>
  __device__ __forceinline__ void each_group(const F& f) const {
#pragma unroll 1
    for (int i = 0; i < mine;) {
      const int end = min(i + p.group, mine);
      uint32_t word = largest_word<T>(vec(i));
#pragma unroll 4
      for (++i; i < end; ++i) word = larger(T(), word, largest_word<T>(vec(i)));
      f(largest_key<T>(word));
    }
  }

  // A bit for each of the thread's elements that reaches `floor`.
  __device__ __forceinline__ uint64_t reaching_floor(uint32_t floor) const {
    const float bound = bound_of<T>(floor);
    uint64_t mask = 0;
#pragma unroll 4
    for (int i = mine - 1; i >= 0; --i) {
      const Vec<T> v = vec(i);
      uint32_t below = 0;
#pragma unroll
      for (int j = kEach - 1; j >= 0; --j) {
        const float apart = number_of(T(), item_bits(v, j)) - bound;
        below = __funnelshift_l(__float_as_uint(apart), below, 1);  // its sign
      }
      mask = mask << kEach | (~below & ((1u << kEach) - 1));
    }
    return mask & present();  // -inf may reach the floor
  }

  // The thread's i-th element.
  __device__ __forceinline__ uint64_t candidate(int i) const {
    const auto* const items = reinterpret_cast<const typename Keys<T>::Word*>(&vec(i / kEach));
    const int place = (first + i / kEach * step) * kEach + i % kEach - window.lead;
    return candidate_of(key_of<T>(items[i % kEach]), p.last_first ? place : kMaxPlaces - 1 - place);
  }

  // Calls f with the candidate of each bit.
  template <typename F>
  __device__ __forceinline__ void each_candidate(uint64_t mask, const F& f) const {
#pragma unroll 1
    for (; mask != 0; mask &= mask - 1) f(candidate(__ffsll(mask) - 1));
  }

  // Without the bits of candidates below `edge`.
  __device__ __forceinline__ uint64_t from_edge(uint64_t mask, uint64_t edge) const {
    uint64_t kept = 0;
#pragma unroll 1
    for (; mask != 0; mask &= mask - 1) {
      if (candidate(__ffsll(mask) - 1) >= edge) kept |= mask & -mask;
    }
    return kept;
  }
};

// Puts candidates on the first CTA's list, one behind the other.
struct PutOnFirstCta {
  uint64_t*& to;

  __device__ __forceinline__ void operator()(uint64_t x) const { store_in_cta(to++, 0, x); }
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

// Elements that reach a floor, for go_on().
template <typename T>
struct EachReaching {
  const WholePart<T>& part;
  uint64_t mask;

  template <int kKeyBits>
  __device__ __forceinline__ void count_top(uint32_t* histogram) const {
    constexpr int kShift = kKeyBits + kPlaceBits - kDigitBits;
    (*this)(CountDigit{histogram, 0, kKeyBits + kPlaceBits, kShift, kBins - 1});
  }

  template <typename F>
  __device__ __forceinline__ void operator()(const F& f) const {
    part.each_candidate(mask, f);
  }
};

// The smallest floor of all CTAs, and the largest key of the row.
template <typename T>
__device__ __forceinline__ uint2 find_floor(const WholePart<T>& part, int ctas, uint32_t& most,
                                            int& turn) {
  constexpr int kKeyBits = Keys<T>::kBits;
  ListShared& s = part.s;
  const uint32_t share = (part.p.k + ctas - 1) / ctas;
  Cut cut = uncut<kKeyBits>(share);
  go_on<kKeyBits, 1>(cut, s, EachGroup<T>{part, most}, share, part.p.enough, 1, turn, kPlaceBits);
  uint32_t floor = cut.count == 0 ? 0 : static_cast<uint32_t>(cut.edge >> kPlaceBits);
  uint32_t highest = s.highest;
  if (ctas > 1) {
    cluster_wait();  // all have started
    if (threadIdx.x < ctas) {
      store_in_cta(&s.floors[cluster_rank()], threadIdx.x, floor);
      store_in_cta(&s.mosts[cluster_rank()], threadIdx.x, highest);
    }
    cluster_barrier(ctas);
    const int rank = threadIdx.x % ctas;
    floor = __reduce_min_sync(0xffffffffu, s.floors[rank]);
    highest = __reduce_max_sync(0xffffffffu, s.mosts[rank]);
  }
  return make_uint2(max(floor, lowest_key<T>()), highest);
}

// All threads of the cluster: the bits of all masks, and of those before the thread's.
__device__ __forceinline__ uint32_t add_up_whole(ListShared& s, uint64_t mask, int ctas,
                                                 uint32_t& before) {
  const int lane = threadIdx.x % kWarpSize, rank = cluster_rank();
  const uint32_t held = __popcll(mask);
  uint32_t up_to = held;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, up_to, distance);
    if (lane >= distance) up_to += other;
  }
  uint32_t base = 0;
  if (lane == kWarpSize - 1 && up_to != 0) base = atomicAdd(&s.kept, up_to);
  before = __shfl_sync(0xffffffffu, base, kWarpSize - 1) + up_to - held;
  __syncthreads();
  const uint32_t total = s.kept;
  if (ctas == 1) return total;
  if (threadIdx.x < ctas) store_in_cta(&s.counts[rank], threadIdx.x, total);
  cluster_barrier(ctas);
  const uint32_t count = lane < ctas ? s.counts[lane] : 0;
  before += warp_sum(lane < rank ? count : 0u);
  return warp_sum(count);
}

// All threads of the cluster: gathers on the list of the first CTA, whose room is p.room, what may
// be among the k largest. How many that is; `bin`: for their range. `turn` as in go_on().
template <typename T>
__device__ __forceinline__ uint32_t gather_whole(const WholePart<T>& part, uint64_t* list, int ctas,
                                                 Binning& bin, int& turn) {
  constexpr int kKeyBits = Keys<T>::kBits;
  ListShared& s = part.s;
  const uint32_t room = part.p.room;
  uint32_t most = 0, before;
  const uint2 range = find_floor(part, ctas, most, turn);
  uint32_t floor = range.x;
  uint64_t mask = most >= floor ? part.reaching_floor(floor) : 0;
  uint32_t total = add_up_whole(s, mask, ctas, before);
  if (total > room) {
    share_turn(s, turn);
    __syncthreads();  // all have read what is set here
    if (threadIdx.x == 0) s.kept = 0;
    Cut cut = uncut<kKeyBits>(part.p.k);
    go_on<kKeyBits, kMostCtasOfArch>(cut, s, EachReaching<T>{part, mask}, part.p.k, room, ctas,
                                     turn);
    floor = static_cast<uint32_t>(cut.edge >> kPlaceBits);
    mask = part.from_edge(mask, cut.edge);
    total = add_up_whole(s, mask, ctas, before);
  }
  constexpr uint32_t kBelow = kKeyBits == 32 ? 0 : (1u << (32 - kKeyBits) % 32) - 1;
  bin = binning_of(range.y << (32 - kKeyBits) | kBelow, floor << (32 - kKeyBits),
                   kKeyBits + kPlaceBits);
  uint64_t* to = list + before;
  part.each_candidate(mask, PutOnFirstCta{to});
  cluster_barrier(ctas);
  return total;
}

#endif  // __CUDACC__

}  // namespace precast
