// SPDX-License-Identifier: Apache-2.0
// The tiles of MLA for every GPU: which warp of a CTA computes what, and what lies in shared
// memory.
//
//   BLOCK_M 16   4 warps, for few heads. Two CTAs share an SM that has room for them.
//   BLOCK_M 64   8 warps, for targets whose CTAs have kMlaWideSharedKib of shared memory.
//
// Scores   a warp computes 16 rows and an equal part of the kBlockN tokens of a KV block; P goes
//          through shared memory, because every warp needs all of it
// Output   a warp has 16 kRowTiles rows and a quarter of the columns of acc_o, so that four warps
//          hold a row of 512 columns, and V is read from shared memory once for 16 kRowTiles rows
#pragma once

#include "precast/attention/tile.cuh"

namespace precast {

constexpr int kMlaNarrowBlockM = 16, kMlaWideBlockM = 64;
constexpr int kMlaWideSharedKib = 128;  // MLA_WIDE_SHARED_KIB in python/precast/_ops/mla/tiles.py
constexpr int kMlaColumnWarps = 4;

#if defined(PRECAST_SM)

template <int kKvSize, int kDimCkv, int kDimKpe, int kRows>
struct MlaTile {
  static constexpr int kKvBytes = kKvSize;
  static constexpr bool kFp8 = kKvBytes == 1;
  static constexpr int kBlockM = kRows;
  static_assert(kBlockM == kMlaNarrowBlockM || kBlockM == kMlaWideBlockM, "a tile of this file");
  static constexpr int kRowTiles = kBlockM == kMlaWideBlockM ? 2 : 1;  // m16 tiles of acc_o
  static constexpr int kRowWarps = kBlockM / (16 * kRowTiles);
  static constexpr int kWarps = kRowWarps * kMlaColumnWarps;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kTokenWarps = kWarps * 16 / kBlockM;  // that share the tokens of a block

  // What attention/kv_pipeline.cuh and attention/work_queue.cuh ask of a tile: kpe are its keys,
  // and ckv its values.
  static constexpr int kDimK = kDimKpe, kDimV = kDimCkv, kVSplits = 1;
  static constexpr bool kWarpsSplitKv = false, kPlansItself = false, kGeneral = false,
                        kMayPairHeads = false, kPaired = false;
  static constexpr int kPipelines = 1, kPipelineThreads = kThreads;
  using KeyRows = SharedRows<kDimKpe * kKvBytes, false>;
  using ValueRows = SharedRows<kDimCkv * kKvBytes, false>;
  using QueryRows = SharedRows<(kDimCkv + kDimKpe) * 2, false>;

  static constexpr int kWarpDimV = kDimV / kMlaColumnWarps;  // columns of a warp's acc_o
  static constexpr int kQueryBytes = kBlockM * QueryRows::kStride;
  static constexpr int kTokenBytes = KeyRows::kStride + ValueRows::kStride;
  static constexpr int kStaticBytes = 1280;  // MlaSharedStorage

  // P takes the place of kpe of its KV block, which no warp reads any more, where it is as large.
  static constexpr bool kPInKeys = KeyRows::kStride >= 2 * kBlockM;
  static constexpr int fixed_bytes(int block_n) {
    const int table = 2 * block_n * 16;  // addresses of rows
    const int p = kPInKeys ? 0 : kBlockM * block_n * 2;
    const int row_max = kTokenWarps * kBlockM * 4;
    const int scales = kFp8 ? 2 * block_n * (kDimV / 128) * 4 : 0;
    return kQueryBytes + table + p + row_max + scales;
  }
  static constexpr int stages_in(int bytes, int block_n) {
    return (bytes - kStaticBytes - fixed_bytes(block_n)) / (block_n * kTokenBytes);
  }
  // With twice as many tokens a warp reads Q half as often: 16 heads on a cache of e4m3 take 0.8 of
  // the time on an H200. Two CTAs of a narrow tile must still fit on an SM.
  static constexpr int kBytesForLong = kBlockM == kMlaWideBlockM ? kSmemPerCta
                                       : kFp8                    ? kSmemPerSm / 2 - 1024
                                                                 : 0;
  static constexpr int kBlockN = stages_in(kBytesForLong, 64) >= 2 ? 64 : 32;
  static constexpr int kWarpN = kBlockN / kTokenWarps;  // tokens that a warp scores
  static constexpr bool kTwoCtas =
      kBlockM == kMlaNarrowBlockM && stages_in(kSmemPerSm / 2 - 1024, kBlockN) >= 2;
  static constexpr int kFittingStages =
      stages_in(kTwoCtas ? kSmemPerSm / 2 - 1024 : kSmemPerCta, kBlockN);
  static constexpr int kStages = kFittingStages < 4 ? kFittingStages : 4;
  static constexpr int kCtasPerSm = kTwoCtas ? 2 : 1;

  static constexpr int kKeyBytes = kBlockN * KeyRows::kStride;
  static constexpr int kStageBytes = kBlockN * kTokenBytes;
  using ProbabilityRows = SharedRows<kBlockN * 2, false>;
  static constexpr int kPBytes = kPInKeys ? 0 : kBlockM * ProbabilityRows::kStride;
  static constexpr int kTableBytes = 2 * kBlockN * 16;
  static constexpr int kRowMaxBytes = kTokenWarps * kBlockM * 4;
  static constexpr int kScaleGroups = kDimV / 128;
  static constexpr int kScaleBytes = kFp8 ? kBlockN * kScaleGroups * 4 : 0;  // of a block
  static constexpr int kFixedBytes = fixed_bytes(kBlockN);
  static constexpr int kSharedBytes = kFixedBytes + kStages * kStageBytes;
  static_assert(kQueryBytes % 128 == 0 && kFixedBytes % 128 == 0 && kStageBytes % 128 == 0,
                "stages are aligned");
  static constexpr bool kExists =
      kBlockM == kMlaNarrowBlockM || kSharedKibPerCta >= kMlaWideSharedKib;
  static_assert(!kExists || (kStages >= 2 && kStaticBytes + kSharedBytes <= kSmemPerCta),
                "a CTA has this much shared memory");

  // What attention/combine.cuh asks of a tile.
  static constexpr int kCombineBatch = 20;
  static constexpr bool kCombinesWideRows = false;
#if defined(__CUDACC__)
  static __device__ __forceinline__ int thread() { return threadIdx.x; }
  static __device__ __forceinline__ void barrier() { __syncthreads(); }
#endif
};

template <int kKvBytes, int kDimCkv, int kDimKpe>
constexpr int mla_ctas_per_sm(int block_m) {
  if (block_m == kMlaNarrowBlockM) {
    return MlaTile<kKvBytes, kDimCkv, kDimKpe, kMlaNarrowBlockM>::kCtasPerSm;
  }
  using Wide = MlaTile<kKvBytes, kDimCkv, kDimKpe, kMlaWideBlockM>;
  return block_m == kMlaWideBlockM && Wide::kExists ? Wide::kCtasPerSm : 0;
}

// How many CTAs of a tile an SM holds; 0 if there is no such tile. A plan is made for that number
// times the number of SMs.
constexpr int mla_ctas_per_sm(int kv_bytes, int block_m, int head_dim_ckv, int head_dim_kpe) {
  const bool is_fp8 = kv_bytes == 1, has_kpe = head_dim_kpe == 64;
  if (!has_kpe && head_dim_kpe != 0) return 0;
  if (head_dim_ckv == 512) {
    return has_kpe ? (is_fp8 ? mla_ctas_per_sm<1, 512, 64>(block_m)
                             : mla_ctas_per_sm<2, 512, 64>(block_m))
                   : (is_fp8 ? mla_ctas_per_sm<1, 512, 0>(block_m)
                             : mla_ctas_per_sm<2, 512, 0>(block_m));
  }
  if (head_dim_ckv != 256) return 0;
  return has_kpe
             ? (is_fp8 ? mla_ctas_per_sm<1, 256, 64>(block_m)
                       : mla_ctas_per_sm<2, 256, 64>(block_m))
             : (is_fp8 ? mla_ctas_per_sm<1, 256, 0>(block_m) : mla_ctas_per_sm<2, 256, 0>(block_m));
}

#endif  // PRECAST_SM

}  // namespace precast
