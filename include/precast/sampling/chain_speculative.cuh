// SPDX-License-Identifier: Apache-2.0
// Speculative sampling of a chain of draft tokens (Chen et al., Accelerating large language model
// decoding with speculative sampling, arXiv:2302.01318).
//
//   token i is accepted if u[i] * draft[i, token] < target[i, token]
//   out = the accepted prefix; then a token by max(target - draft, 0) at the first position that is
//         rejected (by target if that has no mass), or by target[n] if none is; then -1
//
// Layout   draft      [batch, n, vocab]      f32, f16 or bf16; any strides, elements contiguous
//          target     [batch, n + 1, vocab]  the same
//          tokens     [batch, n]             int32 or int64; rejected if outside the vocabulary
//          accepted   [batch]                int32, incremented by the number of accepted positions
//          emitted    [batch]                int32, incremented by the length of the accepted
//          prefix out        [batch, n + 1]         as tokens
// Threads  one cluster a request, as in sampling/sampling.cuh
// Traffic  reads n + 1 numbers of each tensor, then one row of each
#pragma once

#include "precast/sampling/sampling.cuh"

namespace precast {

struct ChainParams {
  RowSource source;  // each output is a request
  RandomSource random;
  const void* draft;
  const void* target;
  const void* tokens;
  int32_t* accepted;
  int32_t* emitted;
  void* out;
  int64_t draft_strides[2];  // of the requests and of the positions, in elements
  int64_t target_strides[2];
  int32_t num_draft_tokens;  // n
  bool int64_tokens;
};

#if defined(__CUDACC__)

// The uniform number of position i is the first word of Philox draw kFirstAcceptDraw + i.
constexpr uint32_t kFirstAcceptDraw = 2;

// Returns the length of the accepted prefix, and how many positions are accepted in total. All
// threads of the CTA call it.
template <typename T>
__device__ __forceinline__ int2 accept_tokens(const ChainParams& p, uint32_t request) {
  const T* draft = static_cast<const T*>(p.draft) + request * p.draft_strides[0];
  const T* target = static_cast<const T*>(p.target) + request * p.target_strides[0];
  int prefix_length = -1, num_accepted = 0;
#pragma unroll 1
  for (int first = 0; first < p.num_draft_tokens; first += kWarpSize) {
    const int i = first + threadIdx.x % kWarpSize;
    bool is_accepted = false;
    if (i < p.num_draft_tokens) {
      const int64_t token =
          load_index(p.tokens, p.int64_tokens, int64_t(request) * p.num_draft_tokens + i);
      if (token >= 0 && token < p.source.vocab_size) {
        const float q = load_as_float(draft + i * p.draft_strides[1] + token);
        const float t = load_as_float(target + i * p.target_strides[1] + token);
        is_accepted = to_uniform(p.random.philox_words(request, kFirstAcceptDraw + i).x) * q < t;
      }
    }
    const uint32_t accepted_mask = __ballot_sync(0xffffffffu, is_accepted);
    num_accepted += __popc(accepted_mask);
    if (prefix_length < 0 && accepted_mask != 0xffffffffu) {
      prefix_length = first + __ffs(~accepted_mask) - 1;
    }
  }
  return {
      prefix_length < 0 || prefix_length > p.num_draft_tokens ? p.num_draft_tokens : prefix_length,
      num_accepted};
}

// Subtracts another row of probabilities, unless it is null. Negative results count as 0.
template <typename T>
struct SubtractDraft {
  static constexpr bool kEnabled = true;
  const RowSource& p;
  const T* subtrahend;

  __device__ __forceinline__ void begin_row(int64_t) {}
  __device__ __forceinline__ bool is_active() const { return subtrahend != nullptr; }
  __device__ __forceinline__ void operator()(int tile, float (&x)[kItemsPerLane]) const {
    float y[kItemsPerLane];
    load_tile(subtrahend, p, tile, 0.0f, y);
#pragma unroll
    for (int i = 0; i < kItemsPerLane; ++i) x[i] -= y[i];
  }
};

template <typename T, bool kOnChip>
__global__ __launch_bounds__(kTransformMaxThreads<kOnChip>) void ChainSpeculativeKernel(
    const __grid_constant__ ChainParams p) {
  extern __shared__ __align__(128) float memory[];
  __shared__ SamplerStorage shared;
  Sampler<T, kOnChip, SubtractDraft<T>> sampler(shared, p.source, memory, {p.source, nullptr});
  auto& row = sampler.row;
  const uint32_t request = cluster_id();
  int2 accepted_counts;
  row.reset(false);
  sampler.begin([&] {
    accepted_counts = accept_tokens<T>(p, request);
    row.data = static_cast<const T*>(p.target) + request * p.target_strides[0] +
               accepted_counts.x * p.target_strides[1];
    if (accepted_counts.x < p.num_draft_tokens) {
      row.transform.subtrahend = static_cast<const T*>(p.draft) + request * p.draft_strides[0] +
                                 accepted_counts.x * p.draft_strides[1];
    }
  });
  sampler.generate_random_words(p.random, request);
  sampler.wait_for_row();
  const int prefix_length = accepted_counts.x;
  sampler.all_gather_mass();
  Token token = sampler.sample_token(0);
  if (sampler.total_mass() == 0.0f && row.transform.subtrahend != nullptr) {
    row.transform.subtrahend = nullptr;  // the rows are equal up to rounding
    if constexpr (kOnChip) row.load_with_threads();
    sampler.all_gather_mass();
    token = sampler.sample_token(0);
  }
  const int64_t first = int64_t(request) * (p.num_draft_tokens + 1);
  if (token.id >= 0) {
    const int lane = threadIdx.x % kWarpSize;
    for (int i = lane; i <= p.num_draft_tokens; i += kWarpSize) {
      int64_t value = i == prefix_length ? (token.valid ? token.id : 0) : -1;
      if (i < prefix_length) {
        value = load_index(p.tokens, p.int64_tokens, int64_t(request) * p.num_draft_tokens + i);
      }
      store_index(p.out, p.int64_tokens, first + i, value);
    }
    if (lane == 0) {
      p.accepted[request] += accepted_counts.y;
      p.emitted[request] += prefix_length;
    }
  }
}

#endif  // __CUDACC__

}  // namespace precast
