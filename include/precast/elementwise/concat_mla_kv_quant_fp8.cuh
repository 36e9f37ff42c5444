// SPDX-License-Identifier: Apache-2.0
// Keys and values of multi-head latent attention in e4m3, from the up-projection and the rotary
// part that all heads share.
//
//   key[t, h, :]   = sat(kv[t, h, :nope], pe[t, :])
//   value[t, h, :] = sat(kv[t, h, nope:])
//
// Layout   kv     [tokens, heads, nope + v]     T     any two strides, unit stride in a row
//          pe     [tokens, rope]                T     any stride, unit stride in a row
//          key    [tokens, heads, nope + rope]  e4m3  as kv
//          value  [tokens, heads, v]            e4m3  as kv
// Threads  one thread writes 16 elements: of the first part of a key, of its second, or of a value
// Traffic  reads kv once and pe once (again from L1 for each head), writes key and value once
// Source   DeepSeek-AI, DeepSeek-V2, arXiv:2405.04434; rounding: core/fp8.cuh
// Measured 2026-11-23 on an H200, bf16, 128 heads: 2048 tokens 50.5 us, 16384 tokens 398 us
#pragma once

#include "precast/core/fp8.cuh"
#include "precast/core/items.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/rows.cuh"
#include "precast/core/vec.cuh"

namespace precast {

constexpr int kPackSize = 16;  // elements of an item

// Sizes and strides are in elements.
struct ConcatMlaKvQuantParams {
  const void* kv;  // [tokens, heads, nope + v]
  const void* pe;  // [tokens, rope]
  void* key;       // [tokens, heads, nope + rope]
  void* value;     // [tokens, heads, v]
  RowStrides kv_strides;
  RowStrides key_strides;
  RowStrides value_strides;
  int64_t pe_stride;
  Rows rows;  // tokens * heads; heads is the inner count
  int nope;
  int rope;
  int v;
  // Set by the launcher:
  Items items;
  uint32_t nope_items;
  uint32_t key_items;
};

// The items of a row.
inline int64_t pack_items(int64_t elements) { return (elements + kPackSize - 1) / kPackSize; }

#if defined(__CUDACC__)

template <typename T, bool kAligned>
__global__ __launch_bounds__(kItemThreads) void ConcatMlaKvQuantKernel(
    const __grid_constant__ ConcatMlaKvQuantParams p) {
  const uint32_t item = blockIdx.x * kItemThreads + threadIdx.x;
  if (item >= p.items.count) return;
  const uint32_t row = p.items.per_row.divide(item);
  const uint32_t at = item - row * p.items.per_row.value;
  const RowPosition position(p.rows, row);
  const T* source = position.in<T>(p.kv, p.kv_strides);
  e4m3* target = position.in<e4m3>(p.key, p.key_strides);
  int start, size;  // of the part in elements
  if (at < p.nope_items) {
    start = at * kPackSize;
    size = p.nope;
  } else if (at < p.key_items) {
    start = (at - p.nope_items) * kPackSize;
    size = p.rope;
    source = static_cast<const T*>(p.pe) + position.outer * p.pe_stride;
    target += p.nope;
  } else {
    start = (at - p.key_items) * kPackSize;
    size = p.v;
    source += p.nope;
    target = position.in<e4m3>(p.value, p.value_strides);
  }
  source += start;
  target += start;
  const int count = size - start;

  launch_dependent_grids();
  if (may_overlap_previous_grid()) prefetch_to_l2(source);
  wait_on_dependent_grids();

  const L2Policy policy = read_policy(true);
  float x[kPackSize];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float eight[8];
    unpack(load<kAligned>(source + 8 * half, count - 8 * half, policy), eight);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[8 * half + i] = eight[i];
  }
  if constexpr (kAligned) {
    store_fp8(target, x);
  } else {
#pragma unroll
    for (int i = 0; i < kPackSize; ++i) {
      if (i < count) store_one_fp8(target + i, x[i]);
    }
  }
}

#if !defined(__CUDACC_RTC__)

// Launches the pack on `stream`, unless there are no rows. A stride that is never used must be 0.
// Returns cudaErrorInvalidValue if there are more than 2^32 items.
template <typename T>
cudaError_t launch_concat_mla_kv_quant(ConcatMlaKvQuantParams p, bool enable_pdl,
                                       cudaStream_t stream) {
  if (p.rows.count == 0) return cudaSuccess;
  p.nope_items = static_cast<uint32_t>(pack_items(p.nope));
  p.key_items = p.nope_items + static_cast<uint32_t>(pack_items(p.rope));
  const ItemPlan plan = plan_items(p.rows.count, p.key_items + pack_items(p.v), 1);
  if (!plan.fits) return cudaErrorInvalidValue;
  p.items = plan.items;
  const bool aligned = p.nope % kPackSize == 0 && p.rope % kPackSize == 0 && p.v % kPackSize == 0 &&
                       rows_are_vector_aligned<T>(p.kv, p.kv_strides) &&
                       rows_are_vector_aligned<T>(p.pe, RowStrides{p.pe_stride, 0}) &&
                       rows_are_vector_aligned<e4m3>(p.key, p.key_strides) &&
                       rows_are_vector_aligned<e4m3>(p.value, p.value_strides);
  const auto kernel = aligned ? ConcatMlaKvQuantKernel<T, true> : ConcatMlaKvQuantKernel<T, false>;
  return launch(kernel, dim3(plan.ctas), dim3(kItemThreads), enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
