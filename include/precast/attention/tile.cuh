// SPDX-License-Identifier: Apache-2.0
// The shapes of attention tiles: who of a CTA does what, and what lies in shared memory.
//
//   narrow  16 packed rows, for decode. Each warp is a team with a ring of its own and takes every
//           fourth group of tokens; the warps never wait for each other before the tile's end.
//   middle  64 rows, 16 a warp.
//   wide    128 rows, 32 a warp: two m16 tiles share each fragment of keys and values, and that
//           halves the reads of shared memory, which bound the middle tile. Of heads of 256 the
//           sums of 32 rows do not fit the registers of a warp: there eight warps share the rows by
//           twos (attention/warp_pair.cuh).
// In the middle and the wide tile the CTA is one team: all warps read the same tokens.
#pragma once

#include "precast/core/host_device.cuh"
#include "precast/core/types.cuh"

namespace precast {

constexpr int kNarrowRows = 16;
constexpr int kMiddleRows = 64;
constexpr int kWideRows = 128;

// Head dimensions of values above this are cut in parts, each with CTAs of its own.
constexpr int kMostValueDim = 256;

constexpr int attention_value_parts(int head_dim_vo) {
  return head_dim_vo > kMostValueDim ? (head_dim_vo + kMostValueDim - 1) / kMostValueDim : 1;
}

// A slot of partial results: sums [rows, value_dim], then of each row maximum and denominator.
constexpr int64_t attention_slot_floats(int rows, int value_dim) {
  return int64_t(rows) * (value_dim + 2);
}

#if defined(PRECAST_SM)

// Bytes of shared memory a CTA can have, and an SM, which takes 1 KB of each CTA for itself.
constexpr int kSharedOfCta = PRECAST_SM >= 120                      ? 99 * 1024
                             : PRECAST_SM >= 90                     ? 227 * 1024
                             : PRECAST_SM == 80 || PRECAST_SM == 87 ? 163 * 1024
                                                                    : 99 * 1024;
constexpr int kSharedOfSm = kSharedOfCta + 1024;

// Queries of 256 columns take 66 KB of shared memory.
constexpr bool has_wide_tile(int head_dim_vo) {
  return head_dim_vo <= 128 || (head_dim_vo == 256 && kSharedOfCta > 128 * 1024);
}

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

// The value stays in a register. Why: the compiler would compute it anew in each round of a loop.
__device__ __forceinline__ void keep(uint32_t& value) { asm volatile("" : "+r"(value)); }

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

// What a kernel is compiled for. kDimV: columns of values that a CTA takes. kIsGeneral: with all
// that changes scores (attention/mask.cuh, attention/rotary.cuh), else causal mask and window
// alone.
template <int kBytes, int kDimQ, int kDimAll, int kTileRows, bool kIsGeneral>
struct AttentionTile {
  static constexpr bool kGeneral = kIsGeneral;
  static constexpr int kKvBytes = kBytes;
  static constexpr bool kFp8 = kKvBytes == 1;
  static constexpr bool kNarrow = kTileRows == kNarrowRows;
  static constexpr int kRows = kTileRows;
  static constexpr int kDimK = kDimQ;
  static constexpr int kParts = attention_value_parts(kDimAll);
  static constexpr int kDimV = kDimAll / kParts;
  static constexpr bool kPaired = kRows == kWideRows && kDimV > 128;  // two warps share rows
  static constexpr int kRowTiles = kRows == kWideRows ? 2 : 1;        // m16 tiles of a warp
  static_assert(kDimK % 16 == 0 && kDimV % 16 == 0, "whole products");

  // Rows of keys and values are not padded where that is not needed: cp.async takes twice as long
  // to write rows that do not begin at multiples of 128 bytes. With heads of 64 the arithmetic
  // costs more than that. Queries come once a piece.
  static constexpr bool kPadsTokens = !kNarrow && kDimK + kDimV <= 128;
  using KeyRows = SharedRows<kDimK * kKvBytes, kPadsTokens>;
  using ValueRows = SharedRows<kDimV * kKvBytes, kPadsTokens>;
  using QueryRows = SharedRows<kDimK * 2, !kNarrow && kDimK + kDimV <= 512>;

  static constexpr int kMostWarps = kPaired ? 8 : 4;
  // Tokens of a stage: as many for a warp as make 8 KB at head_dim 128.
  static constexpr int kTokens = kNarrow                ? (kFp8 ? 32 : 16)
                                 : kDimK + kDimV <= 256 ? (kGeneral && kRowTiles > 1 ? 32 : 64)
                                 : kDimK + kDimV <= 512
                                     ? (kPaired && (kFp8 || kSharedOfCta > 224 * 1024) ? 64 : 32)
                                     : 16;
  static constexpr int kWarpTokens = kPaired ? kTokens / 2 : kTokens;  // that a warp scores
  static constexpr int kWarpDimV = kPaired ? kDimV / 2 : kDimV;        // columns of its sums
  static constexpr int kKeyBytes = kTokens * KeyRows::kStride;
  static constexpr int kStageBytes = kKeyBytes + kTokens * ValueRows::kStride;
  static constexpr int kQueryBytes = kRows * QueryRows::kStride;
  static constexpr int kTurnBytes = kGeneral ? (kDimK * 4 + 127) / 128 * 128 : 0;
  static constexpr int kStaticBytes = kNarrow ? 1024 : 1152;  // room for AttentionShared
  static constexpr int kQueryBuffers = kNarrow ? 2 : 1;
  static constexpr int kTableBytes = 2 * kTokens * 16;  // of a team
  // What a warp gives the other of its pair: numbers of rows, weights of its tokens.
  static constexpr int kWarpPairBytes = 512 + kRowTiles * kWarpTokens / 16 * 512;
  static constexpr int kPairBytes = kPaired ? kMostWarps * kWarpPairBytes : 0;
  static constexpr int kFixedBytes = kQueryBuffers * kQueryBytes + kTurnBytes + kPairBytes +
                                     (kNarrow ? kMostWarps : 1) * kTableBytes;

  static constexpr int kWarps =
      kNarrow && kStaticBytes + kFixedBytes + 4 * kStageBytes > kSharedOfCta ? 2 : kMostWarps;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kTeams = kNarrow ? kWarps : 1;
  static constexpr int kTeamThreads = kThreads / kTeams;

  // Two CTAs an SM where each of them can have a ring of two stages (narrow: three); of one CTA as
  // many stages as fit, at most kMostStages.
  static constexpr int kLeastStages = kNarrow ? 3 : 2;
  static constexpr int stages_in(int bytes) {
    return (bytes - kStaticBytes - kFixedBytes) / (kTeams * kStageBytes);
  }
  static constexpr bool kTwoCtas =
      stages_in(kSharedOfSm / 2 - 1024) >= kLeastStages && kWarpDimV * kRowTiles <= 256;
  static constexpr int kMostStages = kNarrow ? 6 : 3;
  static constexpr int kFit = stages_in(kTwoCtas ? kSharedOfSm / 2 - 1024 : kSharedOfCta);
  static constexpr int kStages = kFit < kMostStages ? kFit : kMostStages;
  static_assert(kStages >= 1, "a stage of each team fits");
  static constexpr int kCtasPerSm = kTwoCtas ? 2 : 1;

  static constexpr int kRingBytes = kStages * kStageBytes;
  static_assert(kFixedBytes % 128 == 0 && kRingBytes % 128 == 0, "rings start at such an address");
  static_assert(!kNarrow || kRows * kDimV * 4 <= kStageBytes, "a team's result fits a stage");
  static constexpr int kSharedBytes = kFixedBytes + kTeams * kRingBytes;
  static_assert(kStaticBytes + kSharedBytes <= kSharedOfCta, "it fits");
};

template <int kKvBytes, int kDimQ, int kDimV>
constexpr int attention_ctas_per_sm(int tile_rows) {
  switch (tile_rows) {
    case kNarrowRows:
      return AttentionTile<kKvBytes, kDimQ, kDimV, kNarrowRows, false>::kCtasPerSm;
    case kMiddleRows:
      return AttentionTile<kKvBytes, kDimQ, kDimV, kMiddleRows, false>::kCtasPerSm;
    case kWideRows:
      if constexpr (has_wide_tile(kDimV)) {
        return AttentionTile<kKvBytes, kDimQ, kDimV, kWideRows, false>::kCtasPerSm;
      }
  }
  return 0;
}

template <int kKvBytes>
constexpr int attention_ctas_per_sm(int tile_rows, int head_dim_qk, int head_dim_vo) {
  if (head_dim_qk == 192 && head_dim_vo == 128) {
    return attention_ctas_per_sm<kKvBytes, 192, 128>(tile_rows);
  }
  if (head_dim_qk != head_dim_vo) return 0;
  switch (head_dim_qk) {
    case 64:
      return attention_ctas_per_sm<kKvBytes, 64, 64>(tile_rows);
    case 80:
      return attention_ctas_per_sm<kKvBytes, 80, 80>(tile_rows);
    case 96:
      return attention_ctas_per_sm<kKvBytes, 96, 96>(tile_rows);
    case 128:
      return attention_ctas_per_sm<kKvBytes, 128, 128>(tile_rows);
    case 256:
      return attention_ctas_per_sm<kKvBytes, 256, 256>(tile_rows);
    case 512:
      return attention_ctas_per_sm<kKvBytes, 512, 512>(tile_rows);
  }
  return 0;
}

// CTAs of a tile that an SM holds; a plan is for so many times the number of SMs. 0: there is no
// such tile.
constexpr int attention_ctas_per_sm(int kv_bytes, int tile_rows, int head_dim_qk, int head_dim_vo) {
  return kv_bytes == 1 ? attention_ctas_per_sm<1>(tile_rows, head_dim_qk, head_dim_vo)
                       : attention_ctas_per_sm<2>(tile_rows, head_dim_qk, head_dim_vo);
}

#endif  // PRECAST_SM

}  // namespace precast
