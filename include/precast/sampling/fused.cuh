// SPDX-License-Identifier: Apache-2.0
// One launch from logits to a token: penalties, bitmask, temperature, filters, draw, and the log
// probabilities of the token and of the n most likely ones.
//
//   x = logit; where the token is in the prompt or the output: x > 0 ? x / repetition
//                                                                    : x * repetition
//   x = x - frequency * count - presence * (count > 0); x = -inf where the bitmask has a 0
//   then as sampling/sampling.cuh; at temperature 0 the first of the largest
//   logprob = (x - max) / temperature - log(sum), of all tokens, temperature 0 as 1
//
// Layout   logits        [batch, vocab]             f32, f16 or bf16
//          prompt_mask   [batch, ceil(vocab / 32)]  int32, or null: bit i % 32 of word i / 32
//          counts        [batch, vocab]             int32, or null: of tokens in the output
//          bitmask       [batch, ceil(vocab / 32)]  int32, or null: 1 is allowed
//          out           [batch]                    int32 or int64
//          logprobs      [batch]                    f32, or null
//          top_tokens    [batch, n]                 int32, or null: -1 where there is no token
//          top_logprobs  [batch, n]                 f32, or null: n up to 32
// Threads  as sampling/sampling.cuh. A warp edits its slab as it was read.
// Traffic  reads each tensor once; the logits as sampling/sampling.cuh.
// Measured 2026-11-21 on an H200, f32, rows of 128256, batch 64 and 256, top_k 50 and top_p 0.9, in
//          us: with a bitmask 53.4 and 154.6, with counts 59.6 and 190.2. Without any of it 38.1
//          and 79.6; sampling/sampling.cuh, which draws the same tokens, 30.4 and 57.2.
// Source   penalties: Keskar et al., CTRL, arXiv:1909.05858 (repetition); the OpenAI API (others).
#pragma once

#include "precast/sampling/sampling.cuh"

namespace precast {

constexpr int kMaxTopTokens = 32;

struct FusedParams : SampleParams {
  PerRow repetition;
  PerRow frequency;
  PerRow presence;
  const uint32_t* prompt_mask;
  const int32_t* counts;
  const uint32_t* bitmask;
  float* logprobs;
  int32_t* top_tokens;
  float* top_logprobs;
  int32_t top_count;
  bool counts_aligned;  // rows of whole aligned vectors
};

#if !defined(__CUDACC_RTC__)

// As for SampleParams: neither edits nor the sum of all tokens read a row again.
inline bool reads_once(const FusedParams& p) {
  const bool edits = p.prompt_mask != nullptr || p.counts != nullptr || p.bitmask != nullptr;
  return !edits && p.logprobs == nullptr && p.top_count == 0 &&
         reads_once(static_cast<const SampleParams&>(p));
}

#endif

#if defined(__CUDACC__)

// Penalties and the bitmask of one row.
struct Penalties {
  static constexpr bool kChanges = true;
  const FusedParams& p;
  const uint32_t* prompt_mask;
  const int32_t* counts;
  const uint32_t* bitmask;
  float repetition;
  float frequency;
  float presence;

  __device__ __forceinline__ explicit Penalties(const FusedParams& params) : p(params) {}

  __device__ __forceinline__ void start(int64_t row) {
    const int64_t vocab = p.source.vocab, words = (vocab + 31) / 32;
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

  // Why loads of their own loops: so that they are under way together.
  __device__ __forceinline__ void operator()(int slab, float (&x)[kPerLane]) const {
    constexpr int kFours = kPerLane / 4;
    const int first = slab * kSlab + threadIdx.x % kWarpSize * 4;
    uint32_t said[kFours], allowed[kFours];  // four bits each
#pragma unroll
    for (int j = 0; j < kFours; ++j) {
      said[j] = bits_of(prompt_mask, first + j * 4 * kWarpSize, 0u);
      allowed[j] = bits_of(bitmask, first + j * 4 * kWarpSize, 15u);
    }
#pragma unroll
    for (int half = 0; half < kFours; half += kFours / 2) {
      int4 count[kFours / 2];
#pragma unroll
      for (int j = 0; j < kFours / 2; ++j) {
        count[j] = counts_of(first + (half + j) * 4 * kWarpSize);
      }
#pragma unroll
      for (int j = 0; j < kFours / 2; ++j) {
        const int at = half + j;
        const int32_t four[4] = {count[j].x, count[j].y, count[j].z, count[j].w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          float y = x[4 * at + c];
          const bool out = four[c] > 0;
          if (repetition != 1.0f && (out || (said[at] >> c & 1))) {
            y = y > 0.0f ? __fdiv_rn(y, repetition) : y * repetition;
          }
          if (out) {
            y = __fsub_rn(y, __fmul_rn(frequency, static_cast<float>(four[c])));
            y = __fsub_rn(y, presence);
          }
          x[4 * at + c] = allowed[at] >> c & 1 ? y : -__int_as_float(0x7f800000);
        }
      }
    }
  }

  __device__ __forceinline__ uint32_t bits_of(const uint32_t* words, int at,
                                              uint32_t without) const {
    return words == nullptr || at >= p.source.vocab ? without : words[at / 32] >> at % 32;
  }

  __device__ __forceinline__ int4 counts_of(int at) const {
    int4 four = {0, 0, 0, 0};
    const int left = counts == nullptr ? 0 : p.source.vocab - at;
    if (p.counts_aligned) {
      if (left > 0) four = *reinterpret_cast<const int4*>(counts + at);
    } else {
      if (left > 0) four.x = counts[at];
      if (left > 1) four.y = counts[at + 1];
      if (left > 2) four.z = counts[at + 2];
      if (left > 3) four.w = counts[at + 3];
    }
    return four;
  }
};

struct TopShared {
  float2 items[kMaxTopTokens];  // logit and index
};

// The log probabilities. The n largest logits are collected before they are weighed, by two counts
// of each slab: what exceeds the n-th largest, and what equals it.
struct LogProbs {
  const FusedParams& p;
  TopShared& s;
  float temperature;
  float max;

  __device__ __forceinline__ void start(float of_row) {
    temperature = of_row == 0.0f ? 1.0f : of_row;
  }

  __device__ __forceinline__ bool wants_maxima() const { return p.top_count > 0; }
  __device__ __forceinline__ bool wants_total() const {
    return p.top_count > 0 || p.logprobs != nullptr;
  }

  template <typename Sampler>
  __device__ __forceinline__ void before_weighing(Sampler& sampler, uint32_t, float row_max) {
    max = row_max;
    if (p.top_count == 0) return;
    collect(sampler, p, s, max);
    ++sampler.exchanges;
    sampler.has_tops = sampler.has_seconds = false;
  }

  // Why not inline: it is long, and seldom wanted.
  template <typename Sampler>
  static __device__ __noinline__ void collect(Sampler sampler, const FusedParams& p, TopShared& s,
                                              float row_max) {
    const int n = p.top_count < p.source.vocab ? p.top_count : p.source.vocab;
    auto& row = sampler.row;
    const int lane = threadIdx.x % kWarpSize, ctas = sampler.ctas;
    cluster_barrier(ctas);  // between this selection and that of top_k
    const float nth =
        n == p.source.vocab ? -__int_as_float(0x7f800000) : sampler.select(n, row_max, false, 0.0f);
    if (threadIdx.x < kMaxTopTokens) s.items[threadIdx.x] = {-__int_as_float(0x7f800000), 0.0f};
    sampler.template exchange<Counts>([&] {
      row.each_slab([&](int i, const float (&x)[kPerLane]) {
        uint32_t larger = 0, equal = 0;
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
          larger += x[j] > nth;
          equal += x[j] == nth;
        }
        sampler.put(i, __uint_as_float(__reduce_add_sync(0xffffffffu, larger)),
                    __uint_as_float(__reduce_add_sync(0xffffffffu, equal)));
      });
    });
    const float2* slots = sampler.slots;
    const float2* pairs = sampler.pairs();
    const int groups_before = cluster_rank() * sampler.groups;
    row.each_slab([&](int i, const float (&x)[kPerLane]) {
      const int slab = row.first + i;
      if ((__float_as_uint(slots[i].x) | __float_as_uint(slots[i].y)) == 0) return;
      uint32_t all = 0, larger = 0, equal = 0;  // of all slabs, and of those before
      if (lane < kGroups) {
        all = __float_as_uint(pairs[lane].x);
        if (lane < groups_before) {
          larger = all;
          equal = __float_as_uint(pairs[lane].y);
        }
      }
      for (int other = lane; other < i; other += kWarpSize) {
        larger += __float_as_uint(slots[other].x);
        equal += __float_as_uint(slots[other].y);
      }
      all = warp_sum(all);
      larger = warp_sum(larger);
      equal = all + warp_sum(equal);
      const uint32_t before = (1u << lane) - 1;
#pragma unroll
      for (int i = 0; i < kPerLane; i += 4) {
        // In the order of the index: the lanes' fours, one after the other.
        uint32_t up = 0, ties = 0;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const uint32_t up_votes = __ballot_sync(0xffffffffu, x[i + c] > nth);
          const uint32_t tie_votes = __ballot_sync(0xffffffffu, x[i + c] == nth);
          up += __popc(up_votes & before);
          ties += __popc(tie_votes & before);
        }
        int up_at = larger + up, tie_at = equal + ties;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const bool is_up = x[i + c] > nth, is_tie = x[i + c] == nth;
          const int at = is_up ? up_at : tie_at;
          if ((is_up || is_tie) && at < n) {
            const int index = slab * kSlab + place_in_slab(lane, i + c);
            if (index < p.source.vocab)
              store_in_cta(&s.items[at], 0, {x[i + c], __int_as_float(index)});
          }
          up_at += is_up;
          tie_at += is_tie;
        }
        larger = __shfl_sync(0xffffffffu, up_at, kWarpSize - 1);
        equal = __shfl_sync(0xffffffffu, tie_at, kWarpSize - 1);
      }
    });
    cluster_barrier(ctas);  // what was collected is seen
  }

  // All threads call, behind a barrier of the cluster: the first warp writes what was collected, in
  // order.
  __device__ __forceinline__ void with_total(uint32_t output, float total) const {
    if (p.top_count == 0 || cluster_rank() != 0 || threadIdx.x >= kWarpSize) return;
    const int lane = threadIdx.x;
    const float2 item = s.items[lane];
    int place = 0;
    for (int other = 0; other < kMaxTopTokens; ++other) {
      const float2 y = s.items[other];
      const int index = __float_as_int(item.y), other_index = __float_as_int(y.y);
      place += y.x > item.x ||
               (y.x == item.x && (other_index < index || (other_index == index && other < lane)));
    }
    if (place >= p.top_count) return;
    const bool some = item.x > -__int_as_float(0x7f800000) && total > 0.0f;
    const int64_t at = int64_t(output) * p.top_count + place;
    p.top_tokens[at] = some ? __float_as_int(item.y) : -1;
    p.top_logprobs[at] = some ? log_of(item.x, total) : -__int_as_float(0x7f800000);
  }

  __device__ __forceinline__ float log_of(float x, float total) const {
    return __fdiv_rn(x - max, temperature) - logf(total);
  }

  __device__ __forceinline__ void finish(uint32_t output, const Token& token, float total) const {
    if (p.logprobs == nullptr) return;
    p.logprobs[output] =
        token.valid ? logf(token.weight) - logf(total) : __int_as_float(0x7fc00000);
  }
};

template <typename T, bool kOnChip>
__global__ __launch_bounds__(kDrawThreads<kOnChip>) void FusedSampleKernel(
    const __grid_constant__ FusedParams p) {
  extern __shared__ __align__(128) float memory[];
  __shared__ RowShared shared;
  __shared__ ListShared listed;
  __shared__ TopShared top;
  Sampler<T, kOnChip, Penalties> sampler(shared, p.source, memory, Penalties(p));
  sample_row<true>(sampler, listed, p, LogProbs{p, top, 1.0f, 0.0f});
}

#endif  // __CUDACC__

}  // namespace precast
