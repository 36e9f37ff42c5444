// SPDX-License-Identifier: Apache-2.0
// Quantisation to 8 bits with one scale for each group of consecutive elements of a row, or with
// one scale that is given for all. Alone, or of silu(gate) * up.
//
//   scale[r, g] = quant_scale(max_{c in g} |x[r, c]|)          core/quant.cuh
//   out[r, c]   = round(x[r, c] * (1 / scale[r, c / group]))
//
// Layout   input  [rows, columns]   T, or [rows, 2 * columns] gated; any two row strides
//          out    [rows, columns]   codes, any two row strides
//          scales [rows, groups]    fp32 at any strides (row-major, column-major), or
//                 [rows, ceil(groups / 4)] words of four exponents
// Threads  one thread takes one vector (16 bytes of input, or two when gated); a group is 2 to 32
//          neighbouring lanes, which find its maximum by shuffles.
// Traffic  reads input once, writes out and scales once.
// Source   DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv:2412.19437 (1 x 128 groups); the
//          layouts are those that DeepGEMM reads.
#pragma once

#include "precast/core/items.cuh"
#include "precast/core/launch.cuh"
#include "precast/quantize_input.cuh"

namespace precast {

struct GroupQuantParams {
  QuantTensors tensors;
  void* scales;  // [rows, groups], or words of exponents
  RowStrides scale_strides;
  int64_t group_stride;  // of scales, from one group (or word) to the next
  ScaleFormat format;
  int group_size;  // 16, 32, 64 or 128
  float eps;
  int lanes;        // that share a group; the launcher sets it
  int group_shift;  // log2(group_size); the launcher sets it
  Items items;      // the launcher sets it
};

struct StaticQuantParams {
  QuantTensors tensors;
  const float* scale;  // [1]
  Items items;         // the launcher sets it
};

#if defined(__CUDACC__)

template <typename T, typename Q, bool kGated, bool kAligned>
__global__ __launch_bounds__(kItemThreads) void GroupQuantKernel(
    const __grid_constant__ GroupQuantParams p) {
  constexpr int kSize = Vec<T>::kSize;
  const QuantTensors& t = p.tensors;
  const uint32_t item = blockIdx.x * kItemThreads + threadIdx.x;
  // Why: groups are whole, but the last warp may not be, and all its lanes must shuffle.
  const bool exists = item < p.items.count;
  const ItemPosition at(p.items, exists ? item : 0u, kSize);
  const RowPosition row(t.rows, at.row);
  const T* input = input_row<T>(t, row) + at.column;  // [kSize] of [columns]
  Q* out = out_row<Q>(t, row) + at.column;            // [kSize] of [columns]

  allow_next_grid();
  if (may_overlap_previous_grid()) prefetch_vec<T, kGated>(input, t.columns);
  wait_for_previous_grid();

  QuantVec<T, kGated> vec;
  vec.template load_from<kAligned>(input, t.columns, kSize, read_policy(true));
  const uint32_t amax = warp_max(vec.amax(), p.lanes);
  if (!exists) return;
  const QuantScale scale = quant_scale<Q>(amax, p.eps, p.format);
  vec.template store_to<Q, kAligned>(out, scale.reciprocal, kSize);
  if ((threadIdx.x & (p.lanes - 1)) == 0) {
    const uint32_t group = static_cast<uint32_t>(at.column >> p.group_shift);
    const uint32_t groups = static_cast<uint32_t>(t.columns >> p.group_shift);
    store_scale(p.scales, p.format, row.offset(p.scale_strides), group, p.group_stride, groups,
                scale);
  }
}

template <typename T, typename Q, bool kGated, bool kAligned>
__global__ __launch_bounds__(kItemThreads) void StaticQuantKernel(
    const __grid_constant__ StaticQuantParams p) {
  constexpr int kSize = Vec<T>::kSize;
  const QuantTensors& t = p.tensors;
  const uint32_t item = blockIdx.x * kItemThreads + threadIdx.x;
  if (item >= p.items.count) return;
  const ItemPosition at(p.items, item, kSize);
  const RowPosition row(t.rows, at.row);
  const int64_t left = t.columns - at.column;
  const T* input = input_row<T>(t, row) + at.column;  // [kSize] of [columns]
  Q* out = out_row<Q>(t, row) + at.column;            // [kSize] of [columns]

  allow_next_grid();
  if (may_overlap_previous_grid()) prefetch_vec<T, kGated>(input, t.columns);
  wait_for_previous_grid();

  QuantVec<T, kGated> vec;
  vec.template load_from<kAligned>(input, t.columns, left, read_policy(true));
  const float scale = __uint_as_float(load_word(p.scale));
  vec.template store_to<Q, kAligned>(out, __frcp_rn(scale), left);
}

#if !defined(__CUDACC_RTC__)

// Launches on `stream`; nothing for an empty tensor. cudaErrorInvalidValue if the tensor has more
// than 2^32 vectors, or columns that are not whole groups.
template <typename T, typename Q, bool kGated>
cudaError_t launch_group_quant(GroupQuantParams p, bool enable_pdl, cudaStream_t stream) {
  const QuantTensors& t = p.tensors;
  if (t.rows.count == 0 || t.columns == 0) return cudaSuccess;
  const ItemPlan plan = plan_items(t.rows.count, t.columns, Vec<T>::kSize);
  if (!plan.fits || t.columns % p.group_size != 0) return cudaErrorInvalidValue;
  p.items = plan.items;
  p.lanes = p.group_size / Vec<T>::kSize;
  p.group_shift = 0;
  while (1 << p.group_shift < p.group_size) ++p.group_shift;
  const auto kernel = are_vector_aligned<T>(t) ? GroupQuantKernel<T, Q, kGated, true>
                                               : GroupQuantKernel<T, Q, kGated, false>;
  return launch(kernel, dim3(plan.ctas), dim3(kItemThreads), enable_pdl, stream, p);
}

// The same with a given scale; any number of columns.
template <typename T, typename Q, bool kGated>
cudaError_t launch_static_quant(StaticQuantParams p, bool enable_pdl, cudaStream_t stream) {
  const QuantTensors& t = p.tensors;
  if (t.rows.count == 0 || t.columns == 0) return cudaSuccess;
  const ItemPlan plan = plan_items(t.rows.count, t.columns, Vec<T>::kSize);
  if (!plan.fits) return cudaErrorInvalidValue;
  p.items = plan.items;
  const auto kernel = are_vector_aligned<T>(t) ? StaticQuantKernel<T, Q, kGated, true>
                                               : StaticQuantKernel<T, Q, kGated, false>;
  return launch(kernel, dim3(plan.ctas), dim3(kItemThreads), enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
