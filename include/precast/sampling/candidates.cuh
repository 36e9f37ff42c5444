// SPDX-License-Identifier: Apache-2.0
// The candidates of a small top-k: a list of the few elements that may be among the k largest.
//
// At least k elements reach the k-th largest of the tile maxima, and seldom many more do. They are
// collected chunk by chunk in the shared memory of the cluster's first CTA, with their positions.
//
// When rows are streamed, the previous pass has stored each tile's argmax and second largest
// element. So the tiles with one candidate, which are most of them, are not read again.
#pragma once

#include "precast/sampling/row_sampler.cuh"

namespace precast {

// The largest k for which candidates are collected.
__host__ __device__ constexpr int max_candidate_k(int vocab) {
  return (vocab + kTileSize - 1) / kTileSize * 3 / 4;
}

#if defined(__CUDACC__)

struct CandidateStorage {
  uint32_t counts[kNumChunks];
  uint32_t smallest_key;                     // an ordered key
  uint32_t mass_above[kMaxRejectionRounds];  // mass above the token of each round
};

template <typename Sampler>
struct CandidateList {
  CandidateStorage& s;
  Sampler& sampler;

  // The weights and positions of each chunk, valid after collect(). A position is (tile * 32 +
  // lane) * kItemsPerLane + the item of the lane.
  __device__ __forceinline__ auto items() const -> float2 (*)[kMaxCandidatesPerChunk] {
    return sampler.s.candidates;
  }

  static __device__ __forceinline__ int lane() { return threadIdx.x % kWarpSize; }

  // Must be called before the tile maxima are gathered.
  __device__ __forceinline__ void init() {
    if (threadIdx.x == 0) s.smallest_key = 0xffffffffu;
    if (threadIdx.x < kNumChunks) s.counts[threadIdx.x] = 0;
    if (threadIdx.x < kMaxRejectionRounds) s.mass_above[threadIdx.x] = 0;
    const int num_tiles = sampler.row.p.num_tiles;
    if (threadIdx.x < kNumChunks * sampler.row.p.tiles_per_chunk - num_tiles) {
      sampler.tile_maxima[num_tiles + threadIdx.x] = -__int_as_float(0x7f800000);
    }
  }

  // Returns the k-th largest of the tile maxima. Two threads share a tile.
  __device__ __forceinline__ float kth_tile_maximum(int k) {
    const int num_tiles = sampler.row.p.num_tiles, half = threadIdx.x % 2;
    const float4* maxima = reinterpret_cast<const float4*>(sampler.tile_maxima);
    const int count = kNumChunks / 4 * sampler.row.p.tiles_per_chunk;
    uint32_t smallest = 0xffffffffu;
#pragma unroll 1
    for (int first = 0; first < num_tiles; first += blockDim.x / 2) {
      const int i = first + threadIdx.x / 2;
      const float x = i < num_tiles ? sampler.tile_maxima[i] : -__int_as_float(0x7f800000);
      int larger = 0;
#pragma unroll 4
      for (int j = half; j < count; j += 2) {
        const float4 y = maxima[j];
        larger += (y.x > x) + (y.y > x) + (y.z > x) + (y.w > x);
      }
      larger += __shfl_xor_sync(0xffffffffu, larger, 1);
      if (i < num_tiles && larger < k) smallest = min(smallest, to_ordered_key(x));
    }
    smallest = __reduce_min_sync(0xffffffffu, smallest);
    if (lane() == 0) atomicMin(&s.smallest_key, smallest);
    __syncthreads();
    return from_ordered_key(s.smallest_key);
  }

  // Calls f(x, position) for the lane's elements of a tile that are at least `lower_bound`.
  template <typename F>
  static __device__ __forceinline__ void for_each_at_least(float lower_bound,
                                                           const float (&y)[kItemsPerLane],
                                                           int tile, const F& f) {
    uint32_t matches = 0;
#pragma unroll
    for (int j = 0; j < kItemsPerLane; ++j) matches |= y[j] >= lower_bound ? 1u << j : 0u;
#pragma unroll 1
    for (; matches != 0; matches &= matches - 1) {
      const int j = __ffs(matches) - 1;
      float x = y[0];
#pragma unroll
      for (int other = 1; other < kItemsPerLane; ++other) {
        if (j == other) x = y[other];
      }
      f(x, tile * kTileSize + lane() * kItemsPerLane + j);
    }
  }

  // Returns a bound on elements whose weight may equal that of `bound` after rounding. It is above
  // the elements that have no mass.
  static __device__ __forceinline__ float below_bound(float bound, const WeightTransform& weights) {
    return weights.is_logits
               ? fmaxf(bound - __fdiv_rn(0x1p-12f, weights.scale_log2), -3.402823466e38f)
               : fmaxf(bound, 0x1p-149f);
  }

  // Collects the candidates for the k largest. The row must not yet be softmax weights, and the
  // tile maxima must have been gathered. All threads of the cluster call it; all get false if a
  // chunk has too many candidates.
  __device__ __forceinline__ bool collect(int k, const WeightTransform& weights) {
    auto& row = sampler.row;
    const auto weight = [&](float x) { return weights.is_logits ? exp_weight(x, weights) : x; };
    const float bound = kth_tile_maximum(k);
    const float threshold = weight(bound), lower_bound = below_bound(bound, weights);
    const auto keep = [&](float x, int position) {
      const float w = weight(x);
      if (!(w >= threshold && w > 0.0f)) return;
      const int chunk = position / kTileSize / row.p.tiles_per_chunk;
      const uint32_t slot = atomicAdd(&s.counts[chunk], 1u);
      if (slot < kMaxCandidatesPerChunk) items()[chunk][slot] = {w, __int_as_float(position)};
    };
    float* smem = row.lane_smem;
#pragma unroll 1
    for (int i = row.warp_id(); i < row.cta_tiles;
         i += row.num_warps(), smem += row.tile_stride()) {
      const float tile_max = sampler.tile_maxima[row.first_tile + i];
      if (!(tile_max >= lower_bound)) continue;
      if (!Sampler::kIsOnChip && sampler.has_second_maxima &&
          sampler.tile_stats[i].x < lower_bound) {
        if (lane() == 0) keep(tile_max, sampler.tile_argmax[i]);
        continue;
      }
      float y[kItemsPerLane];
      row.load(row.first_tile + i, smem, y);
      for_each_at_least(lower_bound, y, row.first_tile + i, keep);
    }
    return gather_on_first_cta();
  }

  // Gives each CTA the counts of all chunks, and the first CTA the candidates of all chunks.
  __device__ __forceinline__ bool gather_on_first_cta() {
    const int rank = cluster_rank(), ctas = sampler.ctas, cta_chunks = sampler.cta_chunks;
    uint64_t* barrier = &sampler.s.candidates_barrier;
    __syncthreads();
    if (ctas > 1) {
      if (threadIdx.x == 0) {
        const int bytes =
            sizeof(uint32_t) + (rank == 0 ? kMaxCandidatesPerChunk * sizeof(float2) : 0);
        mbarrier_arrive_expect_tx(barrier, (kNumChunks - cta_chunks) * bytes);
      }
#pragma unroll 1
      for (int i = sampler.row.warp_id(); i < cta_chunks; i += sampler.row.num_warps()) {
        const int chunk = rank * cta_chunks + i;
        if (lane() < ctas && lane() != rank) {
          store_async(&s.counts[chunk], barrier, lane(), s.counts[chunk]);
        }
        if (rank != 0) {
          store_async(&items()[chunk][lane()], barrier, 0, items()[chunk][lane()]);
        }
      }
      mbarrier_wait_parity(barrier, 0);
    }
    bool fits = true;
#pragma unroll
    for (int i = 0; i < kNumChunks; ++i) fits = fits && s.counts[i] <= kMaxCandidatesPerChunk;
    return fits;
  }
};

#endif  // __CUDACC__

}  // namespace precast
