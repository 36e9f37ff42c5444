// SPDX-License-Identifier: Apache-2.0
// The few elements that top-k may keep: a list of them in one CTA of the cluster.
//
// At least k elements reach the k-th largest of the slabs' maxima, and seldom many more. They are
// collected by groups, each with its place.
//
// Where rows do not stay on chip, the pass before told the place of each slab's largest element and
// its second largest: slabs of which but one element may be kept, most of them, are not read again.
#pragma once

#include "precast/sampling/row_sampler.cuh"

namespace precast {

// The largest k for which a list is tried.
__host__ __device__ constexpr int most_listed(int vocab) {
  return (vocab + kSlab - 1) / kSlab * 3 / 4;
}

#if defined(__CUDACC__)

struct ListShared {
  uint32_t counts[kGroups];
  uint32_t least;           // a key
  uint32_t above[kRounds];  // mass above the drawn tokens
};

template <typename Sampler>
struct List {
  ListShared& s;
  Sampler& sampler;

  // Of the groups, once they are collected: weights and places.
  __device__ __forceinline__ auto items() const -> float2 (*)[kListed] { return sampler.s.listed; }

  static __device__ __forceinline__ int lane() { return threadIdx.x % kWarpSize; }

  // Ahead of the exchange of maxima.
  __device__ __forceinline__ void start() {
    if (threadIdx.x == 0) s.least = 0xffffffffu;
    if (threadIdx.x < kGroups) s.counts[threadIdx.x] = 0;
    if (threadIdx.x < kRounds) s.above[threadIdx.x] = 0;
    const int slabs = sampler.row.p.slabs;
    if (threadIdx.x < kGroups * sampler.row.p.slabs_of_group - slabs) {
      sampler.maxima[slabs + threadIdx.x] = -__int_as_float(0x7f800000);
    }
  }

  // The k-th largest of the slabs' maxima. Two threads a slab.
  __device__ __forceinline__ float kth_of_maxima(int k) {
    const int slabs = sampler.row.p.slabs, half = threadIdx.x % 2;
    const float4* fours = reinterpret_cast<const float4*>(sampler.maxima);
    const int count = kGroups / 4 * sampler.row.p.slabs_of_group;
    uint32_t least = 0xffffffffu;
#pragma unroll 1
    for (int first = 0; first < slabs; first += blockDim.x / 2) {
      const int i = first + threadIdx.x / 2;
      const float x = i < slabs ? sampler.maxima[i] : -__int_as_float(0x7f800000);
      int larger = 0;
#pragma unroll 4
      for (int j = half; j < count; j += 2) {
        const float4 y = fours[j];
        larger += (y.x > x) + (y.y > x) + (y.z > x) + (y.w > x);
      }
      larger += __shfl_xor_sync(0xffffffffu, larger, 1);
      if (i < slabs && larger < k) least = min(least, to_key(x));
    }
    least = __reduce_min_sync(0xffffffffu, least);
    if (lane() == 0) atomicMin(&s.least, least);
    __syncthreads();
    return from_key(s.least);
  }

  // Calls f(x, place) for the lane's elements of a slab that are not below `least`.
  template <typename F>
  static __device__ __forceinline__ void each_from(float least, const float (&y)[kPerLane],
                                                   int slab, const F& f) {
    uint32_t hits = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) hits |= y[j] >= least ? 1u << j : 0u;
#pragma unroll 1
    for (; hits != 0; hits &= hits - 1) {
      const int j = __ffs(hits) - 1;
      float x = y[0];
#pragma unroll
      for (int other = 1; other < kPerLane; ++other) {
        if (j == other) x = y[other];
      }
      f(x, slab * kSlab + lane() * kPerLane + j);
    }
  }

  // A little below the bound, as what may weigh the same, and above what has no mass.
  static __device__ __forceinline__ float near(float bound, const Weighing& to_be) {
    return to_be.logits ? fmaxf(bound - __fdiv_rn(0x1p-12f, to_be.factor), -3.402823466e38f)
                        : fmaxf(bound, 0x1p-149f);
  }

  // Collects what the k largest are among, while the row is not yet weighed; behind an exchange of
  // its slabs' maxima. False where they are too many. All threads of the cluster call and know.
  __device__ __forceinline__ bool collect(int k, const Weighing& to_be) {
    auto& row = sampler.row;
    const auto weight = [&](float x) { return to_be.logits ? weight_of_logit(x, to_be) : x; };
    const float bound = kth_of_maxima(k);
    const float floor = weight(bound), least = near(bound, to_be);
    const auto keep = [&](float x, int place) {
      const float w = weight(x);
      if (!(w >= floor && w > 0.0f)) return;
      const int group = place / kSlab / row.p.slabs_of_group;
      const uint32_t slot = atomicAdd(&s.counts[group], 1u);
      if (slot < kListed) items()[group][slot] = {w, __int_as_float(place)};
    };
    float* at = row.copy;
#pragma unroll 1
    for (int i = row.warp(); i < row.count; i += row.warps(), at += row.step()) {
      const float top = sampler.maxima[row.first + i];
      if (!(top >= least)) continue;
      if (!Sampler::kIsOnChip && sampler.has_seconds && sampler.slots[i].x < least) {
        if (lane() == 0) keep(top, sampler.places[i]);
        continue;
      }
      float y[kPerLane];
      row.load(row.first + i, at, y);
      each_from(least, y, row.first + i, keep);
    }
    return tell();
  }

  // The CTAs tell each other their counts, and the first one what they collected.
  __device__ __forceinline__ bool tell() {
    const int rank = cluster_rank(), ctas = sampler.ctas, own = sampler.groups;
    uint64_t* told = &sampler.s.listed_told;
    __syncthreads();
    if (ctas > 1) {
      if (threadIdx.x == 0) {
        const int bytes = sizeof(uint32_t) + (rank == 0 ? kListed * sizeof(float2) : 0);
        expect_bytes(told, (kGroups - own) * bytes);
      }
#pragma unroll 1
      for (int i = sampler.row.warp(); i < own; i += sampler.row.warps()) {
        const int group = rank * own + i;
        if (lane() < ctas && lane() != rank) {
          store_and_count(&s.counts[group], told, lane(), s.counts[group]);
        }
        if (rank != 0) {
          store_and_count(&items()[group][lane()], told, 0, items()[group][lane()]);
        }
      }
      wait_for_bytes(told, 0);
    }
    bool few = true;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) few = few && s.counts[i] <= kListed;
    return few;
  }
};

#endif  // __CUDACC__

}  // namespace precast
