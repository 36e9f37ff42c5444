// SPDX-License-Identifier: Apache-2.0
// What a GEMM for sm_90a gets from its launcher.
#pragma once

#include "precast/core/sm90/tensor_map.cuh"
#include "precast/gemm/gemm_params.cuh"
#include "precast/gemm/sm90/choose.cuh"

namespace precast {

template <typename P>
struct GemmLaunchParams {
  TensorMap a;  // [groups, tokens, depth]
  TensorMap b;  // [weights, columns, depth]
  // The same with boxes of so many rows, for the last tile if not all of its rows exist.
  TensorMap a_edge, b_edge;
  int a_edge_rows, b_edge_rows;
  P p;
  ClusterUse use;
  int clusters, cluster_ctas;
  // Blocks of the depth that a CTA multiplies; if it splits the depth, the first ones of a cluster
  // have one more.
  int blocks, ctas_with_more;
  // Blocks of the depth before the end of a CTA's only tile at which the next grid may start; 0 if
  // it may when the CTA begins.
  int blocks_beside_next;
  // Units are the tiles of a cluster. Those of a group are numbered in bands of `band` units along
  // the tokens, in a band column by column, so that what the CTAs read at a time stays in L2.
  int token_units;  // of a group; not used where its size is on the device
  int column_units;
  int band;
};

// Those of block-scaled e4m3.
struct Sm90GemmParams : GemmLaunchParams<Fp8GemmParams> {
  // A group has the weight of its number; rows of the output are whole vectors of 16 bytes.
  static constexpr bool kChoosesWeights = false, kHasBias = false, kHasAnyRows = false;
  static constexpr bool kHasScales = false;  // of rows
  // Accumulators are those of a block of the depth; what is written are other registers.
  static constexpr bool kHasSumsOfBlocks = true;
  static constexpr bool kIsGated = false, kTakesRowMajorB = false;

  // Whether the scales of four tokens, the first of them a multiple of four, lie in 16 bytes; and
  // whether this is true of all tiles' first tokens, so that those of a tile are one copy.
  bool has_four_scales, has_scales_in_row;
  // To which tiles of outputs of 16 bits are written that are not split: [groups, tokens, columns].
  TensorMap out;

  static constexpr bool has_row_major_b() { return false; }
};

// Those of operands without scales of blocks: `Types` as plain.cuh says.
template <typename Types>
struct PlainLaunchParams : GemmLaunchParams<typename Types::Problem> {
  // Whether a column of the output is a function of two rows of the weight.
  static constexpr bool kIsGated = Types::kIsGated;
  static constexpr int kGatedRun = 8;  // rows of the weight before their gates
  static constexpr bool kChoosesWeights = true, kHasBias = !kIsGated, kHasAnyRows = true;
  static constexpr bool kHasScales = Types::kHasScales;
  static constexpr bool kHasSumsOfBlocks = Types::kHasSumsOfBlocks;
  // Whether weights may be [depth, columns]: wgmma of 8 bits has no such operand.
  static constexpr bool kTakesRowMajorB = Types::Family::kElementBytes == 2 && !kIsGated;
  using Bias = typename Types::Bias;

  // 0 where all groups have the same memory, whose map has one group, else 1.
  int a_group_step, b_group_step;
  // Whether rows of the output are whole vectors of 16 bytes.
  bool has_vector_rows;
  // Whether tiles that are not split are written by TMA, to this map: [groups, tokens, columns].
  bool stores_boxes;
  TensorMap out;
  // Whether a CTA has several tiles, so that its warpgroups shall not end them at the same time.
  bool staggers;
  bool row_major_b;

  PRECAST_HOST_DEVICE constexpr bool has_row_major_b() const {
    return kTakesRowMajorB && row_major_b;
  }
};

}  // namespace precast
