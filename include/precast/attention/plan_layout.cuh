// SPDX-License-Identifier: Apache-2.0
// The memory layout of a plan, which attention/plan.cuh writes and the tile scheduler
// (attention/scheduler.cuh) reads. A plan is an array of int32:
//
//   PlanHeader                    one
//   stream-K split counters       [ctas], one for each CTA
//   CtaStart                      [ctas + 1]
//   PlannedRequest                [batch], of which header.num_requests are filled
//   WorkTileEntry                 [header.num_entries], only in static_persistent mode
//   split counters of tiles       [heads * header.num_tiles], only in static_persistent mode
//
// A request without queries has no PlannedRequest.
#pragma once

#include "precast/core/host_device.cuh"
#include "precast/core/types.cuh"

namespace precast {

// How tiles are distributed over CTAs; attention/scheduler.cuh describes the modes.
enum class ScheduleMode : int32_t { stream_k, static_persistent, stream_k_by_tiles };

// What a plan depends on besides the lengths of the batch. plan() and run() must use the same one.
struct ScheduleShape {
  int32_t batch;
  int32_t ctas;         // grid size of the attention kernel
  int32_t heads;        // KV heads times the number of blocks that head_dim_vo is cut into
  int32_t group_size;   // query heads per KV head
  int32_t block_m;      // packed query rows of a tile
  int32_t window_left;  // < 0: no window
  bool causal;
};

// A ScheduleShape as eight numbers, which a kernel compares without branches.
struct alignas(16) PackedShape {
  int32_t words[8];

  PackedShape() = default;
  PRECAST_HOST_DEVICE constexpr explicit PackedShape(const ScheduleShape& shape)
      : words{shape.batch,   shape.ctas,        shape.heads,  shape.group_size,
              shape.block_m, shape.window_left, shape.causal, 0} {}
};

// The first entry of a plan. Fields marked "static" are 0 in stream_k mode.
struct alignas(16) PlanHeader {
  ScheduleMode mode;
  int32_t num_requests;     // requests that have queries
  int32_t num_tiles;        // tiles of one head
  int32_t active_ctas;      // CTAs with a greater index have no work
  int32_t split_size;       // static: tokens of a split; 0: no tile is split
  int32_t num_entries;      // static: entries of one head
  int32_t entries_offset;   // static: in int32, from the start of the plan
  int32_t counters_offset;  // static: in int32, from the start of the plan
  int32_t num_partials;     // partial results that the split workspace must hold
  int32_t num_ints;         // length of the plan
  int32_t total_cost[2];    // low word, high word
  int32_t swizzle_size;     // static: entries of which all heads are taken one after another
  int32_t num_swizzled;     // static: entries that belong to such a block
  int32_t next_ticket;      // static: entries that TileScheduler::take_work() has given out; 0
  int32_t unused;           // when no kernel runs
  PackedShape shape;        // the shape that the plan was made for
};
constexpr int kHeaderInts = 24;
static_assert(sizeof(PlanHeader) == 4 * kHeaderInts, "kHeaderInts");

// A request that has queries.
struct alignas(16) PlannedRequest {
  int32_t request_idx;       // index in the batch
  int32_t q_begin, q_len;    // qo_indptr[request_idx], number of queries
  int32_t kv_start, kv_len;  // kv_indptr[request_idx] (pages or tokens), number of tokens
  int32_t tiles_before;      // tiles of one head of the planned requests before this one
  int32_t unused[2];
};
constexpr int kRequestInts = 8;
static_assert(sizeof(PlannedRequest) == 4 * kRequestInts, "kRequestInts");

// Where a CTA starts in stream_k mode, which is also where the CTA before it ends.
struct alignas(16) CtaStart {
  int32_t planned_idx;            // index of the PlannedRequest
  int32_t head, m_block;          // head: ScheduleShape::heads if the CTA starts past the last tile
  int32_t n_block;                // > 0: the tile began in a CTA before
  int32_t first_cta, num_splits;  // of that tile
  int32_t request_idx, q_begin, q_len, kv_start, kv_len;
  int32_t unused;
};
constexpr int kStartInts = 12;
static_assert(sizeof(CtaStart) == 4 * kStartInts, "kStartInts");

// A tile, or a split of a tile, for all heads (static_persistent mode).
struct alignas(16) WorkTileEntry {
  int32_t planned_idx;  // index of the PlannedRequest
  int32_t m_block;
  int32_t split_idx;
  int32_t first_partial;  // partial result of split 0, in units of `heads`; unused without splits
};
constexpr int kEntryInts = 4;
static_assert(sizeof(WorkTileEntry) == 4 * kEntryInts, "kEntryInts");

PRECAST_HOST_DEVICE constexpr int64_t align_ints(int64_t ints) { return (ints + 3) / 4 * 4; }

// Offsets of the parts of a plan, in int32 from its start.
struct PlanLayout {
  int64_t counters, starts, requests, entries;

  PRECAST_HOST_DEVICE constexpr PlanLayout(int32_t batch, int32_t ctas)
      : counters(kHeaderInts),
        starts(counters + align_ints(ctas)),
        requests(starts + int64_t(kStartInts) * (ctas + 1)),
        entries(requests + int64_t(kRequestInts) * batch) {}
};

// What the tile scheduler of an attention kernel needs.
struct TileSchedulerParams {
  int32_t* plan;  // 16-byte aligned
  ScheduleShape shape;
};

// Whether a plan was made for a call of that shape, and the split workspace can hold its partial
// results. A kernel must not take work from another plan: it names heads and tiles that do not
// exist, and its counters belong to another call.
PRECAST_HOST_DEVICE inline bool is_planned(const PackedShape& planned, int32_t num_partials,
                                           const ScheduleShape& shape, int64_t max_partials) {
  const PackedShape expected(shape);
  const bool fits = num_partials <= max_partials;
  int32_t differ = 0;
  for (int i = 0; i < 8; ++i) differ |= planned.words[i] ^ expected.words[i];
  return fits & (differ == 0);  // Why &: no branch waits for a load.
}

PRECAST_HOST_DEVICE inline bool is_planned(const TileSchedulerParams& params,
                                           int64_t max_partials) {
  const PlanHeader& header = *reinterpret_cast<const PlanHeader*>(params.plan);
  return is_planned(header.shape, header.num_partials, params.shape, max_partials);
}

}  // namespace precast
