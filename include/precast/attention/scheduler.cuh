// SPDX-License-Identifier: Apache-2.0
// The tile scheduler: which CTA of an attention kernel works on which queries and which KV tokens.
//
// The query heads that read one KV head are packed into rows (PackGQA): packed row = query *
// group_size + head within the group. A tile is kBlockM packed rows of one request and one head. It
// reads the KV tokens that its rows may attend to: from the window of its first query to the causal
// end of its last query. The cost of a tile is its number of KV blocks (64 tokens) plus a constant.
// A tile whose tokens are distributed over several CTAs is split; each split writes a partial
// result to the split workspace, and attention/combine.cuh combines them (split-KV).
//
// All tiles stand in one order: head by head, then request by request, then tile by tile. The heads
// of a token are neighbours in memory, and this order makes CTAs read them at about the same time.
//
//   stream_k           CTA w of W takes the w-th of W equal shares of the total cost: the last
//                      splits of a tile that began before, whole tiles, the first splits of a tile
//                      that continues. Ragged lengths need no other balancing. The splits of a tile
//                      are in consecutive CTAs, and each split but the first is the first work of
//                      its CTA, so two partial results per CTA are enough.
//   stream_k_by_tiles  The same, but tiles stand head by head, then tile by tile, then request by
//                      request, and each tile of a request has equally many CTAs. So a kernel can
//                      give neighbouring CTAs the same tokens for all tiles of a request
//                      (share_of_cta() of MLA for sm_90a).
//   static_persistent  CTA w takes the entries w, w + W, ... of a table in the plan: whole tiles,
//                      the longest first, or splits of a fixed number of tokens. An entry depends
//                      on its own request only, so results do not depend on the rest of the batch.
//                      Each entry is taken for all heads. Where there are many tiles, the heads are
//                      swizzled for L2: all entries of a block for one head, then for the next.
//
// The plan (attention/plan.cuh) stores where each CTA starts; the kernel iterates from there.
//
// Source   stream-K: Osama et al., arXiv:2301.03598, here on the KV blocks of a batch.
#pragma once

#include "precast/attention/plan_layout.cuh"

namespace precast {

constexpr int kKvBlockSize = 64;  // tokens; work tiles begin at multiples of it

// Costs are in quarters of a KV block. The constant cost of a tile is about that of a block.
constexpr int kBlockCost = 4;
constexpr int kTileCost = 4;
// In a small batch, a CTA gets at least this cost.
constexpr int kMinCtaCost = 4;
// No tile is split if the longest tile costs at most this many times the share of a CTA.
constexpr int kMaxImbalance = 2;

static_assert(kMinCtaCost >= kBlockCost, "two boundaries of a tile would fall on one block");

// -- Tiles ----------------------------------------------------------------------------------------

PRECAST_HOST_DEVICE constexpr int32_t min_int32(int64_t a, int64_t b) {
  return static_cast<int32_t>(a < b ? a : b);
}

// x / y of numbers that are not negative. Why 32 bits: a GPU has no divide instruction, and the
// code that replaces it is short for 32 bits only.
PRECAST_HOST_DEVICE constexpr int32_t quotient(int64_t x, int32_t y) {
  return static_cast<int32_t>(static_cast<uint32_t>(x) / static_cast<uint32_t>(y));
}

// Tiles of a request and a head. A request has fewer than 2^31 packed rows.
PRECAST_HOST_DEVICE constexpr int32_t num_m_blocks(const ScheduleShape& shape, int32_t q_len) {
  return quotient(int64_t(q_len) * shape.group_size + shape.block_m - 1, shape.block_m);
}

// KV tokens [begin, end); begin is a multiple of kKvBlockSize. Both are 0 if there are no tokens.
struct KvRange {
  int32_t begin, end;

  PRECAST_HOST_DEVICE constexpr int32_t num_n_blocks() const {
    return (end - begin + kKvBlockSize - 1) / kKvBlockSize;
  }
};

// The tokens that at least one row of a tile attends to.
PRECAST_HOST_DEVICE constexpr KvRange kv_range_of_tile(const ScheduleShape& shape, int32_t q_len,
                                                       int32_t kv_len, int32_t m_block) {
  // All of them, without a division, as in most decodes: a CTA finds its work thread by thread.
  if (shape.window_left < 0 && (q_len == 1 || !shape.causal)) return {0, kv_len > 0 ? kv_len : 0};
  const int64_t first_row = int64_t(m_block) * shape.block_m;
  const int64_t end_row = first_row + shape.block_m;
  const int64_t rows = int64_t(q_len) * shape.group_size;
  const int64_t shift = int64_t(kv_len) - q_len;  // position of a query, minus its index
  int64_t begin = 0, end = kv_len;
  if (shape.causal) {
    end = shift + quotient((end_row < rows ? end_row : rows) - 1, shape.group_size) + 1;
  }
  if (shape.window_left >= 0) {
    begin = shift + quotient(first_row, shape.group_size) - shape.window_left;
  }
  if (begin < 0) begin = 0;
  if (begin >= end) return {0, 0};
  return {static_cast<int32_t>(begin / kKvBlockSize * kKvBlockSize), static_cast<int32_t>(end)};
}

PRECAST_HOST_DEVICE constexpr int64_t tile_cost(KvRange range) {
  return int64_t(range.num_n_blocks()) * kBlockCost + kTileCost;
}

// -- Stream-K -------------------------------------------------------------------------------------

// Equal shares of the total cost, one for each CTA. `Cost` holds the total cost times the CTAs and
// one more: it is uint32_t where that suffices and many divisions would take too long.
template <typename Cost>
struct StreamKPartitionOf {
  Cost total_cost;
  Cost ctas;          // CTAs that get a share
  int32_t tile_cost;  // the constant cost of a tile in it

  PRECAST_HOST_DEVICE constexpr StreamKPartitionOf(Cost cost, int32_t max_ctas,
                                                   int32_t cost_of_tile = kTileCost)
      : total_cost(cost),
        ctas(cost / kMinCtaCost < Cost(max_ctas) ? cost / kMinCtaCost : Cost(max_ctas)),
        tile_cost(cost_of_tile) {
    if (ctas < 1) ctas = 1;
  }

  // The cost at which the share of a CTA begins.
  PRECAST_HOST_DEVICE constexpr Cost begin_of(int32_t cta) const {
    return Cost(cta) >= ctas ? total_cost : total_cost * cta / ctas;
  }

  // The first CTA whose share begins at or after `cost`.
  PRECAST_HOST_DEVICE constexpr int32_t first_cta_at(Cost cost) const {
    return static_cast<int32_t>((cost * ctas + total_cost - 1) / total_cost);
  }
};
using StreamKPartition = StreamKPartitionOf<int64_t>;

// Where a share begins inside a tile: before n_block, which is 0 at the tile's begin and the number
// of its blocks at the tile's end.
struct TileBoundary {
  int32_t n_block;
  int32_t first_cta, num_splits;  // of the tile, if it is split
};

// `cost_before`: cost of all tiles before this one; `cost`: where the share begins, inside the
// tile.
template <typename Cost>
PRECAST_HOST_DEVICE constexpr TileBoundary find_boundary(const StreamKPartitionOf<Cost>& partition,
                                                         Cost cost_before, int32_t n_blocks,
                                                         Cost cost) {
  // A boundary is rounded to the next block: after `from` it is behind the first block, after
  // `until` it is the tile's end.
  const Cost from = cost_before + partition.tile_cost + kBlockCost / 2;
  const Cost until = from + (Cost(n_blocks) - 1) * kBlockCost;
  if (cost < from) return {0, 0, 1};
  const int32_t first = partition.first_cta_at(from);
  return {static_cast<int32_t>((cost - from) / kBlockCost) + 1, first - 1,
          partition.first_cta_at(until) - first + 1};
}

// -- Static persistent ----------------------------------------------------------------------------

// Number of splits of a tile if a split has `split_size` tokens, a multiple of kKvBlockSize; 0: the
// tile is not split. Splits begin at multiples of their size, so that the window does not change
// which split a token is in.
PRECAST_HOST_DEVICE constexpr int32_t num_splits_of(KvRange range, int32_t split_size) {
  if (split_size == 0 || range.begin >= range.end) return 1;
  return quotient(range.end - 1, split_size) - quotient(range.begin, split_size) + 1;
}

PRECAST_HOST_DEVICE constexpr KvRange kv_range_of_split(KvRange range, int32_t split_size,
                                                        int32_t split_idx) {
  if (split_size == 0 || range.begin >= range.end) return range;
  const int64_t begin = (int64_t(range.begin / split_size) + split_idx) * split_size;
  return {begin > range.begin ? static_cast<int32_t>(begin) : range.begin,
          min_int32(begin + split_size, range.end)};
}

// -- The scheduler of a kernel --------------------------------------------------------------------

// One tile, or one split of it: KV tokens [kv_begin, kv_end) for one m_block, request and head.
struct WorkTile {
  int32_t request_idx, head, m_block;
  int32_t q_begin, q_len;         // qo_indptr[request_idx], number of queries
  int32_t kv_start, kv_len;       // kv_indptr[request_idx], number of tokens of the request
  int32_t kv_begin, kv_end;       // multiples of kKvBlockSize, or kv_end ends the tile
  int32_t split_idx, num_splits;  // num_splits is 1 if the tile is not split
  int32_t counter;                // index of the tile's first split counter, if it is split
  int32_t first_partial, partial_step, partial_skip;

  // Index of the partial result of a split of the tile in the split workspace.
  PRECAST_HOST_DEVICE constexpr int32_t partial(int32_t split) const {
    return first_partial + split * partial_step - (split > 0 ? partial_skip : 0);
  }

  // Number of the tile's split counters, from `counter` on. In stream_k mode it has one of each of
  // its CTAs but the last, which may begin another tile.
  PRECAST_HOST_DEVICE constexpr int32_t num_counters() const {
    return partial_skip > 0 ? num_splits - 1 : 1;
  }
};

// Iterates over the work tiles of CTA `cta`. One thread of the CTA calls it. Plans in mode
// stream_k_by_tiles need kByTiles, which costs others an instruction or two a tile.
template <bool kByTiles>
class TileSchedulerOf {
 public:
  PRECAST_HOST_DEVICE TileSchedulerOf(const TileSchedulerParams& params, int32_t cta)
      : TileSchedulerOf(params, cta, first_start(params) + cta,
                        reinterpret_cast<const PlanHeader*>(params.plan)->mode) {}

  // The same with the mode and the starts of CTAs `cta` and `cta` + 1 from elsewhere. Why
  // static_persistent mode reads the starts, too: so no load waits for the mode.
  PRECAST_HOST_DEVICE TileSchedulerOf(const TileSchedulerParams& params, int32_t cta,
                                      const CtaStart* starts, ScheduleMode mode)
      : params_(params), layout_(params.shape.batch, params.shape.ctas), cta_(cta) {
    header_ = reinterpret_cast<const PlanHeader*>(params.plan);
    at_ = starts[0];
    const CtaStart end = starts[1];
    end_planned_idx_ = end.planned_idx;
    end_head_ = end.head;
    end_m_block_ = end.m_block;
    end_n_block_ = end.n_block;
    end_num_splits_ = end.num_splits;
    end_first_cta_ = end.first_cta;
    is_static_ = mode == ScheduleMode::static_persistent;
    is_by_tiles_ = kByTiles && mode == ScheduleMode::stream_k_by_tiles;
  }

  static PRECAST_HOST_DEVICE const CtaStart* first_start(const TileSchedulerParams& params) {
    const PlanLayout layout(params.shape.batch, params.shape.ctas);
    return reinterpret_cast<const CtaStart*>(params.plan + layout.starts);
  }

  // The split counters of the plan; WorkTile::counter is an index of them.
  PRECAST_HOST_DEVICE int32_t* counters() const {
    return params_.plan + (is_static_ ? header_->counters_offset : layout_.counters);
  }

  // Returns false if there is no more work.
  PRECAST_HOST_DEVICE bool get_next_work(WorkTile& work) {
    return is_static_ ? get_work_of_round(round_++, work) : get_next_stream_k(work);
  }

#if defined(__CUDACC__)
  // The same by tickets: in static_persistent mode, behind the first rounds, a CTA takes the next
  // entry that no other has taken. CTAs whose tiles take longer than their cost, because of clocks
  // or of L2, take fewer. Why not from the start: the entries of the first two rounds make equal
  // sums. All CTAs of a launch must use it, until it returns false.
  __device__ bool take_work(WorkTile& work) {
    constexpr int32_t kFirstRounds = 2;
    if (!is_static_ || round_ < kFirstRounds) return get_next_work(work);
    const int64_t tickets =
        int64_t(header_->num_entries) * params_.shape.heads - kFirstRounds * params_.shape.ctas;
    if (tickets <= 0) return false;
    int32_t* const next = &reinterpret_cast<PlanHeader*>(params_.plan)->next_ticket;
    const int32_t ticket = atomicAdd(next, 1);
    if (ticket < tickets) return get_item(kFirstRounds * params_.shape.ctas + ticket, work);
    // Each CTA takes one ticket too many. The last of them leaves the plan as it was.
    if (ticket == tickets + params_.shape.ctas - 1) *next = 0;
    return false;
  }
#endif

  // Whether the mode is static_persistent, in which work can be found in any order.
  PRECAST_HOST_DEVICE bool is_static() const { return is_static_; }

  // The work that get_next_work() gives after `round` others. Returns false past the end.
  PRECAST_HOST_DEVICE bool get_work_of_round(int32_t round, WorkTile& work) const {
    const int32_t ctas = params_.shape.ctas;
    // Every second round reverses the order of the CTAs, and every two rounds shift it by an eighth
    // of them. Why: the entries are sorted, so the CTA with the longest entry of a round gets the
    // shortest of the next one, and the middle of a round becomes the end of a later one.
    const int32_t shifted = cta_ + round / 2 * (ctas / 8);
    const int32_t place = shifted - quotient(shifted, ctas) * ctas;
    return get_item(round * ctas + (round % 2 == 0 ? place : ctas - 1 - place), work);
  }

 private:
  // An entry for one head. Items are counted in the order in which CTAs take them. Returns false
  // past the end.
  PRECAST_HOST_DEVICE bool get_item(int32_t item, WorkTile& work) const {
    const int32_t heads = params_.shape.heads;
    if (item >= header_->num_entries * heads) return false;
    const int32_t swizzle = header_->swizzle_size, num_swizzled = header_->num_swizzled;
    int32_t entry_idx;
    if (item < num_swizzled * heads) {
      const int32_t first = quotient(item, swizzle * heads) * swizzle, rest = item - first * heads;
      work.head = quotient(rest, swizzle);
      entry_idx = first + rest - work.head * swizzle;
    } else {
      const int32_t rest = item - num_swizzled * heads;
      entry_idx = quotient(rest, heads);
      work.head = rest - entry_idx * heads;
      entry_idx += num_swizzled;
    }
    const WorkTileEntry& entry =
        reinterpret_cast<const WorkTileEntry*>(params_.plan + header_->entries_offset)[entry_idx];
    const PlannedRequest& request = planned_request(entry.planned_idx);
    work.request_idx = request.request_idx;
    work.m_block = entry.m_block;
    work.q_begin = request.q_begin;
    work.q_len = request.q_len;
    work.kv_start = request.kv_start;
    work.kv_len = request.kv_len;
    const KvRange range =
        kv_range_of_tile(params_.shape, request.q_len, request.kv_len, entry.m_block);
    const KvRange split = kv_range_of_split(range, header_->split_size, entry.split_idx);
    work.kv_begin = split.begin;
    work.kv_end = split.end;
    work.split_idx = entry.split_idx;
    work.num_splits = num_splits_of(range, header_->split_size);
    work.counter = (request.tiles_before + entry.m_block) * params_.shape.heads + work.head;
    work.first_partial = entry.first_partial * params_.shape.heads + work.head;
    work.partial_step = params_.shape.heads;
    work.partial_skip = 0;
    return true;
  }

  PRECAST_HOST_DEVICE const PlannedRequest& planned_request(int32_t planned_idx) const {
    return reinterpret_cast<const PlannedRequest*>(params_.plan + layout_.requests)[planned_idx];
  }

  // Why the tile before is left here and not once it is given: that may load from the plan, and the
  // first work of a CTA must not (see AttentionMainloop::start()).
  PRECAST_HOST_DEVICE bool get_next_stream_k(WorkTile& work) {
    bool ends_here = is_last_tile();
    if (has_given_) {
      if (ends_here) {
        at_.n_block = end_n_block_;
      } else {
        at_.n_block = 0;
        advance();
        ends_here = is_last_tile();
      }
    }
    has_given_ = false;
    if (ends_here ? at_.n_block >= end_n_block_ : is_past_end()) return false;
    const KvRange range = kv_range_of_tile(params_.shape, at_.q_len, at_.kv_len, at_.m_block);
    work.request_idx = at_.request_idx;
    work.head = at_.head;
    work.m_block = at_.m_block;
    work.q_begin = at_.q_begin;
    work.q_len = at_.q_len;
    work.kv_start = at_.kv_start;
    work.kv_len = at_.kv_len;
    work.kv_begin = range.begin + at_.n_block * kKvBlockSize;
    work.kv_end = ends_here ? range.begin + end_n_block_ * kKvBlockSize : range.end;
    work.num_splits = at_.n_block > 0 ? at_.num_splits : ends_here ? end_num_splits_ : 1;
    const int32_t first_cta = at_.n_block > 0 ? at_.first_cta : ends_here ? end_first_cta_ : cta_;
    work.split_idx = cta_ - first_cta;
    work.counter = first_cta;
    work.first_partial = 2 * first_cta + 1;
    work.partial_step = 2;
    work.partial_skip = 1;
    has_given_ = true;
    return true;
  }

  // Whether the next CTA starts in this tile, or after it.
  PRECAST_HOST_DEVICE bool is_last_tile() const {
    return at_.planned_idx == end_planned_idx_ && at_.head == end_head_ &&
           at_.m_block == end_m_block_;
  }

  // Goes on to the next tile.
  PRECAST_HOST_DEVICE void advance() {
    const int32_t tiles = num_m_blocks(params_.shape, at_.q_len);
    if (kByTiles && is_by_tiles_) {
      if (++at_.planned_idx >= header_->num_requests) {
        at_.planned_idx = 0;
        if (++at_.m_block >= tiles) {
          at_.m_block = 0;
          ++at_.head;
        }
      }
    } else {
      if (++at_.m_block < tiles) return;
      at_.m_block = 0;
      if (++at_.planned_idx >= header_->num_requests) {
        at_.planned_idx = 0;
        ++at_.head;
      }
    }
    if (is_past_end() || is_at_end()) return;
    const PlannedRequest& next = planned_request(at_.planned_idx);
    at_.request_idx = next.request_idx;
    at_.q_begin = next.q_begin;
    at_.q_len = next.q_len;
    at_.kv_start = next.kv_start;
    at_.kv_len = next.kv_len;
  }

  // Why >, not ==: the iteration ends whatever the plan holds, even where it misses the end.
  PRECAST_HOST_DEVICE bool is_past_end() const {
    const int64_t at = place_in_head(at_.planned_idx, at_.m_block);
    const int64_t end = place_in_head(end_planned_idx_, end_m_block_);
    return (at_.head > end_head_) | ((at_.head == end_head_) & (at > end));
  }

  // Places in the order of a head are compared by this.
  PRECAST_HOST_DEVICE int64_t place_in_head(int32_t planned_idx, int32_t m_block) const {
    return kByTiles && is_by_tiles_ ? int64_t(m_block) << 32 | planned_idx
                                    : int64_t(planned_idx) << 32 | m_block;
  }

  // Whether the next CTA takes all of this tile.
  PRECAST_HOST_DEVICE bool is_at_end() const {
    return at_.head == end_head_ && at_.planned_idx == end_planned_idx_ &&
           at_.m_block == end_m_block_ && end_n_block_ == 0;
  }

  TileSchedulerParams params_;
  PlanLayout layout_;
  const PlanHeader* header_;
  int32_t cta_;
  int32_t round_ = 0;
  CtaStart at_;
  int32_t end_planned_idx_, end_head_, end_m_block_, end_n_block_, end_num_splits_, end_first_cta_;
  bool is_static_, is_by_tiles_;
  bool has_given_ = false;  // whether at_ is the tile that was given last
};
using TileScheduler = TileSchedulerOf<false>;

}  // namespace precast
