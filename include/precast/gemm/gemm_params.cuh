// SPDX-License-Identifier: Apache-2.0
// The arguments of a product of matrices whose scales, if there are some, are those of rows:
//
//   out[t, n] = round(a_scale[t] * b_scale[n] * alpha * sum_k a[t, k] b[n, k] + bias[n])
//
// Tokens t are the rows of `a`, or belong to groups that have a weight `b` each.
#pragma once

#include "precast/gemm/fp8_params.cuh"

namespace precast {

// Scales of the rows of a matrix, or one for all of them; strides are in elements.
struct RowScales {
  const float* data;  // [groups, rows], or null: 1
  int64_t row_stride;
  int64_t group_stride;
};

struct GemmParams {
  GemmMatrix a;        // [groups, tokens, depth], or [tokens, depth]
  GemmMatrix b;        // [weights, columns, depth]; row-major weights are [weights, depth, columns]
  RowScales a_scale;   // of groups and tokens
  RowScales b_scale;   // of weights and columns
  const float* alpha;  // one number, or null: 1
  const void* bias;    // [columns], or null
  void* out;           // [groups, tokens, columns], or [tokens, columns]
  int64_t out_row_stride;       // elements
  int64_t out_group_stride;     // elements
  const void* group_info;       // int32 or int64
  const void* weight_of_group;  // [groups], of the same type; null: group g has weight g
  TokenGroups kind;
  int groups;
  int weights;  // fewer than groups if weight_of_group says which
  int tokens;
  int columns;
  int depth;
  bool info_is_int64;
};

}  // namespace precast
