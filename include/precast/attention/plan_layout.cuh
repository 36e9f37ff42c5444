// SPDX-License-Identifier: Apache-2.0
// What lies in the plan of an attention kernel (attention/scheduler.cuh), in int32:
//
//   header | counters [ctas] | starts [ctas + 1] | requests [batch] | the rest, which only the list
//   mode reads: items, counters of tiles
//
// Requests without queries are left out.
#pragma once

#include "precast/core/host_device.cuh"
#include "precast/core/types.cuh"

namespace precast {

enum class ScheduleMode : int32_t { stream, list };

// What a plan depends on besides lengths: the same for plan and run.
struct ScheduleShape {
  int32_t batch;
  int32_t ctas;         // of the attention kernel
  int32_t heads;        // KV heads, times the parts that head_dim_vo falls into
  int32_t group;        // query heads of a KV head
  int32_t tile_rows;    // packed rows
  int32_t window_left;  // < 0: none
  bool causal;
};

// A shape as numbers that are compared at once.
struct alignas(16) ShapeWords {
  int32_t words[8];

  ShapeWords() = default;
  PRECAST_HOST_DEVICE constexpr explicit ShapeWords(const ScheduleShape& shape)
      : words{shape.batch,     shape.ctas,        shape.heads,  shape.group,
              shape.tile_rows, shape.window_left, shape.causal, 0} {}
};

// At the start of a plan.
struct alignas(16) PlanHeader {
  ScheduleMode mode;
  int32_t requests;       // with queries
  int32_t tiles;          // of one head
  int32_t used_ctas;      // stream: CTAs beyond have nothing
  int32_t chunk;          // list: tokens, 0 for whole tiles
  int32_t items;          // list: of one head
  int32_t items_at;       // list: int32 from the start of the plan
  int32_t counters_at;    // list
  int32_t slots;          // of the float workspace that the plan uses
  int32_t ints;           // length of the plan
  int32_t total_cost[2];  // low, high
  int32_t block;          // list: items whose heads are taken one after another
  int32_t in_blocks;      // list: items that are in such blocks
  int32_t unused[2];
  ShapeWords shape;  // what the plan is for
};
constexpr int kHeaderInts = 24;
static_assert(sizeof(PlanHeader) == 4 * kHeaderInts, "kHeaderInts");

// A request with queries.
struct alignas(16) PlannedRequest {
  int32_t request;
  int32_t q_begin, q_len;    // tokens
  int32_t kv_start, kv_len;  // kv_indptr[request] (pages or tokens), tokens
  int32_t tiles_before;      // of one head, of the requests before
  int32_t unused[2];
};
constexpr int kRequestInts = 8;
static_assert(sizeof(PlannedRequest) == 4 * kRequestInts, "kRequestInts");

// Where a CTA starts in the line, and the CTA before ends.
struct alignas(16) CtaStart {
  int32_t index;             // of the planned request
  int32_t head, tile;        // head: the number of heads at the end of the line
  int32_t block;             // of the tile, > 0 if the tile began in a CTA before
  int32_t first_cta, parts;  // of that tile
  int32_t request, q_begin, q_len, kv_start, kv_len;
  int32_t unused;
};
constexpr int kStartInts = 12;
static_assert(sizeof(CtaStart) == 4 * kStartInts, "kStartInts");

struct alignas(16) ListItem {
  int32_t index;  // of the planned request
  int32_t tile;
  int32_t part;
  int32_t slot;  // of part 0, in steps of `heads`; unused for a whole tile
};
constexpr int kItemInts = 4;
static_assert(sizeof(ListItem) == 4 * kItemInts, "kItemInts");

PRECAST_HOST_DEVICE constexpr int64_t align_ints(int64_t ints) { return (ints + 3) / 4 * 4; }

struct PlanLayout {
  int64_t counters, starts, requests, rest;  // int32 from the start

  PRECAST_HOST_DEVICE constexpr PlanLayout(int32_t batch, int32_t ctas)
      : counters(kHeaderInts),
        starts(counters + align_ints(ctas)),
        requests(starts + int64_t(kStartInts) * (ctas + 1)),
        rest(requests + int64_t(kRequestInts) * batch) {}
};

// What an attention kernel needs of the plan.
struct ScheduleParams {
  int32_t* plan;  // 16-byte aligned
  ScheduleShape shape;
};

// Whether a plan is for a call of that shape with room for `slots` partial results. Of another one
// a kernel must not take a piece: heads and tiles that there are not, counters of another plan.
PRECAST_HOST_DEVICE inline bool is_planned(const ScheduleParams& params, int64_t slots) {
  const PlanHeader& header = *reinterpret_cast<const PlanHeader*>(params.plan);
  const ShapeWords planned = header.shape, wanted(params.shape);
  const bool fits = header.slots <= slots;
  int32_t differ = 0;
  for (int i = 0; i < 8; ++i) differ |= planned.words[i] ^ wanted.words[i];
  return fits & (differ == 0);  // Why: no branch waits for a load.
}

}  // namespace precast
