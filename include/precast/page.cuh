// SPDX-License-Identifier: Apache-2.0
// Appends rows to a paged KV cache: a copy to places that a page table or a slot mapping names.
//
//   cache[page, entry, h, :] = rows[token, h, :]   (page, entry) of core/paged.cuh, for two tensors
//
// Layout   rows   [tokens, heads, size]            any two strides, unit stride in a row
//          cache  [pages, page_size, heads, size]  any three strides (NHD, HND, slices of a larger
//                                                  buffer), unit stride in a row
//          Elements are bytes here: nothing is computed, so one kernel serves every element type.
// Threads  one thread takes the same unit of a key row and of a value row: two loads in flight, and
//          one search for the slot, which is three loads after one another with a page table.
//          A unit is 16 bytes, or the largest power of two that divides all addresses.
// Traffic  reads the rows once, writes them once; the indices come from L1 and L2.
// Source   Kwon et al., Efficient Memory Management for Large Language Model Serving with
//          PagedAttention, arXiv:2309.06180; the page table is FlashInfer's, arXiv:2501.01005.
#pragma once

#include "precast/core/launch.cuh"
#include "precast/core/paged.cuh"
#include "precast/core/unit.cuh"

namespace precast {

#if !defined(__CUDACC_RTC__)

// The bytes of a unit that suits a call.
inline int append_unit(const AppendPagedParams& p) {
  UnitChoice unit;
  for (const PagedRows& part : p.parts) {
    unit.add(part.rows);
    unit.add(part.cache);
    for (int64_t bytes : {part.size, part.token_stride, part.head_stride, part.page_stride,
                          part.entry_stride, part.cache_head_stride}) {
      unit.add(bytes);
    }
  }
  return unit.value();
}

#endif

#if defined(__CUDACC__)

template <int kUnit, SlotKind kKind>
__global__ __launch_bounds__(kItemThreads) void AppendPagedKernel(
    const __grid_constant__ AppendPagedParams p) {
  const uint32_t number = blockIdx.x * blockDim.x + threadIdx.x;
  if (number >= p.items.count) return;
  const AppendPosition at(p, number);
  const char* rows[2];  // [kUnit] of [size]
  bool exists[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const PagedRows& part = p.parts[i];
    rows[i] = static_cast<const char*>(part.rows) + at.row(part) + int64_t(at.item) * kUnit;
    exists[i] = at.item < p.part_items[i];
  }

  allow_next_grid();
  if (may_overlap_previous_grid()) {
    SlotFinder<kKind>::prefetch(p.slots, at.token);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (exists[i]) prefetch_to_l2(rows[i]);
    }
  }
  wait_for_previous_grid();

  const L2Policy policy = read_policy(true);
  Unit<kUnit> units[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (exists[i]) units[i] = Unit<kUnit>::load(rows[i], policy);
  }
  issue_loads();
  SlotFinder<kKind> slot(p.slots, at.token);
  if (!slot.find(p.slots)) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const PagedRows& part = p.parts[i];
    char* target = static_cast<char*>(part.cache) + at.cache_row(part, slot.page, slot.entry) +
                   int64_t(at.item) * kUnit;  // [kUnit] of [size]
    if (exists[i]) units[i].store(target);
  }
}

#if !defined(__CUDACC_RTC__)

template <int kUnit, SlotKind kKind>
cudaError_t launch_append_units(AppendPagedParams p, bool enable_pdl, cudaStream_t stream) {
  const AppendPlan plan = plan_append(p, kUnit);
  if (!plan.fits) return cudaErrorInvalidValue;
  return launch(AppendPagedKernel<kUnit, kKind>, dim3(plan.ctas), dim3(plan.threads), enable_pdl,
                stream, p);
}

// Launches the copy on `stream`; nothing without tokens or bytes. Sizes and strides of `p` are in
// bytes; a stride that is never taken must be 0. cudaErrorInvalidValue if there are more than 2^32
// units.
template <SlotKind kKind>
cudaError_t launch_append_paged(const AppendPagedParams& p, bool enable_pdl, cudaStream_t stream) {
  static_assert(kKind != SlotKind::narrow_table, "chosen below");
  if (p.tokens == 0 || p.heads == 0 || (p.parts[0].size == 0 && p.parts[1].size == 0)) {
    return cudaSuccess;
  }
  switch (append_unit(p)) {
    case 16:
      if (kKind == SlotKind::table && is_narrow(p.slots)) {
        return launch_append_units<16, SlotKind::narrow_table>(p, enable_pdl, stream);
      }
      return launch_append_units<16, kKind>(p, enable_pdl, stream);
    case 8:
      return launch_append_units<8, kKind>(p, enable_pdl, stream);
    case 4:
      return launch_append_units<4, kKind>(p, enable_pdl, stream);
    case 2:
      return launch_append_units<2, kKind>(p, enable_pdl, stream);
  }
  return launch_append_units<1, kKind>(p, enable_pdl, stream);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
