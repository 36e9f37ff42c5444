// SPDX-License-Identifier: Apache-2.0
// A cluster of CTAs that works on a row: what its CTAs tell each other, and the draw of a token.
//
// A CTA has one or more of the row's 8 groups of slabs. Sums, maxima and counts of a row are told
// group by group, 8 bytes each to each CTA, by stores that complete on a barrier of the receiver:
// there is no barrier of the cluster but the first. A token is drawn by every CTA down to its
// group, and from there on by the CTA that has it.
#pragma once

#include "precast/sampling_draw.cuh"
#include "precast/sampling_select.cuh"

namespace precast {

// Launch bounds: those on chip leave a thread 80 registers, for three CTAs of 256 threads a
// multiprocessor.
template <bool kOnChip>
constexpr int kBoundThreads = kOnChip ? 768 : kRowThreads;

#if defined(__CUDACC__)

// What a CTA needs beside the row and what it keeps of each slab.
struct RowShared {
  alignas(16) float2 pairs[2][kGroups];
  uint64_t told[2];                          // barriers of the pairs, in a cluster
  uint64_t maxima_told;                      // of the slabs' maxima, in a cluster
  uint64_t drawn_told;                       // of `drawn`, in a cluster
  uint64_t copied[kRowThreads / kWarpSize];  // of the warps' copies
  SelectShared select;
  float2 drawn;  // its weight
  uint4 words;
  int slab;
};

struct Token {
  int id;  // -1: another warp has it
  float weight;
  bool valid;  // the row has mass, and no NaN; else the token is 0
};

// The pairs that slabs and groups tell. over(): all lanes of a warp get the sum of `count` of them.
struct MassAndMax {
  static __device__ __forceinline__ float2 over(const float2* slots, int count) {
    const int lane = threadIdx.x % kWarpSize;
    float mass = 0.0f, max = -__int_as_float(0x7f800000);
#pragma unroll 1
    for (int start = 0; start < count; start += kWarpSize) {
      const int left = count - start;
      float2 one = {0.0f, -__int_as_float(0x7f800000)};
      if (lane < left) one = slots[start + lane];
      max = fmaxf(max, one.y);
#pragma unroll 1
      for (int i = 0; i < kWarpSize && i < left; i += 8) {
#pragma unroll
        for (int j = 0; j < 8; ++j) mass += __shfl_sync(0xffffffffu, one.x, i + j);
      }
    }
    return {mass, warp_max(max)};
  }
};

struct Counts {
  static __device__ __forceinline__ float2 over(const float2* slots, int count) {
    uint32_t x = 0, y = 0;
#pragma unroll 1
    for (int i = threadIdx.x % kWarpSize; i < count; i += kWarpSize) {
      x += __float_as_uint(slots[i].x);
      y += __float_as_uint(slots[i].y);
    }
    return {__uint_as_float(__reduce_add_sync(0xffffffffu, x)),
            __uint_as_float(__reduce_add_sync(0xffffffffu, y))};
  }
};

// 1 if x is at least `floor`, or NaN, else 0. Why numbers and not predicates: additions under a
// predicate wait for it, one by one.
__device__ __forceinline__ float reaches(float x, float floor) {
  float one;
  asm("set.geu.f32.f32 %0, %1, %2;" : "=f"(one) : "f"(x), "f"(floor));
  return one;
}

__device__ __forceinline__ float exceeds(float x, float bound) {
  float one;
  asm("set.gt.f32.f32 %0, %1, %2;" : "=f"(one) : "f"(x), "f"(bound));
  return one;
}

// NaN stays.
__device__ __forceinline__ float positive_part(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

// What lanes fold of their elements.
struct FoldMass {
  float mass;
  __device__ __forceinline__ void add(float x) { mass += positive_part(x); }
};

struct FoldCutMass {
  float mass, floor;
  __device__ __forceinline__ void add(float x) { mass = __fmaf_rn(reaches(x, floor), x, mass); }
};

struct FoldMassAndMax {
  float mass, max;
  __device__ __forceinline__ void add(float x) {
    mass += positive_part(x);
    max = fmaxf(max, x);
  }
};

struct FoldMax {
  float max;
  __device__ __forceinline__ void add(float x) { max = fmaxf(max, x); }
};

struct FoldAbove {
  float mass, bound;
  __device__ __forceinline__ void add(float x) { mass = __fmaf_rn(exceeds(x, bound), x, mass); }
};

struct FoldFixedAbove {
  float bound, scale;
  uint32_t mass;
  __device__ __forceinline__ void add(float x) { mass += fixed_mass(x > bound ? x : 0.0f, scale); }
};

// The CTAs of a cluster tell each other a pair a group, in two buffers in turn. Every CTA tells
// each time, behind a barrier of its own, so that whoever has all pairs of one exchange knows that
// nobody reads those of the one before.
template <typename T, bool kOnChip, typename Edit = NoEdit>
struct Sampler {
  RowShared& s;
  float* maxima;  // of all slabs, where they were told
  float2* slots;  // of the CTA's slabs
  Row<T, kOnChip, Edit> row;
  int ctas;
  int groups;  // of the CTA
  uint32_t exchanges = 0;
  SelectTurns turns = {0, 0};

  // Numbers ahead of the row in the CTA's dynamic shared memory.
  static __host__ __device__ __forceinline__ int numbers_ahead(int slabs_of_group, int groups) {
    return (kGroups * slabs_of_group + 2 * groups * slabs_of_group + 31) / 32 * 32;
  }

  // `memory`: the CTA's dynamic shared memory.
  __device__ __forceinline__ Sampler(RowShared& shared, const RowSource& source, float* memory,
                                     const Edit& edit = {})
      : s(shared),
        maxima(memory),
        slots(reinterpret_cast<float2*>(memory + kGroups * source.slabs_of_group)),
        row(source, edit, memory + numbers_ahead(source.slabs_of_group, groups_of_cta())),
        ctas(cluster_size()),
        groups(groups_of_cta()) {}

  __device__ __forceinline__ uint32_t turn() const { return exchanges % 2; }
  __device__ __forceinline__ const float2* pairs() const { return s.pairs[turn()]; }

  // Waits for the grid before and starts to bring the row, which `choose()` sets.
  template <typename F>
  __device__ __forceinline__ void begin(const F& choose) {
    if (threadIdx.x % kWarpSize == 0) {
      init_barrier(copied());
      if (ctas > 1 && threadIdx.x == 0) {
        init_barrier(&s.told[0]);
        init_barrier(&s.told[1]);
        init_barrier(&s.maxima_told);
        init_barrier(&s.drawn_told);
      }
      finish_init();
    }
    __syncwarp();
    if (ctas > 1) cluster_arrive_relaxed();
    allow_next_grid();
    wait_for_previous_grid();
    choose();
    row.fetch(copied());
  }

  __device__ __forceinline__ uint64_t* copied() const { return &s.copied[row.warp()]; }

  // The row is there, and the cluster.
  __device__ __forceinline__ void arrive() {
    if (ctas > 1) cluster_wait();
    row.arrive(copied());
  }

  // Tells all CTAs the sum over each group of the pairs that pass() puts in the slots.
  template <typename Sum, typename Pass>
  __device__ __forceinline__ void exchange(const Pass& pass) {
    ++exchanges;
    uint64_t* told = &s.told[turn()];
    const int lane = threadIdx.x % kWarpSize;
    if (ctas > 1 && threadIdx.x == 0) expect_bytes(told, kGroups * sizeof(float2));
    pass();
    __syncthreads();
#pragma unroll 1
    for (int group = row.warp(); group < groups; group += row.warps()) {
      const int first = group * row.p.slabs_of_group;
      const float2 sum = Sum::over(slots + first, min(row.p.slabs_of_group, row.count - first));
      float2* target = &s.pairs[turn()][cluster_rank() * groups + group];
      if (ctas == 1) {
        *target = sum;
      } else if (lane < ctas) {
        store_and_count(target, told, lane, sum);
      }
    }
    if (ctas == 1) {
      __syncthreads();
    } else {
      wait_for_bytes(told, (exchanges - 1) / 2 % 2);
    }
  }

  __device__ __forceinline__ void put(int slab, float x, float y) {
    if (threadIdx.x % kWarpSize == 0) slots[slab] = {x, y};
  }

  // Puts the mass of each slab that is folded.
  template <bool kWeighs, typename Fold>
  __device__ __forceinline__ void put_masses(const Fold& nothing) {
    row.template fold_slabs<kWeighs>(nothing, [&](int i, Fold one, int k, Fold other, bool both) {
      one.mass = warp_sum(one.mass);
      if (both) other.mass = warp_sum(other.mass);
      put(i, one.mass, 0.0f);
      if (both) put(k, other.mass, 0.0f);
    });
  }

  __device__ __forceinline__ void exchange_masses() {
    exchange<MassAndMax>([&] {
      if (row.weighing.logits || row.weighing.floor > 0.0f) {
        put_masses<true>(FoldCutMass{0.0f, row.weighing.floor});
      } else {
        put_masses<false>(FoldMass{0.0f});
      }
    });
  }

  // Of probabilities.
  __device__ __forceinline__ void exchange_masses_and_maxima() {
    exchange<MassAndMax>([&] {
      const FoldMassAndMax nothing = {0.0f, -__int_as_float(0x7f800000)};
      row.template fold_slabs<false>(
          nothing, [&](int i, FoldMassAndMax one, int k, FoldMassAndMax other, bool both) {
            put(i, warp_sum(one.mass), warp_max(one.max));
            if (both) put(k, warp_sum(other.mass), warp_max(other.max));
          });
    });
  }

  // `by_slab`: also the maximum of each slab; once a kernel.
  __device__ __forceinline__ void exchange_maxima(bool by_slab) {
    const int lane = threadIdx.x % kWarpSize;
    if (by_slab && ctas > 1 && threadIdx.x == 0) {
      expect_bytes(&s.maxima_told, row.p.slabs * sizeof(float));
    }
    const auto put_max = [&](int i, float max) {
      max = warp_max(max);
      put(i, 0.0f, max);
      if (!by_slab || lane >= ctas) return;
      float* target = maxima + row.first + i;
      if (ctas == 1) {
        *target = max;
      } else {
        store_and_count(reinterpret_cast<uint32_t*>(target), &s.maxima_told, lane,
                        __float_as_uint(max));
      }
    };
    exchange<MassAndMax>([&] {
      const FoldMax nothing = {-__int_as_float(0x7f800000)};
      row.template fold_slabs<false>(nothing,
                                     [&](int i, FoldMax one, int k, FoldMax other, bool both) {
                                       put_max(i, one.max);
                                       if (both) put_max(k, other.max);
                                     });
    });
    if (by_slab && ctas > 1) {
      wait_for_bytes(&s.maxima_told, 0);
    }
  }

  // Of what was told.
  __device__ __forceinline__ float max() const {
    float max = pairs()[0].y;
#pragma unroll
    for (int i = 1; i < kGroups; ++i) max = fmaxf(max, pairs()[i].y);
    return max;
  }

  __device__ __forceinline__ float total() const {
    float sum = pairs()[0].x;
#pragma unroll
    for (int i = 1; i < kGroups; ++i) sum += pairs()[i].x;
    return sum;
  }

  // The random numbers of a draw; an exchange follows.
  __device__ __forceinline__ void roll(const RandomSource& random, uint32_t output, uint32_t draw) {
    if (threadIdx.x < kWarpSize) {
      const uint4 words = random.words(output, draw);
      if (threadIdx.x == 0) s.words = words;
    }
  }

  // Draws a token by the weights, whose masses were told, and the numbers of roll(). The token is
  // known to the warp that holds it; -1 elsewhere.
  // `greedy`: the first of all that have mass.
  __device__ __forceinline__ Token draw(bool greedy = false) {
    const float all = total();
    const float target = greedy ? 0.0f : to_uniform(s.words.x) * all;
    int group = -1, last = 0;
    float mass = 0.0f, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const float of_group = pairs()[i].x;
      sum += of_group;
      if (group < 0 && of_group > 0.0f) {
        last = i;
        mass = of_group;
      }
      if (group < 0 && sum > target) group = i;
    }
    if (group < 0) group = last;
    Token token = {-1, 0.0f, all > 0.0f && all < __int_as_float(0x7f800000)};
    group -= cluster_rank() * groups;
    if (group < 0 || group >= groups) return token;
    const int first = group * row.p.slabs_of_group;
    if (threadIdx.x < kWarpSize) {
      const int slab =
          first + pick_slab(slots + first, min(row.p.slabs_of_group, row.count - first), mass,
                            greedy ? 0.0f : to_uniform(s.words.y));
      if (threadIdx.x == 0) s.slab = slab;
    }
    __syncthreads();
    const int slab = s.slab;
    if (!row.has(slab)) return token;
    FoldCutMass own = {0.0f, row.weighing.floor};
    row.fold_slab(slab, own);
    const Drawn drawn =
        greedy ? first_element(row, slab)
               : pick_element(row, slab, own.mass, to_uniform(s.words.z), to_uniform(s.words.w));
    token.id = token.valid ? (row.first + slab) * kSlab + drawn.place : 0;
    token.weight = drawn.weight;
    return token;
  }

  // Whether less than `need` is larger than the token; every CTA's threads call, once a kernel, and
  // know.
  __device__ __forceinline__ bool below(const Token& token, uint32_t need, float scale) {
    const int lane = threadIdx.x % kWarpSize;
    if (ctas > 1 && threadIdx.x == 0) expect_bytes(&s.drawn_told, sizeof(float2));
    if (token.id >= 0) {
      const float2 value = {token.weight, 0.0f};
      if (ctas == 1) {
        s.drawn = value;
      } else if (lane < ctas) {
        store_and_count(&s.drawn, &s.drawn_told, lane, value);
      }
    }
    if (ctas == 1) {
      __syncthreads();
    } else {
      wait_for_bytes(&s.drawn_told, 0);
    }
    const float drawn = s.drawn.x;
    exchange<MassAndMax>([&] { put_masses<false>(FoldAbove{0.0f, drawn}); });
    // This sum and that of fixed-point masses differ by less than 2^-10: half a unit an element,
    // and what 2^8 additions round. Mostly it tells.
    const float share = total() * scale - float(need);
    if (fabsf(share) >= 0x1p21f) return share < 0.0f;
    exchange<Counts>([&] {
      const FoldFixedAbove nothing = {drawn, scale, 0};
      row.template fold_slabs<false>(
          nothing, [&](int i, FoldFixedAbove one, int k, FoldFixedAbove other, bool both) {
            put(i, __uint_as_float(__reduce_add_sync(0xffffffffu, one.mass)), 0.0f);
            if (both) put(k, __uint_as_float(__reduce_add_sync(0xffffffffu, other.mass)), 0.0f);
          });
    });
    uint32_t above = 0;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) above += __float_as_uint(pairs()[i].x);
    return above < need;
  }
};

#endif  // __CUDACC__

}  // namespace precast
