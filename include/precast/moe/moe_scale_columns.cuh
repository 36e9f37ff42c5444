// SPDX-License-Identifier: Apache-2.0
// Columns multiplied by scales and rounded to e4m3, as bf16: what experts with weights of int4 and
// activations of 8 bits multiply.
//
//   out[r, c] = e4m3(input[r, c] * scale[c])      saturated; bf16 holds each e4m3 exactly
//
// Layout   input  [rows, columns]   bf16, rows at multiples of 16 bytes
//          scale  [columns]         bf16, contiguous, at a multiple of 16 bytes; null: 1
//          out    [rows, columns]   bf16, rows at multiples of 16 bytes; may be the input
// Threads  one thread has 16 bytes of a row
// Traffic  reads input once, the scales from L2 once for each row, writes out once
// Source   definition
#pragma once

#include "precast/core/fp8.cuh"
#include "precast/core/items.cuh"
#include "precast/core/launch.cuh"
#include "precast/moe/expert_rows.cuh"

namespace precast {

struct MoeScaleColumnsParams {
  const void* input;        // [rows, columns]
  const void* scale;        // [columns], or null
  const int32_t* rows_end;  // rows from this one on are neither read nor written; null: all exist
  void* out;                // [rows, columns]
  int64_t input_stride;     // elements
  int64_t out_stride;
  Items items;
};

#if defined(__CUDACC__)

__global__ __launch_bounds__(kItemThreads) void MoeScaleColumnsKernel(
    const __grid_constant__ MoeScaleColumnsParams p) {
  constexpr int kSize = Vec<bf16>::kSize;
  const uint32_t item = blockIdx.x * kItemThreads + threadIdx.x;
  if (item >= p.items.count) return;
  const ItemPosition at(p.items, item, kSize);
  const bf16* input = static_cast<const bf16*>(p.input) + at.row * p.input_stride + at.column;

  launch_dependent_grids();
  if (may_overlap_previous_grid()) prefetch_to_l2(input);
  wait_on_dependent_grids();

  if (p.rows_end != nullptr && static_cast<int>(at.row) >= load_number(p.rows_end)) return;
  float x[kSize], scale[kSize];
  unpack(load_vec(input), x);
  if (p.scale != nullptr) {
    unpack(load_vec(static_cast<const bf16*>(p.scale) + at.column), scale);
#pragma unroll
    for (int i = 0; i < kSize; ++i) x[i] *= scale[i];
  }
#pragma unroll
  for (float& number : x) number = to_float(from_float<e4m3>(number));
  bf16* out = static_cast<bf16*>(p.out) + at.row * p.out_stride + at.column;
  store_vec(out, pack<bf16>(x));
}

#if !defined(__CUDACC_RTC__)

// Launches the kernel on `stream`; params.items must have at least one item.
inline cudaError_t launch_moe_scale_columns(const MoeScaleColumnsParams& p, bool enable_pdl,
                                            cudaStream_t stream) {
  const dim3 grid((p.items.count - 1) / kItemThreads + 1);
  return launch(MoeScaleColumnsKernel, grid, dim3(kItemThreads), enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
