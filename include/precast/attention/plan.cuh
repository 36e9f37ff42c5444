// SPDX-License-Identifier: Apache-2.0
// The plan of an attention kernel (attention/scheduler.cuh) from the lengths of a batch: the
// formulas that the host and the device (attention/plan_kernel.cuh) share, and the plan of the
// host.
//
// Layout   qo_indptr  [batch + 1]  or a fixed number of queries a request
//          kv_indptr  [batch + 1]  pages with last_page_len [batch] or kv_len [batch]; or tokens
//          plan       int32        header, counters, starts, requests, items
// Source   attention/scheduler.cuh
#pragma once

#include "precast/attention/scheduler.cuh"
#include "precast/attention/tile.cuh"

#if !defined(__CUDACC_RTC__)
#include <algorithm>
#include <cstring>
#include <vector>
#endif

namespace precast {

// No request has more tokens. Why: sums of a few such numbers stay below 2^31.
constexpr int32_t kMostTokens = 1 << 30;

// The lengths of a batch. Whatever they hold, the plan's are neither negative nor past the pages or
// kMostTokens, and packed rows are fewer than 2^31.
struct Lengths {
  const int32_t* qo_indptr;      // or null
  const int32_t* kv_indptr;      // or null: kv_start is 0
  const int32_t* last_page_len;  // or null
  const int32_t* kv_len;         // or null
  int32_t q_len_per_req;         // without qo_indptr
  int32_t page_size;             // 0: kv_indptr counts tokens

  PRECAST_HOST_DEVICE PlannedRequest request(int32_t number, int32_t group) const {
    PlannedRequest to = {};
    to.request = number;
    if (qo_indptr != nullptr) {
      to.q_begin = qo_indptr[number];
      const int64_t q_len = int64_t(qo_indptr[number + 1]) - to.q_begin;
      to.q_len = to.q_begin < 0 || q_len < 0 ? 0 : static_cast<int32_t>(q_len);
    } else {
      to.q_begin = number * q_len_per_req;
      to.q_len = q_len_per_req;
    }
    int64_t room = int64_t(1) << 31;  // tokens that kv_indptr has place for
    if (kv_indptr != nullptr) {
      to.kv_start = kv_indptr[number];
      room = int64_t(kv_indptr[number + 1]) - to.kv_start;
    }
    int64_t length = room;
    if (page_size > 0) {
      if (last_page_len != nullptr && room > 0) {
        length = (room - 1) * page_size + last_page_len[number];
      }
      room *= page_size;
    }
    if (kv_len != nullptr) length = kv_len[number];
    if (length > room) length = room;
    if (length > kMostTokens) length = kMostTokens;
    to.kv_len = static_cast<int32_t>(length < 0 ? 0 : length);
    if (int64_t(to.q_len) * group > 0x7fffffff) to.q_len = 0x7fffffff / group;
    return to;
  }
};

// A table that the launch of a plan copies, too: under CUDA graphs lengths and pages of a batch go
// into buffers that stay where they are.
struct TableCopy {
  const int32_t* from;
  int32_t* to;
  int64_t count;  // 0: nothing is copied
};

constexpr int kTableCopies = 4;  // qo_indptr, kv_indptr, last_page_len, indices

struct PlanParams {
  ScheduleShape shape;
  Lengths lengths;
  int32_t* plan;      // 16-byte aligned
  int64_t plan_ints;  // room of the plan
  int64_t slots;      // room of the float workspace
  int32_t chunk;      // tokens of a part in list mode, a multiple of a block; 0: none asked for
  bool whole;         // no tile is cut
  TableCopy copies[kTableCopies];
};

// Costs of a head below this times heads and CTAs fit 64 bits.
constexpr int64_t kMostStreamed = int64_t(1) << 36;

// How a line of tiles of one length is shared.
constexpr int kLongShare = 256 * kBlockCost;
constexpr int kManyParts = 20;

// What is known once all tiles are.
struct LineSums {
  int64_t cost = 0;     // of one head
  int64_t longest = 0;  // cost of a tile
  int32_t requests = 0;
  int32_t tiles = 0;  // of one head
};

PRECAST_HOST_DEVICE inline ScheduleMode choose_mode(const PlanParams& p, const LineSums& sums) {
  if (p.whole || p.chunk > 0 || sums.cost > kMostStreamed) return ScheduleMode::list;
  if (p.slots < 2 * int64_t(p.shape.ctas)) return ScheduleMode::list;  // no room for parts
  // Of narrow tiles there are too few, and of any length.
  if (p.shape.tile_rows <= kNarrowRows) return ScheduleMode::stream;
  const int64_t share = sums.cost * p.shape.heads / p.shape.ctas;
  return sums.longest <= share * kListBalance ? ScheduleMode::list : ScheduleMode::stream;
}

// CTAs that share the line. Where all tiles are of a length and it costs few CTAs, so many that
// they take whole tiles, or tiles are cut into equal parts: no CTA has parts of two tiles. Long
// shares lose more by the CTAs that are left out. Half as many parts where the last CTA of a tile
// would take longer to merge them than each takes to read its tokens.
PRECAST_HOST_DEVICE inline int32_t ctas_of_line(const ScheduleShape& shape, const LineSums& sums) {
  const int64_t tiles = int64_t(sums.tiles) * shape.heads, ctas = shape.ctas;
  if (tiles == 0 || sums.longest * sums.tiles != sums.cost) return shape.ctas;
  const int64_t share = sums.cost * shape.heads / ctas;
  if (share > kLongShare) return shape.ctas;
  if (tiles > ctas) {
    const int64_t of_cta = (tiles + ctas - 1) / ctas, even = tiles / of_cta;
    return even * of_cta == tiles && even * 8 >= ctas * 7 ? least(even, ctas) : shape.ctas;
  }
  const int64_t parts = ctas / tiles;
  const bool halves = parts > kManyParts && share <= int64_t(2) * shape.group;
  if (halves) return least(parts / 2 * tiles, ctas);
  return parts * tiles * 8 >= ctas * 7 ? least(parts * tiles, ctas) : shape.ctas;
}

// Where CTA `cta` starts. `costs`: of one head up to each tile, [tiles + 1].
PRECAST_HOST_DEVICE inline CtaStart start_of(const ScheduleShape& shape, const Cuts& cuts,
                                             const PlannedRequest* requests, const LineSums& sums,
                                             const int64_t* costs, int32_t cta) {
  CtaStart start = {};
  start.head = shape.heads;
  start.parts = 1;
  const int64_t cut = cuts.at(cta);
  if (cut >= cuts.total) return start;
  start.head = static_cast<int32_t>(cut / sums.cost);
  int64_t before = start.head * sums.cost;
  int32_t low = 0, high = sums.requests;  // the last request that starts at or before the cut
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    (before + costs[requests[middle].tiles_before] <= cut ? low : high) = middle;
  }
  PlannedRequest at = requests[low];
  start.index = low;
  const int32_t tiles = tiles_of(shape, at.q_len);
  const int64_t* line = costs + at.tiles_before;  // [tiles + 1]
  before += line[0];
  low = 0;
  high = tiles;
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    (before + line[middle] - line[0] <= cut ? low : high) = middle;
  }
  start.tile = low;
  before += line[low] - line[0];
  const int32_t blocks = tokens_of(shape, at.q_len, at.kv_len, low).blocks();
  const TileCut in_tile = cut_tile(cuts, before, blocks, cut);
  if (in_tile.block > 0 && in_tile.block == blocks) {
    if (++start.tile == tiles) {
      start.tile = 0;
      if (++start.index == sums.requests) {
        start.index = 0;
        if (++start.head == shape.heads) return start;
      }
      at = requests[start.index];
    }
  } else {
    start.block = in_tile.block;
    start.first_cta = in_tile.first_cta;
    start.parts = in_tile.parts;
  }
  start.request = at.request;
  start.q_begin = at.q_begin;
  start.q_len = at.q_len;
  start.kv_start = at.kv_start;
  start.kv_len = at.kv_len;
  return start;
}

// The place of a tile in a list that is sorted by length, longest first, in steps of `longest`.
constexpr int kLengthSteps = 1024;
PRECAST_HOST_DEVICE constexpr int32_t length_step(int64_t cost, int64_t longest) {
  return kLengthSteps - 1 - static_cast<int32_t>(cost * (kLengthSteps - 1) / longest);
}

// Items of a list of whole tiles whose heads are taken one after another: half as many as CTAs, so
// that two heads are at work at a time, whose keys and values stay in L2 while many CTAs read them.
// Four heads make two rounds, one of them the other way round, and CTAs have equal shares of them.
// 0: heads side by side, as they are in memory; so of narrow tiles, which read tokens once.
PRECAST_HOST_DEVICE constexpr int32_t block_of_list(const ScheduleShape& shape) {
  const bool is_even = shape.heads % 4 == 0 && shape.ctas % 2 == 0;
  return is_even && shape.tile_rows > kNarrowRows ? shape.ctas / 2 : 0;
}

// Items and slots of one head in chunks, and whether they fit.
struct ListSums {
  int64_t items = 0;
  int64_t slots = 0;  // items of tiles that are cut
};

PRECAST_HOST_DEVICE constexpr int64_t list_ints(const ScheduleShape& shape, const LineSums& sums,
                                                const ListSums& list) {
  const int64_t counters = list.slots > 0 ? align_ints(int64_t(sums.tiles) * shape.heads) : 0;
  return list.items * kItemInts + counters;
}

// What the costs of tiles take while a plan is made; they lie at the end of its room, at a multiple
// of 16 bytes.
PRECAST_HOST_DEVICE constexpr int64_t costs_ints(int32_t tiles) {
  return 2 * (int64_t(tiles) + 1) + 4;
}

// Room that a plan of so many tiles of a head needs at least: with it, any batch has one.
PRECAST_HOST_DEVICE constexpr int64_t plan_room(const ScheduleShape& shape, int64_t tiles) {
  return PlanLayout(shape.batch, shape.ctas).rest + kItemInts * tiles + 2 * (tiles + 1) + 4;
}

// A longer chunk, if a plan has no room for this one; at last tiles stay whole.
PRECAST_HOST_DEVICE constexpr int32_t longer_chunk(int32_t chunk) {
  return chunk >= 1 << 28 ? 0 : 2 * chunk;
}

PRECAST_HOST_DEVICE inline PlanHeader header_of(const PlanParams& p, ScheduleMode mode,
                                                const LineSums& sums, const ListSums& list,
                                                int32_t chunk) {
  const PlanLayout layout(p.shape.batch, p.shape.ctas);
  const int64_t cost = sums.cost * p.shape.heads;
  PlanHeader header = {};
  header.mode = mode;
  header.shape = ShapeWords(p.shape);
  header.requests = sums.requests;
  header.tiles = sums.tiles;
  header.total_cost[0] = static_cast<int32_t>(cost & 0xffffffff);
  header.total_cost[1] = static_cast<int32_t>(cost >> 32);
  if (mode == ScheduleMode::stream) {
    header.used_ctas = static_cast<int32_t>(Cuts(cost, ctas_of_line(p.shape, sums)).ctas);
    header.slots = 2 * header.used_ctas;
    header.ints = static_cast<int32_t>(layout.rest);
  } else {
    header.used_ctas = least(list.items * p.shape.heads, p.shape.ctas);
    header.chunk = chunk;
    header.block = chunk == 0 ? block_of_list(p.shape) : 0;
    header.items = static_cast<int32_t>(list.items);
    if (header.block > 0) header.in_blocks = header.items / header.block * header.block;
    header.items_at = static_cast<int32_t>(layout.rest);
    header.counters_at = static_cast<int32_t>(layout.rest + list.items * kItemInts);
    header.slots = static_cast<int32_t>(list.slots * p.shape.heads);
    header.ints = static_cast<int32_t>(layout.rest + list_ints(p.shape, sums, list));
  }
  return header;
}

#if !defined(__CUDACC_RTC__)

// -- On the host ----------------------------------------------------------------------------------

// `chunk_kept` is false if there is no room for chunks as short as asked for.
struct HostPlan {
  std::vector<int32_t> ints;  // the plan
  PlanHeader header;
  int64_t scratch_ints;  // more, where the device makes it
  int64_t queries;       // of the batch
  bool chunk_kept;
};

// No limits for `plan_ints` or `slots` if they are 0.
inline HostPlan plan_on_host(PlanParams p) {
  if (p.plan_ints == 0) p.plan_ints = int64_t(1) << 31;
  if (p.slots == 0) p.slots = int64_t(1) << 31;
  const ScheduleShape& shape = p.shape;
  const PlanLayout layout(shape.batch, shape.ctas);
  std::vector<PlannedRequest> requests;
  std::vector<int64_t> costs = {0};
  LineSums sums;
  for (int32_t i = 0; i < shape.batch; ++i) {
    PlannedRequest request = p.lengths.request(i, shape.group);
    if (request.q_len == 0) continue;
    request.tiles_before = sums.tiles;
    requests.push_back(request);
    const int32_t tiles = tiles_of(shape, request.q_len);
    for (int32_t tile = 0; tile < tiles; ++tile) {
      const int64_t cost = cost_of(tokens_of(shape, request.q_len, request.kv_len, tile));
      sums.cost += cost;
      sums.longest = std::max(sums.longest, cost);
      costs.push_back(sums.cost);
    }
    sums.tiles += tiles;
  }
  sums.requests = static_cast<int32_t>(requests.size());
  HostPlan to = {};
  to.scratch_ints = costs_ints(sums.tiles);
  for (const PlannedRequest& request : requests) to.queries += request.q_len;
  const ScheduleMode mode = choose_mode(p, sums);
  const auto parts = [&](const PlannedRequest& request, int32_t tile, int32_t chunk) {
    return parts_of(tokens_of(shape, request.q_len, request.kv_len, tile), chunk);
  };
  ListSums list;
  int32_t chunk = p.whole ? 0 : p.chunk;
  if (mode == ScheduleMode::list) {
    for (;; chunk = longer_chunk(chunk)) {
      list = {};
      for (const PlannedRequest& request : requests) {
        for (int32_t tile = 0; tile < tiles_of(shape, request.q_len); ++tile) {
          const int32_t count = parts(request, tile, chunk);
          list.items += count;
          list.slots += count > 1 ? count : 0;
        }
      }
      const int64_t ints = layout.rest + list_ints(shape, sums, list) + to.scratch_ints;
      const bool fits = ints <= p.plan_ints && list.slots * shape.heads <= p.slots;
      if (fits || chunk == 0) break;
    }
  }
  to.chunk_kept = p.whole || chunk == p.chunk;
  to.header = header_of(p, mode, sums, list, chunk);
  to.ints.resize(to.header.ints);
  int32_t* plan = to.ints.data();
  std::memcpy(plan, &to.header, sizeof to.header);
  if (sums.requests > 0) {
    std::memcpy(plan + layout.requests, requests.data(), requests.size() * sizeof(PlannedRequest));
  }
  if (mode == ScheduleMode::stream) {
    const Cuts cuts(sums.cost * shape.heads, ctas_of_line(shape, sums));
    for (int32_t cta = 0; cta <= shape.ctas; ++cta) {
      const CtaStart start = start_of(shape, cuts, requests.data(), sums, costs.data(), cta);
      std::memcpy(plan + layout.starts + int64_t(cta) * kStartInts, &start, sizeof start);
    }
    return to;
  }
  // Chunks are all of a length; whole tiles are sorted.
  std::vector<int64_t> place(kLengthSteps + 1);
  const auto step = [&](int32_t tile) {
    return chunk > 0 ? 0 : length_step(costs[tile + 1] - costs[tile], sums.longest);
  };
  if (chunk == 0) {
    for (int32_t tile = 0; tile < sums.tiles; ++tile) ++place[step(tile) + 1];
    for (int i = 0; i < kLengthSteps; ++i) place[i + 1] += place[i];
  }
  int32_t slots = 0;
  for (int32_t index = 0; index < sums.requests; ++index) {
    const PlannedRequest& request = requests[index];
    for (int32_t tile = 0; tile < tiles_of(shape, request.q_len); ++tile) {
      const int32_t count = parts(request, tile, chunk);
      for (int32_t part = 0; part < count; ++part) {
        const ListItem item = {index, tile, part, slots};
        const int64_t at = place[step(request.tiles_before + tile)]++;
        std::memcpy(plan + to.header.items_at + at * kItemInts, &item, sizeof item);
      }
      if (count > 1) slots += count;
    }
  }
  return to;
}

#endif

}  // namespace precast
