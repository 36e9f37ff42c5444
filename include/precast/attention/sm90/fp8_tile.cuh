// SPDX-License-Identifier: Apache-2.0
// The tiles of attention for sm_90a whose queries, keys and values are all e4m3.
// attention/sm90/tile.cuh has those of 16 bits; what both have is said there.
//
// Rows of Q, K and V in shared memory are 128 bytes, or 64 where a head dimension is no multiple of
// 128. V is copied to a buffer of its own, and from there the producer transposes it.
#pragma once

#include "precast/attention/sm90/params.cuh"
#include "precast/attention/sm90/pipeline.cuh"
#include "precast/core/fp8.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename Tile>
struct Sm90Fp8Storage : Sm90SharedStorage<Tile> {
  PipelineBarriers<Tile::kStagedStages> staged;  // V before it is transposed; `v` is V^T
};

// Where V lies before it is transposed: behind everything else.
template <typename Tile>
__device__ __forceinline__ uint32_t staged_values(const Sm90Buffers<Tile>& buffers, int stage) {
  return buffers.base + Sm90Buffers<Tile>::kStorageOffset + Tile::kStorageBytes +
         stage * Tile::kStagedBytes;
}

#endif  // __CUDACC__

#if defined(__CUDACC__) && defined(PRECAST_SM)

// O: the type of outputs.
template <typename O, int kDimQ, int kDimO, bool kIsGeneral>
struct Sm90Fp8Tile {
  using Query = O;  // as the epilogue calls it
  using QueryElement = e4m3;
  using Key = e4m3;
  using Value = e4m3;
  static constexpr bool kConverts = false, kConvertsKeys = false;
  static constexpr bool kConvertsQueries = false, kSplitsQueries = false;
  static constexpr bool kScalesRows = true, kScalesHeads = true;
  static constexpr bool kSharesRows = false;
  static constexpr bool kGeneral = kIsGeneral;
  static constexpr int kDimK = kDimQ, kDimV = kDimO;
  static constexpr int kConsumers = sm90_consumers(kDimV, 1);
  static constexpr int kBlockM = 64 * kConsumers;
  static constexpr int kBlockN = 128;  // a row of V^T
  static constexpr int kLeastN = 64;
  // Whether Q K^T of a block is computed beside P V of the block before it. Registers are too few
  // for it where O has 256 columns, and in general kernels.
  static constexpr bool kOverlaps = !kGeneral && kDimV <= 128;
  // Whether consumers take turns in their products, so that one computes its softmax meanwhile.
  static constexpr bool kTakesTurns = kDimV > 128;
  static constexpr int kCtaThreads = kWarpgroupSize * (1 + kConsumers);
  static constexpr int kConsumerWarps = 4 * kConsumers;
  static constexpr int kProducerRegisters = kDimV > 128 ? 56 : 40;
  static constexpr int kConsumerRegisters = kDimV > 128 ? 224 : 232;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                    (1 + kConsumers) * (65536 / kCtaThreads / 8 * 8),
                "a CTA has these registers");

  using QueryLayout = PanelLayout<kDimK>;
  using KeyLayout = PanelLayout<kDimK>;
  using ValueLayout = PanelLayout<kDimV>;  // of V before it is transposed
  static constexpr int kQueryPanel = QueryLayout::kPanelBytes, kQueryRowBytes = kDimK;

  static constexpr int kQueryBytes = kBlockM * kDimK, kThirdBytes = 0;
  static constexpr int kKeyBytes = kBlockN * kDimK;
  // Columns of ones beside V, as many as the tensor cores take at least.
  static constexpr int kOnes = 8;
  static constexpr int kValueBytes = kBlockN * (kDimV + kOnes);  // of V^T
  static constexpr int kStagedBytes = kBlockN * kDimV;           // of V before
  static constexpr int kStages = kDimK + kDimV > 256 ? 2 : 4;
  // A power of two, whose remainders take no register. Work is found one tile at a time.
  static constexpr int kWorkSlots = 4;
  static constexpr int kStagedStages = 2;  // of V before it is transposed
  static constexpr int kStorageBytes = 1024;
  static constexpr int kRotaryBytes = 0;
  static constexpr int kBytesOfOneQuery = kQueryBytes + kStages * (kKeyBytes + kValueBytes) +
                                          kStagedStages * kStagedBytes + kStorageBytes;
  static constexpr int kQueryStages = kBytesOfOneQuery + kQueryBytes <= kSmemPerCta ? 2 : 1;
  static constexpr int kSharedBytes = kBytesOfOneQuery + (kQueryStages - 1) * kQueryBytes;
  static_assert(kSharedBytes <= kSmemPerCta, "a CTA has this much shared memory");

  static constexpr int kThreads = kWarpgroupSize * kConsumers;
  static constexpr bool kWarpsSplitKv = false;
  static constexpr int kCombineBatch = 8;
  static constexpr bool kCombinesWideRows = false;
  // Why volatile: a row that is known from the start of the kernel to its end takes a register.
  static __device__ __forceinline__ int thread() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread - kWarpgroupSize;
  }
  static __device__ __forceinline__ void barrier() { named_barrier(1, kThreads); }
};

#endif  // __CUDACC__ && PRECAST_SM

}  // namespace precast
