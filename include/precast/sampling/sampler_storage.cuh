// SPDX-License-Identifier: Apache-2.0
// What a CTA of the sampler keeps in static shared memory, its launch bounds, and its results.
#pragma once

#include "precast/sampling/inverse_cdf.cuh"
#include "precast/sampling/radix_select.cuh"

namespace precast {

// The launch bounds. On chip they leave a thread 80 registers, so that three CTAs of 256 threads
// fit on a multiprocessor.
template <bool kOnChip>
constexpr int kTransformMaxThreads = kOnChip ? 768 : kMaxThreadsPerCta;

// Launches that sample from many streamed rows keep two CTAs of kMaxThreadsPerCta threads on a
// multiprocessor.
template <bool kOnChip>
constexpr int kSampleMaxThreads = kOnChip ? 768 : 2 * kMaxThreadsPerCta;

#if defined(__CUDACC__)

constexpr int kMaxCandidatesPerChunk = kWarpSize;

// The static shared memory of a CTA.
struct SamplerStorage {
  alignas(16) float2 chunk_stats[2][kNumChunks];
  // mbarriers of `chunk_stats`; the mbarriers here are used only if a cluster has several CTAs
  uint64_t chunk_barriers[2];
  uint64_t tile_maxima_barrier;  // mbarrier of the tile maxima
  uint64_t sampled_barrier;      // mbarrier of `sampled`
  uint64_t candidates_barrier;   // mbarrier of the candidates (sampling/candidates.cuh)
  // mbarriers of the bulk copies, one for each warp
  uint64_t load_barriers[kMaxThreadsPerCta / kWarpSize];
  union {
    RadixSelectStorage select;
    float2 candidates[kNumChunks][kMaxCandidatesPerChunk];  // weights and indices, in the first CTA
  };
  float2 sampled;   // the weight of the sampled token
  bool row_exists;  // the output's index is one of a row
  uint4 random_words[kMaxDraws];
};

struct SampledChunk {
  int index;
  float mass;
};

struct Token {
  int id;  // -1 in all warps but the one that holds the token
  float weight;
  bool valid;  // the row has mass and no NaN
};

#endif  // __CUDACC__

}  // namespace precast
