// SPDX-License-Identifier: Apache-2.0
// Random batches through the plan and the walk of attention kernels: attention_schedule CASES SEED.
// Prints what fails, with the case's number, and returns 1.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <tuple>

#include "precast/attention/plan.cuh"

using namespace precast;

namespace {

int number = 0;
bool failed = false;

#define CHECK(condition, ...)                                              \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::printf("case %d, line %d: %s: ", number, __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                            \
      std::printf("\n");                                                   \
      failed = true;                                                       \
      return;                                                              \
    }                                                                      \
  } while (0)

using Random = std::mt19937;

int pick(Random& random, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(random);
}

int pick_of(Random& random, std::initializer_list<int> from) {
  return from.begin()[pick(random, 0, static_cast<int>(from.size()) - 1)];
}

// A length from 0 to `most`: often small, often near a block's or a tile's border.
int length(Random& random, int most) {
  switch (pick(random, 0, 5)) {
    case 0:
      return pick(random, 0, std::min(3, most));
    case 1:
      return std::min(most, pick(random, 1, 40) * 64 + pick(random, -1, 1));
    case 2:
      return std::min(most, 1 << pick(random, 0, 20));
    default:
      return pick(random, 0, most);
  }
}

struct Batch {
  std::vector<int32_t> qo_indptr = {0}, kv_indptr = {0}, last_page_len, kv_len;
  std::vector<int32_t> q_lens, kv_lens;  // what they say
  PlanParams params = {};
};

Batch random_batch(Random& random) {
  Batch batch;
  PlanParams& p = batch.params;
  ScheduleShape& shape = p.shape;
  shape.batch = pick_of(random, {0, 1, 1, 2, 3, 7, 16, 33, 64});
  shape.ctas = pick_of(random, {1, 2, 7, 132, 264, 264, 396});
  shape.heads = pick_of(random, {1, 1, 2, 5, 8, 32});
  shape.group = pick_of(random, {1, 2, 3, 4, 7, 8, 16, 128});
  shape.tile_rows = pick_of(random, {16, 64, 128});
  shape.causal = pick(random, 0, 1) == 1;
  shape.window_left = pick(random, 0, 2) == 0 ? length(random, 3000) : -1;
  if (pick(random, 0, 30) == 0) shape.window_left = 0x7fffffff;
  const bool decode = pick(random, 0, 1) == 1;
  const bool paged = pick(random, 0, 1) == 1;
  const bool by_kv_len = paged && pick(random, 0, 1) == 1;
  p.lengths.page_size = paged ? pick_of(random, {1, 3, 16, 64}) : 0;
  p.lengths.q_len_per_req = decode ? pick_of(random, {1, 1, 2, 5}) : 0;
  // Walks of more tiles take longer, and show no more.
  const int most_tiles = 4000 / (std::max(1, shape.batch) * shape.heads) + 1;
  const int most_q =
      std::min(pick_of(random, {1, 20, 300, 2000}), most_tiles * shape.tile_rows / shape.group + 1);
  const int most_kv = pick_of(random, {0, 60, 1000, 8000, 100000});
  const int same_kv = pick(random, 0, 3) == 0 ? length(random, most_kv) : -1;
  for (int i = 0; i < shape.batch; ++i) {
    const int q_len = decode ? p.lengths.q_len_per_req : length(random, most_q);
    const int kv_len = same_kv >= 0 ? same_kv : length(random, most_kv);
    batch.q_lens.push_back(q_len);
    batch.kv_lens.push_back(kv_len);
    batch.qo_indptr.push_back(batch.qo_indptr.back() + q_len);
    if (paged) {
      const int page = p.lengths.page_size;
      const int pages = (kv_len + page - 1) / page;
      batch.last_page_len.push_back(pages == 0 ? pick(random, 0, 1) : kv_len - (pages - 1) * page);
      batch.kv_len.push_back(kv_len);
      batch.kv_indptr.push_back(batch.kv_indptr.back() + pages);
    } else {
      batch.kv_indptr.push_back(batch.kv_indptr.back() + kv_len);
    }
  }
  if (!decode) p.lengths.qo_indptr = batch.qo_indptr.data();
  p.lengths.kv_indptr = batch.kv_indptr.data();
  if (by_kv_len) {
    p.lengths.kv_len = batch.kv_len.data();
  } else if (paged) {
    p.lengths.last_page_len = batch.last_page_len.data();
  }
  switch (pick(random, 0, 3)) {
    case 0:
      p.chunk = pick_of(random, {64, 128, 256, 2048});
      break;
    case 1:
      p.whole = true;
      break;
  }
  return batch;
}

// What a row may see, from its definition.
bool sees(const ScheduleShape& shape, int q_len, int kv_len, int query, int64_t token) {
  const int64_t position = int64_t(kv_len) - q_len + query;
  return token < kv_len && (!shape.causal || token <= position) &&
         (shape.window_left < 0 || token >= position - shape.window_left);
}

using Tile = std::tuple<int, int, int>;  // request, head, tile

// Every walk of a plan agrees with the batch.
void check_plan(const Batch& batch, HostPlan& plan) {
  const ScheduleShape& shape = batch.params.shape;
  CHECK(int64_t(plan.ints.size()) == plan.header.ints, "%zu ints", plan.ints.size());
  const ScheduleParams params = {plan.ints.data(), shape};
  std::map<Tile, std::vector<std::pair<int, Piece>>> tiles;  // with the CTA
  std::set<int> slots, counters;
  std::vector<int64_t> work(shape.ctas);
  int64_t total = 0, longest = 0;
  for (int cta = 0; cta < shape.ctas; ++cta) {
    PieceIterator pieces(params, cta);
    Piece piece = {};
    while (pieces.next(piece)) {
      CHECK(piece.request >= 0 && piece.request < shape.batch, "request %d", piece.request);
      CHECK(piece.kv_head >= 0 && piece.kv_head < shape.heads, "head %d", piece.kv_head);
      const int q_len = batch.q_lens[piece.request], kv_len = batch.kv_lens[piece.request];
      CHECK(piece.q_begin == batch.qo_indptr[piece.request], "q_begin %d", piece.q_begin);
      CHECK(piece.kv_start == batch.kv_indptr[piece.request], "kv_start %d", piece.kv_start);
      CHECK(piece.q_len == q_len && piece.kv_len == kv_len, "%d %d", piece.q_len, piece.kv_len);
      CHECK(piece.tile >= 0 && int64_t(piece.tile) * shape.tile_rows < int64_t(q_len) * shape.group,
            "tile %d", piece.tile);
      CHECK(piece.kv_begin % kKvBlock == 0 && piece.kv_begin >= 0, "begins at %d", piece.kv_begin);
      CHECK(piece.part >= 0 && piece.part < piece.parts, "part %d", piece.part);
      const int64_t cost = cost_of({piece.kv_begin, piece.kv_end});
      work[cta] += cost;
      total += cost;
      longest = std::max(longest, cost);
      if (piece.parts > 1) {
        CHECK(piece.kv_begin < piece.kv_end, "an empty part");
        const int slot = piece.slot(piece.part);
        CHECK(slot >= 0 && slot < plan.header.slots, "slot %d", slot);
        CHECK(slots.insert(slot).second, "slot %d twice", slot);
        const int32_t* own = &pieces.counters()[piece.counter];
        CHECK(own >= plan.ints.data() &&
                  own + piece.counters() <= plan.ints.data() + plan.ints.size(),
              "counter %d", piece.counter);
        for (int i = 0; i < piece.counters(); ++i) {
          CHECK(own[i] == 0, "counter %d is not 0", piece.counter + i);
        }
      }
      tiles[{piece.request, piece.kv_head, piece.tile}].push_back({cta, piece});
    }
    CHECK(!pieces.next(piece), "goes on after its end");
  }
  size_t expected = 0;
  for (int q_len : batch.q_lens) expected += size_t(tiles_of(shape, q_len)) * shape.heads;
  CHECK(tiles.size() == expected, "%zu tiles of %zu", tiles.size(), expected);
  const bool list = plan.header.mode == ScheduleMode::list;
  for (auto& [key, pieces] : tiles) {
    const auto by_part = [](const auto& a, const auto& b) { return a.second.part < b.second.part; };
    std::sort(pieces.begin(), pieces.end(), by_part);
    const Piece& first = pieces[0].second;
    CHECK(int(pieces.size()) == first.parts, "%zu of %d parts", pieces.size(), first.parts);
    for (size_t i = 0; i < pieces.size(); ++i) {
      const Piece& piece = pieces[i].second;
      CHECK(piece.part == int(i) && piece.parts == first.parts, "part %d", piece.part);
      for (int j = 0; j < first.parts; ++j) {
        CHECK(piece.slot(j) == pieces[j].second.slot(j), "slot %d", piece.slot(j));
      }
      CHECK(first.parts == 1 || piece.counter == first.counter, "counter %d", piece.counter);
      if (i > 0) {
        CHECK(piece.kv_begin == pieces[i - 1].second.kv_end, "a gap at %d", piece.kv_begin);
        if (!list) CHECK(pieces[i].first == pieces[i - 1].first + 1, "not the next CTA");
      }
      // Parts depend on the request alone.
      if (list && plan.header.chunk > 0 && first.parts > 1) {
        CHECK(piece.kv_begin / plan.header.chunk == (piece.kv_end - 1) / plan.header.chunk,
              "[%d, %d)", piece.kv_begin, piece.kv_end);
      }
      if (list && plan.header.chunk == 0) CHECK(first.parts == 1, "%d parts", first.parts);
    }
    for (int i = 0; first.parts > 1 && i < first.counters(); ++i) {
      CHECK(counters.insert(first.counter + i).second, "counter of two tiles");
    }
    // The range holds what rows see, and no block besides.
    const int begin = first.kv_begin, end = pieces.back().second.kv_end;
    const int64_t end_row = std::min<int64_t>((int64_t(first.tile) + 1) * shape.tile_rows,
                                              int64_t(first.q_len) * shape.group);
    int64_t least = INT64_MAX, most = -1;
    for (int64_t row = int64_t(first.tile) * shape.tile_rows; row < end_row; row += shape.group) {
      for (int64_t r : {row, end_row - 1}) {
        const int query = int(r / shape.group);
        const int64_t position = int64_t(first.kv_len) - first.q_len + query;
        int64_t from = shape.window_left < 0 ? 0 : position - shape.window_left;
        int64_t to = shape.causal ? position : first.kv_len - 1;
        if (from < 0) from = 0;
        if (from > to) continue;
        CHECK(sees(shape, first.q_len, first.kv_len, query, from) &&
                  sees(shape, first.q_len, first.kv_len, query, to),
              "query %d", query);
        least = std::min(least, from);
        most = std::max(most, to);
      }
    }
    if (most < 0) {
      CHECK(begin == end, "[%d, %d) of nothing", begin, end);
    } else {
      CHECK(begin == least / kKvBlock * kKvBlock && end == most + 1, "[%d, %d) is not [%lld, %lld]",
            begin, end, (long long)least, (long long)most);
    }
  }
  // Balance: what a CTA does, less the constants of the pieces it would not have uncut.
  int64_t whole = 0;
  for (const auto& [key, pieces] : tiles) {
    whole += cost_of({pieces[0].second.kv_begin, pieces.back().second.kv_end});
  }
  if (list && plan.header.chunk == 0) {
    int64_t longest = 0, most = 0;
    for (const auto& [key, pieces] : tiles) {
      longest = std::max(longest, cost_of({pieces[0].second.kv_begin, pieces[0].second.kv_end}));
    }
    for (int64_t cost : work) most = std::max(most, cost);
    CHECK(most <= whole / shape.ctas + 4 * longest, "%lld of %lld", (long long)most,
          (long long)whole / shape.ctas);
  }
  if (!list) {
    CHECK(whole == (int64_t(plan.header.total_cost[1]) << 32 | uint32_t(plan.header.total_cost[0])),
          "cost %lld", (long long)whole);
    const int64_t share = whole / std::max(1, plan.header.used_ctas);
    for (int cta = 0; cta < shape.ctas; ++cta) {
      // A cut moves by half a block, and over the constant of a tile; a later part has one, too.
      CHECK(work[cta] <= share + 1 + 2 * kTileCost + kBlockCost + 1, "CTA %d has %lld of %lld", cta,
            (long long)work[cta], (long long)share);
    }
    // Tiles of a length that divide the CTAs, or the other way round: none has parts of two.
    const int64_t count = tiles.size(), used = plan.header.used_ctas;
    bool same = count > 0;
    for (const auto& [key, pieces] : tiles) {
      same = same &&
             cost_of({pieces[0].second.kv_begin, pieces.back().second.kv_end}) * count == whole;
    }
    const bool divides = used % std::max<int64_t>(count, 1) == 0 || count % used == 0;
    // Few CTAs are left out, shares are short, and there is enough for all.
    const bool may = count > 0 && count <= shape.ctas && shape.ctas % count * 8 <= shape.ctas &&
                     whole / shape.ctas <= kLongShare && whole / kLeastCtaCost >= shape.ctas;
    if (same && may) CHECK(divides, "%lld CTAs for %lld tiles", (long long)used, (long long)count);
    same = same && divides;
    for (const auto& [key, pieces] : tiles) {
      if (!same || pieces.size() == 1) continue;
      for (const auto& [cta, piece] : pieces) {
        CHECK(work[cta] == cost_of({piece.kv_begin, piece.kv_end}), "CTA %d has two pieces", cta);
      }
    }
  }
}

// A request's parts are the same in a batch of its own.
void check_alone(Random& random, const Batch& batch) {
  if (batch.params.shape.batch == 0 || (batch.params.chunk == 0 && !batch.params.whole)) return;
  const int request = pick(random, 0, batch.params.shape.batch - 1);
  const auto parts = [](const PlanParams& p, int of) {
    HostPlan plan = plan_on_host(p);
    std::set<std::tuple<int, int, int, int, int, int>> found;
    for (int cta = 0; cta < p.shape.ctas; ++cta) {
      PieceIterator pieces({plan.ints.data(), p.shape}, cta);
      Piece piece = {};
      while (pieces.next(piece)) {
        if (piece.request != of) continue;
        found.insert(
            {piece.kv_head, piece.tile, piece.part, piece.parts, piece.kv_begin, piece.kv_end});
      }
    }
    return found;
  };
  PlanParams alone = batch.params;
  const int32_t qo_indptr[] = {0, batch.q_lens[request]};
  const int32_t kv_indptr[] = {0, batch.kv_lens[request]};
  alone.shape.batch = 1;
  alone.shape.ctas = 13;
  alone.lengths = {qo_indptr, kv_indptr, nullptr, nullptr, 0, 0};
  CHECK(parts(batch.params, request) == parts(alone, 0), "request %d", request);
}

// With too little room chunks grow, and the plan still is one.
void check_room(Random& random, Batch& batch) {
  if (batch.params.chunk == 0) return;
  HostPlan roomy = plan_on_host(batch.params);
  CHECK(roomy.chunk_kept, "chunk %d", roomy.header.chunk);
  if (roomy.header.slots == 0) return;
  batch.params.slots = pick(random, 1, roomy.header.slots);
  HostPlan plan = plan_on_host(batch.params);
  CHECK(plan.header.slots <= batch.params.slots, "%d slots", plan.header.slots);
  CHECK(plan.chunk_kept == (batch.params.slots >= roomy.header.slots), "%d", plan.header.chunk);
  check_plan(batch, plan);
}

// A long causal prompt: CTAs have as much to do each, and two heads at a time but for the rest.
void check_long_prompt() {
  const int32_t length = 16384, qo_indptr[] = {0, length}, heads = 8;
  PlanParams p = {};
  p.shape = {1, 264, heads, 4, kWideRows, -1, true};
  p.lengths = {qo_indptr, qo_indptr, nullptr, nullptr, 0, 0};
  HostPlan plan = plan_on_host(p);
  const int block = plan.header.block, in_blocks = plan.header.in_blocks;
  CHECK(block == 132 && in_blocks == 396, "%d items in blocks of %d", in_blocks, block);
  int64_t most = 0, all = 0;
  for (int cta = 0; cta < p.shape.ctas; ++cta) {
    PieceIterator pieces({plan.ints.data(), p.shape}, cta);
    Piece piece = {};
    int64_t cost = 0;
    for (int round = 0; pieces.next(piece); ++round) {
      const int pair = round % (heads / 2);
      if (round < in_blocks / block * heads / 2) {
        CHECK(piece.kv_head / 2 == pair, "round %d: head %d", round, piece.kv_head);
      }
      cost += cost_of({piece.kv_begin, piece.kv_end});
    }
    most = std::max(most, cost);
    all += cost;
  }
  CHECK(most * p.shape.ctas <= all + all / 100, "%lld of %lld", (long long)most, (long long)all);
}

}  // namespace

int main(int count, char** words) {
  const int cases = count > 1 ? std::atoi(words[1]) : 1000;
  const unsigned seed = count > 2 ? std::strtoul(words[2], nullptr, 10) : 1;
  int modes[2] = {}, cut = 0;
  check_long_prompt();
  for (number = 0; number < cases && !failed; ++number) {
    Random random(seed * 1000003u + number);
    Batch batch = random_batch(random);
    HostPlan plan = plan_on_host(batch.params);
    check_plan(batch, plan);
    ++modes[static_cast<int>(plan.header.mode)];
    cut += plan.header.slots > 0;
    if (!failed) check_alone(random, batch);
    if (!failed) check_room(random, batch);
  }
  std::printf("%d cases of seed %u: %d streams, %d lists, %d with cuts\n", number, seed, modes[0],
              modes[1], cut);
  return failed ? 1 : 0;
}
