// SPDX-License-Identifier: Apache-2.0
// Draws from a list of the elements that top-k may keep.
//
// The k-th largest, the filters and the draws need neither the row nor the other CTAs of the
// cluster, whose places on the multiprocessors are free for other rows. Sums are those of the row:
// what is not on the list would add zeros to them. A warp has a group, and a lane an element.
#pragma once

#include "precast/sampling/candidates.cuh"

namespace precast {

#if defined(__CUDACC__)

// The filters of a row, behind top-k.
struct ListFilters {
  int k;
  float min_p;
  uint32_t need;  // of mass, as needed_mass()
  float total;    // whose share that is; that of the k largest if not positive
  bool limits_mass;
};

// All threads of the first CTA call each of these.
template <typename Sampler>
struct ListDraw {
  List<Sampler>& list;

  static __device__ __forceinline__ int lane() { return threadIdx.x % kWarpSize; }

  template <typename F>
  __device__ __forceinline__ void each_group(const F& f) {
#pragma unroll 1
    for (int group = list.sampler.row.warp(); group < kGroups; group += list.sampler.row.warps()) {
      const bool some = lane() < list.s.counts[group];
      const float2 item = list.items()[group][some ? lane() : 0];
      f(group, some ? item.x : 0.0f, some ? __float_as_int(item.y) : 0x40000000 + lane());
    }
  }

  // Orders each group by place.
  __device__ __forceinline__ void sort() {
    each_group([&](int group, float weight, int place) {
      int rank = 0;
#pragma unroll 8
      for (int i = 0; i < kListed; ++i) rank += __shfl_sync(0xffffffffu, place, i) < place;
      if (weight > 0.0f) list.items()[group][rank] = {weight, __int_as_float(place)};
    });
  }

  // The smallest weight for which less than `need` is told by amount(x) of larger ones.
  template <typename Amount>
  __device__ __forceinline__ float least_of(uint32_t need, const Amount& amount) {
    if (threadIdx.x == 0) list.s.least = 0xffffffffu;
    __syncthreads();
    each_group([&](int, float weight, int) {
      uint32_t above = 0;
#pragma unroll 1
      for (int group = 0; group < kGroups; ++group) {
        const int count = list.s.counts[group];
#pragma unroll 4
        for (int i = 0; i < count; ++i) {
          const float x = list.items()[group][i].x;
          above += x > weight ? amount(x) : 0;
        }
      }
      const bool in_set = weight > 0.0f && above < need;
      const uint32_t least = __reduce_min_sync(0xffffffffu, in_set ? to_key(weight) : 0xffffffffu);
      if (lane() == 0) atomicMin(&list.s.least, least);
    });
    __syncthreads();
    return from_key(list.s.least);
  }

  // The lane's mass of the slab whose items are those from `head` on to `end`.
  static __device__ __forceinline__ float lane_mass(float weight, int place, int head, int end) {
    const int of_lane = place / kPerLane % kWarpSize;
    float mass = 0.0f;
#pragma unroll 1
    for (int i = head; i < end; ++i) {
      const float x = __shfl_sync(0xffffffffu, weight, i);
      if (__shfl_sync(0xffffffffu, of_lane, i) == lane()) mass += x;
    }
    return mass;
  }

  // The masses of a group's slabs, each in the lane of its first item; and those lanes.
  static __device__ __forceinline__ float slab_mass(float weight, int place, uint32_t& heads) {
    const int slab = place / kSlab;
    const int before = __shfl_up_sync(0xffffffffu, slab, 1);
    const bool is_head = lane() == 0 || slab != before;
    heads = __ballot_sync(0xffffffffu, is_head);
    // Two numbers add up in any order.
    const float next = __shfl_down_sync(0xffffffffu, weight, 1);
    const int size = end_of(heads & ~0u << lane()) - lane();  // of heads
    float mass = size > 1 ? weight + next : weight;
    uint32_t longer = __ballot_sync(0xffffffffu, is_head && size > 2 && place < kMaxVocab);
#pragma unroll 1
    for (; longer != 0; longer &= longer - 1) {
      const int head = __ffs(longer) - 1, end = end_of(heads & ~0u << head);
      const float sum = warp_sum(lane_mass(weight, place, head, end));
      if (lane() == head) mass = sum;
    }
    return is_head ? mass : 0.0f;
  }

  // Behind the items of the first slab of `heads`.
  static __device__ __forceinline__ int end_of(uint32_t heads) {
    const uint32_t next = heads & (heads - 1);
    return next != 0 ? __ffs(next) - 1 : kWarpSize;
  }

  // Tells the groups' masses of what weighs `floor` or more.
  __device__ __forceinline__ void tell_masses(float floor) {
    __syncthreads();
    float2* pairs = list.sampler.s.pairs[list.sampler.turn()];
    each_group([&](int group, float weight, int place) {
      uint32_t heads;
      const float mass = slab_mass(weight >= floor ? weight : 0.0f, place, heads);
      const float sum = running_sum(mass, kWarpSize);
      if (lane() == kWarpSize - 1) pairs[group].x = sum;
    });
    __syncthreads();
  }

  // As Sampler::draw().
  __device__ __forceinline__ Token draw(uint32_t round, float floor) {
    const uint4& words = list.sampler.s.words[round];
    const Picked picked = list.sampler.pick_group(to_uniform(words.x));
    Token token = {-1, 0.0f, is_mass(list.sampler.total())};
    each_group([&](int group, float weight, int place) {
      if (group != picked.at) return;
      if (!(weight >= floor)) weight = 0.0f;
      uint32_t heads;
      const float slab = slab_mass(weight, place, heads);
      const int head =
          first_above(running_sum(slab, kWarpSize), to_uniform(words.y) * picked.mass, slab);
      const int end = end_of(heads & ~0u << head);
      const float of_lane = lane_mass(weight, place, head, end);
      const int from = pick_one(of_lane, to_uniform(words.z));
      const bool is_of = lane() >= head && lane() < end && place / kPerLane % kWarpSize == from;
      const int at = pick_one(is_of ? weight : 0.0f, to_uniform(words.w));
      token.weight = __shfl_sync(0xffffffffu, weight, at);
      const int drawn = __shfl_sync(0xffffffffu, place, at);
      token.id = drawn / kSlab * kSlab + place_in_slab(from, drawn % kPerLane);
    });
    return token;
  }

  // Draws a token by the filters.
  __device__ __forceinline__ Token sample(const ListFilters& f) {
    __syncthreads();
    sort();
    __syncthreads();
    float floor = least_of(f.k, [](float) { return 1u; });
    float total = f.total;
    bool told = false;
    if (f.limits_mass && !(total > 0.0f)) {
      tell_masses(floor);
      total = list.sampler.total();
      told = f.min_p <= floor;
    }
    const float scale = mass_scale(total);
    floor = fmaxf(floor, f.min_p);
    Token token;
#pragma unroll 1
    for (uint32_t round = 0;; ++round) {
      if (!told) tell_masses(floor);
      told = false;
      token = draw(round, floor);
      if (!f.limits_mass || round == kRounds || !token.valid) break;
      if (token.id >= 0 && lane() == 0) list.sampler.s.drawn.x = token.weight;
      __syncthreads();
      const float drawn = list.sampler.s.drawn.x;
      each_group([&](int, float weight, int) {
        const uint32_t mass = fixed_mass(weight > drawn ? weight : 0.0f, scale);
        const uint32_t sum = warp_sum(mass);
        if (lane() == 0) atomicAdd(&list.s.above[round], sum);
      });
      __syncthreads();
      if (list.s.above[round] < f.need) break;
      floor = round + 1 < kRounds
                  ? just_above(drawn)
                  : fmaxf(floor, least_of(f.need, [=](float x) { return fixed_mass(x, scale); }));
    }
    return token;
  }
};

#endif  // __CUDACC__

}  // namespace precast
