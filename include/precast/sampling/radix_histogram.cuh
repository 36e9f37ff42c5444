// SPDX-License-Identifier: Apache-2.0
// One pass of radix selection: a histogram of a row's elements by their ordered keys, and a prefix
// sum that finds the bin in which the target lies.
//
// Each CTA adds the amounts of its elements to 2048 bins. One warp of each CTA then sums the
// histograms of all CTAs in two levels: first 32 coarse bins of 64 bins each, then the 64 bins of
// the coarse bin that holds the target.
#pragma once

#include "precast/sampling/row.cuh"

namespace precast {

constexpr int kBinBits = 11;
constexpr int kBins = 1 << kBinBits;
constexpr int kFineBins = 2 * kWarpSize;        // bins that a warp searches at a time
constexpr int kCoarseBins = kBins / kFineBins;  // each is the sum of kFineBins bins
constexpr int kFirstShift = 17;            // bins of 1/64 octave at most, which cover 32 octaves
constexpr int kMaxCandidates = 1024;       // of all CTAs together
constexpr int kMaxCandidatesPerCta = 128;  // of one CTA
constexpr int kMaxGathers = 4;             // gathers of candidates in one selection

static_assert(kMaxCandidates >= kMaxTiles &&
              kMaxCandidates >= kMaxSamplerCtas * kMaxCandidatesPerCta);

#if defined(__CUDACC__)

struct Bin {
  int index;           // negative if the total is below the target
  uint32_t remaining;  // the target minus the amounts of all larger bins
  uint32_t amount;     // the amount of the bin
};

struct RadixSelectStorage {
  union {
    alignas(16) uint32_t bins[kBins + kWarpSize];
    alignas(16) uint2 candidates[kMaxCandidates];  // keys and amounts
  };
  // Other CTAs read the following, besides the bins.
  alignas(16) uint32_t coarse[kCoarseBins];
  uint32_t cta_candidates[kMaxCandidatesPerCta];  // keys
  // of `cta_candidates`: one count for each gather, at the even indices
  uint32_t candidate_counts[2 * kMaxGathers];

  Bin found_bin;
  uint32_t result;
};

// Returns a weight as a multiple of 2^-31 of the total mass, rounded to nearest. Fixed-point sums
// do not depend on the order of addition.
__device__ __forceinline__ uint32_t to_fixed_point(float weight, float scale) {
  return __float2uint_rn(weight * scale);
}

// Returns the scale of to_fixed_point() for weights with this total.
__device__ __forceinline__ float fixed_point_scale(float total) {
  return fminf(__fdiv_rn(0x1p31f, total), 3.402823466e38f);
}

// Returns the top_p share of the mass in the unit of to_fixed_point().
__device__ __forceinline__ uint32_t fixed_point_target(float top_p) {
  const uint32_t target = __double2uint_ru(double(top_p) * 0x1p31);
  return target > 0 ? target : 1;
}

// Returns the bin at which the prefix sum of the amounts reaches `target`. All lanes of a warp call
// it; lane l holds the amounts of the bins 2 l and 2 l + 1.
__device__ __forceinline__ Bin find_bin(uint2 amounts, uint32_t target) {
  const int lane = threadIdx.x % kWarpSize;
  uint32_t prefix_sum = amounts.x + amounts.y;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, prefix_sum, distance);
    if (lane >= distance) prefix_sum += other;
  }
  const uint32_t reached = __ballot_sync(0xffffffffu, prefix_sum >= target);
  if (reached == 0) return {-1, target - __shfl_sync(0xffffffffu, prefix_sum, kWarpSize - 1), 0};
  const int first_lane = __ffs(reached) - 1;
  const uint32_t first = __shfl_sync(0xffffffffu, amounts.x, first_lane);
  const uint32_t second = __shfl_sync(0xffffffffu, amounts.y, first_lane);
  const uint32_t remaining =
      target - (__shfl_sync(0xffffffffu, prefix_sum, first_lane) - first - second);
  if (remaining <= first) return {2 * first_lane, remaining, first};
  return {2 * first_lane + 1, remaining - first, second};
}

// Makes what each CTA wrote to its shared memory visible to the whole cluster.
__device__ __forceinline__ void publish_smem(int ctas) {
  if (ctas > 1) {
    cluster_arrive_shared();
    cluster_wait();
  } else {
    __syncthreads();
  }
}

// Returns the sum over the CTAs of the pair at `source` in the shared memory of each.
__device__ __forceinline__ uint2 sum_pairs_over_ctas(const uint32_t* source, int ctas) {
  uint2 pairs[kMaxSamplerCtas], sum = {0, 0};
#pragma unroll
  for (int i = 0; i < kMaxSamplerCtas; ++i) pairs[i] = load_pair_from_cta(source, min(i, ctas - 1));
#pragma unroll
  for (int i = 0; i < kMaxSamplerCtas; ++i) {
    sum.x += i < ctas ? pairs[i].x : 0;
    sum.y += i < ctas ? pairs[i].y : 0;
  }
  return sum;
}

// Returns the bin of the row at which the prefix sum reaches `target`. All threads of the cluster
// call it.
__device__ __forceinline__ Bin find_bin_in_row(RadixSelectStorage& s, int ctas, uint32_t target) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll 1
  for (int i = threadIdx.x / kWarpSize; i < kCoarseBins; i += blockDim.x / kWarpSize) {
    const uint2 pair = *reinterpret_cast<const uint2*>(&s.bins[i * kFineBins + 2 * lane]);
    const uint32_t sum = __reduce_add_sync(0xffffffffu, pair.x + pair.y);
    if (lane == 0) s.coarse[i] = sum;
  }
  publish_smem(ctas);
  // Why one warp: reads from other CTAs' shared memory are slow.
  if (threadIdx.x < kWarpSize) {
    uint2 pair = sum_pairs_over_ctas(&s.coarse[2 * lane % kCoarseBins], ctas);
    if (2 * lane >= kCoarseBins) pair = {0, 0};
    Bin bin = find_bin(pair, target);
    if (bin.index >= 0) {
      const int coarse = bin.index;
      pair = sum_pairs_over_ctas(&s.bins[coarse * kFineBins + 2 * lane], ctas);
      bin = find_bin(pair, bin.remaining);
      bin.index += coarse * kFineBins;
    }
    if (lane == 0) s.found_bin = bin;
  }
  __syncthreads();
  return s.found_bin;
}

// The keys from `high` down to `high - range`.
struct KeyRange {
  uint32_t high;
  uint32_t range;

  // The shift that maps the range to at most kBins bins.
  __device__ __forceinline__ int shift() const {
    return max(kWarpSize - __clz(range) - kBinBits, 0);
  }

  __device__ __forceinline__ void narrow(int bin, int shift) {
    const uint32_t start = uint32_t(bin) << shift;
    high -= start;
    range = min(range - start, (1u << shift) - 1);
  }
};

// Calls f(i, first, x) for each half of the lane's elements of each tile i of the warp for which
// needs_tile(i). The elements are the lane's vectors of four from `first` on.
template <typename T, bool kOnChip, typename InputTransform, typename NeedsTile, typename F>
__device__ __forceinline__ void for_each_half_tile(Row<T, kOnChip, InputTransform>& row,
                                                   const NeedsTile& needs_tile, const F& f) {
  constexpr int kHalf = kItemsPerLane / 8;
  float x[4 * kHalf];
  if constexpr (kOnChip) {
    float* smem = row.lane_smem;
#pragma unroll 1
    for (int i = row.warp_id(); i < row.cta_tiles;
         i += row.num_warps(), smem += row.tile_stride()) {
      if (!needs_tile(i)) continue;
#pragma unroll 1
      for (int first = 0; first < 2 * kHalf; first += kHalf) {
#pragma unroll
        for (int j = 0; j < kHalf; ++j) {
          const float4 four = *row.vec4_ptr(smem, first + j);
          x[4 * j] = four.x;
          x[4 * j + 1] = four.y;
          x[4 * j + 2] = four.z;
          x[4 * j + 3] = four.w;
        }
        f(i, first, x);
      }
    }
  } else {
    row.for_each_tile([&](int i, const float (&y)[kItemsPerLane]) {
      if (!needs_tile(i)) return;
#pragma unroll
      for (int first = 0; first < 2 * kHalf; first += kHalf) {
#pragma unroll
        for (int j = 0; j < 4 * kHalf; ++j) x[j] = y[4 * first + j];
        f(i, first, x);
      }
    });
  }
}

struct AllTiles {
  __device__ __forceinline__ bool operator()(int) const { return true; }
};

// All threads of a CTA call it; a barrier of the CTA must follow.
__device__ __forceinline__ void clear_bins(RadixSelectStorage& s) {
#pragma unroll 1
  for (int i = threadIdx.x; i < kBins / 4; i += blockDim.x) {
    reinterpret_cast<uint4*>(s.bins)[i] = make_uint4(0, 0, 0, 0);
  }
}

// The amount of an element: 1 for top-k, its fixed-point mass for top-p.
struct ItemAmount {
  bool by_mass;
  float scale;

  __device__ __forceinline__ uint32_t operator()(float x) const {
    return by_mass ? to_fixed_point(x, scale) : 1;
  }
};

// Adds the amounts of the row's elements with keys in the range to the bins. Why the other elements
// add to dummy bins, one for each lane: branches would cost more.
template <bool kByMass, typename Row>
__device__ __forceinline__ void fill_bins(Row& row, RadixSelectStorage& s, KeyRange keys, int shift,
                                          float scale) {
  const uint32_t dummy_bin = kBins + threadIdx.x % kWarpSize;
  const auto bin_of = [&](float x) {
    // An element with mass is not negative, so its key is its bits plus 0x80000000. The keys of all
    // other elements are out of range.
    const uint32_t distance_from_high =
        kByMass ? keys.high - 0x80000000u - __float_as_uint(x) : keys.high - to_ordered_key(x);
    return distance_from_high <= keys.range ? distance_from_high >> shift : dummy_bin;
  };
  const auto amount = [&](float x) { return kByMass ? to_fixed_point(x, scale) : 1u; };
  const auto count_vec4 = [&](float x, float y, float z, float w) {
    const uint32_t a = bin_of(x), b = bin_of(y), c = bin_of(z), d = bin_of(w);
    if constexpr (kByMass) {
      // Additions to one bin wait for each other, as in rows of equal elements: the warp adds these
      // at once.
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
  for_each_half_tile(row, AllTiles(), [&](int, int, const float (&x)[kItemsPerLane / 2]) {
#pragma unroll
    for (int j = 0; j < kItemsPerLane / 2; j += 4) count_vec4(x[j], x[j + 1], x[j + 2], x[j + 3]);
  });
}

#endif  // __CUDACC__

}  // namespace precast
