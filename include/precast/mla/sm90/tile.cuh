// SPDX-License-Identifier: Apache-2.0
// The tiles of MLA for sm_90a: who computes what, and what lies in shared memory.
//
// A CTA has a producer warpgroup, which copies, and two consumer warpgroups. Both hold the same 64
// packed rows (token, head): a row of acc_o has 512 columns of fp32, for which one warpgroup has
// too few registers, so consumer 0 holds its left half and consumer 1 its right half. KV blocks of
// 64 tokens belong to the consumers in turn: the owner of a block computes its scores and its P,
// and both multiply P with their half of the columns of V.
//
// Shared memory consists of panels: 64 rows of 128 bytes, swizzled, which TMA writes and wgmma
// reads.
//
//   Q       [panels of ckv | panel of kpe]
//   stage   [panels of ckv | panel of kpe, and then of P], which is one KV block
//
// The last panels of Q are in the consumers' registers as well (kRegisterPanels).
//
// V is the panels of ckv once more. P takes the place of kpe, which no one reads once the scores
// are there, so that it needs no memory of its own, and what frees a stage frees P. A stage serves
// the blocks of one owner alone; so a consumer that may write to its stage knows that the other one
// has read all that it wrote there before.
#pragma once

#include "precast/attention/combine.cuh"
#include "precast/attention/sm90/pipeline.cuh"
#include "precast/mla/params.cuh"

namespace precast {

#if defined(__CUDACC__) && defined(PRECAST_SM)

// The type in which wgmma multiplies: caches of e4m3 are converted to f16, which holds each e4m3
// number.
template <typename Q, typename KV>
struct MlaElement {
  using Type = Q;
};
template <typename Q>
struct MlaElement<Q, e4m3> {
  using Type = f16;
};

// `kBoxes`: whether TMA copies the KV blocks, for which a producer needs few registers.
template <typename Q, typename KV, int kCkv, int kKpe, bool kBoxes>
struct MlaSm90Tile {
  using Query = Q;  // queries and outputs
  using Element = typename MlaElement<Q, KV>::Type;
  static constexpr bool kConverts = sizeof(KV) == 1, kCopiesBoxes = kBoxes;
  static_assert(!kConverts || !kCopiesBoxes, "TMA does not convert");
  static constexpr int kDimCkv = kCkv, kDimKpe = kKpe;
  static constexpr int kBlockM = kMlaSm90BlockM, kBlockN = 64;
  static constexpr int kConsumers = 2, kConsumerWarps = 4 * kConsumers;
  static constexpr int kCtaThreads = kWarpgroupSize * (1 + kConsumers);
  static_assert(kBlockN == kKvBlockSize, "work tiles begin at blocks");

  // Registers of a thread. Those of all warpgroups are at most what the CTA is launched with, or
  // setmaxnreg waits for ever.
  static constexpr int kProducerRegisters = kConverts ? 120 : kCopiesBoxes ? 40 : 72;
  static constexpr int kConsumerRegisters = kConverts ? 192 : kCopiesBoxes ? 232 : 216;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                    (1 + kConsumers) * (65536 / kCtaThreads / 8 * 8),
                "a CTA has these registers");

  using Panel = PanelLayout<128>;
  static constexpr int kPanelColumns = 64, kPanelBytes = 64 * 128;
  static constexpr int kCkvPanels = kDimCkv / kPanelColumns;
  static constexpr int kQueryPanels = kCkvPanels + kDimKpe / kPanelColumns;
  // The last panels of Q that consumers multiply from registers, as many as they have registers
  // for. Why: wgmma reads Q from shared memory for every KV block, at all the bandwidth that there
  // is while Q K^T runs, and that takes energy, where the GPU's clock is limited by its power.
  static constexpr int kRegisterPanels = kConverts ? 0 : kCopiesBoxes ? 2 : 1;
  static constexpr int kHalfPanels = kCkvPanels / 2;  // of a consumer's columns
  static constexpr int kHalfColumns = kDimCkv / 2;
  static constexpr int kPanelOfP = kCkvPanels;  // of a stage
  static constexpr int kStageBytes = (kCkvPanels + 1) * kPanelBytes;
  static constexpr int kQueryBytes = kQueryPanels * kPanelBytes;
  static_assert(kDimKpe == 0 || kDimKpe == kPanelColumns, "kpe is a panel");

  static constexpr int kStorageBytes = 5120;  // MlaSm90Storage
  static constexpr int kStages = 2 * ((kSmemPerCta - kStorageBytes - kQueryBytes) /
                                      (2 * kStageBytes));  // as many of each owner
  static constexpr int kDepth = kStages / 2;
  static_assert(kDepth >= 1, "each consumer owns a stage");
  static constexpr int kWorkSlots = 3;
  static constexpr int kSharedBytes = kQueryBytes + kStages * kStageBytes + kStorageBytes;
  static_assert(kSharedBytes <= kSmemPerCta, "a CTA has this much shared memory");

  // What attention/epilogue.cuh and attention/combine.cuh ask of a tile.
  static constexpr int kDimV = kDimCkv;
  static constexpr int kThreads = kWarpgroupSize * kConsumers;
  static constexpr bool kWarpsSplitKv = false;
  static constexpr int kCombineBatch = 16;  // partial results that a thread loads at once
  static constexpr bool kCombinesWideRows = true;
  // Why volatile: a row that is known from the start of the kernel to its end takes registers, and
  // so does what follows from it.
  static __device__ __forceinline__ int thread() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread - kWarpgroupSize;
  }
  static __device__ __forceinline__ void barrier() { named_barrier(1, kThreads); }
};

// What the warps of a CTA share besides the panels. A panel is full when it has been copied; half a
// stage is empty when the consumer of these columns has read them, and the other one's P goes with
// its half.
template <typename Tile>
struct MlaSm90Storage {
  using Scheduler = TileSchedulerOf<true>;
  uint64_t query_full[Tile::kQueryPanels], query_empty;
  uint64_t full[Tile::kStages][Tile::kQueryPanels];
  uint64_t empty[Tile::kStages][Tile::kConsumers];
  uint64_t p_full[Tile::kStages];  // P and row_stats have been written
  PipelineBarriers<Tile::kWorkSlots> work;
  WorkSlot slots[Tile::kWorkSlots];
  int32_t* counters;  // split counters of the plan
  // Why not in registers: a producer has few of them.
  alignas(16) unsigned char scheduler[sizeof(Scheduler)];
  CombineSharedStorage combine;
  // Of the P in a stage: row_max, and row_sum with the last two blocks of a work tile.
  float2 row_stats[Tile::kStages][Tile::kBlockM];
  float logits_scale[Tile::kConverts ? Tile::kBlockM : 1];  // of a row whose Q has been converted

  // `panel_arrivals`: those that fill a panel of a stage.
  __device__ __forceinline__ void init(uint32_t panel_arrivals) {
    for (uint64_t& barrier : query_full) mbarrier_init(&barrier, 1);
    mbarrier_init(&query_empty, Tile::kConsumerWarps);
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      for (uint64_t& barrier : full[stage]) mbarrier_init(&barrier, panel_arrivals);
      for (uint64_t& barrier : empty[stage]) mbarrier_init(&barrier, 4);
      mbarrier_init(&p_full[stage], 4);
    }
  }
};

// Addresses in dynamic shared memory, which starts at a multiple of 1024 bytes.
template <typename Tile>
struct MlaSm90Buffers {
  uint32_t base;

  __device__ __forceinline__ uint32_t q() const { return base; }
  __device__ __forceinline__ uint32_t stage(int stage) const {
    return base + Tile::kQueryBytes + stage * Tile::kStageBytes;
  }
  static constexpr int kStorageOffset = Tile::kQueryBytes + Tile::kStages * Tile::kStageBytes;
};

// The stage of a KV block, and the parity of its phase. `count`: blocks of this owner before it.
template <typename Tile>
struct MlaStage {
  int index;
  uint32_t parity;

  __device__ __forceinline__ MlaStage(int owner, uint32_t count)
      : index(static_cast<int>(count % Tile::kDepth) * 2 + owner),
        parity(count / Tile::kDepth % 2) {}
};

// What a warp has seen until now: KV blocks of each owner, as far as their stages depend on it, and
// whether work tiles are even or odd. Why in one register: producers that convert have none to
// spare.
template <typename Tile>
class MlaCounts {
  static constexpr uint32_t kRound = 2 * Tile::kDepth;  // after so many blocks stages repeat
  static_assert(kRound <= 128, "counts have 8 bits");

 public:
  // Blocks of an owner, `more` of them behind those until now.
  __device__ __forceinline__ uint32_t blocks(int owner, uint32_t more) const {
    return (counts_ >> 8 * owner & 0xff) + more;
  }
  __device__ __forceinline__ uint32_t tile_parity() const { return counts_ >> 16 & 1; }

  // A work tile of so many blocks is done.
  __device__ __forceinline__ void add_tile(int32_t of_tile) {
    const uint32_t even = blocks(0, (of_tile + 1) / 2) % kRound;
    const uint32_t odd = blocks(1, of_tile / 2) % kRound;
    counts_ = even | odd << 8 | (tile_parity() ^ 1) << 16;
  }

 private:
  uint32_t counts_ = 0;
};

// The first token of a KV block of a work tile. The last tokens are block 0.
template <typename Tile>
__device__ __forceinline__ int32_t first_token(const WorkTile& work, int32_t blocks, int32_t i) {
  return work.kv_begin + (blocks - 1 - i) * Tile::kBlockN;
}

#endif  // __CUDACC__ && PRECAST_SM

}  // namespace precast
