// SPDX-License-Identifier: Apache-2.0
// Dequantisation of the keys and values of whole requests from a paged KV cache in NVFP4.
//
//   out[b, t, h, i] = round((q * s) * g)  for t < seq_lens[b]; other tokens are not written
//
//   q = data[page, entry, h, i], s = scales[page, entry, h, i / 16],
//   page = block_tables[b, t / page_size], entry = t mod page_size
//
// The first product is exact, the second one is fp32. Tokens whose page is not in the cache are not
// written either, so that no index makes the kernel read elsewhere.
//
// Layout   data          [pages, page_size, heads, head_dim / 2]   e2m1, the first of two in the
//                        lower 4 bits; any strides except in the last dimension
//          scales        [pages, page_size, heads, head_dim / 16]  e4m3, likewise
//          g             [1]                                       fp32
//          block_tables  [batch, columns]                          int32 or int64, any row stride
//          seq_lens      [batch]                                   int32
//          out           [batch, length, heads, head_dim]          T, contiguous, 16-byte aligned
//          each for keys and for values, whose head_dim may differ
// Threads  one thread writes 16 bytes of the keys and of the values of neighbouring tokens in one
//          page. Why: these share the page and most of the index arithmetic.
// Traffic  reads data and scales once, writes out once; the page table comes from L2
// Source   NVIDIA, Pretraining Large Language Models with NVFP4, arXiv:2509.25149; Kwon et al.,
//          PagedAttention, arXiv:2309.06180
#pragma once

#include "precast/core/items.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/vec.cuh"
#include "precast/paged/slot_mapping.cuh"
#include "precast/quantize/block_dequantize.cuh"

namespace precast {

// The bytes of a paged tensor, and their strides.
struct PagedBytes {
  const void* data = nullptr;  // [pages, page_size, heads, bytes]
  int64_t page_stride = 0, entry_stride = 0, head_stride = 0;
};

// The keys or the values.
struct PagedTensor {
  PagedBytes data;
  PagedBytes scales;
  const float* global = nullptr;  // [1]
  void* out = nullptr;            // [batch, length, heads, head_dim]
  uint32_t head_dim = 0;          // a multiple of 16
};

struct PagedDequantizeParams {
  PagedTensor parts[2];
  IndexTensor block_tables;  // [batch, columns], columns * page_size >= length
  int64_t table_stride = 0;
  const int32_t* seq_lens = nullptr;  // [batch]
  uint32_t batch = 0, length = 0, heads = 0;
  int64_t pages = 0;
  FastDivmod page_size;
  // Set by the launcher:
  FastDivmod groups;      // groups of tokens in a request
  FastDivmod head_items;  // items of the longer of the two rows
  Items items;            // items of a group of tokens
};

#if defined(__CUDACC__)

// Loads the packed elements of one item.
template <bool kAligned>
__device__ __forceinline__ uint32_t load_codes(const char* source, L2Policy policy) {
  if constexpr (kAligned) return static_cast<uint32_t>(load_packed<4>(source, policy));
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) codes |= load_byte(source + i) << 8 * i;
  return codes;
}

__device__ __forceinline__ int64_t offset_of(const PagedBytes& bytes, int64_t page, uint32_t entry,
                                             uint32_t head) {
  return page * bytes.page_stride + entry * bytes.entry_stride + head * bytes.head_stride;
}

// kSameLayout: values have the strides and the head_dim of keys, which saves half of the index
// arithmetic.
template <typename T, int kTokens, bool kAligned, bool kSameLayout>
__global__ __launch_bounds__(kItemThreads) void PagedDequantizeKernel(
    const __grid_constant__ PagedDequantizeParams p) {
  constexpr int kSize = Vec<T>::kSize;
  static_assert(kSize == 8, "a 16-bit type");
  const uint32_t number = blockIdx.x * kItemThreads + threadIdx.x;
  if (number >= p.items.count) return;
  const uint32_t group = p.items.per_row.divide(number);
  const uint32_t rest = number - group * p.items.per_row.value;
  const uint32_t head = p.head_items.divide(rest);
  const uint32_t item = rest - head * p.head_items.value;
  const uint32_t request = p.groups.divide(group);
  const uint32_t first = (group - request * p.groups.value) * kTokens;
  const uint32_t column = p.page_size.divide(first);
  const uint32_t entry = first - column * p.page_size.value;
  const int64_t at = request * p.table_stride + column;

  launch_dependent_grids();
  // Why by one thread: on an H200, prefetches of so few lines by every thread took 8 to 10 us.
  if (may_overlap_previous_grid() && threadIdx.x == 0) {
    if (first == 0) prefetch_to_l2(p.seq_lens + request);
    prefetch_to_l2(address_of(p.block_tables, at));
  }
  wait_on_dependent_grids();

  // The page of a token behind the end may be any number. It is not used.
  const int64_t page = load_index(p.block_tables, at);
  const int32_t tokens = load_index32({p.seq_lens, false}, request);
  const float globals[2] = {load_scalar(p.parts[0].global), load_scalar(p.parts[1].global)};
  const uint32_t end = min(static_cast<uint32_t>(max(tokens, 0)), p.length);
  if (first >= end || page < 0 || page >= p.pages) return;

  const L2Policy policy = read_policy(true);
  uint32_t codes[2][kTokens];
  uint32_t scales[2][kTokens];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const PagedTensor& part = p.parts[i];
    const PagedTensor& like = p.parts[kSameLayout ? 0 : i];
    const char* data = static_cast<const char*>(part.data.data) +
                       offset_of(like.data, page, entry, head) + item * (kSize / 2);
    const char* scale = static_cast<const char*>(part.scales.data) +
                        // one scale for 16 elements
                        offset_of(like.scales, page, entry, head) + item / 2;
    const bool is_in_row = kSameLayout || item * kSize < part.head_dim;
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      if (!is_in_row || first + j >= end) continue;
      codes[i][j] = load_codes<kAligned>(data + j * like.data.entry_stride, policy);
      scales[i][j] = load_byte(scale + j * like.scales.entry_stride);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const PagedTensor& part = p.parts[i];
    const uint32_t head_dim = p.parts[kSameLayout ? 0 : i].head_dim;
    const int64_t row = (int64_t(request) * p.length + first) * p.heads + head;
    T* out = static_cast<T*>(part.out) + row * head_dim + item * kSize;
    const bool is_in_row = kSameLayout || item * kSize < head_dim;
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      if (!is_in_row || first + j >= end) continue;
      float x[kSize];
      unpack_block<BlockFormat::e2m1_e4m3>(codes[i][j], scales[i][j], x);
#pragma unroll
      for (int k = 0; k < kSize; ++k) x[k] = __fmul_rn(x[k], globals[i]);
      store_vec(out + int64_t(j) * p.heads * head_dim, pack<T>(x));
    }
  }
}

#endif  // __CUDACC__

#if !defined(__CUDACC_RTC__)

// Neighbouring tokens of one thread, if the page size allows it. On an H200 eight take 2 to 6 %
// more time; two and four differ by less than 2 %.
constexpr int kPagedDequantizeTokens = 4;

// Fills in what the launcher sets. Returns false if there are more items than 32 bits can count.
inline bool plan_paged_dequantize(PagedDequantizeParams& p, uint32_t tokens) {
  const uint32_t longer =
      p.parts[0].head_dim > p.parts[1].head_dim ? p.parts[0].head_dim : p.parts[1].head_dim;
  const uint64_t per_group = uint64_t(longer / 8) * p.heads;
  const uint64_t groups = (uint64_t(p.length) + tokens - 1) / tokens;
  if (per_group > kMaxItems || groups * p.batch > kMaxItems / per_group) return false;
  p.groups = FastDivmod(static_cast<uint32_t>(groups));
  p.head_items = FastDivmod(longer / 8);
  p.items.per_row = FastDivmod(static_cast<uint32_t>(per_group));
  p.items.count = static_cast<uint32_t>(per_group * groups * p.batch);
  return true;
}

#endif

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)

inline bool is_word_aligned(const PagedBytes& bytes) {
  const uint64_t bits = reinterpret_cast<uint64_t>(bytes.data) | bytes.page_stride |
                        bytes.entry_stride | bytes.head_stride;
  return bits % 4 == 0;
}

inline bool have_same_strides(const PagedBytes& a, const PagedBytes& b) {
  return a.page_stride == b.page_stride && a.entry_stride == b.entry_stride &&
         a.head_stride == b.head_stride;
}

template <typename T, int kTokens>
auto choose_paged_dequantize(const PagedTensor& keys, const PagedTensor& values) {
  if (!is_word_aligned(keys.data) || !is_word_aligned(values.data)) {
    return PagedDequantizeKernel<T, kTokens, false, false>;
  }
  const bool same_layout = keys.head_dim == values.head_dim &&
                           have_same_strides(keys.data, values.data) &&
                           have_same_strides(keys.scales, values.scales);
  return same_layout ? PagedDequantizeKernel<T, kTokens, true, true>
                     : PagedDequantizeKernel<T, kTokens, true, false>;
}

// Launches the kernel on `stream`, unless there are no elements. Returns cudaErrorInvalidValue if
// the outputs have more than 2^32 items of 16 bytes.
template <typename T>
cudaError_t launch_paged_dequantize(PagedDequantizeParams p, bool enable_pdl, cudaStream_t stream) {
  if (p.batch == 0 || p.length == 0 || p.heads == 0) return cudaSuccess;
  if (p.parts[0].head_dim == 0 && p.parts[1].head_dim == 0) return cudaSuccess;
  if (!plan_paged_dequantize(p, 1)) return cudaErrorInvalidValue;
  const bool several = p.items.count > kLargeLaunchItems && p.length > 1 &&
                       p.page_size.value % kPagedDequantizeTokens == 0;
  if (several) plan_paged_dequantize(p, kPagedDequantizeTokens);
  const PagedTensor &keys = p.parts[0], &values = p.parts[1];
  const auto kernel = several ? choose_paged_dequantize<T, kPagedDequantizeTokens>(keys, values)
                              : choose_paged_dequantize<T, 1>(keys, values);
  const uint32_t ctas = (p.items.count - 1) / kItemThreads + 1;
  return launch(kernel, dim3(ctas), dim3(kItemThreads), enable_pdl, stream, p);
}

#endif

}  // namespace precast
