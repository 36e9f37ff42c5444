// SPDX-License-Identifier: Apache-2.0
// A cluster of CTAs that works on a row: what its CTAs tell each other, and the draw of a token.
//
// A CTA has one or more of the row's 8 groups of slabs. Sums, maxima and counts of a row are told
// group by group, 8 bytes each to each CTA, by stores that complete on a barrier of the receiver:
// there is no barrier of the cluster but the first. A token is drawn by every CTA down to its
// group, and from there on by the CTA that has it.
#pragma once

#include "precast/sampling/accumulators.cuh"
#include "precast/sampling/inverse_cdf.cuh"

namespace precast {

// Launch bounds: those on chip leave a thread 80 registers, for three CTAs of 256 threads a
// multiprocessor.
template <bool kOnChip>
constexpr int kBoundThreads = kOnChip ? 768 : kRowThreads;

// For draws from many rows that do not stay on chip: two CTAs of kRowThreads.
template <bool kOnChip>
constexpr int kDrawThreads = kOnChip ? 768 : 2 * kRowThreads;

#if defined(__CUDACC__)

constexpr int kListed = kWarpSize;  // of a group, at most

// What a CTA needs beside the row and what it keeps of each slab.
struct RowShared {
  alignas(16) float2 pairs[2][kGroups];
  uint64_t told[2];                          // barriers of the pairs, in a cluster
  uint64_t maxima_told;                      // of the slabs' maxima, in a cluster
  uint64_t drawn_told;                       // of `drawn`, in a cluster
  uint64_t listed_told;                      // of a list (sampling/candidates.cuh), in a cluster
  uint64_t copied[kRowThreads / kWarpSize];  // of the warps' copies
  union {
    SelectShared select;
    float2 listed[kGroups][kListed];  // of the first CTA: weight and place
  };
  float2 drawn;         // its weight
  bool has_row;         // the output's index is that of a row
  uint4 words[kDraws];  // random ones
};

struct Picked {
  int at;
  float mass;
};

struct Token {
  int id;  // -1: another warp has it
  float weight;
  bool valid;  // the row has mass, and no NaN
};

// The CTAs of a cluster tell each other a pair a group, in two buffers in turn. Every CTA tells
// each time, behind a barrier of its own, so that whoever has all pairs of one exchange knows that
// nobody reads those of the one before.
template <typename T, bool kOnChip, typename Edit = NoEdit>
struct Sampler {
  static constexpr bool kIsOnChip = kOnChip;

  RowShared& s;
  float* maxima;  // of all slabs, where they were told
  float2* slots;  // of the CTA's slabs
  int* places;    // of the slabs' maxima, where the seconds are told
  Row<T, kOnChip, Edit> row;
  int ctas;
  int groups;  // of the CTA
  uint32_t exchanges = 0;
  uint32_t drawn = 0;        // how often a weight was told
  bool has_tops = false;     // the slots' second numbers are the slabs' maxima, or NaN
  bool has_seconds = false;  // and the first ones their second largest

  // Numbers ahead of the row in the CTA's dynamic shared memory.
  static __host__ __device__ __forceinline__ int numbers_ahead(int slabs_of_group, int groups) {
    return (kGroups * slabs_of_group + 3 * groups * slabs_of_group + 31) / 32 * 32;
  }

  // `memory`: the CTA's dynamic shared memory.
  __device__ __forceinline__ Sampler(RowShared& shared, const RowSource& source, float* memory,
                                     const Edit& edit = {})
      : s(shared),
        maxima(memory),
        slots(reinterpret_cast<float2*>(memory + kGroups * source.slabs_of_group)),
        places(reinterpret_cast<int*>(slots + groups_of_cta() * source.slabs_of_group)),
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
        init_barrier(&s.listed_told);
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

  // The row of an output, from its first element on; the first row in place of one that is not
  // there. Returns its number.
  __device__ __forceinline__ int64_t choose_row(uint32_t output) {
    const int64_t wanted = row_of(row.p, output);
    const bool has_row = static_cast<uint64_t>(wanted) < row.p.rows;
    if (threadIdx.x == 0) s.has_row = has_row;  // why: a register is dearer
    const int64_t number = has_row ? wanted : 0;
    row.data = static_cast<const T*>(row.p.data) + number * row.p.stride;
    return number;
  }

  __device__ __forceinline__ uint64_t* copied() const { return &s.copied[row.warp()]; }

  // The row is there, and the cluster.
  __device__ __forceinline__ void arrive() {
    if (ctas > 1) cluster_wait();
    row.arrive(copied());
  }

  // Tells all CTAs the sum over each group of the pairs that pass() puts in the slots.
  template <typename Sum, typename Pass>
  __device__ __forceinline__ void exchange(const Pass& pass, const Sum& sums = {}) {
    ++exchanges;
    uint64_t* told = &s.told[turn()];
    const int lane = threadIdx.x % kWarpSize;
    if (ctas > 1 && threadIdx.x == 0) expect_bytes(told, kGroups * sizeof(float2));
    pass();
    __syncthreads();
#pragma unroll 1
    for (int group = row.warp(); group < groups; group += row.warps()) {
      const int first = group * row.p.slabs_of_group;
      const float2 sum = sums.over(slots + first, min(row.p.slabs_of_group, row.count - first));
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

  __device__ __forceinline__ void put(int slab, float x) {
    if (threadIdx.x % kWarpSize == 0) slots[slab].x = x;
  }

  // Whether an element of the slab may weigh `floor` or more.
  __device__ __forceinline__ bool may_reach(int slab, float floor) const {
    if (!has_tops) return true;
    const float top = slots[slab].y;
    return !((row.weighing.weighed ? weight_of_logit(top, row.weighing) : top) < floor);
  }

  // Puts the mass of each slab.
  template <bool kWeighs, typename Fold>
  __device__ __forceinline__ void put_masses(const Fold& nothing) {
    row.template fold_slabs<kWeighs>(
        nothing, [&](int i) { return may_reach(i, row.weighing.floor); },
        [&](int i, Fold one, int k, Fold other, bool both) {
          one.mass = warp_sum(one.mass);
          if (both) other.mass = warp_sum(other.mass);
          put(i, one.mass);
          if (both) put(k, other.mass);
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

  // Tells maxima, and masses that `Fold` has. `by_slab`: also the maximum of each slab to all; once
  // a kernel.
  template <typename Fold>
  __device__ __forceinline__ void exchange_tops(const Fold& nothing, bool by_slab) {
    const int lane = threadIdx.x % kWarpSize;
    if (by_slab && ctas > 1 && threadIdx.x == 0) {
      expect_bytes(&s.maxima_told, row.p.slabs * sizeof(float));
    }
    const auto put_top = [&](int i, const Fold& fold) {
      const float max = warp_max(fold.max);
      if constexpr (Fold::kHasSecond) {
        const uint32_t votes = __ballot_sync(0xffffffffu, fold.max == max);
        const float other = warp_max(fold.max == max ? fold.second : fold.max);
        const int from = __ffs(votes) - 1, at = __shfl_sync(0xffffffffu, fold.at, from);
        put(i, (votes & (votes - 1)) != 0 ? max : other, max);
        if (lane == 0) places[i] = ((row.first + i) * kWarpSize + from) * kPerLane + at;
      } else {
        put(i, sizeof(Fold) > sizeof(float) ? warp_sum(fold.mass) : 0.0f, max);
      }
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
      row.template fold_slabs<false>(
          nothing, [](int) { return true; },
          [&](int i, const Fold& one, int k, const Fold& other, bool both) {
            put_top(i, one);
            if (both) put_top(k, other);
          });
    });
    has_seconds = Fold::kHasSecond;
    if (by_slab && ctas > 1) wait_for_bytes(&s.maxima_told, 0);
  }

  // Of probabilities.
  __device__ __forceinline__ void exchange_masses_and_maxima(bool by_slab = false) {
    exchange_tops(FoldMassAndMax{0.0f, -__int_as_float(0x7f800000)}, by_slab);
  }

  __device__ __forceinline__ void exchange_maxima(bool by_slab) {
    exchange_tops(FoldMax{-__int_as_float(0x7f800000)}, by_slab);
  }

  // As precast::select().
  __device__ __forceinline__ float select(uint32_t need, float max, bool by_mass, float scale) {
    if constexpr (Edit::kChanges) {
      return select_aside(row, s.select, ctas, need, max, by_mass, scale, maxima);
    } else {
      return precast::select(row, s.select, ctas, need, max, by_mass, scale, maxima);
    }
  }

  // Why not inline: kernels with edits select in two places.
  static __device__ __noinline__ float select_aside(Row<T, kOnChip, Edit> row, SelectShared& shared,
                                                    int ctas, uint32_t need, float max,
                                                    bool by_mass, float scale,
                                                    const float* maxima) {
    return precast::select(row, shared, ctas, need, max, by_mass, scale, maxima);
  }

  // Of what was told.
  __device__ __forceinline__ float max() const {
    float max = pairs()[0].y;
#pragma unroll
    for (int i = 1; i < kGroups; ++i) max = max_or_nan(max, pairs()[i].y);
    return max;
  }

  __device__ __forceinline__ float total() const {
    float sum = pairs()[0].x;
#pragma unroll
    for (int i = 1; i < kGroups; ++i) sum += pairs()[i].x;
    return sum;
  }

  // The random numbers of all draws; an exchange follows.
  __device__ __forceinline__ void roll(const RandomSource& random, uint32_t output) {
    if (threadIdx.x < kDraws) s.words[threadIdx.x] = random.words(output, threadIdx.x);
  }

  // The group that a number u falls on, by the masses that were told, and its mass.
  __device__ __forceinline__ Picked pick_group(float u) const {
    const float target = u * total();
    Picked picked = {-1, 0.0f};
    int last = 0;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const float of_group = pairs()[i].x;
      sum += of_group;
      if (picked.at < 0 && of_group > 0.0f) {
        last = i;
        picked.mass = of_group;
      }
      if (picked.at < 0 && sum > target) picked.at = i;
    }
    if (picked.at < 0) picked.at = last;
    return picked;
  }

  // Draws a token by the weights, whose masses were told, and the numbers of `round`. The token is
  // known to the warp that holds it; -1 elsewhere.
  __device__ __forceinline__ Token draw(uint32_t round) {
    const uint4& words = s.words[round];
    const Picked picked = pick_group(to_uniform(words.x));
    Token token = {-1, 0.0f, is_mass(total())};
    const int group = picked.at - cluster_rank() * groups;
    if (group < 0 || group >= groups) return token;
    const int first = group * row.p.slabs_of_group;
    const int slab = first + pick_slab(slots + first, min(row.p.slabs_of_group, row.count - first),
                                       picked.mass, to_uniform(words.y));
    if (!row.has(slab)) return token;
    FoldCutMass own = {0.0f, row.weighing.floor};
    row.fold_slab(slab, own);
    const Drawn drawn = pick_element(row, slab, own.mass, to_uniform(words.z), to_uniform(words.w));
    token.id = (row.first + slab) * kSlab + drawn.place;
    token.weight = drawn.weight;
    return token;
  }

  // The first of the elements that equal `max`, in the units that maxima were just told in: a token
  // that weighs 1. None equals a maximum that is NaN; what is not finite makes no token valid.
  __device__ __forceinline__ Token first_of(float max) const {
    Token token = {-1, 1.0f, fabsf(max) < __int_as_float(0x7f800000)};
    int group = 0;
    while (token.valid && group < kGroups - 1 && !(pairs()[group].y == max)) ++group;
    group -= cluster_rank() * groups;
    if (group < 0 || group >= groups) return token;
    int slab = group * row.p.slabs_of_group;
    while (token.valid && slab < row.count - 1 && !(slots[slab].y == max)) ++slab;
    if (!row.has(slab)) return token;
    FirstEqual first = {max, 0, kPerLane};
    row.fold_slab(slab, first);
    const int lane = threadIdx.x % kWarpSize;
    const int place = first.at < kPerLane ? place_in_slab(lane, first.at) : kSlab - 1;
    token.id = (row.first + slab) * kSlab + __reduce_min_sync(0xffffffffu, place);
    return token;
  }

  // The drawn token's weight, to all threads of the cluster.
  __device__ __forceinline__ float tell_weight(const Token& token) {
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
      wait_for_bytes(&s.drawn_told, drawn++ % 2);
    }
    return s.drawn.x;
  }

  // The exact mass of what is not cut, as fixed_mass() has it; in place of the masses that were
  // told.
  __device__ __forceinline__ uint32_t fixed_total(float scale) {
    exchange<Counts>([&] {
      row.template fold_slabs<false>(
          FoldFixedMass{row.weighing.floor, scale, 0},
          [&](int i) { return may_reach(i, row.weighing.floor); },
          [&](int i, FoldFixedMass one, int k, FoldFixedMass other, bool both) {
            put(i, __uint_as_float(__reduce_add_sync(0xffffffffu, one.mass)));
            if (both) put(k, __uint_as_float(__reduce_add_sync(0xffffffffu, other.mass)));
          });
    });
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) sum += __float_as_uint(pairs()[i].x);
    return sum;
  }
};

#endif  // __CUDACC__

}  // namespace precast
