// SPDX-License-Identifier: Apache-2.0
// The tiles of attention for sm_90a: who computes what, and what lies in shared memory.
//
// A CTA has one warpgroup that copies (the producer) and two or three that compute (the consumers),
// each of them 64 packed rows of queries. Q, K and V are swizzled panels, as TMA writes them and
// wgmma reads them.
#pragma once

#include "precast/attention/tile.cuh"
#include "precast/core/fp8.cuh"
#include "precast/core/sm90/warpgroup.cuh"

namespace precast {

constexpr int kAtomRows = 8;    // rows that are swizzled together
constexpr int kStepBytes = 32;  // of a row, which one wgmma reads along k

// How rows of kRowBytes lie in shared memory: as panels, each of which has so many of the bytes of
// all rows. A row of a panel is as long as a swizzle: 128, 64 or 32 bytes.
template <int kRowBytes>
struct PanelLayout {
  static constexpr int kPanelBytes = kRowBytes % 128 == 0 ? 128 : kRowBytes % 64 == 0 ? 64 : 32;
  static constexpr int kPanels = kRowBytes / kPanelBytes;
  static constexpr int kAtomBytes = kAtomRows * kPanelBytes;
  static_assert(kRowBytes % kPanelBytes == 0, "whole panels");

  // Where 16 bytes of a row lie in a panel. Panels begin at multiples of 1024 bytes.
  PRECAST_HOST_DEVICE static constexpr int offset(int row, int chunk) {
    return row * kPanelBytes + (chunk ^ row * kPanelBytes / 128 % (kPanelBytes / 16)) * 16;
  }
};

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

// The types in which wgmma multiplies queries with keys, and P with values. Values of e4m3 are
// converted to f16. Keys stay as they are, because a query is the sum of a few e4m3 numbers
// (attention/sm90/query.cuh). General kernels rotate keys, for which e4m3 is too coarse, and
// convert them to f16.
template <typename Q, typename KV, bool kIsGeneral>
struct MmaElements {
  using Key = Q;
  using Value = Q;
};
template <typename Q>
struct MmaElements<Q, e4m3, true> {
  using Key = f16;
  using Value = f16;
};
template <typename Q>
struct MmaElements<Q, e4m3, false> {
  using Key = e4m3;
  using Value = f16;
};

// The e4m3 numbers whose sum a query is: two hold the eight significant bits of bf16. Of the eleven
// of f16 they would hold nine.
template <typename Q>
constexpr int kQueryTerms = TypeName<Q>::value == DType::f16 ? 3 : 2;

// kIsGeneral: with every feature that changes scores (attention/mask.cuh, attention/rotary.cuh);
// otherwise with the causal mask and the window alone.
template <typename Q, typename KV, int kDimQ, int kDimO, bool kIsGeneral>
struct Sm90Tile {
  // Query is the type of queries and outputs; Key and Value are those in which wgmma multiplies.
  using Query = Q;
  using QueryElement = Q;  // in memory
  using Key = typename MmaElements<Q, KV, kIsGeneral>::Key;
  using Value = typename MmaElements<Q, KV, kIsGeneral>::Value;
  static constexpr bool kConverts = sizeof(KV) != sizeof(Value);  // values
  static constexpr bool kConvertsKeys = sizeof(KV) != sizeof(Key);
  static constexpr bool kSplitsQueries = sizeof(Key) == 1;
  // The products with keys that Q K^T is the sum of.
  static constexpr int kTerms = kSplitsQueries ? kQueryTerms<Q> : 1;
  static constexpr bool kConvertsQueries =
      !kSplitsQueries && TypeName<Q>::value != TypeName<Key>::value;
  // Whether the scores of each row have a scale, and whether that of a run is one of heads.
  static constexpr bool kScalesRows = kConvertsQueries || kSplitsQueries, kScalesHeads = false;
  static constexpr bool kGeneral = kIsGeneral;
  static constexpr int kDimK = kDimQ, kDimV = kDimO;
  using QueryLayout = PanelLayout<kDimK * 2>;
  using KeyLayout = PanelLayout<kDimK* int(sizeof(Key))>;
  using ValueLayout = PanelLayout<kDimV * 2>;
  static constexpr int kConsumers = sm90_consumers(kDimV, sizeof(KV));
  static constexpr int kBlockM = 64 * kConsumers;
  // Half as many tokens where registers are few.
  static constexpr int kBlockN = kDimV > 128 || (kGeneral && kConsumers > 2) ? 64 : 128;
  // Scores of the last block are computed for so many tokens if no row of a tile sees more.
  static constexpr int kLeastN = 64;
  // Whether consumers take turns: it costs 1 to 5 % where there are two, and gains 7 % with three.
  static constexpr bool kTakesTurns = kConsumers > 2;
  // Whether two consumers share the rows of a tile that has at most 64. With more columns, ptxas
  // spills some of their registers.
  static constexpr bool kSharesRows = !kConverts && kDimV <= 128;
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

  static constexpr int kQueryPanel = QueryLayout::kPanelBytes / 2;  // elements
  static constexpr int kQueryRowBytes = kDimK * 2;
  static constexpr int kQueryBytes = kBlockM * kQueryRowBytes;
  // Of the third numbers of queries, in panels like those of Q, of which each has half the numbers.
  static constexpr int kThirdPanels = (QueryLayout::kPanels + 1) / 2;
  static constexpr int kThirdBytes =
      kTerms > 2 ? kBlockM * kThirdPanels * QueryLayout::kPanelBytes : 0;
  static constexpr int kKeyBytes = kBlockN * kDimK * sizeof(Key);
  static constexpr int kValueBytes = kBlockN * kDimV * 2;
  static constexpr int kStages = 2;
  // The tile in work, the one that is copied, and the next one, which producers that all copy find
  // before they copy. Why not more: a CTA should not take tickets long before it can use them.
  static constexpr int kWorkSlots = 3;
  static constexpr int kStorageBytes = 2048;  // Sm90SharedStorage
  static constexpr int kRotaryBytes = kGeneral ? kDimK * 4 : 0;
  static constexpr int kBytesOfOneQuery = kQueryBytes + kThirdBytes +
                                          kStages * (kKeyBytes + kValueBytes) + kStorageBytes +
                                          kRotaryBytes;
  // The Q of the next work tile is copied while this one is computed, where there is room.
  static constexpr int kQueryStages = kBytesOfOneQuery + kQueryBytes <= kSmemPerCta ? 2 : 1;
  static constexpr int kSharedBytes = kBytesOfOneQuery + (kQueryStages - 1) * kQueryBytes;
  static_assert(kSharedBytes <= kSmemPerCta, "a CTA has this much shared memory");

  // What attention/epilogue.cuh and attention/combine.cuh ask of a tile: the threads that hold
  // results.
  static constexpr int kThreads = kWarpgroupSize * kConsumers;
  static constexpr bool kWarpsSplitKv = false;
  static constexpr int kCombineBatch = 8;
  static constexpr bool kCombinesWideRows = false;
  static __device__ __forceinline__ int thread() { return threadIdx.x - kWarpgroupSize; }
  static __device__ __forceinline__ void barrier() { named_barrier(1, kThreads); }
};

#endif  // __CUDACC__ && PRECAST_SM

}  // namespace precast
