// SPDX-License-Identifier: Apache-2.0
// Quantises rows to NVFP4, with one scale a tensor, while appending them to a paged KV cache.
//
//   amax = max |x| of a block of 16 elements of rows[token, h], without NaN
//   factors[page, entry, h, block] = s = e4m3((1 / g) * (amax * (1 / 6)))
//   cache[page, entry, h, block]   = e2m1(x * min(1 / (s * (1 / (1 / g))), largest)), 0 if s is 0
//
// All in fp32, each operation rounded once: the formula of quantize/block_quantize.cuh with the
// reciprocal of g, so that e2m1 times s times g restores the number. (page, entry) comes from a
// page table or a slot mapping, paged/slot_mapping.cuh. There are two tensors, each with its g.
//
// Layout   rows     [tokens, heads, size]                 T (16-bit), any two strides, unit stride
//                                                         in a row; size is a multiple of 16
//          cache    [pages, page_size, heads, size / 2]   e2m1, the first of two in the lower 4
//                                                         bits; any three strides
//          factors  [pages, page_size, heads, size / 16]  e4m3, likewise
//          g        one fp32 number, in GPU memory or an argument
// Threads  one thread takes a block: two loads of 16 bytes, a store of 8 bytes and one of a byte.
//          The CTAs of all key rows come first, then those of the value rows.
// Traffic  reads the rows once, writes 9 bytes for each 32
// Source   NVIDIA, NVFP4 (arXiv:2509.25149); arXiv:2309.06180 for the cache
// Measured 2026-11-23 on an H200, bf16, 8 x 8192 tokens of 8 heads of 128, with shares of the
//          elementwise ceiling of the same run: by slots 107 us, 0.73; by a page table 120 us, 0.65
#pragma once

#include "precast/core/aligned_bytes.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/vec.cuh"
#include "precast/paged/slot_mapping.cuh"
#include "precast/quantize/block_values.cuh"

namespace precast {

struct QuantizeAppendNvfp4Params {
  AppendPagedParams append;    // strides of rows in elements, those of the cache in bytes
  PagedRows factors[2];        // the cache of the block scales; its rows are not used
  const float* scale_data[2];  // [1], or null: then `scales` holds the value
  float scales[2];
};

// The kernel's parameters: one group for each tensor.
struct QuantizeAppendNvfp4KernelParams {
  AppendKernelParams<1> append;
  PagedRows factors[2];
  const float* scale_data[2];
  float scales[2];
};

#if defined(__CUDACC__)

// Stores 16 codes to any address.
__device__ __forceinline__ void store_code_bytes(char* target, uint2 codes) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t word = i < 4 ? codes.x : codes.y;
    store_scale_byte(target, i, word >> i % 4 * 8 & 0xffu);
  }
}

template <typename T, SlotKind kKind, bool kAligned>
__global__ __launch_bounds__(kItemThreads) void QuantizeAppendNvfp4Kernel(
    const __grid_constant__ QuantizeAppendNvfp4KernelParams q) {
  const int part = blockIdx.x >= q.append.first_ctas;
  const AppendGroup<1>& group = q.append.groups[part];
  const uint32_t cta = blockIdx.x - (part ? q.append.first_ctas : 0);
  const uint32_t index = cta * blockDim.x + threadIdx.x;
  if (index >= group.items.count) return;
  const AppendPosition at(group, index);
  const T* row = static_cast<const T*>(group.rows[0].rows) + at.row(group.rows[0]) +
                 int64_t(at.item) * kBlockElements;  // [kBlockElements] of [size]

  launch_dependent_grids();
  if (may_overlap_previous_grid()) {
    SlotLookup<kKind>::prefetch(q.append.slots, at.token);
    prefetch_to_l2(row);
    // Why one thread: requests of all warps of a grid for one line delay the others.
    if (threadIdx.x == 0 && q.scale_data[part] != nullptr) prefetch_to_l2(q.scale_data[part]);
  }
  wait_on_dependent_grids();

  const L2Policy policy = read_policy(true);
  Vec<T> vecs[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    vecs[i] = load<kAligned>(row + i * Vec<T>::kSize, int64_t(Vec<T>::kSize), policy);
  }
  const float scale =
      q.scale_data[part] == nullptr ? q.scales[part] : load_scalar(q.scale_data[part]);
  fence_load_order();
  SlotLookup<kKind> slot(q.append.slots, at.token);
  if (!slot.find(q.append.slots)) return;

  float amax = largest<true>(vecs);
  const bool has_nan = amax != amax;
  // Why a vote: otherwise the compiler computes the second maximum in every case. Any lanes that
  // are together may vote, because a second maximum of elements without NaN is the first one.
  if (__any_sync(__activemask(), has_nan)) amax = largest<false>(vecs);
  const BlockScale block = block_scale<BlockRecipe::nvfp4>(amax, __frcp_rn(scale));
  const bool small = !has_nan && __fmul_rn(amax, block.multiplier) < 7.0f;
  const uint2 codes = quantize_e2m1(vecs, block.multiplier, small);

  char* target = static_cast<char*>(group.rows[0].cache) +
                 at.cache_row(group.rows[0], slot.page, slot.entry) +
                 int64_t(at.item) * (kBlockElements / 2);  // [8] of [size / 2]
  if constexpr (kAligned) {
    AlignedBytes<8>{codes}.store(target);
  } else {
    store_code_bytes(target, codes);
  }
  const PagedRows& factors = q.factors[part];
  store_scale_byte(static_cast<char*>(factors.cache) +
                       at.cache_row(factors, slot.page, slot.entry),  // [size / 16]
                   at.item, block.bits);
}

#if !defined(__CUDACC_RTC__)

// Whether rows are loaded by 16 bytes and codes stored by 8.
inline bool quantize_append_nvfp4_is_aligned(const AppendPagedParams& p) {
  for (const PagedRows& part : p.parts) {
    const uint64_t elements = part.token_stride | part.head_stride;
    const uint64_t bytes = part.page_stride | part.entry_stride | part.cache_head_stride;
    if (reinterpret_cast<uint64_t>(part.rows) % kVecBytes != 0 || elements % 8 != 0) return false;
    if (reinterpret_cast<uint64_t>(part.cache) % 8 != 0 || bytes % 8 != 0) return false;
  }
  return true;
}

template <typename T, SlotKind kKind>
auto choose_quantize_append_nvfp4(bool aligned) {
  return aligned ? QuantizeAppendNvfp4Kernel<T, kKind, true>
                 : QuantizeAppendNvfp4Kernel<T, kKind, false>;
}

// Launches the quantisation on `stream`, unless there are no tokens or elements. A stride that is
// never used must be 0. Returns cudaErrorInvalidValue if there are more than 2^32 blocks.
template <typename T>
cudaError_t launch_quantize_append_nvfp4(const QuantizeAppendNvfp4Params& q, bool from_slots,
                                         bool enable_pdl, cudaStream_t stream) {
  const AppendPagedParams& p = q.append;
  if (p.tokens == 0 || p.heads == 0 || (p.parts[0].size == 0 && p.parts[1].size == 0)) {
    return cudaSuccess;
  }
  const uint64_t items = append_items(p, kBlockElements);
  if (items > kMaxItems) return cudaErrorInvalidValue;
  QuantizeAppendNvfp4KernelParams params;
  for (int i = 0; i < 2; ++i) {
    params.append.groups[i].rows[0] = p.parts[i];
    params.factors[i] = q.factors[i];
    params.scale_data[i] = q.scale_data[i];
    params.scales[i] = q.scales[i];
  }
  // Launches of few items use smaller CTAs, which spread over more multiprocessors.
  const int threads = items <= 1u << 16 ? 128 : kItemThreads;
  const uint32_t ctas = plan_groups(params.append, p, kBlockElements, threads);
  const bool aligned = quantize_append_nvfp4_is_aligned(p);
  const auto kernel = from_slots ? choose_quantize_append_nvfp4<T, SlotKind::slots>(aligned)
                      : has_index32_only(p.slots)
                          ? choose_quantize_append_nvfp4<T, SlotKind::table32>(aligned)
                          : choose_quantize_append_nvfp4<T, SlotKind::table>(aligned);
  return launch(kernel, dim3(ctas), dim3(threads), enable_pdl, stream, params);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
