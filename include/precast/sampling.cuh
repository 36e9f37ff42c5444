// SPDX-License-Identifier: Apache-2.0
// Sampling of one token a row from probabilities or logits, with top-k, top-p and min-p filters.
//
//   w[v] = p[v], or exp((x[v] - max(x)) / temperature)
//   kept = {v: w[v] >= k-th largest, and w[v] >= min_p * max(w),
//              and the mass of what is larger than w[v] is below top_p * mass}
//   out  = v of kept with probability w[v] / (sum of w over kept)
//
// Elements as large as the smallest that is kept are kept, too. The mass for top_p is that of the
// k largest, or of all (joint).
//
// Layout   source       [rows, vocab]  f32, f16 or bf16; rows strided, elements contiguous
//          indices      [outputs]      int32 or int64: the row of each output
//          out          [outputs]      int32 or int64
//          valid        [outputs]      bool: false for a row with NaN or without any mass
// Threads  a cluster of 1 to 8 CTAs a row, slabs of 1024 elements by warps (sampling_row.cuh).
// Traffic  reads each row once; rows that do not fit the cluster's shared memory once a pass.
// top_p    The first draw ignores top_p and counts if its token is in the set, which one masked sum
//          tells: with probability top_p or more. Only otherwise is the threshold selected
//          (sampling_select.cuh) and another token drawn.
#pragma once

#include "precast/sampling_cluster.cuh"

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

#if defined(__CUDACC__)

// What else is wanted of a row: nothing.
struct NoExtras {
  static constexpr bool kGreedyAtZero = false;
  static constexpr bool kWantsTotal = false;

  __device__ __forceinline__ void start(float) {}
  __device__ __forceinline__ bool wants_maxima() const { return false; }
  template <typename Sampler>
  __device__ __forceinline__ void before_weighing(Sampler&, uint32_t, float) {}
  __device__ __forceinline__ void with_total(uint32_t, float) {}
  __device__ __forceinline__ void finish(uint32_t, const Token&, float) {}
};

// What is done next for a row.
enum class Step : int { top_k, weigh, total, total_of_top_k, draw, top_p, last_draw };

template <typename T, bool kOnChip, typename Edit, typename Extras>
__device__ __forceinline__ void sample_row(Sampler<T, kOnChip, Edit>& sampler,
                                           const SampleParams& p, Extras extras) {
  auto& s = sampler.s;
  auto& row = sampler.row;
  const int ctas = sampler.ctas;
  const int vocab = row.p.vocab;
  const uint32_t output = cluster_number();
  int64_t number = 0;
  row.start(p.logits);
  sampler.begin([&] {
    number = row_of(row.p, output);
    row.data = static_cast<const T*>(row.p.data) + number * row.p.stride;
    row.edit.start(number);
  });
  sampler.roll(p.random, output, 0);
  int k = p.top_k_values == nullptr ? p.top_k : p.top_k_values[number];
  k = k >= vocab || k <= 0 ? 0 : k;
  const float top_p = p.top_p[number];
  float min_p = fminf(p.min_p[number], 1.0f);
  float temperature = p.logits ? p.temperature[number] : 1.0f;
  bool limits_mass = top_p < 1.0f;
  bool greedy = false;
  if constexpr (Extras::kGreedyAtZero) {
    extras.start(temperature);
    if (temperature == 0.0f) {
      greedy = true;
      temperature = min_p = 1.0f;  // only the maxima stay
      k = 0;
      limits_mass = false;
    }
  }
  sampler.arrive();

  float max = 1.0f, kth = 0.0f, p_total = 0.0f, all = 0.0f, scale = 0.0f;
  if (p.logits || k > 0 || min_p > 0.0f || extras.wants_maxima()) {
    sampler.exchange_maxima(k > 0 || extras.wants_maxima());
    max = sampler.max();
  }
  extras.before_weighing(sampler, output, max);
  const bool mass_of_top_k = limits_mass && k > 0 && !p.joint;
  // The total for top_p may be that of the first draw.
  const bool draws_of_all = k == 0 && !(min_p > 0.0f);
  const bool wants_total = Extras::kWantsTotal || (limits_mass && !mass_of_top_k && !draws_of_all);
  const uint32_t need = needed_mass(top_p);
  // Why a loop of steps: so that selections and sums over the row are compiled once.
  Step step = k > 0 ? Step::top_k : Step::weigh;
  bool fresh = false;  // the masses of the weights were told
  Token token;
  const auto cut_to_top_k = [&] {
    if (k > 0) row.cut(kth);
    if (!mass_of_top_k && min_p > 0.0f) row.cut(min_p * max);
    step = mass_of_top_k ? Step::total_of_top_k : Step::draw;
  };
#pragma unroll 1
  while (true) {
    if (step == Step::top_k || step == Step::top_p) {
      const bool by_mass = step == Step::top_p;
      const float threshold = select(row, s.select, sampler.turns, ctas, by_mass ? need : k, max,
                                     by_mass, scale, sampler.maxima);
      if (by_mass) {
        sampler.roll(p.random, output, 1);
        row.cut(threshold);
        step = Step::last_draw;
      } else {
        kth = threshold;
        step = Step::weigh;
      }
    }
    if (step == Step::weigh) {
      if (p.logits) {
        row.weigh(max, factor_of(temperature));
        if (k > 0) kth = weight_of_logit(kth, row.weighing);
        max = 1.0f;
      }
      step = Step::total;
      if (!wants_total) cut_to_top_k();
    }
    if (!fresh) sampler.exchange_masses();
    if (step == Step::total) {
      p_total = all = sampler.total();
      extras.with_total(output, all);
      fresh = draws_of_all;
      cut_to_top_k();
      continue;
    }
    if (step == Step::total_of_top_k) {
      p_total = sampler.total();
      fresh = !(min_p > 0.0f);
      if (!fresh) row.cut(min_p * max);
      step = Step::draw;
      continue;
    }
    token = sampler.draw(greedy);
    if (!limits_mass || step == Step::last_draw || !token.valid) break;
    if (draws_of_all) p_total = sampler.total();
    scale = mass_scale(p_total);
    if (sampler.below(token, need, scale)) break;
    if (!p.logits && draws_of_all) {
      sampler.exchange_maxima(false);
      max = sampler.max();
    }
    fresh = false;
    step = Step::top_p;
  }
  if (token.id >= 0 && threadIdx.x % kWarpSize == 0) {
    store_index(p.out, p.wide_out, output, token.id);
    if (p.valid != nullptr) p.valid[output] = token.valid;
    extras.finish(output, token, all);
  }
}

template <typename T, bool kOnChip>
__global__ __launch_bounds__(kBoundThreads<kOnChip>) void SampleKernel(
    const __grid_constant__ SampleParams p) {
  extern __shared__ __align__(128) float memory[];
  __shared__ RowShared shared;
  Sampler<T, kOnChip> sampler(shared, p.source, memory);
  sample_row(sampler, p, NoExtras());
}

#endif  // __CUDACC__

}  // namespace precast
