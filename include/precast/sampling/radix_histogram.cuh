// SPDX-License-Identifier: Apache-2.0
// Bins of a row's elements: where, from the largest element down, sums reach an amount.
//
// Each CTA adds up what its elements count in 2048 bins of the ordered keys. One warp of each then
// reads all CTAs' sums of 64 bins each, and of those 64 bins among which the amount is reached.
#pragma once

#include "precast/sampling/row.cuh"

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

// Calls f(i, first, fours) for each half of the lane's fours, from `first` on, of each slab i of
// the warp for which wants(i).
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
    const uint32_t below =
        kByMass ? keys.high - 0x80000000u - __float_as_uint(x) : keys.high - to_key(x);
    return below <= keys.range ? below >> shift : idle;
  };
  const auto amount = [&](float x) { return kByMass ? fixed_mass(x, scale) : 1u; };
  const auto add_four = [&](float x, float y, float z, float w) {
    const uint32_t a = bin_of(x), b = bin_of(y), c = bin_of(z), d = bin_of(w);
    if constexpr (kByMass) {
      // Rows of equal elements: additions to one bin wait for each other.
      const uint32_t one = __shfl_sync(0xffffffffu, a, 0);
      if (__all_sync(0xffffffffu, a == one && b == one && c == one && d == one)) {
        const uint32_t sum =
            __reduce_add_sync(0xffffffffu, amount(x) + amount(y) + amount(z) + amount(w));
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

#endif  // __CUDACC__

}  // namespace precast
