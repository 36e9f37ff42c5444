// SPDX-License-Identifier: Apache-2.0
// The tiles of GEMM for sm_90a, and what the warps of a CTA share.
//
// wgmma has 64 rows a warpgroup and 8 to 256 columns. Rows of a tile are tokens and columns are
// those of the weight; for few tokens it is the other way round (swapped), so that the tensor cores
// do not multiply rows that do not exist.
//
// A stage holds 128 bytes of the depth of both operands as TMA writes them: rows of 128 bytes in
// atoms of eight, swizzled. With scales of blocks, beside it are those of the tile's tokens, and
// two of the weight: a tile may begin in one block of 128 columns and end in the next.
#pragma once

#include "precast/core/sm90/pipeline.cuh"
#include "precast/core/sm90/warpgroup.cuh"
#include "precast/core/target_traits.cuh"
#include "precast/gemm/sm90/choose.cuh"
#include "precast/gemm/sm90/store_boxes.cuh"

namespace precast {

#if defined(PRECAST_SM)

// kStageExtra are bytes that a stage has besides the operands, kReserved those that no stage has,
// kCtas as in Sm90TileShape.
template <int kRowsOf, int kColumnsOf, bool kIsSwapped, int kStageExtra = 0, int kReserved = 0,
          int kCtas = 0>
struct Sm90GemmTile {
  static constexpr int kRows = kRowsOf, kColumns = kColumnsOf;
  static constexpr bool kSwapped = kIsSwapped;
  static constexpr int kTokens = kSwapped ? kColumns : kRows;
  static constexpr int kWeights = kSwapped ? kRows : kColumns;  // columns of the output
  // A consumer warpgroup computes every second 64 rows, one after the other, if there are more.
  static constexpr int kConsumers = kRows < 128 ? 1 : 2;
  static constexpr int kParts = kRows / (64 * kConsumers);
  // How much further a part begins than the one before.
  static constexpr int kPartRows = 64 * kConsumers, kPartColumns = 0;
  static constexpr int kThreads = 128 * kConsumers;  // of the consumers
  static constexpr int kCtaThreads = 128 + kThreads;
  static constexpr int kConsumerWarps = 4 * kConsumers;
  static constexpr int kCtasPerSm = Sm90TileShape{kRows, kColumns, kSwapped, kCtas}.ctas_per_sm();
  // Of a thread, once the warpgroups have exchanged some.
  static constexpr int kProducerRegisters = kConsumers == 1 && kCtasPerSm <= 2 ? 56 : 40;
  static constexpr int kConsumerRegisters = kCtasPerSm == 1   ? 232
                                            : kConsumers == 2 ? 96
                                            : kCtasPerSm == 4 ? 88
                                            : kCtasPerSm == 3 ? 120
                                                              : 200;

  static constexpr int kRowBytes = 128;  // of a stage
  static constexpr int kRowOperandBytes = kRows * kRowBytes;
  static constexpr int kStageBytes = (kRows + kColumns) * kRowBytes;
  static constexpr int kMostStages = 16;
  static constexpr int kWarpBufferBytes = 0;
  // The GPU takes 1 KiB for each CTA.
  static constexpr int kSharedBytes = ((kSharedKibPerCta + 1) / kCtasPerSm - 1) * 1024;
  static constexpr int kFitting =
      (kSharedBytes - kReserved - 64) / (kStageBytes + kStageExtra + 16);
  static constexpr int kStages = kFitting < kMostStages ? kFitting : kMostStages;
  static_assert(kStages >= 3, "a stage is full, one is read, one is on its way");
  static_assert(kRows % 64 == 0 && kColumns % 8 == 0, "wgmma's rows, and those of an atom");
  static_assert(kWeights <= 256 && kTokens <= 256, "a box has at most 256 rows");
};

// The scales of a stage; the last two are not used.
constexpr int fp8_tile_scales(int tokens) { return tokens + 4; }

// The boxes of a tile's outputs for which a consumer warp has buffers: all that it writes.
constexpr int fp8_tile_buffers(int rows, int columns, bool is_swapped) {
  return is_swapped ? 0 : columns / store_box_columns(columns) * (rows > 128 ? 2 : 1);
}
constexpr int fp8_tile_warp_buffer(int rows, int columns, bool is_swapped) {
  return fp8_tile_buffers(rows, columns, is_swapped) * 16 * store_box_columns(columns) * 2;
}

template <int kRowsOf, int kColumnsOf, bool kIsSwapped>
struct Fp8GemmTile
    : Sm90GemmTile<
          kRowsOf, kColumnsOf, kIsSwapped, fp8_tile_scales(kIsSwapped ? kColumnsOf : kRowsOf) * 4,
          fp8_tile_warp_buffer(kRowsOf, kColumnsOf, kIsSwapped) * (kRowsOf < 128 ? 4 : 8)> {
  using Box = StoreBox<store_box_columns(kColumnsOf)>;
  static constexpr int kBoxes = kColumnsOf / Box::kColumns;
  static constexpr int kBuffers = fp8_tile_buffers(kRowsOf, kColumnsOf, kIsSwapped);
  static constexpr int kWarpBufferBytes = fp8_tile_warp_buffer(kRowsOf, kColumnsOf, kIsSwapped);
  static constexpr int kScales = fp8_tile_scales(kIsSwapped ? kColumnsOf : kRowsOf);
  static constexpr bool kOverlaps = fp8_tile_overlaps(kRowsOf, kColumnsOf);
};

#endif  // PRECAST_SM

#if defined(__CUDACC__)

// Those of the stages, and one for the sums that a CTA gets from those of its cluster.
template <int kStages>
struct alignas(16) Fp8GemmBarriers : PipelineBarriers<kStages> {
  uint64_t sums;

  __device__ __forceinline__ void init_by_warp(uint32_t producers, uint32_t consumers) {
    PipelineBarriers<kStages>::init_by_warp(producers, consumers);
    if (threadIdx.x % 32 == 31) mbarrier_init(&sums);
  }
};

template <typename Tile>
struct Fp8GemmStorage {
  Fp8GemmBarriers<Tile::kStages> stages;
  alignas(16) float scales[Tile::kStages][Tile::kScales];  // tokens, then the weight's two
};

// Addresses in dynamic shared memory, which starts at a multiple of 1024 bytes: the stages, the
// buffers of the consumer warps, then the storage.
template <typename Tile, typename Storage = Fp8GemmStorage<Tile>>
struct Sm90GemmBuffers {
  static constexpr int kWarpBufferOffset = Tile::kStages * Tile::kStageBytes;
  static constexpr int kStorageOffset =
      kWarpBufferOffset + Tile::kConsumerWarps * Tile::kWarpBufferBytes;
  static constexpr int kBytes = kStorageOffset + int(sizeof(Storage));

  uint32_t base;

  __device__ __forceinline__ uint32_t rows(int stage) const {
    return base + stage * Tile::kStageBytes;
  }
  __device__ __forceinline__ uint32_t columns(int stage) const {
    return rows(stage) + Tile::kRowOperandBytes;
  }
};

#endif  // __CUDACC__

}  // namespace precast
