// SPDX-License-Identifier: Apache-2.0
// What a block-scaled e4m3 GEMM for sm_90a gets from its launcher.
#pragma once

#include "precast/core/sm90/tensor_map.cuh"
#include "precast/gemm/sm90/choose.cuh"

namespace precast {

struct Sm90GemmParams {
  TensorMap a;  // [groups, tokens, depth]
  TensorMap b;  // [groups, columns, depth]
  Fp8GemmParams p;
  ClusterUse use;
  int clusters, cluster_ctas;
  // Blocks of the depth that a CTA multiplies; if it splits the depth, the first ones of a cluster
  // have one more.
  int blocks, ctas_with_more;
  // Whether the scales of four tokens, the first of them a multiple of four, lie in 16 bytes; and
  // whether this is true of all tiles' first tokens, so that those of a tile are one copy.
  bool has_four_scales, has_scales_in_row;
  // Units are the tiles of a cluster. Those of a group are numbered in bands of `band` units along
  // the tokens, in a band column by column, so that what the CTAs read at a time stays in L2.
  int token_units;  // of a group; not used where its size is on the device
  int column_units;
  int band;
};

}  // namespace precast
