// SPDX-License-Identifier: Apache-2.0
// One launch from logits to a token: penalties, bitmask, temperature, filters and sampling, with
// the log probabilities of the token and of the n most likely tokens.
//
//   x = logit; if the token is in the prompt or the output: x > 0 ? x / repetition
//                                                                 : x * repetition
//   x = x - frequency * count - presence * (count > 0); x = -inf if its bit in the bitmask is 0
//   then as in sampling/sampling.cuh; at temperature 0 the argmax
//   logprob = (x - max) / temperature - log(sum) over all tokens; temperature 0 counts as 1
//
// Layout   logits        [batch, vocab]             f32, f16 or bf16
//          prompt_mask   [batch, ceil(vocab / 32)]  int32, or null: bit i % 32 of word i / 32
//          counts        [batch, vocab]             int32, or null: of tokens in the output
//          bitmask       [batch, ceil(vocab / 32)]  int32, or null: 1 allows the token
//          out           [batch]                    int32 or int64
//          logprobs      [batch]                    f32, or null
//          top_tokens    [batch, n]                 int32, or null: -1 if there is no such token
//          top_logprobs  [batch, n]                 f32, or null: n up to 32
// Threads  as in sampling/sampling.cuh; a warp applies the penalties to a tile as it loads it
// Traffic  reads each tensor once; the logits as in sampling/sampling.cuh
// Measured 2026-11-21 on an H200, f32, rows of 128256, batch 64 and 256, top_k 50 and top_p 0.9, in
//          us: with a bitmask 53.4 and 154.6, with counts 59.6 and 190.2. Without either 38.1
//          and 79.6; sampling/sampling.cuh, which samples the same tokens, 30.4 and 57.2.
// Source   penalties: Keskar et al., CTRL, arXiv:1909.05858 (repetition); the OpenAI API (others)
#pragma once

#include "precast/sampling/sampling.cuh"

namespace precast {

constexpr int kMaxTopTokens = 32;

struct FusedParams : SampleParams {
  PerRowScalar repetition;
  PerRowScalar frequency;
  PerRowScalar presence;
  const uint32_t* prompt_mask;
  const int32_t* counts;
  const uint32_t* bitmask;
  float* logprobs;
  int32_t* top_tokens;
  float* top_logprobs;
  int32_t top_count;
  bool counts_aligned;  // each row starts at a multiple of 16 bytes and holds whole vectors
};

#if !defined(__CUDACC_RTC__)

// As for SampleParams. Penalties and the sum over all tokens make a streamed row be read again.
inline bool reads_row_once(const FusedParams& p) {
  const bool transforms = p.prompt_mask != nullptr || p.counts != nullptr || p.bitmask != nullptr;
  return !transforms && p.logprobs == nullptr && p.top_count == 0 &&
         reads_row_once(static_cast<const SampleParams&>(p));
}

#endif

#if defined(__CUDACC__)

// The penalties and the bitmask of one row.
struct Penalties {
  static constexpr bool kEnabled = true;
  const FusedParams& p;
  const uint32_t* prompt_mask;
  const int32_t* counts;
  const uint32_t* bitmask;
  float repetition;
  float frequency;
  float presence;

  __device__ __forceinline__ explicit Penalties(const FusedParams& params) : p(params) {}

  __device__ __forceinline__ void begin_row(int64_t row) {
    const int64_t vocab = p.source.vocab_size, words = (vocab + 31) / 32;
    prompt_mask = p.prompt_mask == nullptr ? nullptr : p.prompt_mask + row * words;
    counts = p.counts == nullptr ? nullptr : p.counts + row * vocab;
    bitmask = p.bitmask == nullptr ? nullptr : p.bitmask + row * words;
    repetition = p.repetition[row];
    frequency = p.frequency[row];
    presence = p.presence[row];
  }

  __device__ __forceinline__ bool is_active() const {
    return prompt_mask != nullptr || counts != nullptr || bitmask != nullptr;
  }

  // Why the loads have loops of their own: all of them are then in flight together.
  __device__ __forceinline__ void operator()(int tile, float (&x)[kItemsPerLane]) const {
    constexpr int kVec4s = kItemsPerLane / 4;
    const int first = tile * kTileSize + threadIdx.x % kWarpSize * 4;
    uint32_t in_prompt[kVec4s], allowed[kVec4s];  // four bits each
#pragma unroll
    for (int j = 0; j < kVec4s; ++j) {
      in_prompt[j] = mask_bits(prompt_mask, first + j * 4 * kWarpSize, 0u);
      allowed[j] = mask_bits(bitmask, first + j * 4 * kWarpSize, 15u);
    }
#pragma unroll
    for (int half = 0; half < kVec4s; half += kVec4s / 2) {
      int4 count[kVec4s / 2];
#pragma unroll
      for (int j = 0; j < kVec4s / 2; ++j) {
        count[j] = load_counts(first + (half + j) * 4 * kWarpSize);
      }
#pragma unroll
      for (int j = 0; j < kVec4s / 2; ++j) {
        const int vec = half + j;
        const int32_t values[4] = {count[j].x, count[j].y, count[j].z, count[j].w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          float y = x[4 * vec + c];
          const bool is_in_output = values[c] > 0;
          if (repetition != 1.0f && (is_in_output || (in_prompt[vec] >> c & 1))) {
            y = y > 0.0f ? __fdiv_rn(y, repetition) : y * repetition;
          }
          if (is_in_output) {
            y = __fsub_rn(y, __fmul_rn(frequency, static_cast<float>(values[c])));
            y = __fsub_rn(y, presence);
          }
          x[4 * vec + c] = allowed[vec] >> c & 1 ? y : -__int_as_float(0x7f800000);
        }
      }
    }
  }

  __device__ __forceinline__ uint32_t mask_bits(const uint32_t* words, int index,
                                                uint32_t default_bits) const {
    return words == nullptr || index >= p.source.vocab_size ? default_bits
                                                            : words[index / 32] >> index % 32;
  }

  __device__ __forceinline__ int4 load_counts(int index) const {
    int4 values = {0, 0, 0, 0};
    const int remaining = counts == nullptr ? 0 : p.source.vocab_size - index;
    if (p.counts_aligned) {
      if (remaining > 0) values = *reinterpret_cast<const int4*>(counts + index);
    } else {
      if (remaining > 0) values.x = counts[index];
      if (remaining > 1) values.y = counts[index + 1];
      if (remaining > 2) values.z = counts[index + 2];
      if (remaining > 3) values.w = counts[index + 3];
    }
    return values;
  }
};

struct TopLogprobsStorage {
  float2 items[kMaxTopTokens];  // logit and index
};

// Computes the log probabilities. The n largest logits are collected before the softmax, at slots
// that two counts of each tile give: the elements above the n-th largest, and those equal to it.
struct LogProbs {
  const FusedParams& p;
  TopLogprobsStorage& s;
  float temperature;
  float max;

  __device__ __forceinline__ void begin_row(float row_temperature) {
    temperature = row_temperature == 0.0f ? 1.0f : row_temperature;
  }

  __device__ __forceinline__ bool needs_tile_maxima() const { return p.top_count > 0; }
  __device__ __forceinline__ bool needs_total_mass() const {
    return p.top_count > 0 || p.logprobs != nullptr;
  }

  template <typename Sampler>
  __device__ __forceinline__ void before_softmax(Sampler& sampler, uint32_t, float row_max) {
    max = row_max;
    if (p.top_count == 0) return;
    collect(sampler, p, s, max);
    ++sampler.num_exchanges;
    sampler.has_tile_maxima = sampler.has_second_maxima = false;
  }

  // Why it is not inlined: the code is long and seldom needed.
  template <typename Sampler>
  static __device__ __noinline__ void collect(Sampler sampler, const FusedParams& p,
                                              TopLogprobsStorage& s, float row_max) {
    const int n = p.top_count < p.source.vocab_size ? p.top_count : p.source.vocab_size;
    auto& row = sampler.row;
    const int lane = threadIdx.x % kWarpSize, ctas = sampler.ctas;
    cluster_sync(ctas);  // between this selection and that of top_k
    const float nth_largest = n == p.source.vocab_size
                                  ? -__int_as_float(0x7f800000)
                                  : sampler.select_threshold(n, row_max, false, 0.0f);
    if (threadIdx.x < kMaxTopTokens) s.items[threadIdx.x] = {-__int_as_float(0x7f800000), 0.0f};
    sampler.template all_gather<CountReduction>([&] {
      row.for_each_tile([&](int i, const float (&x)[kItemsPerLane]) {
        uint32_t num_larger = 0, num_equal = 0;
#pragma unroll
        for (int j = 0; j < kItemsPerLane; ++j) {
          num_larger += x[j] > nth_largest;
          num_equal += x[j] == nth_largest;
        }
        sampler.set_tile_stats(i, __uint_as_float(__reduce_add_sync(0xffffffffu, num_larger)),
                               __uint_as_float(__reduce_add_sync(0xffffffffu, num_equal)));
      });
    });
    const float2* tile_stats = sampler.tile_stats;
    const float2* chunk_stats = sampler.chunk_stats();
    const int chunks_before = cluster_rank() * sampler.cta_chunks;
    row.for_each_tile([&](int i, const float (&x)[kItemsPerLane]) {
      const int tile = row.first_tile + i;
      if ((__float_as_uint(tile_stats[i].x) | __float_as_uint(tile_stats[i].y)) == 0) return;
      uint32_t total_larger = 0, num_larger = 0,
               // the larger ones of all tiles, and both counts of the tiles before this one
          num_equal = 0;
      if (lane < kNumChunks) {
        total_larger = __float_as_uint(chunk_stats[lane].x);
        if (lane < chunks_before) {
          num_larger = total_larger;
          num_equal = __float_as_uint(chunk_stats[lane].y);
        }
      }
      for (int other = lane; other < i; other += kWarpSize) {
        num_larger += __float_as_uint(tile_stats[other].x);
        num_equal += __float_as_uint(tile_stats[other].y);
      }
      total_larger = warp_sum(total_larger);
      num_larger = warp_sum(num_larger);
      num_equal = total_larger + warp_sum(num_equal);
      const uint32_t lanes_below = (1u << lane) - 1;
#pragma unroll
      for (int i = 0; i < kItemsPerLane; i += 4) {
        // Slots follow the order of the indices: the vectors of the lanes, one after the other.
        uint32_t larger_before = 0, equal_before = 0;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const uint32_t larger_mask = __ballot_sync(0xffffffffu, x[i + c] > nth_largest);
          const uint32_t equal_mask = __ballot_sync(0xffffffffu, x[i + c] == nth_largest);
          larger_before += __popc(larger_mask & lanes_below);
          equal_before += __popc(equal_mask & lanes_below);
        }
        int larger_slot = num_larger + larger_before, equal_slot = num_equal + equal_before;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const bool is_larger = x[i + c] > nth_largest, is_equal = x[i + c] == nth_largest;
          const int slot = is_larger ? larger_slot : equal_slot;
          if ((is_larger || is_equal) && slot < n) {
            const int index = tile * kTileSize + index_in_tile(lane, i + c);
            if (index < p.source.vocab_size) {
              store_in_cta(&s.items[slot], 0, {x[i + c], __int_as_float(index)});
            }
          }
          larger_slot += is_larger;
          equal_slot += is_equal;
        }
        num_larger = __shfl_sync(0xffffffffu, larger_slot, kWarpSize - 1);
        num_equal = __shfl_sync(0xffffffffu, equal_slot, kWarpSize - 1);
      }
    });
    cluster_sync(ctas);  // makes the collected items visible
  }

  // Writes the collected tokens in order, by the first warp. All threads call it, after a barrier
  // of the cluster.
  __device__ __forceinline__ void on_total_mass(uint32_t output, float total) const {
    if (p.top_count == 0 || cluster_rank() != 0 || threadIdx.x >= kWarpSize) return;
    const int lane = threadIdx.x;
    const float2 item = s.items[lane];
    int rank = 0;
    for (int other = 0; other < kMaxTopTokens; ++other) {
      const float2 y = s.items[other];
      const int index = __float_as_int(item.y), other_index = __float_as_int(y.y);
      rank += y.x > item.x ||
              (y.x == item.x && (other_index < index || (other_index == index && other < lane)));
    }
    if (rank >= p.top_count) return;
    const bool exists = item.x > -__int_as_float(0x7f800000) && total > 0.0f;
    const int64_t out_index = int64_t(output) * p.top_count + rank;
    p.top_tokens[out_index] = exists ? __float_as_int(item.y) : -1;
    p.top_logprobs[out_index] = exists ? logprob_of(item.x, total) : -__int_as_float(0x7f800000);
  }

  __device__ __forceinline__ float logprob_of(float x, float total) const {
    return __fdiv_rn(x - max, temperature) - logf(total);
  }

  __device__ __forceinline__ void finish(uint32_t output, const Token& token, float total) const {
    if (p.logprobs == nullptr) return;
    p.logprobs[output] =
        token.valid ? logf(token.weight) - logf(total) : __int_as_float(0x7fc00000);
  }
};

template <typename T, bool kOnChip>
__global__ __launch_bounds__(kSampleMaxThreads<kOnChip>) void FusedSampleKernel(
    const __grid_constant__ FusedParams p) {
  extern __shared__ __align__(128) float memory[];
  __shared__ SamplerStorage shared;
  __shared__ CandidateStorage candidates;
  __shared__ TopLogprobsStorage top_logprobs;
  Sampler<T, kOnChip, Penalties> sampler(shared, p.source, memory, Penalties(p));
  sample_row<true>(sampler, candidates, p, LogProbs{p, top_logprobs, 1.0f, 0.0f});
}

#endif  // __CUDACC__

}  // namespace precast
