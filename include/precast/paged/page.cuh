// SPDX-License-Identifier: Apache-2.0
// Appends rows to a paged KV cache: a copy to places that a page table or a slot mapping names.
//
//   cache[page, entry, h, :] = rows[token, h, :]   (page, entry) of paged/slot_mapping.cuh, for two
//   tensors
//
// Layout   rows   [tokens, heads, size]            any two strides, unit stride in a row
//          cache  [pages, page_size, heads, size]  any three strides (NHD, HND, slices of a larger
//                                                  buffer), unit stride in a row
//          Elements are bytes here: nothing is computed, so one kernel serves every element type.
// Threads  one thread takes the same unit of a key row and of a value row: two loads in flight, and
//          one search for the slot, which is three loads after one another with a page table. Where
//          the rows of both tensors differ in length, it takes a unit of each half of one row: on
//          H200 38.0 us instead of 41.6 for 65536 MLA entries of 1152 bytes by a page table.
//          A unit is 16 bytes, or the largest power of two that divides all addresses.
// Traffic  reads the rows once, writes them once; the indices come from L1 and L2.
// Source   Kwon et al., Efficient Memory Management for Large Language Model Serving with
//          PagedAttention, arXiv:2309.06180; the page table is FlashInfer's, arXiv:2501.01005.
// Measured 2026-11-21 on an H200, bf16, with shares of the elementwise ceiling of the same run
//          (4387 GB/s), by a page table and by slots; 8 heads of 128, MLA entries of 512 and 64:
//          4 x 4096 tokens        33.4 us  0.92     32.9 us  0.93
//          8 x 8192 tokens       130.8 us  0.94    130.3 us  0.94
//          8 x 8192 MLA entries   37.4 us  0.92     37.6 us  0.92
//          In the order of the pages 4 x 4096 tokens take 1.0 us less.
#pragma once

#include "precast/core/aligned_bytes.cuh"
#include "precast/core/launch.cuh"
#include "precast/paged/slot_mapping.cuh"

namespace precast {

#if !defined(__CUDACC_RTC__)

// The bytes of a unit that suits a call.
inline int append_unit(const AppendPagedParams& p) {
  CommonAlignment unit;
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

// On H200 256 threads take up to 1 % longer.
constexpr int kAppendThreads = 128;

// kHalves: two groups of CTAs, each with both halves of one tensor's rows; else one, with the rows
// of both tensors.
template <int kUnit, SlotKind kKind, bool kHalves>
__global__ __launch_bounds__(kAppendThreads) void AppendPagedKernel(
    const __grid_constant__ AppendKernelParams<2> work) {
  const bool is_second = kHalves && blockIdx.x >= work.first_ctas;
  const AppendGroup<2>& group = work.groups[is_second];
  const uint32_t cta = blockIdx.x - (is_second ? work.first_ctas : 0);
  const uint32_t number = cta * kAppendThreads + threadIdx.x;
  if (number >= group.items.count) return;
  const AppendPosition at(group, number);
  const char* rows[2];  // [kUnit] of [size]
  bool exists[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const PagedRows& part = group.rows[i];
    rows[i] = static_cast<const char*>(part.rows) + at.row(part) + int64_t(at.item) * kUnit;
    exists[i] = at.item < group.row_items[i];
  }

  allow_next_grid();
  if (may_overlap_previous_grid()) {
    SlotLookup<kKind>::prefetch(work.slots, at.token);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (exists[i]) prefetch_to_l2(rows[i]);
    }
  }
  wait_for_previous_grid();

  const L2Policy policy = read_policy(true);
  AlignedBytes<kUnit> units[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (exists[i]) units[i] = AlignedBytes<kUnit>::load(rows[i], policy);
  }
  fence_load_order();
  SlotLookup<kKind> slot(work.slots, at.token);
  if (!slot.find(work.slots)) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const PagedRows& part = group.rows[i];
    char* target = static_cast<char*>(part.cache) + at.cache_row(part, slot.page, slot.entry) +
                   int64_t(at.item) * kUnit;  // [kUnit] of [size]
    if (exists[i]) units[i].store(target);
  }
}

#if !defined(__CUDACC_RTC__)

// Fewer items need all their threads: on H200 256 tokens of MLA take 1.0 us, by halves 1.2 us.
constexpr uint64_t kManyAppendItems = 1 << 16;

// The first and the second half of `row`, as rows of their own.
inline void split_row(const PagedRows& row, int unit, PagedRows (&halves)[2]) {
  const int64_t first = (row.size / unit + 1) / 2 * unit;
  halves[0] = halves[1] = row;
  halves[0].size = first;
  halves[1].size = row.size - first;
  halves[1].rows = static_cast<const char*>(row.rows) + first;
  halves[1].cache = static_cast<char*>(row.cache) + first;
}

template <int kUnit, SlotKind kKind>
cudaError_t launch_append_units(const AppendPagedParams& p, bool enable_pdl, cudaStream_t stream) {
  const uint64_t items = append_items(p, kUnit);
  if (items > kMaxItems) return cudaErrorInvalidValue;
  AppendKernelParams<2> work;
  auto kernel = AppendPagedKernel<kUnit, kKind, false>;
  for (int i = 0; i < 2; ++i) work.groups[0].rows[i] = p.parts[i];
  if constexpr (kUnit == kVecBytes) {
    if (p.parts[0].size != p.parts[1].size && items > kManyAppendItems) {
      kernel = AppendPagedKernel<kUnit, kKind, true>;
      for (int i = 0; i < 2; ++i) split_row(p.parts[i], kUnit, work.groups[i].rows);
    }
  }
  const uint32_t ctas = plan_groups(work, p, kUnit, kAppendThreads);
  return launch(kernel, dim3(ctas), dim3(kAppendThreads), enable_pdl, stream, work);
}

// Launches the copy on `stream`; nothing without tokens or bytes. Sizes and strides of `p` are in
// bytes; a stride that is never taken must be 0. cudaErrorInvalidValue if there are more than 2^32
// units.
template <SlotKind kKind>
cudaError_t launch_append_paged(const AppendPagedParams& p, bool enable_pdl, cudaStream_t stream) {
  static_assert(kKind != SlotKind::table32, "chosen below");
  if (p.tokens == 0 || p.heads == 0 || (p.parts[0].size == 0 && p.parts[1].size == 0)) {
    return cudaSuccess;
  }
  switch (append_unit(p)) {
    case 16:
      if (kKind == SlotKind::table && has_index32_only(p.slots)) {
        return launch_append_units<16, SlotKind::table32>(p, enable_pdl, stream);
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
