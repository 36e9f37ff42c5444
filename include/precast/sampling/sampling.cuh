// SPDX-License-Identifier: Apache-2.0
// Sampling of one token a row from probabilities or logits, with top-k, top-p (nucleus) and min-p
// filters.
//
//   w[v] = p[v], or exp((x[v] - max(x)) / temperature)
//   kept = {v: w[v] >= k-th largest, and w[v] >= min_p * max(w),
//              and the mass of all weights larger than w[v] is below top_p * mass}
//   out  = v of kept with probability w[v] / (sum of w over kept); at temperature 0 the argmax
//
// Elements that tie with the smallest kept weight are kept, too. The mass for top_p is that of the
// k largest, or of all elements (joint).
//
// Layout   source       [rows, vocab]  f32, f16 or bf16; rows strided, elements contiguous
//          indices      [outputs]      int32 or int64: the row of each output
//          out          [outputs]      int32 or int64
//          valid        [outputs]      bool: false, with token 0, for a row that has a NaN or no
//                                      mass, and for an index outside of the rows
// Threads  a cluster of 1 to 8 CTAs a row; a warp processes tiles of 1024 elements
//          (sampling/row.cuh)
// Traffic  reads each row once, or once a pass if it does not stay on chip (sampling/plan.cuh)
// top_p    Rejection sampling. A draw that ignores top_p is accepted if the mass above its weight
//          is below the top-p mass, with probability top_p or more. Otherwise no element
//          up to this weight is kept, and the next round samples from the larger weights, whose
//          mass is known already. After four rounds the exact threshold is selected
//          (sampling/radix_select.cuh).
// top_k    For a small k the first CTA continues alone with a list of candidates
//          (sampling/candidates.cuh). For a large k the exact threshold is selected.
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
  PerRowScalar top_p;
  PerRowScalar min_p;
  PerRowScalar temperature;  // for logits
  void* out;                 // [outputs]
  bool* valid;               // [outputs], or null
  int32_t top_k;             // no filter if it is not positive, or at least the vocabulary
  bool logits;
  bool joint;
  bool int64_out;  // int64 rather than int32
};

#if !defined(__CUDACC_RTC__)

// Whether some row may have the filter.
inline bool has_top_k(const SampleParams& p) {
  return p.top_k_values != nullptr || (p.top_k > 0 && p.top_k < p.source.vocab_size);
}

inline bool has_top_p(const SampleParams& p) {
  return p.top_p.values != nullptr || p.top_p.value < 1.0f;
}

inline bool has_min_p(const SampleParams& p) {
  return p.min_p.values != nullptr || p.min_p.value > 0.0f;
}

// Whether a streamed row is read little more than once: with a list of candidates, and when
// sampling from unfiltered probabilities.
inline bool reads_row_once(const SampleParams& p) {
  if (!has_top_k(p)) return !p.logits && !has_top_p(p) && !has_min_p(p);
  return p.top_k_values != nullptr || p.top_k <= max_candidate_k(p.source.vocab_size);
}

#endif

#if defined(__CUDACC__)

// An epilogue computes further outputs of a row, such as log probabilities. This one has none.
struct NoEpilogue {
  __device__ __forceinline__ void begin_row(float) {}
  __device__ __forceinline__ bool needs_tile_maxima() const { return false; }
  __device__ __forceinline__ bool needs_total_mass() const { return false; }
  template <typename Sampler>
  __device__ __forceinline__ void before_softmax(Sampler&, uint32_t, float) {}
  __device__ __forceinline__ void on_total_mass(uint32_t, float) {}
  __device__ __forceinline__ void finish(uint32_t, const Token&, float) {}
};

// The next pass over a row. The passes from total_mass on need the gathered masses of the elements
// at or above the current threshold.
enum class Pass : int {
  select_top_k,
  apply_softmax,
  total_mass,
  top_k_mass,
  sample,
  verify_top_p,
  select_top_p,
};

// Called by all warps; the one that holds the token stores it.
__device__ __forceinline__ void store_token(const SampleParams& p, uint32_t output,
                                            const Token& token, bool row_exists) {
  if (token.id < 0 || threadIdx.x % kWarpSize != 0) return;
  const bool valid = token.valid && row_exists;
  store_index(p.out, p.int64_out, output, valid ? token.id : 0);
  if (p.valid != nullptr) p.valid[output] = valid;
}

template <bool kTopK, typename T, bool kOnChip, typename InputTransform, typename Epilogue>
__device__ __forceinline__ void sample_row(Sampler<T, kOnChip, InputTransform>& sampler,
                                           CandidateStorage& candidates, const SampleParams& p,
                                           Epilogue epilogue) {
  auto& row = sampler.row;
  const int vocab_size = row.p.vocab_size;
  const uint32_t output = cluster_id();
  CandidateList<Sampler<T, kOnChip, InputTransform>> list = {candidates, sampler};
  int64_t row_index = 0;
  row.reset(p.logits);
  sampler.begin([&] {
    row_index = sampler.select_row(output);
    row.transform.begin_row(row_index);
  });
  sampler.generate_random_words(p.random, output);
  int k = p.top_k_values == nullptr ? p.top_k : p.top_k_values[row_index];
  k = !kTopK || k >= vocab_size || k <= 0 ? 0 : k;
  const float top_p = p.top_p[row_index];
  float min_p = fminf(p.min_p[row_index], 1.0f);
  float temperature = p.logits ? p.temperature[row_index] : 1.0f;
  bool has_top_p = top_p < 1.0f;
  epilogue.begin_row(temperature);
  const bool is_greedy = temperature == 0.0f;
  if (is_greedy) {
    temperature = 1.0f;
    min_p = 0.0f;
    k = 0;
    has_top_p = false;
  }
  if (k > 0) list.init();
  sampler.wait_for_row();

  const uint32_t top_p_target = fixed_point_target(top_p);
  // The top-p mass is a share of that of the k largest.
  const bool top_p_of_top_k = has_top_p && k > 0 && !p.joint;
  // Neither top-k nor min-p drops elements.
  const bool samples_all = k == 0 && !(min_p > 0.0f);
  const bool needs_total_mass = epilogue.needs_total_mass() || (has_top_p && !top_p_of_top_k);
  const bool needs_tile_maxima = k > 0 || epilogue.needs_tile_maxima();
  // The masses at or above the current threshold are gathered, or can be with the maxima.
  bool has_masses = !p.logits && (samples_all || needs_total_mass);
  WeightTransform weights = {p.logits, true, false, 0.0f, softmax_scale_log2(temperature), 0.0f};
  const bool uses_candidates = k > 0 && k <= max_candidate_k(vocab_size);
  float max = 1.0f, kth_largest = 0.0f;
  bool is_valid_row = true;
  if (has_masses && samples_all && !has_top_p) {
    sampler.all_gather_mass();
  } else {
    if (has_masses) {
      sampler.all_gather_mass_and_max(needs_tile_maxima);
    } else {
      sampler.all_gather_max(initial_maxima<kTopK && !kOnChip>(), needs_tile_maxima);
    }
    sampler.has_tile_maxima = true;
    max = sampler.row_max();
    is_valid_row = p.logits ? fabsf(max) < __int_as_float(0x7f800000) : is_valid_mass(max);
  }
  Token token = {-1, 0.0f, false};
  if (is_greedy) token = sampler.first_argmax(max);
  epilogue.before_softmax(sampler, output, max);
  weights.row_max = max;
  const bool has_candidates = uses_candidates && list.collect(k, weights);
  float top_p_total = 0.0f;  // the mass that top_p is a share of
  float total_mass = 1.0f, scale = 0.0f;
  uint32_t round = 0;
  Pass pass = k > 0 && !has_candidates && is_valid_row ? Pass::select_top_k : Pass::apply_softmax;
  // Why a loop over passes: the selection and the sums over the row are then compiled only once.
#pragma unroll 1
  while (true) {
    if (pass == Pass::select_top_k || pass == Pass::select_top_p) {
      const bool by_mass = !kTopK || pass == Pass::select_top_p;
      const float threshold =
          sampler.select_threshold(by_mass ? top_p_target : k, max, by_mass, scale);
      if (by_mass) {
        row.raise_threshold(threshold);
        pass = Pass::sample;
      } else {
        kth_largest = threshold;
        pass = Pass::apply_softmax;
      }
    }
    if (pass == Pass::apply_softmax) {
      if (p.logits) {
        row.apply_softmax(weights.row_max, weights.scale_log2);
        if (k > 0) kth_largest = exp_weight(kth_largest, weights);
        max = 1.0f;
      }
      pass = has_masses || needs_total_mass ? Pass::total_mass
             : top_p_of_top_k               ? Pass::top_k_mass
                                            : Pass::sample;
      if (pass != Pass::total_mass) {
        row.raise_threshold(top_p_of_top_k ? kth_largest : fmaxf(kth_largest, min_p * max));
      }
      if (pass != Pass::total_mass && (is_greedy || has_candidates)) break;
    }
    if (!has_masses) sampler.all_gather_mass();
    has_masses = true;
    if (pass == Pass::total_mass) {
      top_p_total = total_mass = sampler.total_mass();
      epilogue.on_total_mass(output, total_mass);
      if (is_greedy || has_candidates) break;
      pass = top_p_of_top_k ? Pass::top_k_mass : Pass::sample;
      row.raise_threshold(top_p_of_top_k ? kth_largest : fmaxf(kth_largest, min_p * max));
      has_masses = samples_all;
    } else if (pass == Pass::top_k_mass) {
      top_p_total = sampler.total_mass();
      pass = Pass::sample;
      row.raise_threshold(min_p * max);
      has_masses = !(min_p > 0.0f);
    } else if (pass == Pass::verify_top_p) {
      // The fp32 sum differs from the sum of fixed-point masses by less than 2^-10 of the total:
      // half a unit an element, and the rounding of 2^8 additions. It mostly decides.
      const float excess = sampler.total_mass() * scale - float(top_p_target);
      has_masses = fabsf(excess) >= 0x1p21f;
      if (has_masses ? excess < 0.0f : sampler.fixed_point_total(scale) < top_p_target) break;
      pass = ++round < kMaxRejectionRounds ? Pass::sample : Pass::select_top_p;
      if (pass == Pass::select_top_p) has_masses = false;
    }
    if (!has_masses) continue;
    if (samples_all) {
      top_p_total = total_mass = round > 0 ? total_mass : sampler.total_mass();
    }
    token = sampler.sample_token(round);
    if (!has_top_p || round == kMaxRejectionRounds || !token.valid) break;
    scale = fixed_point_scale(top_p_total);
    row.raise_threshold(next_float_up(sampler.broadcast_weight(token)));
    has_masses = false;
    pass = Pass::verify_top_p;
  }
  if (has_candidates) {
    if (cluster_rank() != 0) return;
    CandidateSampler<Sampler<T, kOnChip, InputTransform>> candidate_sampler = {list};
    token = candidate_sampler.sample(
        {k, min_p * max, top_p_target, top_p_of_top_k ? 0.0f : total_mass, has_top_p});
  }
  if (token.id >= 0 && threadIdx.x % kWarpSize == 0) {
    token.valid = token.valid && is_valid_row && is_valid_mass(total_mass);
    epilogue.finish(output, token, total_mass);
  }
  store_token(p, output, token, sampler.s.row_exists);
}

template <typename T, bool kOnChip, bool kTopK>
__global__ __launch_bounds__(
    kTopK ? kSampleMaxThreads<kOnChip>
          : kTransformMaxThreads<kOnChip>) void TopKTopPSampleKernel(const __grid_constant__
                                                                         SampleParams p) {
  extern __shared__ __align__(128) float memory[];
  __shared__ SamplerStorage shared;
  __shared__ CandidateStorage candidates;
  Sampler<T, kOnChip> sampler(shared, p.source, memory);
  sample_row<kTopK>(sampler, candidates, p, NoEpilogue());
}

// The kernel for rows with neither top-k nor top-p. Why it is a kernel of its own: it is much
// smaller, and instruction fetches cost time.
template <typename T, bool kOnChip>
__global__ __launch_bounds__(kSampleMaxThreads<kOnChip>) void MinPSampleKernel(
    const __grid_constant__ SampleParams p) {
  extern __shared__ __align__(128) float memory[];
  __shared__ SamplerStorage shared;
  Sampler<T, kOnChip> sampler(shared, p.source, memory);
  auto& row = sampler.row;
  const uint32_t output = cluster_id();
  int64_t row_index = 0;
  row.reset(p.logits);
  sampler.begin([&] { row_index = sampler.select_row(output); });
  sampler.generate_random_words(p.random, output);
  const float min_p = fminf(p.min_p[row_index], 1.0f);
  const float temperature = p.logits ? p.temperature[row_index] : 1.0f;
  sampler.wait_for_row();
  Token token = {-1, 0.0f, false};
  bool is_valid_row = true;
  if (p.logits || min_p > 0.0f) {
    sampler.all_gather_max(NanMaxAccumulator{-__int_as_float(0x7f800000)}, false);
    sampler.has_tile_maxima = true;
    const float max = sampler.row_max();
    is_valid_row = p.logits ? fabsf(max) < __int_as_float(0x7f800000) : is_valid_mass(max);
    if (temperature == 0.0f) token = sampler.first_argmax(max);
    if (p.logits) row.apply_softmax(max, softmax_scale_log2(temperature));
    row.raise_threshold(min_p * (p.logits ? 1.0f : max));
  }
  if (temperature != 0.0f) {
    sampler.all_gather_mass();
    token = sampler.sample_token(0);
  }
  token.valid = token.valid && is_valid_row;
  store_token(p, output, token, shared.row_exists);
}

#endif  // __CUDACC__

}  // namespace precast
