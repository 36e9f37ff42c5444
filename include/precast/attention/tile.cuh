// SPDX-License-Identifier: Apache-2.0
// The shapes of attention tiles: which warp of a CTA computes what, and what lies in shared memory.
// BLOCK_M is the number of query rows of a tile, packed with the query heads that share a KV head;
// BLOCK_N is the number of keys of a pipeline stage.
//
//   BLOCK_M 16   for decode. All warps compute the same rows: each has a pipeline of its own and
//                takes every fourth block of keys, and they only meet at the end of the tile.
//   BLOCK_M 64   16 rows a warp.
//   BLOCK_M 128  32 rows a warp: two m16 tiles share each fragment of keys and values, which halves
//                the reads of shared memory that limit BLOCK_M 64. With a head dimension of 256 the
//                accumulators of 32 rows do not fit into the registers of a warp, so eight warps
//                share the rows in pairs (attention/warp_pair.cuh).
// With BLOCK_M 64 and 128 the CTA has one pipeline: all warps read the same keys.
//
// Which tiles exist is said in aot_configs/attention.toml; attention/tile_traits.cuh is made from
// it.
#pragma once

#include "precast/attention/tile_traits.cuh"
#include "precast/core/host_device.cuh"
#include "precast/core/target_traits.cuh"
#include "precast/core/types.cuh"

namespace precast {

// The tile whose warps split the keys instead of the rows.
constexpr int kDecodeBlockM = 16;

// How many CTAs share the columns of V.
constexpr int attention_v_splits(int head_dim_vo) {
  return head_dim_vo > kMaxHeadDimV ? (head_dim_vo + kMaxHeadDimV - 1) / kMaxHeadDimV : 1;
}

// Whether rows of keys and values are so short that a CTA may read those of two neighbouring heads.
// DRAM delivers 256 bytes that lie together sooner than 128 bytes here and 128 there.
constexpr bool may_pair_heads(int head_dim_qk, int head_dim_vo, int kv_bytes) {
  return head_dim_qk * kv_bytes <= 128 && head_dim_vo * kv_bytes <= 128;
}

// The size of a partial result: acc_o [block_m, head_dim_v], then row_max and row_sum of each row.
constexpr int64_t attention_partial_floats(int block_m, int head_dim_v) {
  return int64_t(block_m) * (head_dim_v + 2);
}

#if defined(PRECAST_SM)

constexpr int kSmemPerCta = kSharedKibPerCta * 1024;
constexpr int kSmemPerSm = kSmemPerCta + 1024;  // an SM takes 1 KB for each CTA

// A row of shared memory in chunks of 16 bytes, so laid out that eight rows' chunks of one column
// lie in eight different groups of banks: by an odd distance of rows, or without padding by XOR
// where rows fill 128 bytes or half of them. Distances cost no arithmetic and no registers.
template <int kRowBytes, bool kPadded>
struct SharedRows {
  static_assert(kRowBytes % 16 == 0, "rows are whole chunks");
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr bool kXor = !kPadded && (kChunks % 8 == 0 || kChunks == 4);
  static constexpr int kStride = kXor ? kRowBytes : (kChunks | 1) * 16;
  static constexpr int kMask = kChunks == 4 ? 3 : 7;

  static PRECAST_HOST_DEVICE constexpr int offset(int row, int chunk) {
    if (!kXor) return row * kStride + chunk * 16;
    return row * kStride + (chunk ^ ((kChunks == 4 ? row >> 1 : row) & kMask)) * 16;
  }

  // From offset(row, 0 or 1) to the chunk `chunks` later, which is an even number.
  static PRECAST_HOST_DEVICE constexpr int later(int offset, int chunks) {
    if (!kXor) return offset + chunks * 16;
    return (offset ^ ((chunks & kMask) * 16)) + (chunks & ~kMask) * 16;
  }
};

#if defined(__CUDACC__)

// Keeps the value in a register. Why: the compiler would compute it again in each iteration.
__device__ __forceinline__ void keep_in_register(uint32_t& value) {
  asm volatile("" : "+r"(value));
}

// Where the row of a lane begins for ldmatrix_x4(): rows 0-7, rows 8-15, and both of the next
// chunk.
template <typename Rows>
__device__ __forceinline__ int rows_first() {
  const int lane = threadIdx.x % 32;
  return Rows::offset(lane % 16, lane / 16);
}

// The same: rows 0-7, their next chunk, and both of rows 8-15.
template <typename Rows>
__device__ __forceinline__ int chunks_first() {
  const int lane = threadIdx.x % 32;
  return Rows::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

#endif

// What a kernel is compiled for. kDimV is the number of columns of V that a CTA computes.
// kIsGeneral: with every feature that changes scores (attention/mask.cuh, attention/rotary.cuh);
// otherwise with the causal mask and the window alone. kConvertsKv: keys and values pass through
// registers on their way to shared memory, so that scores have fewer of them.
template <int kBytes, int kDimQ, int kDimAll, int kRows, bool kIsGeneral, bool kConvertsKv = false>
struct AttentionTile {
  static constexpr bool kGeneral = kIsGeneral;
  static constexpr bool kPlansItself = false;
  static constexpr int kKvBytes = kBytes;
  static constexpr bool kFp8 = kKvBytes == 1;
  static constexpr int kBlockM = kRows;
  static_assert(kBlockM == 16 || kBlockM == 64 || kBlockM == 128, "a tile that is written here");
  static constexpr bool kWarpsSplitKv = kBlockM == kDecodeBlockM;
  // Whether CTAs start before the previous grid has ended; see AttentionMainloop::start().
  static constexpr bool kStartsEarly = kWarpsSplitKv && PRECAST_SM >= 90;
  static constexpr int kDimK = kDimQ;
  static constexpr int kVSplits = attention_v_splits(kDimAll);
  static constexpr int kDimV = kDimAll / kVSplits;
  static constexpr bool kPaired = kBlockM == 128 && kDimV > 128;  // two warps share rows
  static constexpr int kRowTiles = kBlockM == 128 ? 2 : 1;        // m16 tiles of a warp
  static_assert(kDimK % 16 == 0 && kDimV % 16 == 0, "whole MMAs");

  // Whether the rows of a tile may be those of two KV heads: see AttentionParams::pair_shift.
  static constexpr bool kMayPairHeads =
      kWarpsSplitKv && !kIsGeneral && !kConvertsKv && may_pair_heads(kDimK, kDimV, kKvBytes);

  // Rows of K and V are padded only where it is worth it: cp.async takes twice as long to write
  // rows that do not begin at multiples of 128 bytes, but with a head dimension of 64 the XOR
  // arithmetic costs more than that. Q is written once a tile.
  static constexpr bool kPadsKv = !kWarpsSplitKv && kDimK + kDimV <= 128;
  using KeyRows = SharedRows<kDimK * kKvBytes, kPadsKv>;
  using ValueRows = SharedRows<kDimV * kKvBytes, kPadsKv>;
  using QueryRows = SharedRows<kDimK * 2, !kWarpsSplitKv && kDimK + kDimV <= 512>;

  static constexpr int kMaxWarps = kPaired ? 8 : 4;
  // As many keys as make 8 KB of a warp at a head dimension of 128.
  static constexpr int kBlockN =
      kWarpsSplitKv          ? (kFp8 ? 32 : 16)
      : kDimK + kDimV <= 256 ? ((kGeneral || kConvertsKv) && kRowTiles > 1 ? 32 : 64)
      : kDimK + kDimV <= 512 ? (kPaired && (kFp8 || kSmemPerCta > 224 * 1024) ? 64 : 32)
                             : 16;
  static constexpr int kWarpN = kPaired ? kBlockN / 2 : kBlockN;  // keys that a warp scores
  static constexpr int kWarpDimV = kPaired ? kDimV / 2 : kDimV;   // columns of its acc_o
  static constexpr int kKeyBytes = kBlockN * KeyRows::kStride;
  static constexpr int kStageBytes = kKeyBytes + kBlockN * ValueRows::kStride;
  static constexpr int kQueryBytes = kBlockM * QueryRows::kStride;
  static constexpr int kRotaryBytes = kGeneral ? (kDimK * 4 + 127) / 128 * 128 : 0;
  static constexpr int kStaticBytes = kWarpsSplitKv ? 1024 : 1152;  // AttentionSharedStorage
  static constexpr int kQueryBuffers = kWarpsSplitKv ? 2 : 1;
  static constexpr int kTableBytes = 2 * kBlockN * 16;  // addresses of rows, of a pipeline
  // What a warp gives the other warp of its pair: the statistics of the rows, and P of its keys.
  static constexpr int kWarpPairBytes = 512 + kRowTiles * kWarpN / 16 * 512;
  static constexpr int kPairBytes = kPaired ? kMaxWarps * kWarpPairBytes : 0;
  static constexpr int kFixedBytes = kQueryBuffers * kQueryBytes + kRotaryBytes + kPairBytes +
                                     (kWarpsSplitKv ? kMaxWarps : 1) * kTableBytes;

  static constexpr int kWarps =
      kWarpsSplitKv && kStaticBytes + kFixedBytes + 4 * kStageBytes > kSmemPerCta ? 2 : kMaxWarps;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kPipelines = kWarpsSplitKv ? kWarps : 1;
  static constexpr int kPipelineThreads = kThreads / kPipelines;

  // Two CTAs share an SM if each of them has room for kMinStages. A CTA alone gets as many stages
  // as fit, at most kMaxStages.
  static constexpr int kMinStages = kWarpsSplitKv ? 3 : 2;
  static constexpr int stages_in(int bytes) {
    return (bytes - kStaticBytes - kFixedBytes) / (kPipelines * kStageBytes);
  }
  static constexpr bool kTwoCtas =
      stages_in(kSmemPerSm / 2 - 1024) >= kMinStages && kWarpDimV * kRowTiles <= 256;
  static constexpr int kMaxStages = kWarpsSplitKv ? 6 : 3;
  static constexpr int kFittingStages = stages_in(kTwoCtas ? kSmemPerSm / 2 - 1024 : kSmemPerCta);
  static constexpr int kStages = kFittingStages < kMaxStages ? kFittingStages : kMaxStages;
  static_assert(kStages >= 1, "every pipeline has a stage");
  static constexpr int kCtasPerSm = kTwoCtas ? 2 : 1;
  static_assert(kCtasPerSm <= kMaxCtasPerSm, "aot_configs/attention.toml: max_ctas_per_sm");

  static constexpr int kPipelineBytes = kStages * kStageBytes;
  static_assert(kFixedBytes % 128 == 0 && kPipelineBytes % 128 == 0, "pipelines are aligned");
  static_assert(!kWarpsSplitKv || kBlockM * kDimV * 4 <= kStageBytes,
                "a warp's acc_o fits a stage");
  static constexpr int kSharedBytes = kFixedBytes + kPipelines * kPipelineBytes;
  static_assert(kStaticBytes + kSharedBytes <= kSmemPerCta, "a CTA has this much shared memory");

  static constexpr int kCombineBatch = 20;  // partial results that a thread loads at once
  static constexpr bool kCombinesWideRows = false;

#if defined(__CUDACC__)
  // The threads that hold results: all of the CTA.
  static __device__ __forceinline__ int thread() { return threadIdx.x; }
  static __device__ __forceinline__ void barrier() { __syncthreads(); }
#endif
};

constexpr bool exists_for_target(const AttentionTileTraits& tile) {
  return tile.min_shared_kib <= kSharedKibPerCta;
}

// How many CTAs of a tile an SM holds; 0 if there is no such tile. A plan is made for that number
// times the number of SMs.
template <int kKvBytes, int kIndex = 0>
constexpr int attention_ctas_per_sm(int block_m, int head_dim_qk, int head_dim_vo) {
  if constexpr (kIndex < kNumAttentionTiles) {
    constexpr AttentionTileTraits kTile = kAttentionTiles[kIndex];
    if constexpr (exists_for_target(kTile)) {
      if (kTile.block_m == block_m && kTile.head_dim_qk == head_dim_qk &&
          kTile.head_dim_vo == head_dim_vo) {
        return AttentionTile<kKvBytes, kTile.head_dim_qk, kTile.head_dim_vo, kTile.block_m,
                             false>::kCtasPerSm;
      }
    }
    return attention_ctas_per_sm<kKvBytes, kIndex + 1>(block_m, head_dim_qk, head_dim_vo);
  } else {
    return 0;
  }
}

constexpr int attention_ctas_per_sm(int kv_bytes, int block_m, int head_dim_qk, int head_dim_vo) {
  return kv_bytes == 1 ? attention_ctas_per_sm<1>(block_m, head_dim_qk, head_dim_vo)
                       : attention_ctas_per_sm<2>(block_m, head_dim_qk, head_dim_vo);
}

#endif  // PRECAST_SM

}  // namespace precast
