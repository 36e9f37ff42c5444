// SPDX-License-Identifier: Apache-2.0
// Sampling of one token a row from probabilities or logits, with top-k, top-p and min-p filters.
//
//   w[v] = p[v], or exp((x[v] - max(x)) / temperature)
//   kept = {v: w[v] >= k-th largest, and w[v] >= min_p * max(w),
//              and the mass of what is larger than w[v] is below top_p * mass}
//   out  = v of kept with probability w[v] / (sum of w over kept); at temperature 0 the first
//          of the largest
//
// Elements as large as the smallest that is kept are kept, too. The mass for top_p is that of the
// k largest, or of all (joint).
//
// Layout   source       [rows, vocab]  f32, f16 or bf16; rows strided, elements contiguous
//          indices      [outputs]      int32 or int64: the row of each output
//          out          [outputs]      int32 or int64
//          valid        [outputs]      bool: false for a row with NaN or without any mass, and for
//                                      an index outside of the rows, which has token 0
// Threads  a cluster of 1 to 8 CTAs a row, slabs of 1024 elements by warps (sampling/row.cuh).
// Traffic  reads each row once; rows that do not stay on chip (sampling/plan.cuh), once a pass.
// top_p    The first draw ignores top_p and counts if its token is in the set, which the mass above
//          it tells: with probability top_p or more. Otherwise nothing up to the token's weight is
//          in the set, and the next draw is from what is above, whose mass was just summed. What
//          four rounds leave open, the exact threshold settles (sampling/radix_select.cuh).
// top_k    The first CTA goes on alone with a list of what small k may keep
// (sampling/candidates.cuh);
//          large k have their threshold selected.
// Measured 2026-11-21 on an H200, f32, rows of 128256, batch 64 and 256, in us: plain 15.5 and
//          35.9, min_p 0.1 16.5 and 41.6, top_p 0.9 22.6 and 57.3, top_k 50 28.3 and 55.6, both
//          29.8 and 58.0; 256 rows are read from memory in 29.9. bf16: plain 10.9 and 21.5, min_p
//          14.9 and 41.1, top_p 22.0 and 59.6, top_k 23.3 and 40.2, both 24.9 and 42.1.
#pragma once

#include "precast/sampling/candidate_sampling.cuh"

namespace precast {

struct SampleParams {
  RowSource source;
  RandomSource random;
  const int32_t* top_k_values;  // [rows], or null
  PerRow top_p;
  PerRow min_p;
  PerRow temperature;  // of logits
  void* out;           // [outputs]
  bool* valid;         // [outputs], or null
  int32_t top_k;       // off from vocab on, and where not positive
  bool logits;
  bool joint;
  bool wide_out;  // int64, not int32
};

#if !defined(__CUDACC_RTC__)

// Whether a row may have the filter.
inline bool has_top_k(const SampleParams& p) {
  return p.top_k_values != nullptr || (p.top_k > 0 && p.top_k < p.source.vocab);
}

inline bool has_top_p(const SampleParams& p) {
  return p.top_p.values != nullptr || p.top_p.value < 1.0f;
}

inline bool has_min_p(const SampleParams& p) {
  return p.min_p.values != nullptr || p.min_p.value > 0.0f;
}

// Whether rows are read little but once though they do not stay on chip: for a list of the k
// largest, and for plain draws from probabilities.
inline bool reads_once(const SampleParams& p) {
  if (!has_top_k(p)) return !p.logits && !has_top_p(p) && !has_min_p(p);
  return p.top_k_values != nullptr || p.top_k <= most_listed(p.source.vocab);
}

#endif

#if defined(__CUDACC__)

// What else is wanted of a row: nothing.
struct NoExtras {
  __device__ __forceinline__ void start(float) {}
  __device__ __forceinline__ bool wants_maxima() const { return false; }
  __device__ __forceinline__ bool wants_total() const { return false; }
  template <typename Sampler>
  __device__ __forceinline__ void before_weighing(Sampler&, uint32_t, float) {}
  __device__ __forceinline__ void with_total(uint32_t, float) {}
  __device__ __forceinline__ void finish(uint32_t, const Token&, float) {}
};

// What is done next for a row. From `total` on: what masses are told for.
enum class Step : int { top_k, weigh, total, total_of_top_k, draw, judge, top_p };

// By the warp that has it.
__device__ __forceinline__ void store_token(const SampleParams& p, uint32_t output,
                                            const Token& token, bool has_row) {
  if (token.id < 0 || threadIdx.x % kWarpSize != 0) return;
  const bool valid = token.valid && has_row;
  store_index(p.out, p.wide_out, output, valid ? token.id : 0);
  if (p.valid != nullptr) p.valid[output] = valid;
}

template <bool kTopK, typename T, bool kOnChip, typename Edit, typename Extras>
__device__ __forceinline__ void sample_row(Sampler<T, kOnChip, Edit>& sampler, ListShared& listed,
                                           const SampleParams& p, Extras extras) {
  auto& row = sampler.row;
  const int vocab = row.p.vocab;
  const uint32_t output = cluster_number();
  List<Sampler<T, kOnChip, Edit>> list = {listed, sampler};
  int64_t number = 0;
  row.start(p.logits);
  sampler.begin([&] {
    number = sampler.choose_row(output);
    row.edit.start(number);
  });
  sampler.roll(p.random, output);
  int k = p.top_k_values == nullptr ? p.top_k : p.top_k_values[number];
  k = !kTopK || k >= vocab || k <= 0 ? 0 : k;
  const float top_p = p.top_p[number];
  float min_p = fminf(p.min_p[number], 1.0f);
  float temperature = p.logits ? p.temperature[number] : 1.0f;
  bool limits_mass = top_p < 1.0f;
  extras.start(temperature);
  const bool greedy = temperature == 0.0f;
  if (greedy) {
    temperature = 1.0f;
    min_p = 0.0f;
    k = 0;
    limits_mass = false;
  }
  if (k > 0) list.start();
  sampler.arrive();

  const uint32_t need = needed_mass(top_p);
  const bool of_top_k = limits_mass && k > 0 && !p.joint;
  const bool draws_of_all = k == 0 && !(min_p > 0.0f);
  const bool wants_total = extras.wants_total() || (limits_mass && !of_top_k);
  const bool by_slab = k > 0 || extras.wants_maxima();
  bool told = !p.logits && (draws_of_all || wants_total);  // the masses of what is not cut
  Weighing to_be = {p.logits, true, false, 0.0f, factor_of(temperature), 0.0f};
  const bool lists = k > 0 && k <= most_listed(vocab);
  float max = 1.0f, kth = 0.0f;
  bool is_row = true;
  if (told && draws_of_all && !limits_mass) {
    sampler.exchange_masses();
  } else {
    if (told) {
      sampler.exchange_masses_and_maxima(by_slab);
    } else {
      sampler.exchange_tops(no_tops<kTopK && !kOnChip>(), by_slab);
    }
    sampler.has_tops = true;
    max = sampler.max();
    is_row = p.logits ? fabsf(max) < __int_as_float(0x7f800000) : is_mass(max);
  }
  Token token = {-1, 0.0f, false};
  if (greedy) token = sampler.first_of(max);
  extras.before_weighing(sampler, output, max);
  to_be.max = max;
  const bool is_listed = lists && list.collect(k, to_be);
  float p_total = 0.0f, all = 1.0f, scale = 0.0f;
  uint32_t round = 0;
  Step step = k > 0 && !is_listed && is_row ? Step::top_k : Step::weigh;
  // Why a loop of steps: so that selections and sums over the row are compiled once.
#pragma unroll 1
  while (true) {
    if (step == Step::top_k || step == Step::top_p) {
      const bool by_mass = !kTopK || step == Step::top_p;
      const float threshold = sampler.select(by_mass ? need : k, max, by_mass, scale);
      if (by_mass) {
        row.cut(threshold);
        step = Step::draw;
      } else {
        kth = threshold;
        step = Step::weigh;
      }
    }
    if (step == Step::weigh) {
      if (p.logits) {
        row.weigh(to_be.max, to_be.factor);
        if (k > 0) kth = weight_of_logit(kth, to_be);
        max = 1.0f;
      }
      step = told || wants_total ? Step::total : of_top_k ? Step::total_of_top_k : Step::draw;
      if (step != Step::total) row.cut(of_top_k ? kth : fmaxf(kth, min_p * max));
      if (step != Step::total && (greedy || is_listed)) break;
    }
    if (!told) sampler.exchange_masses();
    told = true;
    if (step == Step::total) {
      p_total = all = sampler.total();
      extras.with_total(output, all);
      if (greedy || is_listed) break;
      step = of_top_k ? Step::total_of_top_k : Step::draw;
      row.cut(of_top_k ? kth : fmaxf(kth, min_p * max));
      told = draws_of_all;
    } else if (step == Step::total_of_top_k) {
      p_total = sampler.total();
      step = Step::draw;
      row.cut(min_p * max);
      told = !(min_p > 0.0f);
    } else if (step == Step::judge) {
      // This sum and that of fixed-point masses differ by less than 2^-10: half a unit an element,
      // and what 2^8 additions round. Mostly it tells.
      const float share = sampler.total() * scale - float(need);
      told = fabsf(share) >= 0x1p21f;
      if (told ? share < 0.0f : sampler.fixed_total(scale) < need) break;
      step = ++round < kRounds ? Step::draw : Step::top_p;
      if (step == Step::top_p) told = false;
    }
    if (!told) continue;
    if (draws_of_all) p_total = all = round > 0 ? all : sampler.total();
    token = sampler.draw(round);
    if (!limits_mass || round == kRounds || !token.valid) break;
    scale = mass_scale(p_total);
    row.cut(just_above(sampler.tell_weight(token)));
    told = false;
    step = Step::judge;
  }
  if (is_listed) {
    if (cluster_rank() != 0) return;
    ListDraw<Sampler<T, kOnChip, Edit>> draw = {list};
    token = draw.sample({k, min_p * max, need, of_top_k ? 0.0f : all, limits_mass});
  }
  if (token.id >= 0 && threadIdx.x % kWarpSize == 0) {
    token.valid = token.valid && is_row && is_mass(all);
    extras.finish(output, token, all);
  }
  store_token(p, output, token, sampler.s.has_row);
}

template <typename T, bool kOnChip, bool kTopK>
__global__ __launch_bounds__(
    kTopK ? kDrawThreads<kOnChip>
          : kBoundThreads<kOnChip>) void SampleKernel(const __grid_constant__ SampleParams p) {
  extern __shared__ __align__(128) float memory[];
  __shared__ RowShared shared;
  __shared__ ListShared listed;
  Sampler<T, kOnChip> sampler(shared, p.source, memory);
  sample_row<kTopK>(sampler, listed, p, NoExtras());
}

// Neither top_k nor top_p. Why a kernel of its own: the size of the other one is time, too.
template <typename T, bool kOnChip>
__global__ __launch_bounds__(kDrawThreads<kOnChip>) void PlainKernel(
    const __grid_constant__ SampleParams p) {
  extern __shared__ __align__(128) float memory[];
  __shared__ RowShared shared;
  Sampler<T, kOnChip> sampler(shared, p.source, memory);
  auto& row = sampler.row;
  const uint32_t output = cluster_number();
  int64_t number = 0;
  row.start(p.logits);
  sampler.begin([&] { number = sampler.choose_row(output); });
  sampler.roll(p.random, output);
  const float min_p = fminf(p.min_p[number], 1.0f);
  const float temperature = p.logits ? p.temperature[number] : 1.0f;
  sampler.arrive();
  Token token = {-1, 0.0f, false};
  bool is_row = true;
  if (p.logits || min_p > 0.0f) {
    sampler.exchange_tops(FoldMaxOrNan{-__int_as_float(0x7f800000)}, false);
    sampler.has_tops = true;
    const float max = sampler.max();
    is_row = p.logits ? fabsf(max) < __int_as_float(0x7f800000) : is_mass(max);
    if (temperature == 0.0f) token = sampler.first_of(max);
    if (p.logits) row.weigh(max, factor_of(temperature));
    row.cut(min_p * (p.logits ? 1.0f : max));
  }
  if (temperature != 0.0f) {
    sampler.exchange_masses();
    token = sampler.draw(0);
  }
  token.valid = token.valid && is_row;
  store_token(p, output, token, shared.has_row);
}

#endif  // __CUDACC__

}  // namespace precast
