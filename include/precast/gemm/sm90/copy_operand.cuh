// SPDX-License-Identifier: Apache-2.0
// How a producer warp of the GEMMs for sm_90a copies an operand by TMA.
#pragma once

#include "precast/core/launch.cuh"
#include "precast/gemm/sm90/scheduler.cuh"
#include "precast/gemm/sm90/tile.cuh"

namespace precast {

#if defined(__CUDACC__)

// The rows of an operand that a stage gets: all kCount of the tile, or, at the end of the operand,
// those that exist, in one or two boxes of `edge_rows`. Others keep what was in the stage, and no
// output depends on them. Why not a box that TMA fills with zeros: it takes longer than one whose
// rows exist, so that 64 tokens were slower than 128.
template <int kCount>
struct OperandRows {
  bool is_whole;
  int boxes, box_rows;

  __device__ __forceinline__ OperandRows(int existing, int edge_rows) {
    is_whole = existing >= kCount;
    box_rows = is_whole ? kCount : edge_rows;
    boxes = existing <= 0 ? 0 : existing <= box_rows ? 1 : is_whole ? 1 : 2;
  }
};

// Copies these rows by TMA, of an operand whose tile begins at `row`; `edge` is the map of boxes of
// edge_rows. If two CTAs share the rows, this one copies half of them, or every second box, to
// both.
template <typename Tile, int kCount>
__device__ __forceinline__ void copy_operand_rows(uint32_t target, const TensorMap* map,
                                                  const TensorMap* edge, uint64_t* full,
                                                  bool is_shared, const OperandRows<kCount>& rows,
                                                  int k, int row, int group) {
  const int rank = is_shared ? static_cast<int>(cluster_rank()) : 0;
  const auto copy = [&](const TensorMap* boxes, int at) {
    const uint32_t to = target + at * Tile::kRowBytes;
    if (is_shared) {
      copy_box_to_ctas(to, boxes, full, 3, k, row + at, group);
    } else {
      copy_box(to, boxes, full, k, row + at, group);
    }
  };
  if (rows.is_whole) {
    copy(map, rank * (kCount / 2));
    return;
  }
#pragma unroll 1
  for (int box = rank; box < rows.boxes; box += is_shared ? 2 : 1) copy(edge, box * rows.box_rows);
}

// The same of a row-major weight [depth, columns], of which it copies kBlock of the depth: panels
// of 128 bytes of columns, one after the other. If two CTAs share them, this one's half of the
// depth.
template <typename Tile, int kBlock>
__device__ __forceinline__ void copy_weight_panels(uint32_t target, const TensorMap* map,
                                                   uint64_t* full, bool is_shared, int k,
                                                   int column, int group) {
  constexpr int kPanelColumns = kBlock;  // both are 128 bytes
  const int half = is_shared ? static_cast<int>(cluster_rank()) * (kBlock / 2) : 0;
#pragma unroll
  for (int panel = 0; panel < Tile::kWeights / kPanelColumns; ++panel) {
    const uint32_t to = target + (panel * kBlock + half) * Tile::kRowBytes;
    if (is_shared) {
      copy_box_to_ctas(to, map, full, 3, column + panel * kPanelColumns, k + half, group);
    } else {
      copy_box(to, map, full, column + panel * kPanelColumns, k, group);
    }
  }
}

// copy_box_to_ctas() of a box of five dimensions.
__device__ __forceinline__ void copy_box_to_ctas(uint32_t target, const TensorMap* map,
                                                 uint64_t* barrier, uint16_t ctas, int c0, int c1,
                                                 int c2, int c3, int c4) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(target),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"(ctas)
      : "memory");
#endif
}

// The same of a gated weight, whose map encode_gated_weight() makes: the rows of the columns of the
// output from `column` on, `kRun` of them, then their gates, then the next. If two CTAs share them,
// those of this one's half of the columns, or, of one run, its rows or its gates.
template <typename Tile, int kRun>
__device__ __forceinline__ void copy_gated_rows(uint32_t target, const TensorMap* map,
                                                uint64_t* full, bool is_shared, int k, int column,
                                                int group) {
  constexpr bool kIsOneRun = Tile::kWeights == kRun;
  static_assert(kIsOneRun || Tile::kWeights % (2 * kRun) == 0, "two CTAs copy whole runs");
  const int half = is_shared ? static_cast<int>(cluster_rank()) * (Tile::kWeights / 2) : 0;
  const int run = (column + (kIsOneRun ? 0 : half)) / kRun;
  const int gates = kIsOneRun && half > 0 ? 1 : 0;
  if (is_shared) {
    copy_box_to_ctas(target + 2 * half * Tile::kRowBytes, map, full, 3, k, 0, gates, run, group);
  } else {
    copy_box(target, map, full, k, 0, 0, run, group);
  }
}

// Whether a weight may be row-major: the family has such weights, and the tile whole panels of it.
template <typename Tile, typename Params>
constexpr bool takes_row_major_b() {
  if constexpr (Params::kTakesRowMajorB) return Tile::kTakesRowMajorB;
  return false;
}

// Copies `a`, or the weight `b`, of all stages of a CTA; one lane of a warp does it. `kBlock` is
// the depth of a stage, `group_step` the distance of groups in the map, 0 where all have one place.
// Why a row-major weight is known in the loop alone: a second loop would be compiled with a second
// tile scheduler.
template <typename Tile, bool kWeight, int kBlock, typename Params, typename Storage,
          typename Buffers>
__device__ __forceinline__ void copy_operand(const Params& params, Storage& storage,
                                             const Buffers& buffers, int group_step) {
  Storage& shared = kept_object(storage);
  const Buffers stages = {kept(buffers.base)};
  constexpr bool kIsGated = kWeight && Params::kIsGated;
  constexpr bool kTakesPanels = kWeight && takes_row_major_b<Tile, Params>();
  constexpr int kCount = kWeight ? Tile::kWeights * (kIsGated ? 2 : 1) : Tile::kTokens;
  PipelineState<Tile::kStages> state;
  GemmScheduler<Tile, Params> scheduler(params);
  const DepthRange depth(params);
  const bool is_shared = params.use == (kWeight ? ClusterUse::shares_b : ClusterUse::shares_a);
  const TensorMap* map = kWeight ? &params.b : &params.a;
  const TensorMap* edge = kWeight ? &params.b_edge : &params.a_edge;
  const bool is_chosen = elect_lane();
  const bool is_row_major = kTakesPanels && params.has_row_major_b();
  for (GemmTile tile; scheduler.next(tile);) {
    const int row = kWeight ? tile.column : tile.token;
    const int group = group_step * (kWeight ? tile.b_group : tile.a_group);
    // Row-major panels always have all their columns, and gated rows all of a tile.
    const int existing = (kWeight ? params.p.columns : params.p.tokens) - row;
    const OperandRows<kCount> rows(is_row_major || kIsGated ? kCount : existing,
                                   kWeight ? params.b_edge_rows : params.a_edge_rows);
    if (is_chosen) {
#pragma unroll 1
      for (int block = depth.begin; block < depth.end; ++block) {
        if (kWeight && block == depth.end - params.blocks_beside_next) launch_dependent_grids();
        shared.stages.wait_empty(state, kWeight ? "an empty stage for b" : "one for a");
        uint64_t* full = &shared.stages.full[state.stage];
        mbarrier_arrive_expect_tx(full, rows.boxes * rows.box_rows * Tile::kRowBytes);
        const uint32_t target =
            kWeight == Tile::kSwapped ? stages.rows(state.stage) : stages.columns(state.stage);
        if (is_row_major) {
          if constexpr (kTakesPanels) {
            copy_weight_panels<Tile, kBlock>(target, map, full, is_shared, block * kBlock, row,
                                             group);
          }
        } else if constexpr (kIsGated) {
          copy_gated_rows<Tile, Params::kGatedRun>(target, map, full, is_shared, block * kBlock,
                                                   row, group);
        } else {
          copy_operand_rows<Tile>(target, map, edge, full, is_shared, rows, block * kBlock, row,
                                  group);
        }
        state.advance();
      }
    }
    __syncwarp();
  }
  // Why the stages are awaited once more: consumers of the other CTA arrive at the barriers of this
  // one, which must be there when they do. A cluster barrier does not wait for arrivals on the way.
  if (kWeight && shares_operand(params.use) && is_chosen) {
#pragma unroll 1
    for (int i = 0; i < Tile::kStages; ++i) {
      shared.stages.wait_empty(state, "the other CTA's consumers to leave a stage");
      state.advance();
    }
  }
  __syncwarp();
}

#endif  // __CUDACC__

}  // namespace precast
