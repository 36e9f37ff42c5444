// SPDX-License-Identifier: Apache-2.0
// Sampling from the candidates of a small top-k (sampling/candidates.cuh).
//
// The k-th largest weight, the filters and the draws need neither the row nor the other CTAs of the
// cluster. Those CTAs exit, and their resources serve other rows. All sums equal those over the
// row, because elements that are no candidates would only add zeros. A warp processes a chunk, and
// each of its lanes one candidate.
#pragma once

#include "precast/sampling/candidates.cuh"

namespace precast {

#if defined(__CUDACC__)

// The filters that follow top-k.
struct CandidateFilters {
  int k;
  float min_p;
  uint32_t target;  // the top-p mass, as from fixed_point_target()
  float total;      // the mass that top_p is a share of; if not positive, that of the k largest
  bool has_top_p_filter;
};

// All threads of the first CTA call each function.
template <typename Sampler>
struct CandidateSampler {
  CandidateList<Sampler>& list;

  static __device__ __forceinline__ int lane() { return threadIdx.x % kWarpSize; }

  template <typename F>
  __device__ __forceinline__ void for_each_chunk(const F& f) {
#pragma unroll 1
    for (int chunk = list.sampler.row.warp_id(); chunk < kNumChunks;
         chunk += list.sampler.row.num_warps()) {
      const bool exists = lane() < list.s.counts[chunk];
      const float2 item = list.items()[chunk][exists ? lane() : 0];
      f(chunk, exists ? item.x : 0.0f, exists ? __float_as_int(item.y) : 0x40000000 + lane());
    }
  }

  // Sorts the candidates of each chunk by position.
  __device__ __forceinline__ void sort() {
    for_each_chunk([&](int chunk, float weight, int position) {
      int rank = 0;
#pragma unroll 8
      for (int i = 0; i < kMaxCandidatesPerChunk; ++i) {
        rank += __shfl_sync(0xffffffffu, position, i) < position;
      }
      if (weight > 0.0f) list.items()[chunk][rank] = {weight, __int_as_float(position)};
    });
  }

  // Returns the smallest candidate weight such that amount(x), summed over all larger weights x, is
  // below `target`.
  template <typename ItemAmount>
  __device__ __forceinline__ float smallest_weight_within(uint32_t target,
                                                          const ItemAmount& amount) {
    if (threadIdx.x == 0) list.s.smallest_key = 0xffffffffu;
    __syncthreads();
    for_each_chunk([&](int, float weight, int) {
      uint32_t above = 0;
#pragma unroll 1
      for (int chunk = 0; chunk < kNumChunks; ++chunk) {
        const int count = list.s.counts[chunk];
#pragma unroll 4
        for (int i = 0; i < count; ++i) {
          const float x = list.items()[chunk][i].x;
          above += x > weight ? amount(x) : 0;
        }
      }
      const bool in_set = weight > 0.0f && above < target;
      const uint32_t smallest =
          __reduce_min_sync(0xffffffffu, in_set ? to_ordered_key(weight) : 0xffffffffu);
      if (lane() == 0) atomicMin(&list.s.smallest_key, smallest);
    });
    __syncthreads();
    return from_ordered_key(list.s.smallest_key);
  }

  // The lane's mass of the tile whose candidates are those from `head` up to `end`.
  static __device__ __forceinline__ float lane_mass(float weight, int position, int head, int end) {
    const int of_lane = position / kItemsPerLane % kWarpSize;
    float mass = 0.0f;
#pragma unroll 1
    for (int i = head; i < end; ++i) {
      const float x = __shfl_sync(0xffffffffu, weight, i);
      if (__shfl_sync(0xffffffffu, of_lane, i) == lane()) mass += x;
    }
    return mass;
  }

  // Returns the masses of a chunk's tiles, each in the lane of the tile's first candidate. The bits
  // of `head_flags` are these lanes.
  static __device__ __forceinline__ float tile_mass(float weight, int position,
                                                    uint32_t& head_flags) {
    const int tile = position / kTileSize;
    const int before = __shfl_up_sync(0xffffffffu, tile, 1);
    const bool is_head = lane() == 0 || tile != before;
    head_flags = __ballot_sync(0xffffffffu, is_head);
    // The sum of two numbers does not depend on their order.
    const float next = __shfl_down_sync(0xffffffffu, weight, 1);
    // valid in the lanes of `head_flags`
    const int size = tile_end(head_flags & ~0u << lane()) - lane();
    float mass = size > 1 ? weight + next : weight;
    uint32_t long_runs =
        __ballot_sync(0xffffffffu, is_head && size > 2 && position < kMaxVocabSize);
#pragma unroll 1
    for (; long_runs != 0; long_runs &= long_runs - 1) {
      const int head = __ffs(long_runs) - 1, end = tile_end(head_flags & ~0u << head);
      const float sum = warp_sum(lane_mass(weight, position, head, end));
      if (lane() == head) mass = sum;
    }
    return is_head ? mass : 0.0f;
  }

  // Returns the end of the candidates of the first tile in `head_flags`.
  static __device__ __forceinline__ int tile_end(uint32_t head_flags) {
    const uint32_t next = head_flags & (head_flags - 1);
    return next != 0 ? __ffs(next) - 1 : kWarpSize;
  }

  // Writes the chunks' masses of the weights at or above `threshold` to chunk_stats.
  __device__ __forceinline__ void compute_chunk_masses(float threshold) {
    __syncthreads();
    float2* chunk_stats = list.sampler.s.chunk_stats[list.sampler.buffer()];
    for_each_chunk([&](int chunk, float weight, int position) {
      uint32_t head_flags;
      const float mass = tile_mass(weight >= threshold ? weight : 0.0f, position, head_flags);
      const float sum = warp_inclusive_scan(mass, kWarpSize);
      if (lane() == kWarpSize - 1) chunk_stats[chunk].x = sum;
    });
    __syncthreads();
  }

  // Does the same as Sampler::sample_token().
  __device__ __forceinline__ Token sample_token(uint32_t round, float threshold) {
    const uint4& words = list.sampler.s.random_words[round];
    const SampledChunk sampled = list.sampler.sample_chunk(to_uniform(words.x));
    Token token = {-1, 0.0f, is_valid_mass(list.sampler.total_mass())};
    for_each_chunk([&](int chunk, float weight, int position) {
      if (chunk != sampled.index) return;
      if (!(weight >= threshold)) weight = 0.0f;
      uint32_t head_flags;
      const float tile = tile_mass(weight, position, head_flags);
      const int head = first_exceeding(warp_inclusive_scan(tile, kWarpSize),
                                       to_uniform(words.y) * sampled.mass, tile);
      const int end = tile_end(head_flags & ~0u << head);
      const float of_lane = lane_mass(weight, position, head, end);
      const int sampled_lane = sample_lane(of_lane, to_uniform(words.z));
      const bool is_of_lane =
          lane() >= head && lane() < end && position / kItemsPerLane % kWarpSize == sampled_lane;
      const int sampled_item = sample_lane(is_of_lane ? weight : 0.0f, to_uniform(words.w));
      token.weight = __shfl_sync(0xffffffffu, weight, sampled_item);
      const int sampled_position = __shfl_sync(0xffffffffu, position, sampled_item);
      token.id = sampled_position / kTileSize * kTileSize +
                 index_in_tile(sampled_lane, sampled_position % kItemsPerLane);
    });
    return token;
  }

  // Samples a token under the filters, by rejection.
  __device__ __forceinline__ Token sample(const CandidateFilters& f) {
    __syncthreads();
    sort();
    __syncthreads();
    float threshold = smallest_weight_within(f.k, [](float) { return 1u; });
    float total = f.total;
    bool masses_ready = false;
    if (f.has_top_p_filter && !(total > 0.0f)) {
      compute_chunk_masses(threshold);
      total = list.sampler.total_mass();
      masses_ready = f.min_p <= threshold;
    }
    const float scale = fixed_point_scale(total);
    threshold = fmaxf(threshold, f.min_p);
    Token token;
#pragma unroll 1
    for (uint32_t round = 0;; ++round) {
      if (!masses_ready) compute_chunk_masses(threshold);
      masses_ready = false;
      token = sample_token(round, threshold);
      if (!f.has_top_p_filter || round == kMaxRejectionRounds || !token.valid) break;
      if (token.id >= 0 && lane() == 0) list.sampler.s.sampled.x = token.weight;
      __syncthreads();
      const float sampled_weight = list.sampler.s.sampled.x;
      for_each_chunk([&](int, float weight, int) {
        const uint32_t mass = to_fixed_point(weight > sampled_weight ? weight : 0.0f, scale);
        const uint32_t sum = warp_sum(mass);
        if (lane() == 0) atomicAdd(&list.s.mass_above[round], sum);
      });
      __syncthreads();
      if (list.s.mass_above[round] < f.target) break;
      threshold = round + 1 < kMaxRejectionRounds
                      ? next_float_up(sampled_weight)
                      : fmaxf(threshold, smallest_weight_within(f.target, [=](float x) {
                                return to_fixed_point(x, scale);
                              }));
    }
    return token;
  }
};

#endif  // __CUDACC__

}  // namespace precast
