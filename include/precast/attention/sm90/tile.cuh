// SPDX-License-Identifier: Apache-2.0
// The tiles of attention for sm_90a: who computes what, and what lies in shared memory.
//
// A CTA has one warpgroup that copies (the producer) and two or three that compute (the consumers),
// each of them 64 packed rows of queries. Q, K and V are swizzled panels of 64 elements (128
// bytes) a row, as TMA writes them and wgmma reads them.
#pragma once

#include "precast/attention/tile.cuh"
#include "precast/core/fp8.cuh"
#include "precast/core/sm90/warpgroup.cuh"

namespace precast {

constexpr int kPanel = 64;        // elements of 16 bits in a swizzled row
constexpr int kPanelBytes = 128;  // of a row
constexpr int kAtomRows = 8;      // rows that are swizzled together; what one copy of a page takes

// How many consumers a tile has; rows = 64 times that. Where keys and values are converted, a third
// one would leave the producer too few registers.
constexpr int sm90_consumers(int head_dim_vo, int kv_bytes) {
  return head_dim_vo <= 64 && kv_bytes == 2 ? 3 : 2;
}

// The rows of queries that a plan gives a tile: whole groups of heads, because TMA copies tokens.
constexpr int sm90_block_m(int head_dim_vo, int kv_bytes, int group_size) {
  const int rows = 64 * sm90_consumers(head_dim_vo, kv_bytes);
  return rows / group_size * group_size;
}

#if defined(__CUDACC__) && defined(PRECAST_SM)

// The type in which wgmma multiplies queries with keys or values.
template <typename Q, typename KV>
struct MmaElement {
  using Type = Q;
};
template <typename Q>
struct MmaElement<Q, e4m3> {
  using Type = f16;
};

// kIsGeneral: with every feature that changes scores (attention/mask.cuh, attention/rotary.cuh);
// otherwise with the causal mask and the window alone.
template <typename Q, typename KV, int kDimQ, int kDimO, bool kIsGeneral>
struct Sm90Tile {
  // The type of queries and outputs, and the one in which wgmma multiplies. e4m3 is converted to
  // f16, and so are queries that are bf16.
  using Query = Q;
  static constexpr bool kConverts = sizeof(KV) == 1;
  using Element = typename MmaElement<Q, KV>::Type;
  static constexpr bool kConvertsQueries = TypeName<Q>::value != TypeName<Element>::value;
  static constexpr bool kScalesRows = kConvertsQueries;  // scores of each row have a scale
  static constexpr bool kGeneral = kIsGeneral;
  static constexpr int kDimK = kDimQ, kDimV = kDimO;
  static_assert(kDimK % kPanel == 0 && kDimV % kPanel == 0, "whole panels");
  static constexpr int kConsumers = sm90_consumers(kDimV, sizeof(KV));
  static constexpr int kBlockM = 64 * kConsumers;
  // Half as many tokens where registers are few.
  static constexpr int kBlockN = kDimV > 128 || (kGeneral && kConsumers > 2) ? 64 : 128;
  // Scores of the last block are computed for so many tokens if no row of a tile sees more.
  static constexpr int kLeastN = 64;
  // Whether consumers take turns: it costs 1 to 5 % where there are two, and gains 7 % with three.
  static constexpr bool kTakesTurns = kConsumers > 2;
  static constexpr int kCtaThreads = kWarpgroupSize * (1 + kConsumers);
  static constexpr int kConsumerWarps = 4 * kConsumers;

  // Registers of a thread. Those of all warpgroups are at most what the CTA is launched with, or
  // setmaxnreg waits for ever.
  static constexpr int kProducerRegisters = kConverts                     ? (kDimV > 128 ? 72 : 88)
                                            : kConsumers == 2 || kGeneral ? 56
                                                                          : 32;
  static constexpr int kConsumerRegisters = kConverts         ? (kDimV > 128 ? 216 : 208)
                                            : kConsumers == 2 ? 224
                                            : kGeneral        ? 152
                                                              : 160;
  static constexpr int kLaunchRegisters = 65536 / kCtaThreads / 8 * 8;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                    (1 + kConsumers) * kLaunchRegisters,
                "a CTA has these registers");

  static constexpr int kQueryPanels = kDimK / kPanel, kQueryPanel = kPanel;  // elements
  static constexpr int kQueryPanelBytes = kBlockM * kPanelBytes, kQueryRowBytes = kDimK * 2;
  static constexpr int kQueryBytes = kBlockM * kQueryRowBytes;
  static constexpr int kKeyBytes = kBlockN * kDimK * 2;
  static constexpr int kValueBytes = kBlockN * kDimV * 2;
  static constexpr int kStages = 2;
  static constexpr int kStorageBytes = 2048;  // Sm90SharedStorage
  static constexpr int kRotaryBytes = kGeneral ? kDimK * 4 : 0;
  static constexpr int kBytesOfOneQuery =
      kQueryBytes + kStages * (kKeyBytes + kValueBytes) + kStorageBytes + kRotaryBytes;
  // The Q of the next work tile is copied while this one is computed, where there is room.
  static constexpr int kQueryStages = kBytesOfOneQuery + kQueryBytes <= kSmemPerCta ? 2 : 1;
  static constexpr int kSharedBytes = kBytesOfOneQuery + (kQueryStages - 1) * kQueryBytes;
  static_assert(kSharedBytes <= kSmemPerCta, "a CTA has this much shared memory");

  // What attention/epilogue.cuh and attention/combine.cuh ask of a tile: the threads that hold
  // results.
  static constexpr int kThreads = kWarpgroupSize * kConsumers;
  static constexpr bool kWarpsSplitKv = false;
  static constexpr int kCombineBatch = 8;
  static __device__ __forceinline__ int thread() { return threadIdx.x - kWarpgroupSize; }
  static __device__ __forceinline__ void barrier() { named_barrier(1, kThreads); }
};

#endif  // __CUDACC__ && PRECAST_SM

}  // namespace precast
