// SPDX-License-Identifier: Apache-2.0
// Hints before a kernel's turn: while the grid before still runs, a CTA asks for the tokens that it
// starts with in L2. It goes by the plan and the page table as they lie in memory, which that grid
// may be about to write: nothing but the choice of what to prefetch depends on what is read here.
#pragma once

#include "precast/attention/params.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/prefetch.cuh"

namespace precast {

#if defined(__CUDACC__)

// From L2, because L1 would keep what is old then for the loads that count.
__device__ __forceinline__ uint32_t guess_word(const int32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// Prefetches a token's row of keys and of values each. Why not in the first warp: it reads the
// plan.
template <typename Tile, typename KV>
__device__ __forceinline__ void prefetch_first_tokens(const AttentionParams& p) {
  const uint32_t place = threadIdx.x - 32;
  if (!may_overlap_previous_grid() || place >= kKvBlock) return;
  const int32_t* start =
      p.schedule.plan + PlanLayout(p.schedule.shape.batch, p.schedule.shape.ctas).starts;
  const CtaStart& at = reinterpret_cast<const CtaStart*>(start)[blockIdx.x];
  const uint32_t part = guess_word(&at.head), token = guess_word(&at.block) * kKvBlock + place;
  const uint32_t kv_start = guess_word(&at.kv_start), kv_len = guess_word(&at.kv_len);
  const uint32_t head = part / Tile::kParts, column = part % Tile::kParts * Tile::kDimV;
  if (token >= kv_len || head >= static_cast<uint32_t>(p.kv_heads)) return;
  const uint32_t page_of_request = p.page_size.divide(token);
  const uint64_t entry = token - page_of_request * p.page_size.value;
  uint32_t page = kv_start + page_of_request;
  if (p.pages != nullptr) page = page < p.page_entries ? guess_word(p.pages + page) : 0;
  if (page >= p.page_count) return;
  const auto row = [&](const AttentionCache& cache) {
    return static_cast<const uint4*>(cache.data) + head * cache.head_stride +
           (uint64_t(page) * cache.page_stride + entry * cache.entry_stride);
  };
  prefetch_bytes_to_l2(row(p.k), Tile::kDimK * sizeof(KV));
  prefetch_bytes_to_l2(row(p.v) + column * sizeof(KV) / 16, Tile::kDimV * sizeof(KV));
}

#endif  // __CUDACC__

}  // namespace precast
