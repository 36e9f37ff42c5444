// SPDX-License-Identifier: Apache-2.0
// Where a KvPipeline (attention/kv_pipeline.cuh) copies from: it goes from work tile to work tile,
// looks up the pages of a KV block while the one before is copied, and writes the addresses of its
// rows to a table in shared memory. One thread does so for each token.
//
// The table has the page and the entry of a token of NVFP4, because a token has four rows then, of
// codes and of scales.
#pragma once

#include "precast/attention/kv_pipeline.cuh"
#include "precast/core/load_relaxed.cuh"
#include "precast/core/prefetch.cuh"

namespace precast {

#if defined(__CUDACC__)

// An entry of the page table, or 0 if it does not exist, without a branch. kEarly: while another
// grid may be writing it; see load_relaxed().
template <bool kEarly = false>
__device__ __forceinline__ uint32_t load_page(const int32_t* page, bool exists) {
  uint32_t value = 0;
  if constexpr (kEarly) {
    if (exists) value = load_relaxed(page);
  } else {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %2, 0;\n"
        "@p ld.global.u32 %0, [%1];\n"
        "}"
        : "+r"(value)
        : "l"(page), "r"(exists ? 1u : 0u)
        : "memory");
  }
  return value;
}

// Goes on to the next work tile.
template <typename Tile, typename KV>
__device__ __forceinline__ void KvPipeline<Tile, KV>::start_next_tile() {
  switch_tile();
  look_up_pages();
}

template <typename Tile, typename KV>
__device__ __forceinline__ void KvPipeline<Tile, KV>::switch_tile() {
  const BlockInfo& block = queue_.blocks[next_slot_];
  next_token_ = block.work.kv_begin + warp_kv_ * block_tokens();
  end_token_ = block.work.kv_end;
  slot_ = next_slot_;
  if constexpr (kIsPacked) kv_head_ = block.kv_head;
  if constexpr (Tile::kWarpsSplitKv) {
    kv_start_ = block.work.kv_start;
    const uint4* k = static_cast<const uint4*>(p_.k.data) + block.kv_head * p_.k.head_stride;
    const uint4* v = static_cast<const uint4*>(p_.v.data) + block.kv_head * p_.v.head_stride +
                     block.v_column / kElementsPerChunk;
    base_[0] = looks_up_v() ? v : k;
    base_[1] = v;
    if constexpr (Tile::kMayPairHeads) {
      if (thread() & p_.pair_shift) {
        const int64_t to_second = p_.v.head_stride / 2;
        base_[0] += looks_up_v() ? to_second : p_.k.head_stride / 2;
        base_[1] += to_second;
      }
    }
  }
  next_slot_ = -1;
}

// Starts to load the page table entries of the KV block at next_token_.
template <typename Tile, typename KV>
template <bool kEarly>
__device__ __forceinline__ void KvPipeline<Tile, KV>::look_up_pages() {
  if (kLookupThreads < Tile::kPipelineThreads && thread() >= kLookupThreads) return;
  const uint32_t token = next_token_ + token_of(thread() % Tile::kBlockN);
  const uint32_t page = p_.page_size.divide(token);
  page_ = (Tile::kWarpsSplitKv ? kv_start_ : queue_.blocks[slot_].work.kv_start) + page;
  page_entry_ = token - page * p_.page_size.value;
  if (p_.kv_indices == nullptr) return;
  const bool exists = static_cast<int32_t>(token) < end_token_ && page_ < p_.num_kv_indices;
  page_ = load_page<kEarly>(p_.kv_indices + page_, exists);
}

// Prefetches rows of the KV block at next_token_ to L2. Why not more: the prefetches of an SM
// come one after another, and with more of them short requests took longer.
template <typename Tile, typename KV>
__device__ __forceinline__ void KvPipeline<Tile, KV>::prefetch_block() const {
  constexpr int kMostRows = 16;
  if (kLookupThreads < Tile::kPipelineThreads && thread() >= kLookupThreads) return;
  if (thread() % Tile::kBlockN >= kMostRows) return;
  const int32_t token = next_token_ + token_of(thread() % Tile::kBlockN);
  if (token >= end_token_ || page_ >= p_.num_pages) return;
  const uint64_t page = page_, entry = page_entry_;
  const bool is_v = looks_up_v();
  constexpr int kBits = KvFormat<KV>::kBits;
  if (!is_v) {
    prefetch_bytes_to_l2(base(false) + (page * p_.k.page_stride + entry * p_.k.entry_stride),
                         Tile::kDimK * kBits / 8);
  }
  if (is_v || !kSeparateKvLookups) {
    prefetch_bytes_to_l2(base(true) + (page * p_.v.page_stride + entry * p_.v.entry_stride),
                         Tile::kDimV * kBits / 8);
  }
}

// Writes the addresses of these tokens to the table. Why not in look_up_pages(): the loads take
// long. Where there is nothing to load, the addresses are not used.
template <typename Tile, typename KV>
__device__ __forceinline__ void KvPipeline<Tile, KV>::publish_addresses() {
  if (!kOverlapsMma && next_token_ >= end_token_) return;
  if (kLookupThreads < Tile::kPipelineThreads && thread() >= kLookupThreads) return;
  // Why: a page that the cache does not have must not be read.
  const uint64_t page = page_ < p_.num_pages ? page_ : 0u, entry = page_entry_;
  const uint32_t to = table_half() + thread() % Tile::kBlockN * 16;
  const bool is_v = looks_up_v();
  if constexpr (kIsPacked) {
    if (!is_v) store_address(to, reinterpret_cast<const void*>(page << 32 | entry));
    return;
  }
  store_address(to + (is_v ? 8 : 0),
                base(is_v) + (page * (is_v ? p_.v.page_stride : p_.k.page_stride) +
                              entry * (is_v ? p_.v.entry_stride : p_.k.entry_stride)));
  if constexpr (!kSeparateKvLookups) {
    store_address(to + 8, base(true) + (page * p_.v.page_stride + entry * p_.v.entry_stride));
  }
}

// The address of page or token 0 of K or V. Why only the 16-row tile has it in registers: the
// 128-row tile has none left.
template <typename Tile, typename KV>
__device__ __forceinline__ const uint4* KvPipeline<Tile, KV>::base(bool is_v) const {
  if constexpr (Tile::kWarpsSplitKv) {
    return base_[is_v && !kSeparateKvLookups];
  } else {
    return is_v ? queue_.blocks[slot_].v_base : queue_.blocks[slot_].k_base;
  }
}

#endif  // __CUDACC__

}  // namespace precast
