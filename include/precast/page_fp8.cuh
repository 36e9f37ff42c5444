// SPDX-License-Identifier: Apache-2.0
// Quantises rows to fp8 with one scale a tensor, on their way into a paged KV cache.
//
//   cache[page, entry, h, c] = saturate(round(rows[token, h, c] / scale))   the quotient in fp32
//
// (page, entry) from a slot mapping, core/paged.cuh; for two tensors, each with its scale. A cache
// entry times the scale is the number again.
//
// Layout   rows   [tokens, heads, size]            T, any two strides, unit stride in a row
//          cache  [pages, page_size, heads, size]  F, any three strides, unit stride in a row
//          scale  one fp32 number, in memory of the GPU or an argument
// Threads  one thread takes the same 8 elements of a key row and of a value row: two loads of 16
//          bytes, two stores of 8.
// Traffic  reads the rows once, writes half as many bytes.
// Source   arXiv:2309.06180 for the cache; OCP 8-bit Floating Point Specification 1.0.
#pragma once

#include "precast/core/fp8.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/paged.cuh"
#include "precast/core/vec.cuh"

namespace precast {

struct QuantizeAppendPagedParams {
  AppendPagedParams append;
  const float* scale_data[2];  // [1], or null: `scales` holds it
  float scales[2];
};

#if defined(__CUDACC__)

// Quotients by one divisor. Rounded as x / divisor for all that fp8 can hold: the remainder of the
// first estimate, which is exact, corrects it (Markstein, IBM J. Res. Dev. 34, 1990). Why: half the
// instructions of a division, which would take longer than the memory.
struct Quotient {
  float divisor, inverse, shift;

  // The powers of two keep the inverse and the remainder within the normal numbers.
  __device__ __forceinline__ explicit Quotient(float by) {
    const float size = fabsf(by);
    shift = size < 0x1p-60f ? 0x1p100f : size > 0x1p60f ? 0x1p-68f : 1.0f;
    divisor = by * shift;
    inverse = __frcp_rn(divisor);
  }

  __device__ __forceinline__ float of(float x) const {
    x *= shift;
    const float estimate = x * inverse;
    const float remainder = fmaf(-estimate, divisor, x);
    // The sign is that of the estimate: the remainder of a negative zero is a positive one. Far
    // beyond fp8, where the product of the remainder may overflow, the estimate is enough.
    const float corrected = copysignf(fmaf(remainder, inverse, estimate), estimate);
    return fabsf(estimate) <= 0x1p20f ? corrected : estimate;
  }
};

template <typename T, typename F, bool kAligned>
__global__ __launch_bounds__(kItemThreads) void QuantizeAppendPagedKernel(
    const __grid_constant__ QuantizeAppendPagedParams q) {
  constexpr int kSize = Vec<T>::kSize;
  const AppendPagedParams& p = q.append;
  const uint32_t number = blockIdx.x * blockDim.x + threadIdx.x;
  if (number >= p.items.count) return;
  const AppendPosition at(p, number);
  const int64_t column = int64_t(at.item) * kSize;
  const T* rows[2];  // [kSize] of [size]
  bool exists[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    rows[i] = static_cast<const T*>(p.parts[i].rows) + at.row(p.parts[i]) + column;
    exists[i] = at.item < p.part_items[i];
  }

  allow_next_grid();
  if (may_overlap_previous_grid()) {
    SlotFinder<SlotKind::slots>::prefetch(p.slots, at.token);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (exists[i]) prefetch_to_l2(rows[i]);
      if (q.scale_data[i] != nullptr) prefetch_to_l2(q.scale_data[i]);
    }
  }
  wait_for_previous_grid();

  const L2Policy policy = read_policy(true);
  Vec<T> vecs[2];
  float scales[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (exists[i]) vecs[i] = load<kAligned>(rows[i], p.parts[i].size - column, policy);
    scales[i] = q.scales[i];
    if (q.scale_data[i] != nullptr) scales[i] = __uint_as_float(load_word(q.scale_data[i]));
  }
  issue_loads();
  SlotFinder<SlotKind::slots> slot(p.slots, at.token);
  if (!slot.find(p.slots)) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!exists[i]) continue;
    const PagedRows& part = p.parts[i];
    F* target = static_cast<F*>(part.cache) + at.cache_row(part, slot.page, slot.entry) +
                column;  // [kSize] of [size]
    const Quotient quotient(scales[i]);
    float x[kSize];
    unpack(vecs[i], x);
#pragma unroll
    for (int j = 0; j < kSize; ++j) x[j] = quotient.of(x[j]);
    if constexpr (kAligned) {
      store_fp8(target, x);
    } else {
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        if (column + j < part.size) store_one_fp8(target + j, x[j]);
      }
    }
  }
}

#if !defined(__CUDACC_RTC__)

// Launches the copy on `stream`; nothing without tokens or elements. Sizes and strides are in
// elements; a stride that is never taken must be 0. cudaErrorInvalidValue if there are more than
// 2^32 items of 8 elements.
template <typename T, typename F>
cudaError_t launch_quantize_append_paged(QuantizeAppendPagedParams q, bool enable_pdl,
                                         cudaStream_t stream) {
  AppendPagedParams& p = q.append;
  if (p.tokens == 0 || p.heads == 0 || (p.parts[0].size == 0 && p.parts[1].size == 0)) {
    return cudaSuccess;
  }
  constexpr int kSize = Vec<T>::kSize;
  const AppendPlan plan = plan_append(p, kSize);
  if (!plan.fits) return cudaErrorInvalidValue;
  bool aligned = true;
  for (const PagedRows& part : p.parts) {
    aligned = aligned && reinterpret_cast<uint64_t>(part.rows) % kVecBytes == 0 &&
              reinterpret_cast<uint64_t>(part.cache) % kSize == 0;
    for (int64_t elements : {part.size, part.token_stride, part.head_stride, part.page_stride,
                             part.entry_stride, part.cache_head_stride}) {
      aligned = aligned && elements % kSize == 0;
    }
  }
  const auto kernel =
      aligned ? QuantizeAppendPagedKernel<T, F, true> : QuantizeAppendPagedKernel<T, F, false>;
  return launch(kernel, dim3(plan.ctas), dim3(plan.threads), enable_pdl, stream, q);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
