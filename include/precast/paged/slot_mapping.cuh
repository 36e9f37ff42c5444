// SPDX-License-Identifier: Apache-2.0
// The slots of a token's rows in a paged KV cache, from a page table or from a slot mapping.
//
//   page table     page = kv_indices[kv_indptr[b] + position / page_size], entry = position mod
//                  page_size, where b = batch_indices[token] and position = positions[token]
//   slot mapping   page = slot / page_size, entry = slot mod page_size, slot = slots[token]
//
// A token is skipped if an index is negative, if its position is behind the pages of its request,
// or if its page is not in the cache. So no index makes a kernel write elsewhere.
#pragma once

#include "precast/core/items.cuh"
#include "precast/core/rows.cuh"

namespace precast {

// A tensor of int32 or int64 indices. Why this is no axis: the type is the same for the whole grid,
// so the branch costs nothing beside the load.
struct IndexTensor {
  const void* data = nullptr;
  bool is_int64 = false;
};

// table32: a page table whose tensors are all int32, as serving engines have them.
enum class SlotKind { slots, table, table32 };

struct SlotMapping {
  IndexTensor tokens;      // batch_indices, or slots
  IndexTensor positions;   // this and the following: for page tables only
  IndexTensor kv_indptr;   // [batch + 1]
  IndexTensor kv_indices;  // [kv_indices_count]
  uint32_t batch = 0;
  int64_t kv_indices_count = 0;
  int64_t pages = 0;  // pages * page_size < 2^31
  FastDivmod page_size;
};

inline bool has_index32_only(const SlotMapping& source) {
  return !(source.tokens.is_int64 || source.positions.is_int64 || source.kv_indptr.is_int64 ||
           source.kv_indices.is_int64);
}

// Rows to append, and the cache that they are appended to. Strides are in elements.
struct PagedRows {
  const void* rows = nullptr;  // [tokens, heads, size]
  void* cache = nullptr;       // [pages, page_size, heads, size], in any order of strides
  int64_t size = 0;            // elements of a row
  int64_t token_stride = 0, head_stride = 0;
  int64_t page_stride = 0, entry_stride = 0, cache_head_stride = 0;
};

// Two tensors that go to the same slots: keys and values, or the two parts of an MLA entry.
struct AppendPagedParams {
  PagedRows parts[2];
  SlotMapping slots;
  uint32_t tokens = 0;
  uint32_t heads = 0;
};

// A thread processes the same item of kRows rows of one token and head.
template <int kRows>
struct AppendGroup {
  PagedRows rows[kRows];
  // Set by plan_groups():
  uint32_t row_items[kRows] = {};
  Items items;            // of a token: the heads times the items of the longest row
  FastDivmod head_items;  // items of the longest row
};

// The kernel's parameters. The first CTAs process the first group, the others the second.
template <int kRows>
struct AppendKernelParams {
  SlotMapping slots;
  AppendGroup<kRows> groups[2];
  uint32_t first_ctas = 0;
};

#if defined(__CUDACC__)

template <bool kFirst, typename A, typename B>
struct Select {
  using type = A;
};
template <typename A, typename B>
struct Select<false, A, B> {
  using type = B;
};

__device__ __forceinline__ int32_t load_index32(const IndexTensor& index, int64_t i) {
  const int32_t* source = static_cast<const int32_t*>(index.data) + i;
  int32_t value;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(source) : "memory");
  return value;
}

__device__ __forceinline__ int64_t load_index(const IndexTensor& index, int64_t i) {
  if (!index.is_int64) return load_index32(index, i);
  const int64_t* source = static_cast<const int64_t*>(index.data) + i;
  int64_t value;
  asm volatile("ld.global.s64 %0, [%1];" : "=l"(value) : "l"(source) : "memory");
  return value;
}

__device__ __forceinline__ const void* address_of(const IndexTensor& index, int64_t i) {
  return static_cast<const char*>(index.data) + i * (index.is_int64 ? 8 : 4);
}

// Keeps the compiler from moving loads below this point. Why: otherwise the loads of rows would
// wait for the first index of the lookup, and with it for an access to L2.
__device__ __forceinline__ void fence_load_order() { __syncwarp(__activemask()); }

// Looks up the slot of a token in two steps, so that other loads are in flight between them: a page
// table takes three dependent loads.
template <SlotKind kKind>
struct SlotLookup {
  uint32_t page;
  uint32_t entry;

  // Must precede wait_on_dependent_grids().
  __device__ __forceinline__ static void prefetch(const SlotMapping& source, uint32_t token) {
    prefetch_to_l2(address_of(source.tokens, token));
    if constexpr (kKind != SlotKind::slots) {
      prefetch_to_l2(address_of(source.positions, token));
      // Why: in decode, the index of a token's request is that of the token.
      if (token <= source.batch) prefetch_to_l2(address_of(source.kv_indptr, token));
    }
  }

  SlotLookup() = default;

  __device__ __forceinline__ SlotLookup(const SlotMapping& source, uint32_t token) {
    first_ = load(source.tokens, token);
    if constexpr (kKind != SlotKind::slots) position_ = load(source.positions, token);
  }

  // Returns false if the token is skipped.
  __device__ __forceinline__ bool find(const SlotMapping& source) {
    if constexpr (kKind == SlotKind::slots) {
      // The unsigned comparison also rejects negative slots.
      const uint64_t slots = static_cast<uint64_t>(source.pages) * source.page_size.value;
      if (static_cast<uint64_t>(first_) >= slots) return false;
      page = source.page_size.divide(static_cast<uint32_t>(first_));
      entry = static_cast<uint32_t>(first_) - page * source.page_size.value;
      return true;
    } else {
      if (first_ < 0 || first_ >= Number(source.batch)) return false;
      if (position_ < 0 || position_ > Number(0x7fffffff)) return false;
      const Number begin = load(source.kv_indptr, first_);
      const Number end = load(source.kv_indptr, first_ + 1);
      const uint32_t position = static_cast<uint32_t>(position_);
      const uint32_t before = source.page_size.divide(position);
      entry = position - before * source.page_size.value;
      const int64_t at = int64_t(begin) + before;
      if (begin < 0 || at >= end || at >= source.kv_indices_count) return false;
      const Number found = load(source.kv_indices, at);
      page = static_cast<uint32_t>(found);
      return found >= 0 && found < Number(source.pages);
    }
  }

 private:
  static constexpr bool kNarrow = kKind == SlotKind::table32;
  using Number = typename Select<kNarrow, int32_t, int64_t>::type;

  __device__ __forceinline__ static Number load(const IndexTensor& index, int64_t i) {
    if constexpr (kNarrow) return load_index32(index, i);
    return static_cast<Number>(load_index(index, i));
  }

  Number first_;
  Number position_;
};

// The work of a thread. Rows that do not have the item skip it.
struct AppendPosition {
  uint32_t token;
  uint32_t head;
  uint32_t item;  // within the row

  template <int kRows>
  __device__ __forceinline__ AppendPosition(const AppendGroup<kRows>& group, uint32_t index) {
    token = group.items.per_row.divide(index);
    const uint32_t rest = index - token * group.items.per_row.value;
    head = group.head_items.divide(rest);
    item = rest - head * group.head_items.value;
  }

  // Returns the offset of the row in elements.
  __device__ __forceinline__ int64_t row(const PagedRows& part) const {
    return token * part.token_stride + head * part.head_stride;
  }

  __device__ __forceinline__ int64_t cache_row(const PagedRows& part, uint32_t page,
                                               uint32_t entry) const {
    return page * part.page_stride + entry * part.entry_stride + head * part.cache_head_stride;
  }
};

#endif  // __CUDACC__

#if !defined(__CUDACC_RTC__)

// Returns the number of items of `item_size` elements, as if all rows were as long as the longest;
// kMaxItems + 1 if there are more than 32 bits can count.
inline uint64_t append_items(const AppendPagedParams& p, int item_size) {
  uint64_t longest = 1;
  for (const PagedRows& part : p.parts) {
    const uint64_t items = (static_cast<uint64_t>(part.size) + item_size - 1) / item_size;
    if (items > longest) longest = items;
  }
  const bool fits = longest <= kMaxItems / p.heads && longest * p.heads <= kMaxItems / p.tokens;
  return fits ? longest * p.heads * p.tokens : kMaxItems + 1;
}

// Completes `params`, in which the rows of the groups must be set. Returns the number of CTAs.
template <int kRows>
uint32_t plan_groups(AppendKernelParams<kRows>& params, const AppendPagedParams& p, int item_size,
                     int threads) {
  params.slots = p.slots;
  uint32_t ctas[2];
  for (int g = 0; g < 2; ++g) {
    AppendGroup<kRows>& group = params.groups[g];
    uint32_t longest = 0;
    for (int i = 0; i < kRows; ++i) {
      group.row_items[i] = static_cast<uint32_t>((group.rows[i].size + item_size - 1) / item_size);
      if (group.row_items[i] > longest) longest = group.row_items[i];
    }
    group.head_items = FastDivmod(longest);
    group.items.per_row = FastDivmod(longest * p.heads);
    group.items.count = longest * p.heads * p.tokens;
    ctas[g] = group.items.count == 0 ? 0 : (group.items.count - 1) / threads + 1;
  }
  params.first_ctas = ctas[0];
  return ctas[0] + ctas[1];
}

#endif

}  // namespace precast
