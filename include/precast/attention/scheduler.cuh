// SPDX-License-Identifier: Apache-2.0
// Which CTA of an attention kernel works on which queries and which tokens.
//
// The queries of a request that read one KV head are packed rows: row = query * group + head of the
// group. `tile_rows` of them are a tile; its tokens are what its rows may see, from the window of
// its first query to the causal end of its last. Tiles of all requests and heads lie behind one
// another: head by head, request by request, so that CTAs which read a token's heads, neighbours in
// memory, are at work on them at about the same time. A tile costs its blocks of 64 tokens and a
// constant.
//
//   stream  CTA w of W takes the w-th of W equal parts of that line: the end of a tile that began
//           before, whole tiles, the start of one that goes on. Ragged lengths need nothing else. A
//           tile that is cut has parts in consecutive CTAs; each part but the first is what its CTA
//           takes first, so two slots a CTA are enough.
//   list    CTA w takes items w, w + W, ... of a list: whole tiles, the longest first, or chunks of
//           a fixed number of tokens. What an item holds depends on its request alone, so results
//           do not depend on the rest of the batch. Items times heads: where tiles are many, all
//           items of a block for one head after another, else all heads of an item.
//
// The plan (attention/plan.cuh) writes where each CTA starts; kernels walk from there.
//
// Source   stream-k of Osama et al., arXiv:2301.03598, on the line of KV blocks of a batch.
#pragma once

#include "precast/attention/plan_layout.cuh"

namespace precast {

constexpr int kKvBlock = 64;  // tokens; pieces start at multiples

// Costs count quarters of a block; what a tile takes besides is about as much as a block.
constexpr int kBlockCost = 4;
constexpr int kTileCost = 4;
// A CTA of a small batch takes no less.
constexpr int kLeastCtaCost = 4;
// Without a cut, where the longest tile is at most so many times what a CTA gets.
constexpr int kListBalance = 2;

static_assert(kLeastCtaCost >= kBlockCost, "two cuts of a tile would fall on one block");

// -- Tiles ----------------------------------------------------------------------------------------

PRECAST_HOST_DEVICE constexpr int32_t least(int64_t a, int64_t b) {
  return static_cast<int32_t>(a < b ? a : b);
}

// Of numbers that are not negative. Why: the device has no division, and in 32 bits it is short.
PRECAST_HOST_DEVICE constexpr int32_t quotient(int64_t x, int32_t y) {
  return static_cast<int32_t>(static_cast<uint32_t>(x) / static_cast<uint32_t>(y));
}

// Packed rows of a request are less than 2^31.
PRECAST_HOST_DEVICE constexpr int32_t tiles_of(const ScheduleShape& shape, int32_t q_len) {
  return quotient(int64_t(q_len) * shape.group + shape.tile_rows - 1, shape.tile_rows);
}

// The tokens that some row of a tile sees; begin is a multiple of a block. Both 0 if there are
// none.
struct TokenRange {
  int32_t begin, end;

  PRECAST_HOST_DEVICE constexpr int32_t blocks() const {
    return (end - begin + kKvBlock - 1) / kKvBlock;
  }
};

PRECAST_HOST_DEVICE constexpr TokenRange tokens_of(const ScheduleShape& shape, int32_t q_len,
                                                   int32_t kv_len, int32_t tile) {
  const int64_t first_row = int64_t(tile) * shape.tile_rows;
  const int64_t end_row = first_row + shape.tile_rows;
  const int64_t rows = int64_t(q_len) * shape.group;
  const int64_t shift = int64_t(kv_len) - q_len;  // a query's position, less its number
  int64_t begin = 0, end = kv_len;
  if (shape.causal) end = shift + quotient((end_row < rows ? end_row : rows) - 1, shape.group) + 1;
  if (shape.window_left >= 0) begin = shift + quotient(first_row, shape.group) - shape.window_left;
  if (begin < 0) begin = 0;
  if (begin >= end) return {0, 0};
  return {static_cast<int32_t>(begin / kKvBlock * kKvBlock), static_cast<int32_t>(end)};
}

PRECAST_HOST_DEVICE constexpr int64_t cost_of(TokenRange tokens) {
  return int64_t(tokens.blocks()) * kBlockCost + kTileCost;
}

// -- Cuts of the line -----------------------------------------------------------------------------

struct Cuts {
  int64_t total;  // cost of the line
  int64_t ctas;   // that take a part of it

  PRECAST_HOST_DEVICE constexpr Cuts(int64_t cost, int32_t most_ctas)
      : total(cost), ctas(cost / kLeastCtaCost < most_ctas ? cost / kLeastCtaCost : most_ctas) {
    if (ctas < 1) ctas = 1;
  }

  PRECAST_HOST_DEVICE constexpr int64_t at(int32_t cta) const {
    return cta >= ctas ? total : total * cta / ctas;
  }

  // The first CTA whose cut is at or behind `cost`.
  PRECAST_HOST_DEVICE constexpr int32_t first_at(int64_t cost) const {
    return static_cast<int32_t>((cost * ctas + total - 1) / total);
  }
};

// A cut inside of a tile: `block` 0 and `blocks` are its ends.
struct TileCut {
  int32_t block;
  int32_t first_cta, parts;  // of a tile that is cut
};

// `before`: cost of the line up to the tile; `cut`: where it is cut, inside of the tile.
PRECAST_HOST_DEVICE constexpr TileCut cut_tile(const Cuts& cuts, int64_t before, int32_t blocks,
                                               int64_t cut) {
  // Rounded to the next block: from here on it is one behind the first, from there on the end.
  const int64_t from = before + kTileCost + kBlockCost / 2;
  const int64_t until = from + (int64_t(blocks) - 1) * kBlockCost;
  if (cut < from) return {0, 0, 1};
  const int32_t first = cuts.first_at(from);
  return {static_cast<int32_t>((cut - from) / kBlockCost) + 1, first - 1,
          cuts.first_at(until) - first + 1};
}

// -- List -----------------------------------------------------------------------------------------

// The parts of a tile in chunks of `chunk` tokens, a multiple of a block; 0: one part. Chunks start
// at multiples of their size, so that a token's part does not depend on the window.
PRECAST_HOST_DEVICE constexpr int32_t parts_of(TokenRange tokens, int32_t chunk) {
  if (chunk == 0 || tokens.begin >= tokens.end) return 1;
  return quotient(tokens.end - 1, chunk) - quotient(tokens.begin, chunk) + 1;
}

PRECAST_HOST_DEVICE constexpr TokenRange part_of(TokenRange tokens, int32_t chunk, int32_t part) {
  if (chunk == 0 || tokens.begin >= tokens.end) return tokens;
  const int64_t begin = (int64_t(tokens.begin / chunk) + part) * chunk;
  return {begin > tokens.begin ? static_cast<int32_t>(begin) : tokens.begin,
          least(begin + chunk, tokens.end)};
}

// -- What kernels walk ----------------------------------------------------------------------------

// Tokens [kv_begin, kv_end) of tile `tile` of a request and head.
struct Piece {
  int32_t request, kv_head, tile;
  int32_t q_begin, q_len;    // qo_indptr[request], queries
  int32_t kv_start, kv_len;  // kv_indptr[request], tokens of the request
  int32_t kv_begin, kv_end;  // a multiple of a block; one, too, or the end of the tile's tokens
  int32_t part, parts;       // 1: the tile is whole
  int32_t counter;           // of the tile, if it is not whole
  int32_t first_slot, slot_step, slot_skip;

  // Where part `i` of the tile leaves its result.
  PRECAST_HOST_DEVICE constexpr int32_t slot(int32_t i) const {
    return first_slot + i * slot_step - (i > 0 ? slot_skip : 0);
  }

  // The tile's counters, from `counter` on: in stream mode one of each CTA but the last, which may
  // begin another tile.
  PRECAST_HOST_DEVICE constexpr int32_t counters() const { return slot_skip > 0 ? parts - 1 : 1; }
};

// What CTA `cta` has to do, piece by piece. One thread of it walks.
class PieceIterator {
 public:
  PRECAST_HOST_DEVICE PieceIterator(const ScheduleParams& params, int32_t cta)
      : params_(params), layout_(params.shape.batch, params.shape.ctas), cta_(cta) {
    header_ = reinterpret_cast<const PlanHeader*>(params.plan);
    // The starts are read in list mode, too: so no load waits for the mode.
    const CtaStart* starts = reinterpret_cast<const CtaStart*>(params.plan + layout_.starts);
    at_ = starts[cta];
    const CtaStart end = starts[cta + 1];
    end_index_ = end.index;
    end_head_ = end.head;
    end_tile_ = end.tile;
    end_block_ = end.block;
    end_parts_ = end.parts;
    end_first_ = end.first_cta;
    is_list_ = header_->mode == ScheduleMode::list;
  }

  // Where the tickets of this plan are.
  PRECAST_HOST_DEVICE int32_t* counters() const {
    return params_.plan + (is_list_ ? header_->counters_at : layout_.counters);
  }

  // False at the end.
  PRECAST_HOST_DEVICE bool next(Piece& piece) {
    return is_list_ ? item_of_round(round_++, piece) : next_in_line(piece);
  }

  // Whether the pieces are the items of a list: then any of them can be had at once.
  PRECAST_HOST_DEVICE bool is_list() const { return is_list_; }

  // The piece that next() would give after `round` others. False behind the end.
  PRECAST_HOST_DEVICE bool item_of_round(int32_t round, Piece& piece) const {
    const int32_t ctas = params_.shape.ctas, heads = params_.shape.heads;
    // Every other round the other way round, and every two rounds from an eighth of the CTAs on.
    // Why: the list is sorted, so that the CTA with the longest item of a round gets the shortest
    // of the next, and what is in the middle of one is at the end of a later one.
    const int32_t moved = cta_ + round / 2 * (ctas / 8);
    const int32_t place = moved - quotient(moved, ctas) * ctas;
    const int32_t item = round * ctas + (round % 2 == 0 ? place : ctas - 1 - place);
    if (item >= header_->items * heads) return false;
    const int32_t block = header_->block, in_blocks = header_->in_blocks;
    int32_t number;
    if (item < in_blocks * heads) {
      const int32_t first = quotient(item, block * heads) * block, rest = item - first * heads;
      piece.kv_head = quotient(rest, block);
      number = first + rest - piece.kv_head * block;
    } else {
      const int32_t rest = item - in_blocks * heads;
      number = quotient(rest, heads);
      piece.kv_head = rest - number * heads;
      number += in_blocks;
    }
    const ListItem& of =
        reinterpret_cast<const ListItem*>(params_.plan + header_->items_at)[number];
    const PlannedRequest& at = request(of.index);
    piece.request = at.request;
    piece.tile = of.tile;
    piece.q_begin = at.q_begin;
    piece.q_len = at.q_len;
    piece.kv_start = at.kv_start;
    piece.kv_len = at.kv_len;
    const TokenRange tokens = tokens_of(params_.shape, at.q_len, at.kv_len, of.tile);
    const TokenRange part = part_of(tokens, header_->chunk, of.part);
    piece.kv_begin = part.begin;
    piece.kv_end = part.end;
    piece.part = of.part;
    piece.parts = parts_of(tokens, header_->chunk);
    piece.counter = (at.tiles_before + of.tile) * params_.shape.heads + piece.kv_head;
    piece.first_slot = of.slot * params_.shape.heads + piece.kv_head;
    piece.slot_step = params_.shape.heads;
    piece.slot_skip = 0;
    return true;
  }

 private:
  PRECAST_HOST_DEVICE const PlannedRequest& request(int32_t index) const {
    return reinterpret_cast<const PlannedRequest*>(params_.plan + layout_.requests)[index];
  }

  PRECAST_HOST_DEVICE bool next_in_line(Piece& piece) {
    const bool ends_here =
        at_.index == end_index_ && at_.head == end_head_ && at_.tile == end_tile_;
    if (ends_here ? at_.block >= end_block_ : is_behind_end()) return false;
    const TokenRange tokens = tokens_of(params_.shape, at_.q_len, at_.kv_len, at_.tile);
    piece.request = at_.request;
    piece.kv_head = at_.head;
    piece.tile = at_.tile;
    piece.q_begin = at_.q_begin;
    piece.q_len = at_.q_len;
    piece.kv_start = at_.kv_start;
    piece.kv_len = at_.kv_len;
    piece.kv_begin = tokens.begin + at_.block * kKvBlock;
    piece.kv_end = ends_here ? tokens.begin + end_block_ * kKvBlock : tokens.end;
    piece.parts = at_.block > 0 ? at_.parts : ends_here ? end_parts_ : 1;
    const int32_t first = at_.block > 0 ? at_.first_cta : ends_here ? end_first_ : cta_;
    piece.part = cta_ - first;
    piece.counter = first;
    piece.first_slot = 2 * first + 1;
    piece.slot_step = 2;
    piece.slot_skip = 1;
    if (ends_here) {
      at_.block = end_block_;
    } else {
      at_.block = 0;
      advance();
    }
    return true;
  }

  // To the next tile of the line.
  PRECAST_HOST_DEVICE void advance() {
    if (++at_.tile < tiles_of(params_.shape, at_.q_len)) return;
    at_.tile = 0;
    if (++at_.index >= header_->requests) {
      at_.index = 0;
      ++at_.head;
    }
    if (is_behind_end() || is_at_end()) return;
    const PlannedRequest& next = request(at_.index);
    at_.request = next.request;
    at_.q_begin = next.q_begin;
    at_.q_len = next.q_len;
    at_.kv_start = next.kv_start;
    at_.kv_len = next.kv_len;
  }

  // Why: a walk ends whatever the plan holds, even where it comes past the end.
  PRECAST_HOST_DEVICE bool is_behind_end() const {
    const int64_t at = int64_t(at_.index) << 32 | at_.tile;
    const int64_t end = int64_t(end_index_) << 32 | end_tile_;
    return (at_.head > end_head_) | ((at_.head == end_head_) & (at > end));
  }

  // At a tile of which the next CTA takes all.
  PRECAST_HOST_DEVICE bool is_at_end() const {
    return at_.head == end_head_ && at_.index == end_index_ && at_.tile == end_tile_ &&
           end_block_ == 0;
  }

  ScheduleParams params_;
  PlanLayout layout_;
  const PlanHeader* header_;
  int32_t cta_;
  int32_t round_ = 0;
  CtaStart at_;
  int32_t end_index_, end_head_, end_tile_, end_block_, end_parts_, end_first_;
  bool is_list_;
};

}  // namespace precast
