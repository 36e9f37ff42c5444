// SPDX-License-Identifier: Apache-2.0
// Exact thresholds of a row: its k-th largest element, or the weight down to which the largest
// elements hold a share of the mass.
//
// An interval of the ordered keys, from the largest element down, is cut into 64 bins: what the
// elements of each hold is added up in shared memory and over the cluster, and the bin that reaches
// the wanted amount is the next interval. The first bins are a quarter of an octave wide, the last
// of them holds the rest. Shares are fixed-point masses, so that no order of addition matters. The
// k-th largest is mostly found without it: the k-th largest of the slabs' maxima bounds it, and few
// elements reach that.
#pragma once

#include "precast/sampling_row.cuh"

namespace precast {

constexpr uint32_t kBins = 64;
constexpr int kBinBits = 6;
constexpr int kCopies = 16;       // of a histogram: lanes that add to one bin at a time
constexpr int kFirstShift = 21;   // a quarter of an octave
constexpr int kCandidates = 512;  // of all CTAs

#if defined(__CUDACC__)

struct SelectShared {
  union {
    uint32_t histogram[kBins * kCopies];
    struct {
      alignas(16) float candidates[kCandidates];  // kCandidates / ctas of each CTA
      uint32_t held[kCandidates];
    };
  };
  alignas(16) uint32_t mine[kBins];
  alignas(16) uint32_t amounts[2][kMaxCtas][kBins];  // of all CTAs, in turn
  uint64_t told[2];                                  // barriers of them, in a cluster
  uint64_t gathered;                                 // barrier of the candidates and their counts
  uint32_t counts[kMaxCtas];
  uint32_t count;
  uint32_t result;
  float bound;
};

// How often a kernel selected: phases of the barriers.
struct SelectTurns {
  uint32_t passes;
  uint32_t gatherings;
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

struct Bin {
  int at;         // counted from the largest; kBins if nothing reaches what is needed
  uint32_t need;  // within the bin
};

// Any warp: the bin at which the sums reach `need`.
__device__ __forceinline__ Bin find_bin(const uint32_t (&amounts)[kMaxCtas][kBins], int ctas,
                                        uint32_t need) {
  const int lane = threadIdx.x % kWarpSize;
  uint32_t first = 0, second = 0;
#pragma unroll 4
  for (int rank = 0; rank < ctas; ++rank) {
    const uint2 two = *reinterpret_cast<const uint2*>(&amounts[rank][2 * lane]);
    first += two.x;
    second += two.y;
  }
  uint32_t up_to = first + second;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, up_to, distance);
    if (lane >= distance) up_to += other;
  }
  const uint32_t reached = __ballot_sync(0xffffffffu, up_to >= need);
  if (reached == 0) return {kBins, 0};
  const uint32_t left = need - (up_to - first - second);
  const int at = left <= first ? 2 * lane : 2 * lane + 1;
  const int from = __ffs(reached) - 1;
  return {__shfl_sync(0xffffffffu, at, from),
          __shfl_sync(0xffffffffu, left <= first ? left : left - first, from)};
}

// Collects the elements for which reaches(x), those of a slab only where slab_reaches(i), in all
// CTAs. False where they are too many.
template <typename Row, typename SlabReaches, typename Reaches>
__device__ __forceinline__ bool gather(Row& row, SelectShared& s, SelectTurns& turns, int ctas,
                                       const SlabReaches& slab_reaches, const Reaches& reaches) {
  const int room = kCandidates / ctas;
  float* list = s.candidates + cluster_rank() * room;
  if (threadIdx.x == 0) {
    s.count = 0;
    s.result = 0xffffffffu;
    if (ctas > 1) expect_bytes(&s.gathered, ctas * (room * sizeof(float) + sizeof(uint32_t)));
  }
  __syncthreads();
  const auto take = [&](float x) {
    if (!reaches(x)) return;
    const uint32_t at = atomicAdd(&s.count, 1u);
    if (at < room) list[at] = x;
  };
  row.each_four([&](int i, int, float4 x) {
    if (!slab_reaches(i)) return;
    take(x.x);
    take(x.y);
    take(x.z);
    take(x.w);
  });
  __syncthreads();
  if (ctas == 1) {
    if (threadIdx.x == 0) s.counts[0] = s.count;
    __syncthreads();
  } else {
    if (threadIdx.x < ctas) {
      store_and_count(&s.counts[cluster_rank()], &s.gathered, threadIdx.x, s.count);
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < kCandidates / 4; i += blockDim.x) {
      uint4* four = reinterpret_cast<uint4*>(list) + i % (room / 4);
      store_and_count(four, &s.gathered, i / (room / 4), *four);
    }
    wait_for_bytes(&s.gathered, turns.gatherings++ % 2);
  }
  bool few = true;
#pragma unroll 1
  for (int rank = 0; rank < ctas; ++rank) few = few && s.counts[rank] <= room;
  return few;
}

// What an element counts: one, or its mass.
struct Amount {
  bool by_mass;
  float scale;
  float floor;  // what weighs less, has no mass

  __device__ __forceinline__ uint32_t operator()(float x) const {
    return by_mass ? fixed_mass(x < floor ? 0.0f : x, scale) : 1;
  }
};

// The smallest candidate that less than `need` is larger than.
__device__ __forceinline__ float smallest_of_candidates(SelectShared& s, int ctas, uint32_t need,
                                                        const Amount& amount) {
  const int room = kCandidates / ctas;
#pragma unroll 1
  for (int i = threadIdx.x; i < kCandidates; i += blockDim.x) s.held[i] = amount(s.candidates[i]);
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < kCandidates; i += blockDim.x) {
    if (i % room >= s.counts[i / room]) continue;
    const float x = s.candidates[i];
    uint32_t above = 0;
#pragma unroll 1
    for (int rank = 0; rank < ctas; ++rank) {
      const int end = rank * room + s.counts[rank];
#pragma unroll 4
      for (int j = rank * room; j < end; ++j) above += s.candidates[j] > x ? s.held[j] : 0;
    }
    if (above < need) atomicMin(&s.result, to_key(x));
  }
  __syncthreads();
  return from_key(s.result);
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

// The largest x of the row for which the elements from x up hold `need`: of their number, or of
// their mass. 0 where all do not: nothing is cut there. `max` is the largest element, `maxima`
// those of the slabs, which only numbers want. All threads of the cluster call and get it.
template <typename Row>
__device__ __forceinline__ float select(Row& row, SelectShared& s, SelectTurns& turns, int ctas,
                                        uint32_t need, float max, bool by_mass, float scale,
                                        const float* maxima) {
  const Amount amount = {by_mass, scale, row.weighing.floor};
  const int copy = threadIdx.x % kCopies;
  const int rank = cluster_rank();
  const int slabs = row.p.slabs;
  uint32_t high = to_key(max), range = high;  // of keys: from high down to high - range
  int shift = kFirstShift;
  bool few = false;  // elements may be in the range, and reach the bound
  float bound = -__int_as_float(0x7f800000);
  if (!by_mass && need <= slabs - slabs / 4) {
    bound = kth_of_maxima(s, maxima, slabs, need);
    few = true;
  }
#pragma unroll 1
  for (int pass = 0;; ++pass) {
    if (few) {
      const bool fits = gather(
          row, s, turns, ctas, [&](int i) { return by_mass || maxima[row.first + i] >= bound; },
          [&](float x) { return x >= bound && high - to_key(x) <= range; });
      if (fits) return smallest_of_candidates(s, ctas, need, amount);
      __syncthreads();
    }
    if (few || pass == 0) {
#pragma unroll 1
      for (int i = threadIdx.x; i < kBins * kCopies; i += blockDim.x) s.histogram[i] = 0;
    }
    const uint32_t turn = turns.passes % 2;
    const auto add = [&](float x) {
      const uint32_t below = (high - to_key(x)) >> shift;
      atomicAdd(&s.histogram[min(below, kBins - 1) * kCopies + copy], amount(x));
    };
    __syncthreads();
    if (ctas > 1 && threadIdx.x == 0) {
      expect_bytes(&s.told[turn], ctas * kBins * sizeof(uint32_t));
    }
    if (pass == 0) {
      row.each_four([&](int, int, float4 x) {
        add(x.x);
        add(x.y);
        add(x.z);
        add(x.w);
      });
    } else {
      row.each_four([&](int, int, float4 x) {
        if (high - to_key(x.x) <= range) add(x.x);
        if (high - to_key(x.y) <= range) add(x.y);
        if (high - to_key(x.z) <= range) add(x.z);
        if (high - to_key(x.w) <= range) add(x.w);
      });
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < kBins * kCopies; i += blockDim.x) {
      uint32_t sum = s.histogram[i];
      s.histogram[i] = 0;
#pragma unroll
      for (int distance = kCopies / 2; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, distance);
      }
      if (i % kCopies == 0) (ctas > 1 ? s.mine : s.amounts[turn][0])[i / kCopies] = sum;
    }
    __syncthreads();
    if (ctas > 1) {
      constexpr int kFours = kBins / 4;
#pragma unroll 1
      for (int i = threadIdx.x; i < ctas * kFours; i += blockDim.x) {
        const int four = i % kFours * 4;
        store_and_count(reinterpret_cast<uint4*>(&s.amounts[turn][rank][four]), &s.told[turn],
                        i / kFours, *reinterpret_cast<const uint4*>(&s.mine[four]));
      }
      wait_for_bytes(&s.told[turn], turns.passes / 2 % 2);
    }
    ++turns.passes;
    const Bin bin = find_bin(s.amounts[turn], ctas, need);
    if (bin.at == kBins) return 0.0f;
    need = bin.need;
    const uint32_t start = uint32_t(bin.at) << shift;
    const uint32_t width = (1u << shift) - 1;
    high -= start;
    range = bin.at == kBins - 1 || range - start < width ? range - start : width;
    if (range == 0) return from_key(high);
    const int bits = kWarpSize - __clz(range);
    shift = bits > kBinBits ? bits - kBinBits : 0;
    bound = -__int_as_float(0x7f800000);
    // Behind two passes few elements are left, but for rows of equal or very close ones.
    few = pass == 1;
  }
}

#endif  // __CUDACC__

}  // namespace precast
