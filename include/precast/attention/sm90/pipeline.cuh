// SPDX-License-Identifier: Apache-2.0
// What the warps of a CTA share: the buffers of Q, K and V in shared memory with their mbarriers,
// and a ring of work tiles.
//
// A buffer is full when TMA has written it, and empty when each consumer warp has read it. A slot
// of the ring is full when the scheduler warp has filled it, and empty when every role has left it.
#pragma once

#include "precast/attention/combine.cuh"
#include "precast/attention/sm90/params.cuh"
#include "precast/attention/sm90/tile.cuh"
#include "precast/core/sm90/pipeline.cuh"

namespace precast {

#if defined(__CUDACC__)

// A work tile in the ring. The last one is not valid.
struct WorkSlot {
  BlockInfo block;
  bool is_valid;
};

template <typename Tile>
struct Sm90SharedStorage {
  using Scheduler = TileScheduler;
  PipelineBarriers<Tile::kQueryStages> q;
  PipelineBarriers<Tile::kStages> k, v;
  PipelineBarriers<Tile::kWorkSlots> work;
  WorkSlot slots[Tile::kWorkSlots];
  int32_t* counters;  // split counters of the plan
  // Why not in registers: a producer has few of them.
  alignas(16) unsigned char scheduler[sizeof(Scheduler)];
  CombineSharedStorage combine;
  // row_max and row_sum of the second consumer, of tiles of few rows
  float2 row_stats[Tile::kSharesRows ? 64 : 1];
};

// Addresses in dynamic shared memory, which starts at a multiple of 1024 bytes.
template <typename Tile>
struct Sm90Buffers {
  uint32_t base;

  __device__ __forceinline__ uint32_t q(int stage) const {
    return base + stage * Tile::kQueryBytes;
  }
  // The third numbers of the queries in work (attention/sm90/query.cuh).
  __device__ __forceinline__ uint32_t third_of_q() const { return base + kThirdOffset; }
  __device__ __forceinline__ uint32_t k(int stage) const {
    return base + kKeyOffset + stage * Tile::kKeyBytes;
  }
  __device__ __forceinline__ uint32_t v(int stage) const {
    return base + kKeyOffset + Tile::kStages * Tile::kKeyBytes + stage * Tile::kValueBytes;
  }
  static constexpr int kThirdOffset = Tile::kQueryStages * Tile::kQueryBytes;
  static constexpr int kKeyOffset = kThirdOffset + Tile::kThirdBytes;
  static constexpr int kStorageOffset =
      kKeyOffset + Tile::kStages * (Tile::kKeyBytes + Tile::kValueBytes);
};

// KV blocks of a work tile.
template <typename Tile>
__device__ __forceinline__ int32_t num_kv_blocks(const WorkTile& work) {
  return (work.kv_end - work.kv_begin + Tile::kBlockN - 1) / Tile::kBlockN;
}

#endif  // __CUDACC__

}  // namespace precast
