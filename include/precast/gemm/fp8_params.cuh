// SPDX-License-Identifier: Apache-2.0
// The arguments of a product of e4m3 matrices whose scales are those of blocks:
//
//   out[t, n] = round(sum_i a_scale[t, i] * b_scale[n / 128, i] * sum_{k in block i} a[t, k] b[n,
//   k])
//
// A block of the depth is 128 long. Tokens t are the rows of `a`, or belong to groups that have a
// weight `b` each.
#pragma once

#include "precast/core/fp4.cuh"
#include "precast/core/host_device.cuh"
#include "precast/core/types.cuh"

namespace precast {

constexpr int kFp8BlockLog2 = 7;
constexpr int kFp8Block = 1 << kFp8BlockLog2;  // columns of the weight, and of the depth

PRECAST_HOST_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// How tokens belong to groups.
enum class TokenGroups : int {
  equal,    // `a` is [groups, tokens, depth]
  counted,  // the same, of which group_info[group] tokens exist
  ranges,   // `a` is [tokens, depth]; group g has the tokens group_info[g] .. group_info[g + 1] - 1
  blocks,   // `a` is [tokens, depth]; token t belongs to group_info[t], or to none if that is
            // negative; the same group for all tokens of a block of 128 that belong to one
};

// A matrix of each group; rows are contiguous along the depth, strides are in bytes.
struct GemmMatrix {
  const void* data;  // [groups, rows, depth]
  int64_t row_stride;
  int64_t group_stride;
};
using Fp8Matrix = GemmMatrix;

// The scales of a matrix; strides are in elements. The scales of a group span less than 2^32 - 1.
// Packed ones are exponents with a bias of 127 (ue8m0), four blocks of the depth in an element of
// 32 bits, the first one in the lowest byte.
struct Fp8Scales {
  const float* data;     // [groups, row blocks, depth blocks], in any order in memory
  int64_t block_stride;  // to the next block of rows
  int64_t depth_stride;  // to the next block of the depth, or the next four
  int64_t group_stride;
  int rows_log2;  // of a block: 0 or 7
  bool packed;
};

#if defined(__CUDACC__)

// The scale of a block of the depth, of the element that has it.
__device__ __forceinline__ float unpacked_scale(float element, int block) {
  return ue8m0_to_float(__float_as_uint(element) >> block % 4 * 8 & 0xff);
}

#endif

struct Fp8GemmParams {
  Fp8Matrix a;  // [groups, tokens, depth], or [tokens, depth]
  Fp8Matrix b;  // [groups, columns, depth]
  Fp8Scales a_scale;
  Fp8Scales b_scale;
  void* out;                 // [groups, tokens, columns], or [tokens, columns]
  int64_t out_row_stride;    // elements
  int64_t out_group_stride;  // elements
  const int32_t* group_info;
  TokenGroups kind;
  int groups;
  int tokens;
  int columns;
  int depth;
};

}  // namespace precast
