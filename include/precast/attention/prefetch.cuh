// SPDX-License-Identifier: Apache-2.0
// With programmatic dependent launch, a CTA of the 16-row tile (decode) prefetches its first KV
// block to L2 while the previous grid still runs. It reads the plan and the page table as they are
// in memory, which that grid may be about to write. This is safe because the values only decide
// what is prefetched.
#pragma once

#include "precast/attention/kv_format.cuh"
#include "precast/attention/params.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/prefetch.cuh"

namespace precast {

#if defined(__CUDACC__)

// Loads a word that the previous grid may be writing. Why from L2: L1 would keep a stale value for
// the loads that count.
__device__ __forceinline__ uint32_t load_relaxed(const int32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// Prefetches the first KV block of the CTA in stream_k mode, one token per thread. Why not by the
// first warp: it reads the plan.
template <typename Tile, typename KV>
__device__ __forceinline__ void prefetch_first_kv_block(const AttentionParams& p) {
  const uint32_t lane = threadIdx.x - 32;
  if (!may_overlap_previous_grid() || lane >= kKvBlockSize) return;
  const int32_t* starts =
      p.schedule.plan + PlanLayout(p.schedule.shape.batch, p.schedule.shape.ctas).starts;
  const CtaStart& start = reinterpret_cast<const CtaStart*>(starts)[blockIdx.x];
  const uint32_t head = load_relaxed(&start.head),
                 token = load_relaxed(&start.n_block) * kKvBlockSize + lane;
  const uint32_t kv_start = load_relaxed(&start.kv_start), kv_len = load_relaxed(&start.kv_len);
  const uint32_t kv_head = head / Tile::kVSplits, v_column = head % Tile::kVSplits * Tile::kDimV;
  if (token >= kv_len || kv_head >= static_cast<uint32_t>(p.kv_heads)) return;
  const uint32_t request_page = p.page_size.divide(token);
  const uint64_t entry = token - request_page * p.page_size.value;
  uint32_t page = kv_start + request_page;
  if (p.kv_indices != nullptr)
    page = page < p.num_kv_indices ? load_relaxed(p.kv_indices + page) : 0;
  if (page >= p.num_pages) return;
  const auto row = [&](const AttentionCache& cache) {
    return static_cast<const uint4*>(cache.data) + kv_head * cache.head_stride +
           (uint64_t(page) * cache.page_stride + entry * cache.entry_stride);
  };
  constexpr int kBits = KvFormat<KV>::kBits;
  prefetch_bytes_to_l2(row(p.k), Tile::kDimK * kBits / 8);
  prefetch_bytes_to_l2(row(p.v) + v_column * kBits / 128, Tile::kDimV * kBits / 8);
}

#endif  // __CUDACC__

}  // namespace precast
