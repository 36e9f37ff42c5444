// SPDX-License-Identifier: Apache-2.0
// Speculative sampling of a chain of draft tokens (Chen et al., Accelerating large language model
// decoding with speculative sampling, arXiv:2302.01318).
//
//   token i is accepted if u[i] * draft[i, token] < target[i, token]
//   out = the accepted prefix, then a token by max(target - draft, 0) of the first position that is
//         not accepted (by target, where that has no mass), or by target[n], then -1
//
// Layout   draft      [batch, n, vocab]      f32, f16 or bf16; any strides, elements contiguous
//          target     [batch, n + 1, vocab]  the same
//          tokens     [batch, n]             int32 or int64; outside the vocabulary: not accepted
//          accepted   [batch]                int32, counts on: tokens that pass by themselves
//          emitted    [batch]                int32, counts on: the accepted prefix
//          out        [batch, n + 1]         as tokens
// Threads  a cluster a request, as sampling/sampling.cuh.
// Traffic  reads n + 1 numbers of each tensor, then one row of each.
#pragma once

#include "precast/sampling/sampling.cuh"

namespace precast {

struct ChainParams {
  RowSource source;  // outputs: the requests
  RandomSource random;
  const void* draft;
  const void* target;
  const void* tokens;
  int32_t* accepted;
  int32_t* emitted;
  void* out;
  int64_t draft_strides[2];  // of request and position, elements
  int64_t target_strides[2];
  int32_t count;  // n
  bool wide;      // int64 tokens
};

#if defined(__CUDACC__)

// The first uniform number of position i is that of draw kFirstPosition + i.
constexpr uint32_t kFirstPosition = 2;

// All threads of the CTA call; returns the accepted prefix and, of all positions, how many pass.
template <typename T>
__device__ __forceinline__ int2 accept_tokens(const ChainParams& p, uint32_t request) {
  const T* draft = static_cast<const T*>(p.draft) + request * p.draft_strides[0];
  const T* target = static_cast<const T*>(p.target) + request * p.target_strides[0];
  int prefix = -1, passed = 0;
#pragma unroll 1
  for (int first = 0; first < p.count; first += kWarpSize) {
    const int i = first + threadIdx.x % kWarpSize;
    bool passes = false;
    if (i < p.count) {
      const int64_t token = load_index(p.tokens, p.wide, int64_t(request) * p.count + i);
      if (token >= 0 && token < p.source.vocab) {
        const float q = load_number(draft + i * p.draft_strides[1] + token);
        const float t = load_number(target + i * p.target_strides[1] + token);
        passes = to_uniform(p.random.words(request, kFirstPosition + i).x) * q < t;
      }
    }
    const uint32_t votes = __ballot_sync(0xffffffffu, passes);
    passed += __popc(votes);
    if (prefix < 0 && votes != 0xffffffffu) prefix = first + __ffs(~votes) - 1;
  }
  return {prefix < 0 || prefix > p.count ? p.count : prefix, passed};
}

// Another row of probabilities, or null, is taken off. What would be negative is 0.
template <typename T>
struct TakeOff {
  static constexpr bool kChanges = true;
  const RowSource& p;
  const T* other;

  __device__ __forceinline__ void start(int64_t) {}
  __device__ __forceinline__ bool is_active() const { return other != nullptr; }
  __device__ __forceinline__ void operator()(int slab, float (&x)[kPerLane]) const {
    float y[kPerLane];
    load_slab(other, p, slab, 0.0f, y);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) x[i] -= y[i];
  }
};

template <typename T, bool kOnChip>
__global__ __launch_bounds__(kBoundThreads<kOnChip>) void ChainKernel(
    const __grid_constant__ ChainParams p) {
  extern __shared__ __align__(128) float memory[];
  __shared__ RowShared shared;
  Sampler<T, kOnChip, TakeOff<T>> sampler(shared, p.source, memory, {p.source, nullptr});
  auto& row = sampler.row;
  const uint32_t request = cluster_number();
  int2 accepted;
  row.start(false);
  sampler.begin([&] {
    accepted = accept_tokens<T>(p, request);
    row.data = static_cast<const T*>(p.target) + request * p.target_strides[0] +
               accepted.x * p.target_strides[1];
    if (accepted.x < p.count) {
      row.edit.other = static_cast<const T*>(p.draft) + request * p.draft_strides[0] +
                       accepted.x * p.draft_strides[1];
    }
  });
  sampler.roll(p.random, request);
  sampler.arrive();
  const int prefix = accepted.x;
  sampler.exchange_masses();
  Token token = sampler.draw(0);
  if (sampler.total() == 0.0f && row.edit.other != nullptr) {
    row.edit.other = nullptr;  // the rows are equal, up to what rounds to nothing
    if constexpr (kOnChip) row.read();
    sampler.exchange_masses();
    token = sampler.draw(0);
  }
  const int64_t first = int64_t(request) * (p.count + 1);
  if (token.id >= 0) {
    const int lane = threadIdx.x % kWarpSize;
    for (int i = lane; i <= p.count; i += kWarpSize) {
      int64_t value = i == prefix ? (token.valid ? token.id : 0) : -1;
      if (i < prefix) value = load_index(p.tokens, p.wide, int64_t(request) * p.count + i);
      store_index(p.out, p.wide, first + i, value);
    }
    if (lane == 0) {
      p.accepted[request] += accepted.y;
      p.emitted[request] += prefix;
    }
  }
}

#endif  // __CUDACC__

}  // namespace precast
