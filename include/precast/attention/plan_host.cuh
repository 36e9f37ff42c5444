// SPDX-License-Identifier: Apache-2.0
// Makes the plan of an attention kernel on the host, for lengths that are in host memory. It is the
// same plan as that of the device (attention/plan_kernel.cuh), but for the order of whole tiles of
// about the same cost.
#pragma once

#include "precast/attention/plan.cuh"

#if !defined(__CUDACC_RTC__)
#include <algorithm>
#include <cstring>
#include <vector>
#endif

namespace precast {

#if !defined(__CUDACC_RTC__)

struct HostPlan {
  std::vector<int32_t> ints;  // the plan
  PlanHeader header;
  int64_t scratch_ints;  // memory that the device needs besides, while it makes the plan
  int64_t num_queries;   // of the batch
  bool split_size_kept;  // false if the plan does not fit with splits as short as requested
};

// If `max_ints` or `max_partials` is 0, it is no limit.
inline HostPlan plan_on_host(PlanParams p) {
  if (p.max_ints == 0) p.max_ints = int64_t(1) << 31;
  if (p.max_partials == 0) p.max_partials = int64_t(1) << 31;
  const ScheduleShape& shape = p.shape;
  const PlanLayout layout(shape.batch, shape.ctas);
  std::vector<PlannedRequest> requests;
  std::vector<int64_t> costs = {0};
  int32_t most_tiles = 0;
  TileTotals totals;
  for (int32_t i = 0; i < shape.batch; ++i) {
    PlannedRequest request = p.lengths.request(i, shape.group_size);
    if (request.q_len == 0) continue;
    request.tiles_before = totals.num_tiles;
    requests.push_back(request);
    const int32_t tiles = num_m_blocks(shape, request.q_len);
    most_tiles = std::max(most_tiles, tiles);
    totals.num_tiles += tiles;
  }
  totals.num_requests = static_cast<int32_t>(requests.size());
  const auto add_tile = [&](const PlannedRequest& request, int32_t m_block) {
    const int64_t cost = tile_cost(kv_range_of_tile(shape, request.q_len, request.kv_len, m_block));
    totals.cost += cost;
    totals.max_cost = std::max(totals.max_cost, cost);
    costs.push_back(totals.cost);
  };
  const auto add_tiles_by_request = [&] {
    for (const PlannedRequest& request : requests) {
      const int32_t tiles = num_m_blocks(shape, request.q_len);
      for (int32_t m_block = 0; m_block < tiles; ++m_block) add_tile(request, m_block);
    }
  };
  totals.is_by_tiles = is_plan_by_tiles(p, totals, most_tiles);
  if (totals.is_by_tiles) {
    for (int32_t m_block = 0; m_block < most_tiles; ++m_block) {
      for (const PlannedRequest& request : requests) add_tile(request, m_block);
    }
    if (totals.cost > kMaxStreamKCost) {
      totals.is_by_tiles = false;
      totals.cost = 0;
      costs = {0};
    }
  }
  if (!totals.is_by_tiles) add_tiles_by_request();
  HostPlan result = {};
  result.scratch_ints = tile_costs_ints(totals.num_tiles);
  for (const PlannedRequest& request : requests) result.num_queries += request.q_len;
  const ScheduleMode mode = choose_mode(p, totals);
  const auto count_splits = [&](const PlannedRequest& request, int32_t m_block,
                                int32_t split_size) {
    return num_splits_of(kv_range_of_tile(shape, request.q_len, request.kv_len, m_block),
                         split_size);
  };
  EntryTotals entries;
  int32_t split_size = p.disable_split ? 0 : p.split_size;
  if (mode == ScheduleMode::static_persistent) {
    for (;; split_size = next_split_size(split_size)) {
      entries = {};
      for (const PlannedRequest& request : requests) {
        for (int32_t m_block = 0; m_block < num_m_blocks(shape, request.q_len); ++m_block) {
          const int32_t splits = count_splits(request, m_block, split_size);
          entries.num_entries += splits;
          entries.num_partials += splits > 1 ? splits : 0;
        }
      }
      const int64_t ints =
          layout.entries + entries_ints(shape, totals, entries) + result.scratch_ints;
      const bool fits = ints <= p.max_ints && entries.num_partials * shape.heads <= p.max_partials;
      if (fits || split_size == 0) break;
    }
  }
  result.split_size_kept = p.disable_split || split_size == p.split_size;
  result.header = make_header(p, mode, totals, entries, split_size);
  result.ints.resize(result.header.num_ints);
  int32_t* plan = result.ints.data();
  std::memcpy(plan, &result.header, sizeof result.header);
  if (totals.num_requests > 0) {
    std::memcpy(plan + layout.requests, requests.data(), requests.size() * sizeof(PlannedRequest));
  }
  if (mode != ScheduleMode::static_persistent) {
    const StreamKPartition partition = stream_k_partition(p, totals);
    for (int32_t cta = 0; cta <= shape.ctas; ++cta) {
      const CtaStart start =
          make_cta_start(shape, partition, requests.data(), totals, costs.data(), cta);
      std::memcpy(plan + layout.starts + int64_t(cta) * kStartInts, &start, sizeof start);
    }
    return result;
  }
  // Whole tiles are sorted; splits keep their order, because they are of one length.
  std::vector<int64_t> bucket_begin(kCostBuckets + 1);
  const auto bucket_of = [&](int32_t tile) {
    return split_size > 0 ? 0 : cost_bucket(costs[tile + 1] - costs[tile], totals.max_cost);
  };
  if (split_size == 0) {
    for (int32_t tile = 0; tile < totals.num_tiles; ++tile) ++bucket_begin[bucket_of(tile) + 1];
    for (int i = 0; i < kCostBuckets; ++i) bucket_begin[i + 1] += bucket_begin[i];
  }
  int32_t partials = 0;
  for (int32_t planned_idx = 0; planned_idx < totals.num_requests; ++planned_idx) {
    const PlannedRequest& request = requests[planned_idx];
    for (int32_t m_block = 0; m_block < num_m_blocks(shape, request.q_len); ++m_block) {
      const int32_t splits = count_splits(request, m_block, split_size);
      for (int32_t split_idx = 0; split_idx < splits; ++split_idx) {
        const WorkTileEntry entry = {planned_idx, m_block, split_idx, partials};
        const int64_t at = bucket_begin[bucket_of(request.tiles_before + m_block)]++;
        std::memcpy(plan + result.header.entries_offset + at * kEntryInts, &entry, sizeof entry);
      }
      if (splits > 1) partials += splits;
    }
  }
  return result;
}

#endif

}  // namespace precast
