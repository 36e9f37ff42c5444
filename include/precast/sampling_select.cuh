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
constexpr int kFineBins = 2 * kWarpSize;            // that a warp searches at a time
constexpr int kCoarseBins = kBins / kFineBins;      // sums of as many
constexpr int kFirstShift = 17;                     // bins of 1/64 octave: 32 octaves
constexpr int kListBits = 9;
constexpr int kListBins = 1 << kListBits;
constexpr int kCandidates = 1024;    // of all CTAs
constexpr int kOwnCandidates = 256;  // of a CTA
constexpr int kMostGatherings = 4;   // of a selection

#if defined(__CUDACC__)

struct SelectShared {
  union {
    alignas(16) uint32_t bins[kBins + kWarpSize];  // others read, until elements are gathered
    struct {
      uint32_t list[kCandidates];  // keys
      uint32_t list_bins[2][kListBins];
    };
  };
  // What other CTAs read.
  alignas(16) uint32_t coarse[kCoarseBins];
  uint32_t own[kOwnCandidates];          // keys
  uint32_t counts[2 * kMostGatherings];  // of `own`, one a gathering, at even places

  float bound;
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

// The k-th largest of the slabs' maxima: at least k elements reach it.
__device__ __forceinline__ float kth_of_maxima(SelectShared& s, const float* maxima, int slabs,
                                               int k) {
#pragma unroll 1
  for (int i = threadIdx.x; i < slabs; i += blockDim.x) {
    const float x = maxima[i];
    int larger = 0, equal = 0;
#pragma unroll 8
    for (int j = 0; j < slabs; ++j) {
      larger += maxima[j] > x;
      equal += maxima[j] == x;
    }
    if (larger < k && k <= larger + equal) s.bound = x;
  }
  __syncthreads();
  return s.bound;
}

struct Bin {
  int at;         // negative if all do not hold what is needed
  uint32_t need;  // within the bin, or behind all
};

// Any warp: the bin at which the sums reach `need`. Lane l gives bins kEach * l and on.
template <int kEach>
__device__ __forceinline__ Bin find_bin(const uint32_t (&amounts)[kEach], uint32_t need) {
  const int lane = threadIdx.x % kWarpSize;
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) sum += amounts[i];
  uint32_t up_to = sum;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, up_to, distance);
    if (lane >= distance) up_to += other;
  }
  const uint32_t reached = __ballot_sync(0xffffffffu, up_to >= need);
  if (reached == 0) return {-1, need - __shfl_sync(0xffffffffu, up_to, kWarpSize - 1)};
  int at = 0;
  uint32_t left = need - (up_to - sum);
#pragma unroll
  for (int i = 0; i < kEach - 1; ++i) {
    if (at < i || left <= amounts[i]) continue;
    left -= amounts[i];
    ++at;
  }
  const int from = __ffs(reached) - 1;
  return {kEach * from + __shfl_sync(0xffffffffu, at, from),
          __shfl_sync(0xffffffffu, left, from)};
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
  uint2 two = sum_of_pairs(&s.coarse[2 * lane % kCoarseBins], ctas);
  if (2 * lane >= kCoarseBins) two = {0, 0};
  const Bin coarse = find_bin({two.x, two.y}, need);
  if (coarse.at < 0) return coarse;
  two = sum_of_pairs(&s.bins[coarse.at * kFineBins + 2 * lane], ctas);
  const Bin fine = find_bin({two.x, two.y}, coarse.need);
  return {coarse.at * kFineBins + fine.at, fine.need};
}

// Keys from `high` down to `high - range`.
struct Keys {
  uint32_t high;
  uint32_t range;

  __device__ __forceinline__ bool have(uint32_t key) const { return high - key <= range; }

  // What makes at most 2^bits bins of them.
  __device__ __forceinline__ int shift(int bits) const {
    return max(kWarpSize - __clz(range) - bits, 0);
  }

  __device__ __forceinline__ void narrow(int bin, int shift) {
    const uint32_t start = uint32_t(bin) << shift;
    high -= start;
    range = min(range - start, (1u << shift) - 1);
  }
};

// Calls f(i, four) for each lane's fours of each slab i of the warp, four of which are read at once.
template <typename T, bool kOnChip, typename Edit, typename F>
__device__ __forceinline__ void each_four_of(Row<T, kOnChip, Edit>& row, const F& f) {
  if constexpr (!kOnChip) {
    row.each_four([&](int i, int, float4 x) { f(i, x); });
  } else {
    float* at = row.copy;
#pragma unroll 1
    for (int i = row.warp(); i < row.count; i += row.warps(), at += row.step()) {
#pragma unroll 1
      for (int half = 0; half < kPerLane / 4; half += 4) {
        float4 x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = *row.four_of(at, half + j);
#pragma unroll
        for (int j = 0; j < 4; ++j) f(i, x[j]);
      }
    }
  }
}

// Adds up what the row's elements with such keys count: one, or their mass, where none is negative.
// Why others add to bins that nobody reads, one a lane: branches would cost more.
template <bool kByMass, typename Row>
__device__ __forceinline__ void fill_bins(Row& row, SelectShared& s, Keys keys, int shift,
                                          float scale) {
  const uint32_t idle = kBins + threadIdx.x % kWarpSize;
  const auto add = [&](float x) {
    // Of numbers that are not negative, keys are the bits and one more. Others come to be too far.
    const uint32_t below = kByMass ? keys.high - 0x80000000u - __float_as_uint(x)
                                   : keys.high - to_key(x);
    atomicAdd(&s.bins[below <= keys.range ? below >> shift : idle],
              kByMass ? fixed_mass(x, scale) : 1u);
  };
  each_four_of(row, [&](int, float4 x) {
    add(x.x);
    add(x.y);
    add(x.z);
    add(x.w);
  });
}

// Lists the row's elements with such keys, and perhaps a zero of the other sign, in every CTA.
// Returns their number; what exceeds kCandidates is not there. `maxima`: those of the slabs, or
// null.
template <typename Row>
__device__ __forceinline__ uint32_t gather(Row& row, SelectShared& s, int gathering, int ctas,
                                           Keys keys, const float* maxima) {
  const float most = from_key(keys.high), least = from_key(keys.high - keys.range);
  uint32_t* own_count = &s.counts[2 * gathering];
  const auto wanted = [&](float x) { return x >= least && x <= most; };
  each_four_of(row, [&](int i, float4 x) {
    if (maxima != nullptr && maxima[row.first + i] < least) return;
    const bool a = wanted(x.x), b = wanted(x.y), c = wanted(x.z), d = wanted(x.w);
    if (!(a || b || c || d)) return;
    uint32_t at = atomicAdd(own_count, a + b + c + d);
    const auto take = [&](float y) {
      if (at < kOwnCandidates) s.own[at] = to_key(y);
      ++at;
    };
    if (a) take(x.x);
    if (b) take(x.y);
    if (c) take(x.z);
    if (d) take(x.w);
  });
  show_shared(ctas);
  const int lane = threadIdx.x % kWarpSize;
  const uint32_t count = lane < ctas ? load_pair_from_cta(own_count, lane).x : 0;
  uint32_t up_to = count;
#pragma unroll
  for (int distance = 1; distance < kMaxCtas; distance *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, up_to, distance);
    if (lane >= distance) up_to += other;
  }
  const uint32_t all = __shfl_sync(0xffffffffu, up_to, kMaxCtas - 1);
  if (all > kCandidates || __any_sync(0xffffffffu, count > kOwnCandidates)) {
    return kCandidates + 1;
  }
#pragma unroll 1
  for (int rank = threadIdx.x / kWarpSize; rank < ctas; rank += blockDim.x / kWarpSize) {
    const int end = __shfl_sync(0xffffffffu, up_to, rank);
    const int start = end - __shfl_sync(0xffffffffu, count, rank);
#pragma unroll 1
    for (int i = 2 * lane; start + i < end; i += 2 * kWarpSize) {
      const uint2 two = load_pair_from_cta(&s.own[i], rank);
      s.list[start + i] = two.x;
      if (start + i + 1 < end) s.list[start + i + 1] = two.y;
    }
  }
  return all;
}

// All threads of a CTA: the largest listed key at which the sums reach `need`.
__device__ __forceinline__ uint32_t find_in_list(SelectShared& s, int count, Keys keys,
                                                 uint32_t need, bool by_mass, float scale) {
  constexpr int kEach = kListBins / kWarpSize;
#pragma unroll 1
  for (int level = 0;; ++level) {
    uint32_t(&bins)[kListBins] = s.list_bins[level % 2];
#pragma unroll 1
    for (int i = threadIdx.x; i < kListBins; i += blockDim.x) bins[i] = 0;
    __syncthreads();
    const int shift = keys.shift(kListBits);
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      const uint32_t key = s.list[i];
      if (!keys.have(key)) continue;
      atomicAdd(&bins[(keys.high - key) >> shift],
                by_mass ? fixed_mass(from_key(key), scale) : 1);
    }
    __syncthreads();
    uint32_t amounts[kEach];
#pragma unroll
    for (int i = 0; i < kEach; i += 4) {
      const uint4 four =
          *reinterpret_cast<const uint4*>(&bins[threadIdx.x % kWarpSize * kEach + i]);
      amounts[i] = four.x;
      amounts[i + 1] = four.y;
      amounts[i + 2] = four.z;
      amounts[i + 3] = four.w;
    }
    const Bin bin = find_bin(amounts, need);
    if (bin.at < 0) return keys.high - keys.range;
    keys.narrow(bin.at, shift);
    if (keys.range == 0) return keys.high;
    need = bin.need;
  }
}

// The largest x of the row for which the elements from x up hold `need`: of their number, or of
// their mass. 0 where all do not hold the mass: nothing is cut there. `max` is the largest element,
// `maxima` those of the slabs, which only numbers want. All threads of the cluster call and get it.
// Other CTAs may still read this one's shared memory when it returns: an exchange or a barrier of
// the cluster has to be behind it.
template <typename Row>
__device__ __forceinline__ float select(Row& row, SelectShared& s, SelectTurns&, int ctas,
                                        uint32_t need, float max_of_row, bool by_mass, float scale,
                                        const float* maxima) {
  const float infinity = __int_as_float(0x7f800000);
  const int slabs = row.p.slabs;
  if (threadIdx.x < 2 * kMostGatherings) s.counts[threadIdx.x] = 0;
  const uint32_t low = to_key(by_mass ? row.weighing.floor : -infinity);
  const uint32_t high = max(to_key(max_of_row), low);
  Keys keys = {high, high - low};
  int most_shift = kFirstShift;
  uint32_t reach = keys.range;  // how far down the bins of the first pass go
  bool few = !by_mass && need <= slabs - slabs / 4;
  if (few) {
    keys.range = high - to_key(kth_of_maxima(s, maxima, slabs, need));
  } else if (by_mass) {
    // What is so light that all elements of that weight hold half of what may be cut.
    const uint32_t light = (0x80000000u - need) / (2 * row.p.vocab);
    reach = high - max(min(to_key(__fdividef(light, scale)), high), low);
  }
#pragma unroll 1
  for (int gathering = 0;; ++gathering) {
    if (!few) {
#pragma unroll 1
      while (true) {
#pragma unroll 1
        for (int i = threadIdx.x; i < kBins / 4; i += blockDim.x) {
          reinterpret_cast<uint4*>(s.bins)[i] = make_uint4(0, 0, 0, 0);
        }
        __syncthreads();
        Keys covered = {keys.high, min(keys.range, reach)};
        const int shift = min(covered.shift(kBinBits), most_shift);
        covered.range = min(covered.range, (uint32_t(kBins) << shift) - 1);
        if (by_mass) {
          fill_bins<true>(row, s, covered, shift, scale);
        } else {
          fill_bins<false>(row, s, covered, shift, scale);
        }
        __syncthreads();
        const Bin bin = find_in_row(s, ctas, need);
        if (bin.at >= 0) {
          covered.narrow(bin.at, shift);
          keys = covered;
          need = bin.need;
          break;
        }
        if (covered.range == keys.range) return by_mass ? 0.0f : -infinity;
        need = bin.need;
        keys.high -= covered.range + 1;
        keys.range -= covered.range + 1;
        reach = keys.range;
        most_shift = kWarpSize;
        show_shared(ctas);
      }
      if (keys.range == 0) return from_key(keys.high);
    }
    const uint32_t count =
        gather(row, s, gathering, ctas, keys, by_mass ? nullptr : maxima);
    if (count <= kCandidates) {
      return from_key(find_in_list(s, count, keys, need, by_mass, scale));
    }
    few = false;
  }
}

#endif  // __CUDACC__

}  // namespace precast
