// SPDX-License-Identifier: Apache-2.0
// Exact thresholds of a row: its k-th largest element, or the weight down to which the largest
// elements hold a share of the mass.
//
// One pass over the row adds up what the elements count in 2048 bins of the ordered keys, from the
// largest down, 1/64 octave each. The CTAs of a cluster read each other's sums of 64 bins, then the
// 64 bins among which the wanted amount is reached. A second pass gathers the elements of that bin,
// a few hundred of the row, and each CTA finishes on the list of all by itself. Where the list is
// too long, the bin is cut into 2048 again. Shares are fixed-point masses, so that no order of
// addition matters.
//
// Small k need no bins: the k-th largest of the slabs' maxima bounds the k-th largest element, and
// few elements reach that.
#pragma once

#include "precast/sampling_row.cuh"

namespace precast {

constexpr int kBinBits = 11;
constexpr int kBins = 1 << kBinBits;
constexpr int kFineBins = 2 * kWarpSize;        // that a warp searches at a time
constexpr int kCoarseBins = kBins / kFineBins;  // sums of as many
constexpr int kFirstShift = 17;                 // bins of 1/64 octave at most: 32 octaves
constexpr int kCandidates = 1024;               // of all CTAs
constexpr int kOwnCandidates = 128;             // of a CTA
constexpr int kMostGatherings = 4;              // of a selection

static_assert(kCandidates >= kMaxSlabs && kCandidates >= kMaxCtas * kOwnCandidates);

#if defined(__CUDACC__)

struct Bin {
  int at;           // negative if all do not hold what is needed
  uint32_t need;    // within the bin, or behind all
  uint32_t amount;  // of the bin
};

struct SelectShared {
  union {
    alignas(16) uint32_t bins[kBins + kWarpSize];
    alignas(16) uint2 list[kCandidates];  // keys and what they count
  };
  // What other CTAs read, beside the bins.
  alignas(16) uint32_t coarse[kCoarseBins];
  uint32_t own[kOwnCandidates];          // keys
  uint32_t counts[2 * kMostGatherings];  // of `own`, one a gathering, at even places

  Bin found;
  uint32_t result;
};

struct SelectTurns {
  uint32_t unused[2];
};

// A weight as a multiple of 2^-31 of the mass, to the nearest.
__device__ __forceinline__ uint32_t fixed_mass(float weight, float scale) {
  return __float2uint_rn(weight * scale);
}

// What makes fixed-point masses of weights with this total.
__device__ __forceinline__ float mass_scale(float total) {
  return fminf(__fdiv_rn(0x1p31f, total), 3.402823466e38f);
}

// top_p of the mass, in the unit of fixed_mass().
__device__ __forceinline__ uint32_t needed_mass(float top_p) {
  const uint32_t need = __double2uint_ru(double(top_p) * 0x1p31);
  return need > 0 ? need : 1;
}

// All threads of a CTA: the least of the first `count` keys of the list that less than `need` is
// larger than.
__device__ __forceinline__ uint32_t find_in_list(SelectShared& s, int count, uint32_t need) {
  if (threadIdx.x == 0) s.result = 0xffffffffu;
  __syncthreads();
  int threads = 1;  // of a key, side by side
  while (threads < 8 && 2 * threads * count <= blockDim.x) threads *= 2;
#pragma unroll 1
  for (int start = 0; start < count; start += blockDim.x / threads) {
    const int i = start + threadIdx.x / threads;
    const uint32_t key = i < count ? s.list[i].x : 0xffffffffu;
    uint32_t above = 0;
#pragma unroll 4
    for (int j = threadIdx.x % threads; j < count; j += threads) {
      const uint2 other = s.list[j];
      above += other.x > key ? other.y : 0;
    }
#pragma unroll 1
    for (int distance = 1; distance < threads; distance *= 2) {
      above += __shfl_xor_sync(0xffffffffu, above, distance);
    }
    const uint32_t least = __reduce_min_sync(0xffffffffu, above < need ? key : 0xffffffffu);
    if (threadIdx.x % kWarpSize == 0) atomicMin(&s.result, least);
  }
  __syncthreads();
  return s.result;
}

// The k-th largest of the slabs' maxima: at least k elements reach it.
__device__ __forceinline__ float kth_of_maxima(SelectShared& s, const float* maxima, int slabs,
                                               int k) {
#pragma unroll 1
  for (int i = threadIdx.x; i < slabs; i += blockDim.x) s.list[i] = {to_key(maxima[i]), 1};
  return from_key(find_in_list(s, slabs, k));
}

// A warp: the bin at which the sums reach `need`. Lane l gives bins 2 l and the next.
__device__ __forceinline__ Bin find_bin(uint2 amounts, uint32_t need) {
  const int lane = threadIdx.x % kWarpSize;
  uint32_t up_to = amounts.x + amounts.y;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, up_to, distance);
    if (lane >= distance) up_to += other;
  }
  const uint32_t reached = __ballot_sync(0xffffffffu, up_to >= need);
  if (reached == 0) return {-1, need - __shfl_sync(0xffffffffu, up_to, kWarpSize - 1), 0};
  const int from = __ffs(reached) - 1;
  const uint32_t first = __shfl_sync(0xffffffffu, amounts.x, from);
  const uint32_t second = __shfl_sync(0xffffffffu, amounts.y, from);
  const uint32_t left = need - (__shfl_sync(0xffffffffu, up_to, from) - first - second);
  if (left <= first) return {2 * from, left, first};
  return {2 * from + 1, left - first, second};
}

// What each CTA wrote to its shared memory is seen by all.
__device__ __forceinline__ void show_shared(int ctas) {
  if (ctas > 1) {
    cluster_arrive_shared();
    cluster_wait();
  } else {
    __syncthreads();
  }
}

// The sums over the CTAs of the pairs that have the address of `source` in each.
__device__ __forceinline__ uint2 sum_of_pairs(const uint32_t* source, int ctas) {
  uint2 pairs[kMaxCtas], sum = {0, 0};
#pragma unroll
  for (int i = 0; i < kMaxCtas; ++i) pairs[i] = load_pair_from_cta(source, min(i, ctas - 1));
#pragma unroll
  for (int i = 0; i < kMaxCtas; ++i) {
    sum.x += i < ctas ? pairs[i].x : 0;
    sum.y += i < ctas ? pairs[i].y : 0;
  }
  return sum;
}

// All threads of the cluster: the bin of the row at which the sums reach `need`.
__device__ __forceinline__ Bin find_in_row(SelectShared& s, int ctas, uint32_t need) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll 1
  for (int i = threadIdx.x / kWarpSize; i < kCoarseBins; i += blockDim.x / kWarpSize) {
    const uint2 two = *reinterpret_cast<const uint2*>(&s.bins[i * kFineBins + 2 * lane]);
    const uint32_t sum = __reduce_add_sync(0xffffffffu, two.x + two.y);
    if (lane == 0) s.coarse[i] = sum;
  }
  show_shared(ctas);
  // Why one warp: what CTAs read of each other is slow.
  if (threadIdx.x < kWarpSize) {
    uint2 two = sum_of_pairs(&s.coarse[2 * lane % kCoarseBins], ctas);
    if (2 * lane >= kCoarseBins) two = {0, 0};
    Bin bin = find_bin(two, need);
    if (bin.at >= 0) {
      const int coarse = bin.at;
      two = sum_of_pairs(&s.bins[coarse * kFineBins + 2 * lane], ctas);
      bin = find_bin(two, bin.need);
      bin.at += coarse * kFineBins;
    }
    if (lane == 0) s.found = bin;
  }
  __syncthreads();
  return s.found;
}

// Keys from `high` down to `high - range`.
struct Keys {
  uint32_t high;
  uint32_t range;

  // What makes kBins of them, at most.
  __device__ __forceinline__ int shift() const {
    return max(kWarpSize - __clz(range) - kBinBits, 0);
  }

  __device__ __forceinline__ void narrow(int bin, int shift) {
    const uint32_t start = uint32_t(bin) << shift;
    high -= start;
    range = min(range - start, (1u << shift) - 1);
  }
};

// Calls f(i, first, fours) for each half of the lane's fours, from `first` on, of each slab i of the
// warp for which wants(i).
template <typename T, bool kOnChip, typename Edit, typename Wants, typename F>
__device__ __forceinline__ void each_half(Row<T, kOnChip, Edit>& row, const Wants& wants,
                                          const F& f) {
  constexpr int kHalf = kPerLane / 8;
  float x[4 * kHalf];
  if constexpr (kOnChip) {
    float* at = row.copy;
#pragma unroll 1
    for (int i = row.warp(); i < row.count; i += row.warps(), at += row.step()) {
      if (!wants(i)) continue;
#pragma unroll 1
      for (int first = 0; first < 2 * kHalf; first += kHalf) {
#pragma unroll
        for (int j = 0; j < kHalf; ++j) {
          const float4 four = *row.four_of(at, first + j);
          x[4 * j] = four.x;
          x[4 * j + 1] = four.y;
          x[4 * j + 2] = four.z;
          x[4 * j + 3] = four.w;
        }
        f(i, first, x);
      }
    }
  } else {
    row.each_slab([&](int i, const float (&y)[kPerLane]) {
      if (!wants(i)) return;
#pragma unroll
      for (int first = 0; first < 2 * kHalf; first += kHalf) {
#pragma unroll
        for (int j = 0; j < 4 * kHalf; ++j) x[j] = y[4 * first + j];
        f(i, first, x);
      }
    });
  }
}

struct Always {
  __device__ __forceinline__ bool operator()(int) const { return true; }
};

// All threads of a CTA, which then waits for them.
__device__ __forceinline__ void clear_bins(SelectShared& s) {
#pragma unroll 1
  for (int i = threadIdx.x; i < kBins / 4; i += blockDim.x) {
    reinterpret_cast<uint4*>(s.bins)[i] = make_uint4(0, 0, 0, 0);
  }
}

// What an element counts: one, or its mass.
struct Amount {
  bool by_mass;
  float scale;

  __device__ __forceinline__ uint32_t operator()(float x) const {
    return by_mass ? fixed_mass(x, scale) : 1;
  }
};

// Adds up what the row's elements with such keys count. Why others add to bins that nobody reads,
// one a lane: branches would cost more.
template <bool kByMass, typename Row>
__device__ __forceinline__ void fill_bins(Row& row, SelectShared& s, Keys keys, int shift,
                                          float scale) {
  const uint32_t idle = kBins + threadIdx.x % kWarpSize;
  const auto bin_of = [&](float x) {
    // What has mass is not negative: its key is its bits and one more, and others are too far.
    const uint32_t below = kByMass ? keys.high - 0x80000000u - __float_as_uint(x)
                                   : keys.high - to_key(x);
    return below <= keys.range ? below >> shift : idle;
  };
  const auto amount = [&](float x) { return kByMass ? fixed_mass(x, scale) : 1u; };
  const auto add_four = [&](float x, float y, float z, float w) {
    const uint32_t a = bin_of(x), b = bin_of(y), c = bin_of(z), d = bin_of(w);
    if constexpr (kByMass) {
      // Rows of equal elements: additions to one bin wait for each other.
      const uint32_t one = __shfl_sync(0xffffffffu, a, 0);
      if (__all_sync(0xffffffffu, a == one && b == one && c == one && d == one)) {
        const uint32_t sum = __reduce_add_sync(
            0xffffffffu, amount(x) + amount(y) + amount(z) + amount(w));
        if (threadIdx.x % kWarpSize == 0) atomicAdd(&s.bins[one], sum);
        return;
      }
    }
    atomicAdd(&s.bins[a], amount(x));
    atomicAdd(&s.bins[b], amount(y));
    atomicAdd(&s.bins[c], amount(z));
    atomicAdd(&s.bins[d], amount(w));
  };
  each_half(row, Always(), [&](int, int, const float (&x)[kPerLane / 2]) {
#pragma unroll
    for (int j = 0; j < kPerLane / 2; j += 4) add_four(x[j], x[j + 1], x[j + 2], x[j + 3]);
  });
}

// Lists the row's elements with such keys, and perhaps a zero of the other sign, in every CTA.
// Returns their number; what exceeds kCandidates is not there. `maxima`: those of the slabs, or
// null.
template <typename Row>
__device__ __forceinline__ int gather(Row& row, SelectShared& s, uint32_t* own_count, int ctas,
                                      Keys keys, const Amount& amount, const float* maxima) {
  const float most = from_key(keys.high), least = from_key(keys.high - keys.range);
  const auto wants = [&](int i) { return maxima == nullptr || maxima[row.first + i] >= least; };
  each_half(row, wants, [&](int, int, const float (&x)[kPerLane / 2]) {
    uint32_t hits = 0;
#pragma unroll
    for (int j = 0; j < kPerLane / 2; ++j) hits |= x[j] >= least && x[j] <= most ? 1u << j : 0;
#pragma unroll 1
    for (; hits != 0; hits &= hits - 1) {
      const int hit = __ffs(hits) - 1;
      float y = x[0];
#pragma unroll
      for (int j = 1; j < kPerLane / 2; ++j) y = hit == j ? x[j] : y;
      const uint32_t at = atomicAdd(own_count, 1u);
      if (at < kOwnCandidates) s.own[at] = to_key(y);
    }
  });
  show_shared(ctas);
  // A warp takes the list of a CTA, and of the next one that is left.
  const int lane = threadIdx.x % kWarpSize;
  int rank = threadIdx.x / kWarpSize;
  const uint32_t count = load_pair_from_cta(own_count, min(lane, ctas - 1)).x;
  uint2 two = load_pair_from_cta(&s.own[2 * lane], min(rank, ctas - 1));
  uint32_t up_to = lane < ctas ? count : 0;
#pragma unroll
  for (int distance = 1; distance < kMaxCtas; distance *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, up_to, distance);
    if (lane >= distance) up_to += other;
  }
  if (__any_sync(0xffffffffu, count > kOwnCandidates)) return kCandidates + 1;
#pragma unroll 1
  while (rank < ctas) {
    const int end = __shfl_sync(0xffffffffu, up_to, rank);
    const int start = end - __shfl_sync(0xffffffffu, count, rank);
#pragma unroll 1
    for (int i = start + 2 * lane; i < end; i += 2 * kWarpSize) {
      if (i >= start + 2 * kWarpSize) two = load_pair_from_cta(&s.own[i - start], rank);
      s.list[i] = {two.x, amount(from_key(two.x))};
      if (i + 1 < end) s.list[i + 1] = {two.y, amount(from_key(two.y))};
    }
    rank += blockDim.x / kWarpSize;
    if (rank < ctas) two = load_pair_from_cta(&s.own[2 * lane], rank);
  }
  return __shfl_sync(0xffffffffu, up_to, kMaxCtas - 1);
}

// The largest x of the row for which the elements from x up hold `need`: of their number, or of
// their mass. 0 where all do not hold the mass: nothing is cut there. `max` is the largest element,
// `maxima` those of the slabs, which only numbers want; `cleared`: the CTA called clear_bins(). All
// threads of the cluster call and get it. Other CTAs may still read this one's shared memory when
// it returns: an exchange or a barrier of the cluster has to be behind it.
template <typename Row>
__device__ __forceinline__ float select(Row& row, SelectShared& s, SelectTurns&, int ctas,
                                        uint32_t need, float max_of_row, bool by_mass, float scale,
                                        const float* maxima, bool cleared = false) {
  const float infinity = __int_as_float(0x7f800000);
  const Amount amount = {by_mass, scale};
  const int slabs = row.p.slabs;
  const uint32_t low = to_key(by_mass ? row.weighing.floor : -infinity);
  const uint32_t high = max(to_key(max_of_row), low);
  Keys keys = {high, high - low};
  int most_shift = kFirstShift;
  uint32_t reach = keys.range;  // how far down the bins of the first pass go
  if (threadIdx.x < 2 * kMostGatherings) s.counts[threadIdx.x] = 0;
  bool few = !by_mass && need <= slabs - slabs / 4;
  if (few) {
    keys.range = high - to_key(kth_of_maxima(s, maxima, slabs, need));
    cleared = false;
  } else if (by_mass) {
    // All elements lighter than this hold less than may be cut, but for roundings.
    const uint32_t light = (0x80000000u - need) / row.p.vocab;
    reach = high - max(min(to_key(__fdividef(light, scale)), high), low);
  }
#pragma unroll 1
  for (int gathering = 0;;) {
    if (few) {
      const int count = gather(row, s, &s.counts[2 * gathering++], ctas, keys, amount,
                               by_mass ? nullptr : maxima);
      if (count <= kCandidates) return from_key(find_in_list(s, count, need));
    }
    if (!cleared) {
      clear_bins(s);
      __syncthreads();
    }
    cleared = false;
    Keys covered = {keys.high, min(keys.range, reach)};
    const int shift = min(covered.shift(), most_shift);
    covered.range = min(covered.range, (uint32_t(kBins) << shift) - 1);
    if (by_mass) {
      fill_bins<true>(row, s, covered, shift, scale);
    } else {
      fill_bins<false>(row, s, covered, shift, scale);
    }
    __syncthreads();
    const Bin bin = find_in_row(s, ctas, need);
    need = bin.need;
    if (bin.at >= 0) {
      keys = covered;
      keys.narrow(bin.at, shift);
      if (keys.range == 0) return from_key(keys.high);
      // At least so many elements are in the bin.
      few = bin.amount / kCandidates <= amount(from_key(keys.high));
    } else {
      if (covered.range == keys.range) return by_mass ? 0.0f : -infinity;
      keys.high -= covered.range + 1;
      keys.range -= covered.range + 1;
      reach = keys.range;
      most_shift = kWarpSize;
      few = false;
    }
    if (!few) show_shared(ctas);  // before the bins are cleared
  }
}

#endif  // __CUDACC__

}  // namespace precast
