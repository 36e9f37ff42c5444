// SPDX-License-Identifier: Apache-2.0
// Appends rows to a paged KV cache: copies to slots that a page table or a slot mapping gives.
//
//   cache[page, entry, h, :] = rows[token, h, :]   (page, entry) from paged/slot_mapping.cuh, for
//   two
//                                                  tensors
//
// Layout   rows   [tokens, heads, size]            any two strides, unit stride in a row
//          cache  [pages, page_size, heads, size]  any three strides (NHD, HND, slices of a larger
//                                                  buffer), unit stride in a row
//          Elements are bytes here: nothing is computed, so one kernel serves every element type.
// Threads  one thread copies the same access of a key row and of a value row: two loads in flight,
//          and one search for the slot, which is three dependent loads with a page table. If the
//          rows of the two tensors differ in length, a thread copies one access of each half of a
//          row: on an H200 38.0 us instead of 41.6 for 65536 MLA entries of 1152 bytes with a page
//          table. An access is 16 bytes, or the largest power of two that divides all addresses.
// Traffic  reads the rows once, writes them once; the indices come from L1 and L2
// Source   Kwon et al., Efficient Memory Management for Large Language Model Serving with
//          PagedAttention, arXiv:2309.06180; the page table is FlashInfer's, arXiv:2501.01005
// Measured 2026-11-21 on an H200, bf16, with shares of the elementwise ceiling of the same run
//          (4387 GB/s), with a page table and with slots; 8 heads of 128, MLA entries of 512 and
//          64:
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

// Returns the access size in bytes for a call.
inline int append_access_bytes(const AppendPagedParams& p) {
  CommonAlignment alignment;
  for (const PagedRows& part : p.parts) {
    alignment.add(part.rows);
    alignment.add(part.cache);
    for (int64_t bytes : {part.size, part.token_stride, part.head_stride, part.page_stride,
                          part.entry_stride, part.cache_head_stride}) {
      alignment.add(bytes);
    }
  }
  return alignment.value();
}

#endif

#if defined(__CUDACC__)

// On an H200, 256 threads take up to 1 % longer.
constexpr int kAppendThreads = 128;

// With kSplitRows there are two groups of CTAs, each with both halves of one tensor's rows;
// otherwise one group with the rows of both tensors.
template <int kAccessBytes, SlotKind kKind, bool kSplitRows>
__global__ __launch_bounds__(kAppendThreads) void AppendPagedKernel(
    const __grid_constant__ AppendKernelParams<2> params) {
  const bool is_second = kSplitRows && blockIdx.x >= params.first_ctas;
  const AppendGroup<2>& group = params.groups[is_second];
  const uint32_t cta = blockIdx.x - (is_second ? params.first_ctas : 0);
  const uint32_t index = cta * kAppendThreads + threadIdx.x;
  if (index >= group.items.count) return;
  const AppendPosition at(group, index);
  const char* rows[2];  // [kUnit] of [size]
  bool exists[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const PagedRows& part = group.rows[i];
    rows[i] = static_cast<const char*>(part.rows) + at.row(part) + int64_t(at.item) * kAccessBytes;
    exists[i] = at.item < group.row_items[i];
  }

  launch_dependent_grids();
  if (may_overlap_previous_grid()) {
    SlotLookup<kKind>::prefetch(params.slots, at.token);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (exists[i]) prefetch_to_l2(rows[i]);
    }
  }
  wait_on_dependent_grids();

  const L2Policy policy = read_policy(true);
  AlignedBytes<kAccessBytes> accesses[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (exists[i]) accesses[i] = AlignedBytes<kAccessBytes>::load(rows[i], policy);
  }
  fence_load_order();
  SlotLookup<kKind> slot(params.slots, at.token);
  if (!slot.find(params.slots)) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const PagedRows& part = group.rows[i];
    char* target = static_cast<char*>(part.cache) + at.cache_row(part, slot.page, slot.entry) +
                   int64_t(at.item) * kAccessBytes;  // [kUnit] of [size]
    if (exists[i]) accesses[i].store(target);
  }
}

#if !defined(__CUDACC_RTC__)

// Smaller launches do not split rows, because they need all their threads: on an H200, 256 tokens
// of MLA take 1.0 us, and 1.2 us with split rows.
constexpr uint64_t kSplitRowItems = 1 << 16;

// Splits a row into two halves, each a row of its own.
inline void split_row(const PagedRows& row, int access_bytes, PagedRows (&halves)[2]) {
  const int64_t first = (row.size / access_bytes + 1) / 2 * access_bytes;
  halves[0] = halves[1] = row;
  halves[0].size = first;
  halves[1].size = row.size - first;
  halves[1].rows = static_cast<const char*>(row.rows) + first;
  halves[1].cache = static_cast<char*>(row.cache) + first;
}

template <int kAccessBytes, SlotKind kKind>
cudaError_t launch_append_paged_accesses(const AppendPagedParams& p, bool enable_pdl,
                                         cudaStream_t stream) {
  const uint64_t items = append_items(p, kAccessBytes);
  if (items > kMaxItems) return cudaErrorInvalidValue;
  AppendKernelParams<2> params;
  auto kernel = AppendPagedKernel<kAccessBytes, kKind, false>;
  for (int i = 0; i < 2; ++i) params.groups[0].rows[i] = p.parts[i];
  if constexpr (kAccessBytes == kVecBytes) {
    if (p.parts[0].size != p.parts[1].size && items > kSplitRowItems) {
      kernel = AppendPagedKernel<kAccessBytes, kKind, true>;
      for (int i = 0; i < 2; ++i) split_row(p.parts[i], kAccessBytes, params.groups[i].rows);
    }
  }
  const uint32_t ctas = plan_groups(params, p, kAccessBytes, kAppendThreads);
  return launch(kernel, dim3(ctas), dim3(kAppendThreads), enable_pdl, stream, params);
}

// Launches the copy on `stream`, unless there are no tokens or bytes. Sizes and strides of `p` are
// in bytes; a stride that is never used must be 0. Returns cudaErrorInvalidValue if there are more
// than 2^32 accesses.
template <SlotKind kKind>
cudaError_t launch_append_paged(const AppendPagedParams& p, bool enable_pdl, cudaStream_t stream) {
  static_assert(kKind != SlotKind::table32, "chosen below");
  if (p.tokens == 0 || p.heads == 0 || (p.parts[0].size == 0 && p.parts[1].size == 0)) {
    return cudaSuccess;
  }
  switch (append_access_bytes(p)) {
    case 16:
      if (kKind == SlotKind::table && has_index32_only(p.slots)) {
        return launch_append_paged_accesses<16, SlotKind::table32>(p, enable_pdl, stream);
      }
      return launch_append_paged_accesses<16, kKind>(p, enable_pdl, stream);
    case 8:
      return launch_append_paged_accesses<8, kKind>(p, enable_pdl, stream);
    case 4:
      return launch_append_paged_accesses<4, kKind>(p, enable_pdl, stream);
    case 2:
      return launch_append_paged_accesses<2, kKind>(p, enable_pdl, stream);
  }
  return launch_append_paged_accesses<1, kKind>(p, enable_pdl, stream);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
