// SPDX-License-Identifier: Apache-2.0
// Quantisation to 8 bits with one scale for each group of consecutive elements of a row, or with
// one given scale for all elements; of a tensor or of silu(gate) * up.
//
//   scale[r, g] = quant_scale(max_{c in g} |x[r, c]|)          core/quant.cuh
//   out[r, c]   = round(x[r, c] * (1 / scale[r, c / group]))
//
// Layout   input  [rows, columns]   T, or [rows, 2 * columns] gated; any two row strides
//          out    [rows, columns]   codes, any two row strides
//          scales [rows, groups]    fp32 at any strides (row-major, column-major), or
//                 [rows, ceil(groups / 4)] words of four exponents
// Threads  one thread takes two vectors of a group (16 bytes of input each), or one when gated;
//          1 to 16 neighbouring lanes share a group and reduce its maximum by shuffles. With a
//          given scale a thread takes two vectors that are far apart, or one when gated.
// Traffic  reads input once, writes out and scales once
// Source   DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv:2412.19437 (1 x 128 groups); the
//          layouts are those that DeepGEMM reads
#pragma once

#include "precast/core/items.cuh"
#include "precast/core/launch.cuh"
#include "precast/quantize/quant_input.cuh"

namespace precast {

struct GroupQuantParams {
  QuantTensors tensors;
  void* scales;  // [rows, groups], or words of exponents
  RowStrides scale_strides;
  int64_t group_stride;  // between the scales of neighbouring groups (or words)
  ScaleFormat format;
  int group_size;  // 16, 32, 64 or 128
  float eps;
  int lanes;        // lanes that share a group; set by the launcher
  int group_shift;  // log2(group_size); set by the launcher
  Items items;      // set by the launcher
};

struct StaticQuantParams {
  QuantTensors tensors;
  const float* scale;  // [1]
  Items items;         // set by the launcher
};

#if defined(__CUDACC__)

// Vectors of one group that a thread takes. Why two: what a group costs (its index, its scale) is
// as many instructions as the elements of one vector, so one vector would be bound by them. A gated
// vector is two loads and has more instructions of its own: on an H200 [64, 2 * 7168] takes 2.4 us
// with one vector and 2.6 with two, [1024, 2 * 7168] 10.0 and 10.5; for 8192 rows both are equal.
template <bool kGated>
constexpr int kGroupVecs = kGated ? 1 : 2;

// With a given scale, two gated vectors are no faster than one.
template <bool kGated>
constexpr int kStaticVecs = kGated ? 1 : 2;

template <typename T, typename Q, bool kGated, bool kAligned>
__global__ __launch_bounds__(kItemThreads) void GroupQuantKernel(
    const __grid_constant__ GroupQuantParams p) {
  constexpr int kSize = Vec<T>::kSize;
  constexpr int kVecs = kGroupVecs<kGated>;
  constexpr int kMaxLanes = 128 / (kVecs * kSize);
  const QuantTensors& t = p.tensors;
  const uint32_t item = blockIdx.x * kItemThreads + threadIdx.x;
  // Why: groups are whole, but the last warp may not be, and all its lanes must take part in the
  // shuffles. Lanes without an item read the first group.
  const bool exists = item < p.items.count;
  const int lane = threadIdx.x & (p.lanes - 1);  // within the group; a row consists of whole groups
  const ItemPosition at(p.items, exists ? item : lane, kVecs * kSize);
  const RowPosition row(t.rows, at.row);
  const int step = p.lanes * kSize;  // between the thread's vectors
  const int64_t column = at.column - lane * ((kVecs - 1) * kSize);
  const T* input = input_row<T>(t, row) + column;  // [kVecs, kSize] of [columns]
  Q* out = out_row<Q>(t, row) + column;            // [kVecs, kSize] of [columns]

  launch_dependent_grids();
  if (may_overlap_previous_grid()) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) prefetch_vec<T, kGated>(input + i * step, t.columns);
  }
  wait_on_dependent_grids();

  const L2Policy policy = read_policy(true);
  QuantVec<T, kGated> vecs[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    vecs[i].template load_from<kAligned>(input + i * step, t.columns, kSize, policy);
  }
  uint32_t amax = 0u;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    vecs[i].gate();
    amax = max(amax, vecs[i].amax());
  }
  // This needs no branches: a distance beyond the group becomes 0, which is the lane itself.
#pragma unroll
  for (int distance = kMaxLanes / 2; distance > 0; distance /= 2) {
    amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, distance & (p.lanes - 1)));
  }
  if (!exists) return;
  const QuantScale scale = quant_scale<Q>(amax, p.eps, p.format);
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    vecs[i].template store_to<Q, kAligned>(out + i * step, scale.reciprocal, kSize);
  }
  if (lane == 0) {
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
  constexpr int kVecs = kStaticVecs<kGated>;
  const QuantTensors& t = p.tensors;
  const T* inputs[kVecs];  // [kSize] of [columns]
  Q* outs[kVecs];          // [kSize] of [columns]
  int64_t left[kVecs];     // elements that exist; none behind the last item
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const uint64_t item = (uint64_t(blockIdx.x) * kVecs + i) * kItemThreads + threadIdx.x;
    const ItemPosition at(p.items, item < p.items.count ? static_cast<uint32_t>(item) : 0u, kSize);
    const RowPosition row(t.rows, at.row);
    inputs[i] = input_row<T>(t, row) + at.column;
    outs[i] = out_row<Q>(t, row) + at.column;
    left[i] = item < p.items.count ? t.columns - at.column : 0;
  }

  launch_dependent_grids();
  if (may_overlap_previous_grid()) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) prefetch_vec<T, kGated>(inputs[i], t.columns);
  }
  wait_on_dependent_grids();

  const L2Policy policy = read_policy(true);
  QuantVec<T, kGated> vecs[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    if (left[i] > 0) vecs[i].template load_from<kAligned>(inputs[i], t.columns, left[i], policy);
  }
  const float reciprocal = __frcp_rn(load_scalar(p.scale));
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    vecs[i].gate();
    if (left[i] > 0) vecs[i].template store_to<Q, kAligned>(outs[i], reciprocal, left[i]);
  }
}

#if !defined(__CUDACC_RTC__)

// Launches the quantisation on `stream`, unless the tensor is empty. Returns cudaErrorInvalidValue
// if the tensor has more than 2^32 vectors, or columns that are not whole groups.
template <typename T, typename Q, bool kGated>
cudaError_t launch_group_quant(GroupQuantParams p, bool enable_pdl, cudaStream_t stream) {
  const QuantTensors& t = p.tensors;
  if (t.rows.count == 0 || t.columns == 0) return cudaSuccess;
  constexpr int kSize = kGroupVecs<kGated> * Vec<T>::kSize;
  const ItemPlan plan = plan_items(t.rows.count, t.columns, kSize);
  if (!plan.fits || t.columns % p.group_size != 0) return cudaErrorInvalidValue;
  p.items = plan.items;
  p.lanes = p.group_size / kSize;
  p.group_shift = 0;
  while (1 << p.group_shift < p.group_size) ++p.group_shift;
  const auto kernel = are_vector_aligned<T>(t) ? GroupQuantKernel<T, Q, kGated, true>
                                               : GroupQuantKernel<T, Q, kGated, false>;
  return launch(kernel, dim3(plan.ctas), dim3(kItemThreads), enable_pdl, stream, p);
}

// Launches the quantisation with a given scale; any number of columns is legal.
template <typename T, typename Q, bool kGated>
cudaError_t launch_static_quant(StaticQuantParams p, bool enable_pdl, cudaStream_t stream) {
  const QuantTensors& t = p.tensors;
  if (t.rows.count == 0 || t.columns == 0) return cudaSuccess;
  const ItemPlan plan = plan_items(t.rows.count, t.columns, Vec<T>::kSize);
  if (!plan.fits) return cudaErrorInvalidValue;
  p.items = plan.items;
  const auto kernel = are_vector_aligned<T>(t) ? StaticQuantKernel<T, Q, kGated, true>
                                               : StaticQuantKernel<T, Q, kGated, false>;
  const uint32_t ctas = (plan.ctas - 1) / kStaticVecs<kGated> + 1;
  return launch(kernel, dim3(ctas), dim3(kItemThreads), enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
