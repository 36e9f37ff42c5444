// SPDX-License-Identifier: Apache-2.0
// Copies of the rows of tokens in the order of their experts.
//
//   out[rows[t, s], c] = input[t, c]   for each slot s whose rows[t, s] is a row of out
//
// Layout   input  [tokens, row]    any type, rows at multiples of 16 bytes
//          rows   [tokens, slots]  int32, contiguous; other numbers than rows of out are skipped
//          out    [out_rows, row]  the same type; rows that no slot names are not written
// Threads  one thread copies 16 bytes of a token to all of its slots
// Traffic  reads input once, writes a row for each slot
// Source   definition
#pragma once

#include "precast/core/items.cuh"
#include "precast/core/launch.cuh"
#include "precast/moe/expert_rows.cuh"

namespace precast {

struct MoePermuteParams {
  const void* input;     // [tokens, row]
  void* out;             // [out_rows, row]
  TokenSlots slots;      // [tokens, slots], rows of out
  int64_t input_stride;  // bytes
  int64_t out_stride;    // bytes
  uint32_t tokens;
  int64_t row_bytes;  // a multiple of 16
  Items items;        // set by the launcher
};

#if defined(__CUDACC__)

__global__ __launch_bounds__(kItemThreads) void MoePermuteKernel(
    const __grid_constant__ MoePermuteParams p) {
  using Byte = unsigned char;
  const uint32_t item = blockIdx.x * kItemThreads + threadIdx.x;
  if (item >= p.items.count) return;
  const ItemPosition at(p.items, item, kVecBytes);
  const Byte* input = static_cast<const Byte*>(p.input) + at.row * p.input_stride + at.column;
  Byte* out = static_cast<Byte*>(p.out) + at.column;  // + row * out_stride

  launch_dependent_grids();
  if (may_overlap_previous_grid()) prefetch_to_l2(input);
  wait_on_dependent_grids();

  const Vec<Byte> vec = load_vec(input);
  for_each_slot(p.slots, at.row,
                [&](int64_t row, int) { store_vec(out + row * p.out_stride, vec); });
}

#if !defined(__CUDACC_RTC__)

// Launches the copies on `stream`, unless there are none. Returns cudaErrorInvalidValue if the
// input has more than 2^32 items of 16 bytes.
inline cudaError_t launch_moe_permute(MoePermuteParams p, bool enable_pdl, cudaStream_t stream) {
  if (p.tokens == 0 || p.row_bytes == 0 || p.slots.count == 0) return cudaSuccess;
  const ItemPlan plan = plan_items(p.tokens, p.row_bytes, kVecBytes);
  if (!plan.fits) return cudaErrorInvalidValue;
  p.items = plan.items;
  return launch(MoePermuteKernel, dim3(plan.ctas), dim3(kItemThreads), enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
