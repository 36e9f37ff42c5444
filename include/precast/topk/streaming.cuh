// SPDX-License-Identifier: Apache-2.0
// A CTA's part of a row, read once: what may be among the k largest stays on the list.
#pragma once

#include "precast/topk/window.cuh"

namespace precast {

#if defined(__CUDACC__)

// Why: else candidates of all items are computed ahead of loops, and spilled.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// The thread's element of a tile as a candidate.
template <typename T>
__device__ __forceinline__ uint64_t candidate_at(const TopKParams& p, const Window<T>& window,
                                                 const Tile<T>& x, int tile, int i) {
  constexpr int kEach = Vec<T>::kSize;
  const int place = window.vec(tile, i / kEach) * kEach + i % kEach - window.lead;
  const uint32_t key = key_of<T>(item_bits_at(x, i));
  return candidate_of(key, p.last_first ? place : kMaxPlaces - 1 - place);
}

// The candidates of the list, and of a tile that is not yet on it.
template <typename T>
struct EachSeen {
  EachOfList of_list;
  const TopKParams& p;
  const Window<T>& window;
  Tile<T> x;
  int tile;
  uint32_t mask;

  template <int kKeyBits>
  __device__ __forceinline__ void count_top(uint32_t* histogram) const {
    of_list.template count_top<kKeyBits>(histogram);
    if (mask == 0) return;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const uint32_t digit = key_of<T>(opaque(item_bits(x, i))) >> (kKeyBits - kDigitBits);
      if (mask >> i & 1) atomicAdd(&histogram[digit], 1u);
    }
  }

  template <typename F>
  __device__ __forceinline__ void operator()(const F& f) const {
    of_list(f);
#pragma unroll 1
    for (uint32_t left = mask; left != 0; left &= left - 1) {
      f(candidate_at(p, window, x, tile, __ffs(left) - 1));
    }
  }
};

// All threads: counts the bits of all masks, of the warp, and of the warps before it in some order.
__device__ __forceinline__ uint32_t add_up(ListShared& s, int& slot, uint32_t mask, uint32_t& sum,
                                           uint32_t& before) {
  sum = warp_sum(static_cast<uint32_t>(__popc(mask)));
  before = 0;
  if (sum != 0 && threadIdx.x % kWarpSize == 0) before = atomicAdd(&s.added[slot], sum);
  before = __shfl_sync(0xffffffffu, before, 0);
  __syncthreads();
  const uint32_t all = s.added[slot];
  // All have read the one before; it is added to again behind one more barrier.
  if (threadIdx.x == 0) s.added[slot == 0 ? 2 : slot - 1] = 0;
  slot = slot == 2 ? 0 : slot + 1;
  return all;
}

// All threads: before CTAs that have made different numbers of cuts make one together.
__device__ __forceinline__ void share_turn(ListShared& s, int& turn) {
  if (turn == 0) return;
#pragma unroll 1
  for (int i = threadIdx.x; i < kBins; i += blockDim.x) s.histogram[0][i] = 0;
  turn = 0;
  __syncthreads();
}

// A CTA's part of a row as it is read.
template <typename T>
struct Part {
  const TopKParams& p;
  const Window<T>& window;
  ListShared& s;
  uint64_t* list;
  uint32_t size;
  uint32_t floor;  // a key
  bool open;       // more may reach the floor
  int slot;
  int turn;
  Cut cut;         // the last
  bool as_found;   // the lists hold what reached the floor of a sample
  uint32_t total;  // then: of all CTAs
  uint32_t base;   // of those before this one

  __device__ __forceinline__ uint32_t reaching_floor(const Tile<T>& x, int tile) const {
    const uint32_t mask = open ? window.present(tile) : 0;
    return mask == 0 ? 0 : mask & reaching<T>(x, floor);
  }

  // All threads: cuts what is on the list and the tile's elements of `mask`, from which those that
  // are cut go, to the k largest and up to limit - k more.
  template <int kCtas>
  __device__ __forceinline__ void cut_to(uint32_t k, uint32_t limit, int ctas, const Tile<T>& x,
                                         int tile, uint32_t& mask) {
    const EachSeen<T> each = {{list, size}, p, window, x, tile, mask};
    cut = uncut<Keys<T>::kBits>(k);
    go_on<Keys<T>::kBits, kCtas>(cut, s, each, k, limit, ctas, turn);
    if (cut.count == 0) return;
    size = compact(s, list, size, cut.edge);
#pragma unroll 1
    for (uint32_t left = mask; left != 0; left &= left - 1) {
      if (candidate_at(p, window, x, tile, __ffs(left) - 1) < cut.edge) mask &= ~(left & -left);
    }
    floor = static_cast<uint32_t>(cut.edge >> kPlaceBits);
    // Some that equal the floor were dropped: later ones are no better.
    if ((cut.edge & (kMaxPlaces - 1)) != 0) {
      open = floor != key_of<T>(Keys<T>::kInfinity + 1);
      floor += open;
    }
  }

  // All threads: puts the tile's elements of `mask` on the list, for which add_up() was called.
  __device__ __forceinline__ void append_tile(const Tile<T>& x, int tile, uint32_t mask,
                                              uint32_t sum, uint32_t before, uint32_t added) {
    if (sum != 0) {
      uint64_t* to = list + size + before;
#pragma unroll 1
      for (uint32_t left = mask; __any_sync(0xffffffffu, left != 0); left &= left - 1) {
        append(to, candidate_at(p, window, x, tile, (__ffs(left) - 1) & (kItems - 1)), left != 0);
      }
    }
    size += added;
  }

  // Reads all, and cuts what the CTAs of the row hold to at most `limit`.
  //
  // Of a long part a sample tells about how large the k-th largest will be, and a floor somewhat
  // below that is tried first.
  __device__ __forceinline__ void read(uint32_t limit, int ctas) {
    bool trial = window.may_be_sampled(ctas, p.k);
    if (trial) {
      if (ctas > 1) cluster_arrive_relaxed();
      floor = floor_of_sample();
    }
    Tile<T> x;
    int tile = 0;
    uint32_t mask = 0;
#pragma unroll 1
    while (true) {
      bool fits = true;
      if (trial) {
        fits = take_above_floor();
        if (share_counts(fits, ctas)) return;
        x = no_tile<T>();  // Why: else the one before takes registers meanwhile.
        mask = 0;
      } else {
        take_all(x, tile, mask);
      }
      if (ctas > 1) share_turn(s, turn);
      if (!fits && threadIdx.x == 0) s.histogram[turn][kBins - 1] = kSpoilt;
      __syncthreads();
      cut_to<kMostCtasOfArch>(p.k, limit, ctas, x, tile, mask);
      if (!trial || cut.count != 0) break;
      size = 0;
      open = true;
      floor = lowest_key<T>();
      // Cuts of a CTA by itself do not wait until others have read its histograms.
      cluster_barrier(ctas);
      trial = false;
    }
    uint32_t sum, before;
    const uint32_t added = add_up(s, slot, mask, sum, before);
    append_tile(x, tile, mask, sum, before, added);
    __syncthreads();
  }

  // All threads: whether the lists of all CTAs hold k, and not more than can be ordered at once.
  __device__ __forceinline__ bool share_counts(bool fits, int ctas) {
    total = fits ? size : kSpoilt;
    base = 0;
    if (ctas > 1) {
      const int rank = cluster_rank(), lane = threadIdx.x % kWarpSize;
      cluster_wait();  // all have started: see read()
      if (threadIdx.x < ctas) store_in_cta(&s.counts[rank], threadIdx.x, total);
      cluster_barrier(ctas);
      const uint32_t count = lane < ctas ? s.counts[lane] : 0;
      total = warp_sum(count);
      base = warp_sum(lane < rank ? count : 0u);
    }
    as_found = total >= uint32_t(p.k) && total <= p.most;
    return as_found;
  }

  // Where reading starts, and how it goes on: backwards where the last are chosen, for equal
  // elements of later tiles are never better.
  __device__ __forceinline__ int first_tile() const {
    return p.last_first ? window.tiles() - 1 : 0;
  }
  __device__ __forceinline__ int next_tile() const { return p.last_first ? -1 : 1; }

  // Puts on the list what may be among the k largest, but for the last tile, which it returns.
  __device__ __forceinline__ void take_all(Tile<T>& x, int& tile, uint32_t& mask) {
    uint32_t sum, before;
    int left = window.tiles();
    x = no_tile<T>();
    mask = 0;
    if (left == 0) return;
    Tile<T> next;
    tile = first_tile();
    window.load(tile, next);
#pragma unroll 1
    for (; left > 1; --left) {
      x = next;
      window.load(tile + next_tile(), next);
      mask = reaching_floor(x, tile);
      uint32_t added = add_up(s, slot, mask, sum, before);
      if (size + added > uint32_t(p.room)) {
        cut_to<1>(p.k, max(p.room / 2, p.k), 1, x, tile, mask);
        added = add_up(s, slot, mask, sum, before);
      }
      append_tile(x, tile, mask, sum, before, added);
      tile += next_tile();
    }
    x = next;
    mask = reaching_floor(x, tile);
  }

  // Puts all that reach the floor on the list, no warp waiting for another. False where those are
  // too many.
  __device__ __forceinline__ bool take_above_floor() {
    size = 0;
    int left = window.tiles();
    if (left == 0) return true;
    int tile = first_tile();
    Tile<T> next;
    window.load(tile, next);
    if (threadIdx.x == 0) s.kept = 0;
    __syncthreads();
#pragma unroll 1
    for (; left > 0; --left, tile += next_tile()) {
      const Tile<T> x = next;
      // Why always: what may keep its value takes registers elsewhere.
      window.load(left > 1 ? tile + next_tile() : tile, next);
      const uint32_t mask = reaching_floor(x, tile);
      const uint32_t sum = warp_sum(static_cast<uint32_t>(__popc(mask)));
      if (sum == 0) continue;
      uint32_t before = 0;
      if (threadIdx.x % kWarpSize == 0) before = atomicAdd(&s.kept, sum);
      before = __shfl_sync(0xffffffffu, before, 0);
      if (before + sum <= uint32_t(p.room)) append_tile(x, tile, mask, sum, before, 0);
    }
    __syncthreads();
    const bool fits = s.kept <= uint32_t(p.room);
    size = fits ? s.kept : 0;
    return fits;
  }

  // All threads: a key that all but surely is below that of the k-th largest, the same in all CTAs.
  __device__ __forceinline__ uint32_t floor_of_sample() {
    Tile<T> x;
    const uint32_t mask = window.load_sample(x);
    const float rate = float(kSampled * int(blockDim.x)) / float(window.length);
    const float expected = float(p.k) * rate;
    const uint32_t rank = static_cast<uint32_t>(expected + 4.0f * sqrtf(expected) + 8.0f);
    // What half fills a list is not cut further.
    const uint32_t enough =
        max(static_cast<uint32_t>(0.5f * float(p.room) * rate), rank + rank / 4);
    cut = uncut<Keys<T>::kBits>(rank);
    const EachSeen<T> each = {{list, 0}, p, window, x, 0, mask};
    go_on<Keys<T>::kBits, 1>(cut, s, each, rank, enough, 1, turn, kPlaceBits);
    return max(static_cast<uint32_t>(cut.edge >> kPlaceBits), lowest_key<T>());
  }
};

#endif  // __CUDACC__

}  // namespace precast
