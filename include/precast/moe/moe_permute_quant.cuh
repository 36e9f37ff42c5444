// SPDX-License-Identifier: Apache-2.0
// Rows of tokens in the order of their experts, quantised to e4m3 with a scale for each 128
// columns.
//
//   scale[r, g] = quant_scale(max_{c in g} |input[t, c]|)      core/quant.cuh, r = rows[t, s]
//   out[r, c]   = round(input[t, c] * (1 / scale[r, g]))       for each slot s that has a row
//
// Layout   input  [tokens, columns]             T, rows at multiples of 16 bytes
//          rows   [tokens, slots]               int32; other numbers than rows of out are skipped
//          out    [out_rows, columns]           e4m3, rows at multiples of 16 bytes
//          scale  [out_rows, columns / 128]     fp32 at any strides
// Threads  16 lanes quantise a group of a token once and write it to all of its slots
// Traffic  reads input once, writes a row of codes and scales for each slot
// Source   DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.3
#pragma once

#include "precast/core/items.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/quant.cuh"
#include "precast/moe/expert_rows.cuh"

namespace precast {

struct MoePermuteQuantParams {
  const void* input;     // [tokens, columns]
  void* out;             // [out_rows, columns]
  float* scale;          // [out_rows, columns / 128]
  TokenSlots slots;      // [tokens, slots], rows of out
  int64_t input_stride;  // elements
  int64_t out_stride;
  int64_t scale_row_stride;
  int64_t scale_group_stride;
  uint32_t tokens;
  int64_t columns;  // a multiple of 128
  Items items;      // set by the launcher
};

#if defined(__CUDACC__)

template <typename T>
__global__ __launch_bounds__(kItemThreads) void MoePermuteQuantKernel(
    const __grid_constant__ MoePermuteQuantParams p) {
  constexpr int kSize = Vec<T>::kSize, kLanes = kExpertGroup / kSize;
  const uint32_t item = blockIdx.x * kItemThreads + threadIdx.x;
  // Why: groups are whole, but the last warp may not be, and all its lanes take part in the
  // shuffles. Lanes without an item read the first group.
  const bool exists = item < p.items.count;
  const int lane = threadIdx.x % kLanes;
  const ItemPosition at(p.items, exists ? item : lane, kSize);
  const T* input = static_cast<const T*>(p.input) + at.row * p.input_stride + at.column;
  e4m3* out = static_cast<e4m3*>(p.out) + at.column;                          // + row * out_stride
  float* scales = p.scale + at.column / kExpertGroup * p.scale_group_stride;  // + row * row_stride

  launch_dependent_grids();
  if (may_overlap_previous_grid()) prefetch_to_l2(input);
  wait_on_dependent_grids();

  const Vec<T> vec = load_vec(input);
  const QuantScale scale =
      quant_scale<e4m3>(warp_max(amax_bits(vec), kLanes), kExpertEps, ScaleFormat::numbers);
  if (!exists) return;
  float x[kSize];
  unpack(vec, x);
  for_each_slot(p.slots, at.row, [&](int64_t row, int slot) {
    store_codes<e4m3, true>(out + row * p.out_stride, x, scale.reciprocal, kSize);
    if (slot % kLanes == lane) scales[row * p.scale_row_stride] = scale.scale;
  });
}

#if !defined(__CUDACC_RTC__)

// Launches the quantisation on `stream`, unless there is nothing to do. Returns
// cudaErrorInvalidValue if the input has more than 2^32 items of 16 bytes.
template <typename T>
cudaError_t launch_moe_permute_quant(MoePermuteQuantParams p, bool enable_pdl,
                                     cudaStream_t stream) {
  if (p.tokens == 0 || p.columns == 0 || p.slots.count == 0) return cudaSuccess;
  const ItemPlan plan = plan_items(p.tokens, p.columns, Vec<T>::kSize);
  if (!plan.fits) return cudaErrorInvalidValue;
  p.items = plan.items;
  return launch(MoePermuteQuantKernel<T>, dim3(plan.ctas), dim3(kItemThreads), enable_pdl, stream,
                p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
