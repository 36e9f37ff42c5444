// SPDX-License-Identifier: Apache-2.0
// Quantises rows to fp8 with one scale a tensor while appending them to a paged KV cache.
//
//   cache[page, entry, h, c] = saturate(round(rows[token, h, c] / scale))   the quotient in fp32
//
// (page, entry) comes from a slot mapping, paged/slot_mapping.cuh. There are two tensors, each with
// its scale. A cache entry times the scale restores the number.
//
// Layout   rows   [tokens, heads, size]            T, any two strides, unit stride in a row
//          cache  [pages, page_size, heads, size]  F, any three strides, unit stride in a row
//          scale  one fp32 number, in GPU memory or an argument
// Threads  one thread takes 16 elements of a row: two loads of 16 bytes and one store. The CTAs of
//          all key rows come first, then those of the value rows. With 8 elements a thread, and a
//          store of 8 bytes, an H200 takes 20 % longer.
// Traffic  reads the rows once, writes half as many bytes
// Source   arXiv:2309.06180 for the cache; OCP 8-bit Floating Point Specification 1.0
// Measured 2026-11-21 on an H200, bf16 to e4m3, with shares of the elementwise ceiling of the same
//          run (4387 GB/s), 8 x 8192 tokens:
//          keys and values, 8 heads of 128  94.5 us  4259 GB/s  0.97
//          MLA entries of 512 and 64        27.4 us  4126 GB/s  0.94
#pragma once

#include "precast/core/aligned_bytes.cuh"
#include "precast/core/fp8.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/vec.cuh"
#include "precast/paged/slot_mapping.cuh"

namespace precast {

struct QuantizeAppendPagedParams {
  AppendPagedParams append;
  const float* scale_data[2];  // [1], or null: then `scales` holds the value
  float scales[2];
};

// The kernel's parameters: one group for each tensor.
struct QuantizeAppendKernelParams {
  AppendKernelParams<1> append;
  const float* scale_data[2];
  float scales[2];
};

#if defined(__CUDACC__)

// Divides 16-bit numbers by one divisor with two instructions each; a division has eight, which
// would take longer than the memory traffic. high + low equals 1 / divisor up to a relative error
// of 2^-40, so a quotient may be the float next to the rounded one, but never where fp8
// distinguishes them. This was checked for all numerators of 11 bits, boundaries of fp8 up to 7
// bits, and divisors within 40 floats of those that give a boundary.
struct FastDivider {
  float shift, high, low;

  // The powers of two keep all of these within the normal numbers.
  __device__ __forceinline__ explicit FastDivider(float divisor) {
    const float size = fabsf(divisor);
    shift = size < 0x1p-60f ? 0x1p100f : size > 0x1p60f ? 0x1p-68f : 1.0f;
    divisor *= shift;
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(divisor));
    // Why `high` is below the inverse: `low` then has the sign of `high`, and no sum turns -0 into
    // 0 or adds infinities that cancel. Why `low` is above the remainder: for x = 2^n and a divisor
    // just below 2^m the exact quotient is 2^-48 above the middle of two floats.
    high = inverse * (1.0f - 0x1p-21f);
    low = fmaf(-high, divisor, 1.0f) * (inverse * (1.0f + 0x1p-20f));
    // For the divisors 0 and infinity the product with their inverse is the quotient, NaNs
    // included.
    if (isnan(low)) low = high;
  }

  template <int kSize>
  __device__ __forceinline__ void apply(float (&x)[kSize]) const {
    if (shift != 1.0f) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) x[j] *= shift;
    }
#pragma unroll
    for (int j = 0; j < kSize; ++j) x[j] = fmaf(x[j], high, x[j] * low);
  }
};

template <typename T, typename F, int kSize, bool kAligned>
__global__ __launch_bounds__(kItemThreads) void QuantizeAppendPagedKernel(
    const __grid_constant__ QuantizeAppendKernelParams q) {
  constexpr int kVecs = kSize / Vec<T>::kSize;
  const int part = blockIdx.x >= q.append.first_ctas;
  const AppendGroup<1>& group = q.append.groups[part];
  const uint32_t cta = blockIdx.x - (part ? q.append.first_ctas : 0);
  const uint32_t index = cta * blockDim.x + threadIdx.x;
  if (index >= group.items.count) return;
  const AppendPosition at(group, index);
  const int64_t column = int64_t(at.item) * kSize;
  const int64_t left = group.rows[0].size - column;
  const T* row = static_cast<const T*>(group.rows[0].rows) + at.row(group.rows[0]) +
                 column;  // [kSize] of [size]

  launch_dependent_grids();
  if (may_overlap_previous_grid()) {
    SlotLookup<SlotKind::slots>::prefetch(q.append.slots, at.token);
    prefetch_to_l2(row);
    // Why one thread: requests of all warps of a grid for one line delay the others.
    if (threadIdx.x == 0 && q.scale_data[part] != nullptr) prefetch_to_l2(q.scale_data[part]);
  }
  wait_on_dependent_grids();

  const L2Policy policy = read_policy(true);
  Vec<T> vecs[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    vecs[i] = load<kAligned>(row + i * Vec<T>::kSize, left - i * Vec<T>::kSize, policy);
  }
  const float scale =
      q.scale_data[part] == nullptr ? q.scales[part] : load_scalar(q.scale_data[part]);
  fence_load_order();
  SlotLookup<SlotKind::slots> slot(q.append.slots, at.token);
  if (!slot.find(q.append.slots)) return;

  float x[kSize];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    float eight[8];
    unpack(vecs[i], eight);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[i * 8 + j] = eight[j];
  }
  FastDivider(scale).apply(x);
  F* target = static_cast<F*>(group.rows[0].cache) +
              at.cache_row(group.rows[0], slot.page, slot.entry) + column;  // [kSize] of [size]
  if constexpr (kAligned) {
    store_fp8(target, x);
  } else {
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      if (j < left) store_one_fp8(target + j, x[j]);
    }
  }
}

#if !defined(__CUDACC_RTC__)

// Returns the elements of an item for a call: 16 or 8, or 1 if the addresses are not aligned.
inline int quantize_append_size(const AppendPagedParams& p) {
  CommonAlignment alignment;
  for (const PagedRows& part : p.parts) {
    alignment.add(part.cache);
    // An element has two bytes, so that 8 of them are a load of 16 bytes.
    if (reinterpret_cast<uint64_t>(part.rows) % kVecBytes != 0) return 1;
    for (int64_t elements : {part.size, part.token_stride, part.head_stride, part.page_stride,
                             part.entry_stride, part.cache_head_stride}) {
      alignment.add(elements);
    }
  }
  return alignment.value() >= 8 ? alignment.value() : 1;
}

template <typename T, typename F, int kSize, bool kAligned>
cudaError_t launch_quantize_append_items(const QuantizeAppendPagedParams& q, bool enable_pdl,
                                         cudaStream_t stream) {
  const uint64_t items = append_items(q.append, kSize);
  if (items > kMaxItems) return cudaErrorInvalidValue;
  QuantizeAppendKernelParams params;
  for (int i = 0; i < 2; ++i) {
    params.append.groups[i].rows[0] = q.append.parts[i];
    params.scale_data[i] = q.scale_data[i];
    params.scales[i] = q.scales[i];
  }
  // Launches of few items use smaller CTAs, which spread over more multiprocessors.
  const int threads = items <= 1u << 16 ? 128 : kItemThreads;
  const uint32_t ctas = plan_groups(params.append, q.append, kSize, threads);
  return launch(QuantizeAppendPagedKernel<T, F, kSize, kAligned>, dim3(ctas), dim3(threads),
                enable_pdl, stream, params);
}

// Launches the copy on `stream`, unless there are no tokens or elements. Sizes and strides are in
// elements; a stride that is never used must be 0. Returns cudaErrorInvalidValue if there are more
// than 2^32 items of 8 elements.
template <typename T, typename F>
cudaError_t launch_quantize_append_paged(const QuantizeAppendPagedParams& q, bool enable_pdl,
                                         cudaStream_t stream) {
  const AppendPagedParams& p = q.append;
  if (p.tokens == 0 || p.heads == 0 || (p.parts[0].size == 0 && p.parts[1].size == 0)) {
    return cudaSuccess;
  }
  switch (quantize_append_size(p)) {
    case 16:
      return launch_quantize_append_items<T, F, 16, true>(q, enable_pdl, stream);
    case 8:
      return launch_quantize_append_items<T, F, 8, true>(q, enable_pdl, stream);
  }
  return launch_quantize_append_items<T, F, 8, false>(q, enable_pdl, stream);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
