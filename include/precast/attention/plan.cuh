// SPDX-License-Identifier: Apache-2.0
// Makes the plan of an attention kernel (attention/plan_layout.cuh) from the lengths of a batch.
// The formulas here are shared by the host, whose plan_on_host() is at the end of this file, and
// the device (attention/plan_kernel.cuh).
//
// Layout   qo_indptr      [batch + 1] int32, or every request has the same number of queries
//          kv_indptr      [batch + 1] int32; it counts pages, or tokens
//          last_page_len  [batch] int32, if kv_indptr counts pages; or
//          kv_len         [batch] int32
//          plan           int32, the output
// Source   attention/scheduler.cuh
#pragma once

#include "precast/attention/batch_lengths.cuh"
#include "precast/attention/scheduler.cuh"
#include "precast/attention/tile.cuh"

namespace precast {

// A table that the plan kernel copies. Why: with CUDA graphs, the lengths and pages of a batch must
// go into buffers whose addresses do not change.
struct TableCopy {
  const int32_t* from;
  int32_t* to;
  int64_t count;  // 0: nothing is copied
};

constexpr int kTableCopies = 5;  // qo_indptr, kv_indptr, last_page_len, indices, kv_len

struct PlanParams {
  ScheduleShape shape;
  BatchLengths lengths;
  int32_t* plan;         // 16-byte aligned
  int64_t max_ints;      // int32 that fit in the memory at `plan`
  int64_t max_partials;  // partial results that fit in the split workspace
  int32_t split_size;    // tokens of a split, a multiple of kKvBlockSize; 0: the plan chooses
  bool disable_split;    // no tile is split
  bool always_stream_k;  // whole tiles are not taken just because they are about as long as a share
  bool has_neighbours;   // the kernel runs the tiles of a request in CTAs that are neighbours
  TableCopy copies[kTableCopies];
};

// Up to this cost of one head, the cost times heads and CTAs fits 64 bits.
constexpr int64_t kMaxStreamKCost = int64_t(1) << 36;

// A CTA's share above which stream-K uses all CTAs, and the number of splits of a tile above which
// combining them may take too long: see num_stream_k_ctas().
constexpr int kLargeShare = 256 * kBlockCost;
constexpr int kManySplits = 20;
// No tile is split if that shortens the work of a CTA by less than this: partial results must be
// written and combined, which takes as long.
constexpr int kSplitCost = 12 * kBlockCost;

// Totals over all tiles of one head.
struct TileTotals {
  int64_t cost = 0;
  int64_t max_cost = 0;  // cost of the longest tile
  int32_t num_requests = 0;
  int32_t num_tiles = 0;
  bool is_by_tiles = false;  // whether the plan is in mode stream_k_by_tiles
};

// The most tiles of a request, of all heads, that run at the same time in neighbouring CTAs.
constexpr int kMostNeighbours = 16;

// Whether tiles stand tile by tile, then request by request. All requests must have equally many.
// `most`: tiles of the longest one and a head.
PRECAST_HOST_DEVICE inline bool is_plan_by_tiles(const PlanParams& p, const TileTotals& totals,
                                                 int32_t most) {
  return p.has_neighbours && !p.disable_split && p.split_size == 0 && most > 1 &&
         int64_t(most) * p.shape.heads <= kMostNeighbours &&
         int64_t(most) * totals.num_requests == totals.num_tiles &&
         p.max_partials >= 2 * int64_t(p.shape.ctas);
}

PRECAST_HOST_DEVICE inline ScheduleMode choose_mode(const PlanParams& p, const TileTotals& totals) {
  if (p.disable_split || p.split_size > 0 || totals.cost > kMaxStreamKCost) {
    return ScheduleMode::static_persistent;
  }
  if (p.max_partials < 2 * int64_t(p.shape.ctas)) {  // the workspace is too small for stream-K
    return ScheduleMode::static_persistent;
  }
  if (totals.is_by_tiles) return ScheduleMode::stream_k_by_tiles;
  // Why: there are too few 16-row tiles, and they are of any length.
  if (p.shape.block_m <= kDecodeBlockM || p.always_stream_k) return ScheduleMode::stream_k;
  const int64_t share = totals.cost * p.shape.heads / p.shape.ctas;
  const bool gains = totals.max_cost - share > kSplitCost;
  return totals.max_cost <= share * kMaxImbalance || !gains ? ScheduleMode::static_persistent
                                                            : ScheduleMode::stream_k;
}

// The number of CTAs that share the cost in stream_k mode. If all tiles are equally long and few
// CTAs are lost, it is such that no CTA has splits of two tiles: each takes whole tiles, or each
// tile is cut into equal splits. Large shares use all CTAs, because they lose more by each CTA that
// is left out. The number of splits is halved where the last CTA of a tile would take longer to
// combine them than each CTA takes to read its tokens.
PRECAST_HOST_DEVICE inline int32_t num_stream_k_ctas(const ScheduleShape& shape,
                                                     const TileTotals& totals) {
  const int64_t tiles = int64_t(totals.num_tiles) * shape.heads, ctas = shape.ctas;
  if (tiles == 0 || totals.max_cost * totals.num_tiles != totals.cost) return shape.ctas;
  // Shares are compared by products: every CTA may do this before it starts.
  const int64_t cost = totals.cost * shape.heads;
  if (cost >= (kLargeShare + 1) * ctas) return shape.ctas;
  if (tiles > ctas) {
    const int32_t tiles_per_cta = quotient(tiles + ctas - 1, shape.ctas);
    const int64_t even = quotient(tiles, tiles_per_cta);
    return even * tiles_per_cta == tiles && even * 8 >= ctas * 7 ? min_int32(even, ctas)
                                                                 : shape.ctas;
  }
  const int64_t splits = quotient(ctas, static_cast<int32_t>(tiles));
  const bool halve = splits > kManySplits && cost < (2 * int64_t(shape.group_size) + 1) * ctas;
  if (halve) return min_int32(splits / 2 * tiles, ctas);
  return splits * tiles * 8 >= ctas * 7 ? min_int32(splits * tiles, ctas) : shape.ctas;
}

// The shares of CTAs in stream_k mode. With always_stream_k, a tile that is cut into equal splits
// has no constant cost: each of its splits begins a CTA, so that they are equal in KV blocks.
PRECAST_HOST_DEVICE inline StreamKPartition stream_k_partition(const PlanParams& p,
                                                               const TileTotals& totals) {
  int32_t ctas = num_stream_k_ctas(p.shape, totals);
  if (totals.is_by_tiles) {  // Each tile of a request gets equally many CTAs, for the same tokens.
    const int32_t neighbours = totals.num_tiles / totals.num_requests * p.shape.heads;
    if (ctas > neighbours) ctas -= ctas % neighbours;
  }
  const int64_t tiles = int64_t(totals.num_tiles) * p.shape.heads;
  const bool is_even = p.always_stream_k && totals.max_cost > kTileCost &&
                       totals.max_cost * totals.num_tiles == totals.cost && ctas % tiles == 0;
  const int64_t cost = totals.cost * p.shape.heads;
  return is_even ? StreamKPartition(cost - tiles * kTileCost, ctas, 0)
                 : StreamKPartition(cost, ctas);
}

// Where a CTA starts in stream_k mode. `tile_costs` [num_tiles + 1]: the cost of all tiles of one
// head before each tile, with kTileCost.
PRECAST_HOST_DEVICE inline CtaStart make_cta_start(const ScheduleShape& shape,
                                                   const StreamKPartition& partition,
                                                   const PlannedRequest* requests,
                                                   const TileTotals& totals,
                                                   const int64_t* tile_costs, int32_t cta) {
  CtaStart start = {};
  start.head = shape.heads;
  start.num_splits = 1;
  const int64_t cost = partition.begin_of(cta);
  if (cost >= partition.total_cost) return start;
  const int32_t discount = kTileCost - partition.tile_cost;  // of each tile
  const int64_t head_cost = totals.cost - int64_t(totals.num_tiles) * discount;
  start.head = static_cast<int32_t>(cost / head_cost);
  int64_t before = start.head * head_cost;
  const auto cost_before = [&](int64_t tile) { return tile_costs[tile] - tile * discount; };
  PlannedRequest request;
  int32_t low = 0, high = totals.is_by_tiles ? totals.num_tiles : totals.num_requests;
  if (totals.is_by_tiles) {
    while (high - low > 1) {
      const int32_t middle = low + (high - low) / 2;
      (before + cost_before(middle) <= cost ? low : high) = middle;
    }
    start.planned_idx = low % totals.num_requests;
    start.m_block = low / totals.num_requests;
    request = requests[start.planned_idx];
    before += cost_before(low);
  } else {
    while (high - low > 1) {  // finds the last request that begins by `cost`
      const int32_t middle = low + (high - low) / 2;
      (before + cost_before(requests[middle].tiles_before) <= cost ? low : high) = middle;
    }
    request = requests[low];
    start.planned_idx = low;
    const int64_t first = cost_before(request.tiles_before);
    before += first;
    low = 0;
    high = num_m_blocks(shape, request.q_len);
    while (high - low > 1) {
      const int32_t middle = low + (high - low) / 2;
      (before + cost_before(request.tiles_before + middle) - first <= cost ? low : high) = middle;
    }
    start.m_block = low;
    before += cost_before(request.tiles_before + low) - first;
  }
  const int32_t tiles = num_m_blocks(shape, request.q_len);
  const int32_t n_blocks =
      kv_range_of_tile(shape, request.q_len, request.kv_len, start.m_block).num_n_blocks();
  const TileBoundary boundary = find_boundary(partition, before, n_blocks, cost);
  if (boundary.n_block > 0 && boundary.n_block == n_blocks) {  // the CTA starts at the next tile
    if (totals.is_by_tiles) {
      if (++start.planned_idx == totals.num_requests) {
        start.planned_idx = 0;
        if (++start.m_block == tiles) {
          start.m_block = 0;
          if (++start.head == shape.heads) return start;
        }
      }
    } else if (++start.m_block == tiles) {
      start.m_block = 0;
      if (++start.planned_idx == totals.num_requests) {
        start.planned_idx = 0;
        if (++start.head == shape.heads) return start;
      }
    }
    request = requests[start.planned_idx];
  } else {
    start.n_block = boundary.n_block;
    start.first_cta = boundary.first_cta;
    start.num_splits = boundary.num_splits;
  }
  start.request_idx = request.request_idx;
  start.q_begin = request.q_begin;
  start.q_len = request.q_len;
  start.kv_start = request.kv_start;
  start.kv_len = request.kv_len;
  return start;
}

// Whole tiles are sorted by cost, the longest first, by a counting sort: the bucket of a tile.
constexpr int kCostBuckets = 1024;
PRECAST_HOST_DEVICE constexpr int32_t cost_bucket(int64_t cost, int64_t max_cost) {
  return kCostBuckets - 1 - static_cast<int32_t>(cost * (kCostBuckets - 1) / max_cost);
}

// The L2 swizzle of whole tiles: the number of entries of which all heads are taken one after
// another, or 0 for all heads of an entry at once, as they lie in memory. It is half the number of
// CTAs, so that two heads are in work at a time, and L2 holds their keys and values while many CTAs
// read them. Four heads make two rounds, the second in reverse order, so CTAs get equal shares.
// Decode tiles read each token once and gain nothing.
PRECAST_HOST_DEVICE constexpr int32_t l2_swizzle_size(const ScheduleShape& shape) {
  const bool is_even = shape.heads % 4 == 0 && shape.ctas % 2 == 0;
  return is_even && shape.block_m > kDecodeBlockM ? shape.ctas / 2 : 0;
}

// Totals over the entries of one head in static_persistent mode.
struct EntryTotals {
  int64_t num_entries = 0;
  int64_t num_partials = 0;  // entries of tiles that are split
};

// Length of the entries and the tiles' split counters in the plan.
PRECAST_HOST_DEVICE constexpr int64_t entries_ints(const ScheduleShape& shape,
                                                   const TileTotals& totals,
                                                   const EntryTotals& entries) {
  const int64_t counters =
      entries.num_partials > 0 ? align_ints(int64_t(totals.num_tiles) * shape.heads) : 0;
  return entries.num_entries * kEntryInts + counters;
}

// Length of the tile costs, which the device keeps at the end of the plan's memory, 16-byte
// aligned, while it makes the plan.
PRECAST_HOST_DEVICE constexpr int64_t tile_costs_ints(int32_t tiles) {
  return 2 * (int64_t(tiles) + 1) + 4;
}

// The least memory for a plan of so many tiles of a head; any batch of them has a plan that fits.
PRECAST_HOST_DEVICE constexpr int64_t min_plan_ints(const ScheduleShape& shape, int64_t tiles) {
  return PlanLayout(shape.batch, shape.ctas).entries + kEntryInts * tiles + 2 * (tiles + 1) + 4;
}

// The split size to try next if the plan or its partial results do not fit with this one. At last
// it is 0, and tiles are not split.
PRECAST_HOST_DEVICE constexpr int32_t next_split_size(int32_t split_size) {
  return split_size >= 1 << 28 ? 0 : 2 * split_size;
}

PRECAST_HOST_DEVICE inline PlanHeader make_header(const PlanParams& p, ScheduleMode mode,
                                                  const TileTotals& totals,
                                                  const EntryTotals& entries, int32_t split_size) {
  const PlanLayout layout(p.shape.batch, p.shape.ctas);
  const int64_t cost = totals.cost * p.shape.heads;
  PlanHeader header = {};
  header.mode = mode;
  header.shape = PackedShape(p.shape);
  header.num_requests = totals.num_requests;
  header.num_tiles = totals.num_tiles;
  header.total_cost[0] = static_cast<int32_t>(cost & 0xffffffff);
  header.total_cost[1] = static_cast<int32_t>(cost >> 32);
  if (mode != ScheduleMode::static_persistent) {
    header.active_ctas = static_cast<int32_t>(stream_k_partition(p, totals).ctas);
    header.num_partials = 2 * header.active_ctas;
    header.num_ints = static_cast<int32_t>(layout.entries);
  } else {
    header.active_ctas = min_int32(entries.num_entries * p.shape.heads, p.shape.ctas);
    header.split_size = split_size;
    header.swizzle_size = split_size == 0 ? l2_swizzle_size(p.shape) : 0;
    header.num_entries = static_cast<int32_t>(entries.num_entries);
    if (header.swizzle_size > 0) {
      header.num_swizzled = header.num_entries / header.swizzle_size * header.swizzle_size;
    }
    header.entries_offset = static_cast<int32_t>(layout.entries);
    header.counters_offset =
        static_cast<int32_t>(layout.entries + entries.num_entries * kEntryInts);
    header.num_partials = static_cast<int32_t>(entries.num_partials * p.shape.heads);
    header.num_ints = static_cast<int32_t>(layout.entries + entries_ints(p.shape, totals, entries));
  }
  return header;
}

}  // namespace precast
