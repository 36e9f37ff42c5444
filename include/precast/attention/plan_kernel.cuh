// SPDX-License-Identifier: Apache-2.0
// Makes the plan of an attention kernel on the device, so that no length is copied to the host.
//
// Layout   attention/plan.cuh describes the inputs, attention/plan_layout.cuh the plan.
// Threads  The first CTA makes the plan. In each step a thread takes a request, then a tile, then a
//          CTA of the attention kernel, in rounds of kPlanThreads; CTA-wide scans compute the sums
//          over requests and tiles. The other CTAs, if there are any, copy tables meanwhile; the
//          first CTA reads the sources of these copies, not their targets.
// Traffic  12 bytes per request and the plan itself; latency dominates. The tile costs of up to
//          kMaxTilesInShared tiles stay in shared memory.
// Measured 2026-11-21 on an H200, as one node of a CUDA graph: 4.2 us for 1 request, 4.8 us for 64,
//          5.2 us for 256; 6.0 us for a prefill of 32768 tokens in 1024 tiles.
#pragma once

#include "precast/attention/plan.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/warp.cuh"

namespace precast {

#if defined(__CUDACC__)

constexpr int kPlanThreads = 512;
constexpr int kMaxTilesInShared = 2048;

struct PlanSharedStorage {
  int64_t warp_sums[kPlanThreads / kWarpSize];
  int64_t tile_costs[kMaxTilesInShared + 1];
  int32_t bucket_begin[kCostBuckets];
  int32_t max_cost;
};

// Returns the sum of `x` over the threads before this one; `total` becomes the sum over all
// threads. All threads of the CTA must call it.
__device__ __forceinline__ int64_t exclusive_sum(int64_t x, int64_t& total,
                                                 PlanSharedStorage& shared) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  int64_t sum = x;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const int64_t other = __shfl_up_sync(0xffffffffu, sum, distance);
    if (lane >= distance) sum += other;
  }
  if (lane == kWarpSize - 1) shared.warp_sums[warp] = sum;
  __syncthreads();
  int64_t before = 0;
  total = 0;
#pragma unroll
  for (int i = 0; i < kPlanThreads / kWarpSize; ++i) {
    if (i < warp) before += shared.warp_sums[i];
    total += shared.warp_sums[i];
  }
  __syncthreads();  // Why: the next call overwrites warp_sums.
  return before + sum - x;
}

// Two counts below 2^31 in one number, so that one scan sums both.
__device__ inline int64_t pack_counts(int32_t low, int32_t high) {
  return low | int64_t(high) << 32;
}
__device__ inline int32_t low_count(int64_t packed) {
  return static_cast<int32_t>(packed & 0x7fffffff);
}
__device__ inline int32_t high_count(int64_t packed) { return static_cast<int32_t>(packed >> 32); }

// Makes a plan. All threads of the CTA call every function.
class DevicePlanner {
 public:
  __device__ DevicePlanner(const PlanParams& params, PlanSharedStorage& shared)
      : p_(params), shared_(shared), layout_(params.shape.batch, params.shape.ctas) {
    requests_ = reinterpret_cast<PlannedRequest*>(p_.plan + layout_.requests);
  }

  __device__ void run() {
    write_requests();
    find_order();
    scan_tile_costs();
    if (totals_.is_by_tiles && totals_.cost > kMaxStreamKCost) {
      totals_.is_by_tiles = false;
      totals_.cost = 0;
      __syncthreads();
      scan_tile_costs();
    }
    const ScheduleMode mode = choose_mode(p_, totals_);
    EntryTotals entries;
    int32_t split_size = p_.disable_split ? 0 : p_.split_size;
    if (mode != ScheduleMode::static_persistent) {
      write_cta_starts();
    } else {
      entries = fit_split_size(split_size);
      if (split_size > 0) {
        write_split_entries(split_size);
      } else {
        write_sorted_entries();
      }
    }
    const PlanHeader header = make_header(p_, mode, totals_, entries, split_size);
    if (threadIdx.x == 0) *reinterpret_cast<PlanHeader*>(p_.plan) = header;
    int32_t* counters = p_.plan + layout_.counters;
    int64_t count = p_.shape.ctas;
    if (mode == ScheduleMode::static_persistent) {
      counters = p_.plan + header.counters_offset;
      count = header.num_ints - header.counters_offset;
    }
    for (int64_t i = threadIdx.x; i < count; i += kPlanThreads) counters[i] = 0;
  }

 private:
  // Writes the requests that have queries, without gaps.
  __device__ void write_requests() {
    // One number counts requests in its low bits and tiles in its high bits. The high bits do not
    // overflow, because more tiles than the plan can hold count as `max_tiles`.
    constexpr int kCountBits = 25;
    const int64_t max_tiles = p_.max_ints / (kEntryInts + 2);
    static_assert((int64_t(0x7fffffff) / (kEntryInts + 2)) * (kPlanThreads + 1) <
                      int64_t(1) << (63 - kCountBits),
                  "the counts of a scan fit");
    int64_t carry = 0;
    for (int32_t base = 0; base < p_.shape.batch; base += kPlanThreads) {
      const int32_t request_idx = base + threadIdx.x;
      PlannedRequest request = {};
      if (request_idx < p_.shape.batch) {
        request = p_.lengths.request(request_idx, p_.shape.group_size);
      }
      const bool has_queries = request.q_len > 0;
      const int64_t tiles = min(int64_t(num_m_blocks(p_.shape, request.q_len)), max_tiles);
      int64_t total;
      const int64_t before =
          carry + exclusive_sum(has_queries | tiles << kCountBits, total, shared_);
      const int32_t planned_idx = static_cast<int32_t>(before & ((1 << kCountBits) - 1));
      request.tiles_before = static_cast<int32_t>(before >> kCountBits);
      if (has_queries) requests_[planned_idx] = request;
      carry += total;
      carry -= max(int64_t(0), (carry >> kCountBits) - max_tiles) << kCountBits;
    }
    totals_.num_requests = static_cast<int32_t>(carry & ((1 << kCountBits) - 1));
    totals_.num_tiles = static_cast<int32_t>(carry >> kCountBits);
    // The lengths name more queries than the workspace holds tiles for, so more than q has: run()
    // rejects a workspace that is too small for q. Such a plan has no work.
    if (min_plan_ints(p_.shape, totals_.num_tiles) > p_.max_ints) {
      totals_.num_requests = totals_.num_tiles = 0;
    }
    tile_costs_ = totals_.num_tiles <= kMaxTilesInShared
                      ? shared_.tile_costs
                      : reinterpret_cast<int64_t*>(
                            p_.plan + (p_.max_ints - tile_costs_ints(totals_.num_tiles)) / 4 * 4);
    __syncthreads();
  }

  // Finds out in which order tiles stand.
  __device__ void find_order() {
    if (!p_.has_neighbours || totals_.num_requests == 0) return;
    if (threadIdx.x == 0) shared_.max_cost = 0;
    __syncthreads();
    int32_t most = 0;
    for (int32_t i = threadIdx.x; i < totals_.num_requests; i += kPlanThreads) {
      most = max(most, num_m_blocks(p_.shape, requests_[i].q_len));
    }
    most = static_cast<int32_t>(__reduce_max_sync(0xffffffffu, most));
    if (threadIdx.x % kWarpSize == 0) atomicMax(&shared_.max_cost, most);
    __syncthreads();
    totals_.is_by_tiles = is_plan_by_tiles(p_, totals_, shared_.max_cost);
    __syncthreads();  // Why: what follows writes max_cost.
  }

  // The planned request that a tile belongs to; `tile` counts the tiles of all requests.
  __device__ int32_t find_request(int32_t tile) const {
    if (totals_.num_requests == totals_.num_tiles) return tile;
    int32_t low = 0, high = totals_.num_requests;
    while (high - low > 1) {
      const int32_t middle = low + (high - low) / 2;
      (requests_[middle].tiles_before <= tile ? low : high) = middle;
    }
    return low;
  }

  struct PlannedTile {
    int32_t planned_idx, m_block;
    KvRange range;
  };

  __device__ PlannedTile find_tile(int32_t tile) const {
    PlannedTile found;
    found.planned_idx = totals_.is_by_tiles ? tile % totals_.num_requests : find_request(tile);
    const PlannedRequest& request = requests_[found.planned_idx];
    found.m_block = totals_.is_by_tiles ? tile / totals_.num_requests : tile - request.tiles_before;
    found.range = kv_range_of_tile(p_.shape, request.q_len, request.kv_len, found.m_block);
    return found;
  }

  // Fills tile_costs_ and the cost totals.
  __device__ void scan_tile_costs() {
    if (threadIdx.x == 0) {
      tile_costs_[0] = 0;
      shared_.max_cost = 0;
    }
    __syncthreads();
    int32_t max_cost = 0;
    for (int32_t base = 0; base < totals_.num_tiles; base += kPlanThreads) {
      const int32_t tile = base + threadIdx.x;
      int64_t cost = 0, total;
      if (tile < totals_.num_tiles) cost = tile_cost(find_tile(tile).range);
      const int64_t before = totals_.cost + exclusive_sum(cost, total, shared_);
      if (tile < totals_.num_tiles) tile_costs_[tile + 1] = before + cost;
      if (cost > max_cost) max_cost = static_cast<int32_t>(cost);
      totals_.cost += total;
    }
    max_cost = static_cast<int32_t>(__reduce_max_sync(0xffffffffu, max_cost));
    if (threadIdx.x % kWarpSize == 0) atomicMax(&shared_.max_cost, max_cost);
    __syncthreads();
    totals_.max_cost = shared_.max_cost;
  }

  __device__ void write_cta_starts() {
    const StreamKPartition partition = stream_k_partition(p_, totals_);
    CtaStart* starts = reinterpret_cast<CtaStart*>(p_.plan + layout_.starts);
    for (int32_t cta = threadIdx.x; cta <= p_.shape.ctas; cta += kPlanThreads) {
      starts[cta] = make_cta_start(p_.shape, partition, requests_, totals_, tile_costs_, cta);
    }
  }

  // Increases the split size until the plan and its partial results fit. Returns their totals.
  __device__ EntryTotals fit_split_size(int32_t& split_size) {
    for (;; split_size = next_split_size(split_size)) {
      EntryTotals totals;
      if (split_size == 0) {
        totals.num_entries = totals_.num_tiles;
        return totals;
      }
      int64_t num_entries = 0, num_partials = 0;
      for (int32_t tile = threadIdx.x; tile < totals_.num_tiles; tile += kPlanThreads) {
        const int32_t splits = num_splits_of(find_tile(tile).range, split_size);
        num_entries += splits;
        num_partials += splits > 1 ? splits : 0;
      }
      exclusive_sum(num_entries, totals.num_entries, shared_);
      exclusive_sum(num_partials, totals.num_partials, shared_);
      const int64_t ints = layout_.entries + entries_ints(p_.shape, totals_, totals) +
                           tile_costs_ints(totals_.num_tiles);
      if (ints <= p_.max_ints && totals.num_partials * p_.shape.heads <= p_.max_partials) {
        return totals;
      }
    }
  }

  __device__ WorkTileEntry* entries() const {
    return reinterpret_cast<WorkTileEntry*>(p_.plan + layout_.entries);
  }

  // Writes the splits of all tiles in order.
  __device__ void write_split_entries(int32_t split_size) {
    int64_t carry = 0;
    for (int32_t base = 0; base < totals_.num_tiles; base += kPlanThreads) {
      const int32_t tile = base + threadIdx.x;
      PlannedTile found = {};
      int32_t splits = 0;
      if (tile < totals_.num_tiles) {
        found = find_tile(tile);
        splits = num_splits_of(found.range, split_size);
      }
      int64_t total;
      const int64_t before =
          carry + exclusive_sum(pack_counts(splits, splits > 1 ? splits : 0), total, shared_);
      for (int32_t split_idx = 0; split_idx < splits; ++split_idx) {
        entries()[low_count(before) + split_idx] = {found.planned_idx, found.m_block, split_idx,
                                                    high_count(before)};
      }
      carry += total;
    }
  }

  // Writes the whole tiles, the longest first, by a counting sort. The tiles of one bucket come in
  // any order.
  __device__ void write_sorted_entries() {
    for (int i = threadIdx.x; i < kCostBuckets; i += kPlanThreads) shared_.bucket_begin[i] = 0;
    __syncthreads();
    for (int32_t tile = threadIdx.x; tile < totals_.num_tiles; tile += kPlanThreads) {
      atomicAdd(&shared_.bucket_begin[bucket_of(tile)], 1);
    }
    __syncthreads();
    static_assert(kCostBuckets == 2 * kPlanThreads, "a thread scans two buckets");
    int32_t* own = shared_.bucket_begin + 2 * threadIdx.x;
    const int32_t first = own[0], second = own[1];
    int64_t total;
    const int32_t before = static_cast<int32_t>(exclusive_sum(first + second, total, shared_));
    own[0] = before;
    own[1] = before + first;
    __syncthreads();
    for (int32_t tile = threadIdx.x; tile < totals_.num_tiles; tile += kPlanThreads) {
      const int32_t planned_idx = find_request(tile);
      entries()[atomicAdd(&shared_.bucket_begin[bucket_of(tile)], 1)] = {
          planned_idx, tile - requests_[planned_idx].tiles_before, 0, 0};
    }
  }

  __device__ int32_t bucket_of(int32_t tile) const {
    return cost_bucket(tile_costs_[tile + 1] - tile_costs_[tile], totals_.max_cost);
  }

  const PlanParams& p_;
  PlanSharedStorage& shared_;
  const PlanLayout layout_;
  PlannedRequest* requests_;
  int64_t* tile_costs_;  // [num_tiles + 1], in shared memory or at the end of the plan's memory
  TileTotals totals_;
};

constexpr int kCopyElementsPerCta = 4 * kPlanThreads;
constexpr int64_t kMaxCopyCtas = 128;

// Copies the elements of CTA `cta` of the `ctas` that copy.
__device__ inline void copy_tables(const PlanParams& p, uint32_t cta, uint32_t ctas) {
  const int64_t step = int64_t(ctas) * kPlanThreads;
#pragma unroll
  for (int table = 0; table < kTableCopies; ++table) {
    const TableCopy copy = p.copies[table];
#pragma unroll 4
    for (int64_t i = int64_t(cta) * kPlanThreads + threadIdx.x; i < copy.count; i += step) {
      copy.to[i] = copy.from[i];
    }
  }
}

__global__ __launch_bounds__(kPlanThreads,
                             1) void AttentionPlanKernel(const __grid_constant__ PlanParams p) {
  __shared__ PlanSharedStorage shared;
  launch_dependent_grids();
  wait_on_dependent_grids();
  if (blockIdx.x > 0) {
    copy_tables(p, blockIdx.x - 1, gridDim.x - 1);
  } else {
    DevicePlanner(p, shared).run();
  }
}

#if !defined(__CUDACC_RTC__)

// Launches the plan kernel on `stream`. The plan's memory must hold at least min_plan_ints() of no
// tiles.
inline cudaError_t launch_attention_plan(const PlanParams& p, bool enable_pdl,
                                         cudaStream_t stream) {
  int64_t most = 0;
  for (const TableCopy& copy : p.copies) most = copy.count > most ? copy.count : most;
  const int64_t copying = (most + kCopyElementsPerCta - 1) / kCopyElementsPerCta;
  const dim3 grid(1 + static_cast<unsigned>(copying < kMaxCopyCtas ? copying : kMaxCopyCtas));
  return launch(AttentionPlanKernel, grid, dim3(kPlanThreads), enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
