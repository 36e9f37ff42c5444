// SPDX-License-Identifier: Apache-2.0
// Tests the attention plan and the tile scheduler with random batches: attention_schedule CASES
// SEED. Prints the first failed check with the index of its case, and returns 1.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <tuple>

#include "precast/attention/plan_host.cuh"

using namespace precast;

namespace {

int case_idx = 0;
bool failed = false;

#define CHECK(condition, ...)                                                \
  do {                                                                       \
    if (!(condition)) {                                                      \
      std::printf("case %d, line %d: %s: ", case_idx, __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                              \
      std::printf("\n");                                                     \
      failed = true;                                                         \
      return;                                                                \
    }                                                                        \
  } while (0)

using Random = std::mt19937;

int pick(Random& random, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(random);
}

int pick_of(Random& random, std::initializer_list<int> from) {
  return from.begin()[pick(random, 0, static_cast<int>(from.size()) - 1)];
}

// A length from 0 to `most`: often small, often near the end of a KV block or a tile.
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
  std::vector<int32_t> q_lens, kv_lens;  // the lengths that the tensors stand for
  PlanParams params = {};
};

Batch random_batch(Random& random) {
  Batch batch;
  PlanParams& p = batch.params;
  ScheduleShape& shape = p.shape;
  shape.batch = pick_of(random, {0, 1, 1, 2, 3, 7, 16, 33, 64});
  shape.ctas = pick_of(random, {1, 2, 7, 132, 264, 264, 396});
  shape.heads = pick_of(random, {1, 1, 2, 5, 8, 32});
  shape.group_size = pick_of(random, {1, 2, 3, 4, 7, 8, 16, 128});
  shape.block_m = pick_of(random, {16, 64, 128});
  shape.causal = pick(random, 0, 1) == 1;
  shape.window_left = pick(random, 0, 2) == 0 ? length(random, 3000) : -1;
  if (pick(random, 0, 30) == 0) shape.window_left = 0x7fffffff;
  p.has_neighbours = pick(random, 0, 5) == 0;
  if (p.has_neighbours) {
    shape.heads = pick_of(random, {1, 1, 2, 8});
    shape.group_size = pick_of(random, {16, 64, 128});
    shape.block_m = 64;
  }
  const bool decode = pick(random, 0, 1) == 1;
  const bool paged = pick(random, 0, 1) == 1;
  const bool by_kv_len = paged && pick(random, 0, 1) == 1;
  p.lengths.page_size = paged ? pick_of(random, {1, 3, 16, 64}) : 0;
  p.lengths.q_len_per_req = decode ? pick_of(random, {1, 1, 2, 5}) : 0;
  // Why: more tiles take longer to check, and find no more errors.
  const int most_tiles = 4000 / (std::max(1, shape.batch) * shape.heads) + 1;
  const int most_q = std::min(pick_of(random, {1, 20, 300, 2000}),
                              most_tiles * shape.block_m / shape.group_size + 1);
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
      p.split_size = pick_of(random, {64, 128, 256, 2048});
      break;
    case 1:
      p.disable_split = true;
      break;
  }
  p.always_stream_k = p.has_neighbours || pick(random, 0, 3) == 0;
  return batch;
}

// Whether a query attends to a token, by definition.
bool attends(const ScheduleShape& shape, int q_len, int kv_len, int query, int64_t token) {
  const int64_t position = int64_t(kv_len) - q_len + query;
  return token < kv_len && (!shape.causal || token <= position) &&
         (shape.window_left < 0 || token >= position - shape.window_left);
}

using Tile = std::tuple<int, int, int>;  // request, head, tile

// The work tiles of a plan cover each tile of the batch once, in splits that fit together.
void check_plan(const Batch& batch, HostPlan& plan) {
  const ScheduleShape& shape = batch.params.shape;
  CHECK(int64_t(plan.ints.size()) == plan.header.num_ints, "%zu ints", plan.ints.size());
  const TileSchedulerParams params = {plan.ints.data(), shape};
  std::map<Tile, std::vector<std::pair<int, WorkTile>>> tiles;  // with the CTA
  std::set<int> counters;
  std::vector<bool> partials(plan.header.num_partials);
  std::vector<int64_t> cta_costs(shape.ctas);
  int64_t total = 0, longest = 0;
  for (int cta = 0; cta < shape.ctas; ++cta) {
    TileSchedulerOf<true> scheduler(params, cta);
    WorkTile work = {};
    while (scheduler.get_next_work(work)) {
      CHECK(work.request_idx >= 0 && work.request_idx < shape.batch, "request %d",
            work.request_idx);
      CHECK(work.head >= 0 && work.head < shape.heads, "head %d", work.head);
      const int q_len = batch.q_lens[work.request_idx], kv_len = batch.kv_lens[work.request_idx];
      CHECK(work.q_begin == batch.qo_indptr[work.request_idx], "q_begin %d", work.q_begin);
      CHECK(work.kv_start == batch.kv_indptr[work.request_idx], "kv_start %d", work.kv_start);
      CHECK(work.q_len == q_len && work.kv_len == kv_len, "%d %d", work.q_len, work.kv_len);
      CHECK(work.m_block >= 0 &&
                int64_t(work.m_block) * shape.block_m < int64_t(q_len) * shape.group_size,
            "tile %d", work.m_block);
      CHECK(work.kv_begin % kKvBlockSize == 0 && work.kv_begin >= 0, "begins at %d", work.kv_begin);
      CHECK(work.split_idx >= 0 && work.split_idx < work.num_splits, "split %d", work.split_idx);
      const int64_t cost = tile_cost({work.kv_begin, work.kv_end});
      cta_costs[cta] += cost;
      total += cost;
      longest = std::max(longest, cost);
      if (work.num_splits > 1) {
        CHECK(work.kv_begin < work.kv_end, "an empty split");
        const int partial = work.partial(work.split_idx);
        CHECK(partial >= 0 && partial < plan.header.num_partials, "partial result %d", partial);
        CHECK(!partials[partial], "partial result %d twice", partial);
        partials[partial] = true;
        const int32_t* own = &scheduler.counters()[work.counter];
        CHECK(own >= plan.ints.data() &&
                  own + work.num_counters() <= plan.ints.data() + plan.ints.size(),
              "counter %d", work.counter);
        for (int i = 0; i < work.num_counters(); ++i) {
          CHECK(own[i] == 0, "counter %d is not 0", work.counter + i);
        }
      }
      tiles[{work.request_idx, work.head, work.m_block}].push_back({cta, work});
    }
    CHECK(!scheduler.get_next_work(work), "gives work after the end");
  }
  size_t expected = 0;
  for (int q_len : batch.q_lens) expected += size_t(num_m_blocks(shape, q_len)) * shape.heads;
  CHECK(tiles.size() == expected, "%zu tiles of %zu", tiles.size(), expected);
  const bool is_static = plan.header.mode == ScheduleMode::static_persistent;
  for (auto& [key, splits] : tiles) {
    const auto by_split = [](const auto& a, const auto& b) {
      return a.second.split_idx < b.second.split_idx;
    };
    std::sort(splits.begin(), splits.end(), by_split);
    const WorkTile& first = splits[0].second;
    CHECK(int(splits.size()) == first.num_splits, "%zu of %d splits", splits.size(),
          first.num_splits);
    for (size_t i = 0; i < splits.size(); ++i) {
      const WorkTile& work = splits[i].second;
      CHECK(work.split_idx == int(i) && work.num_splits == first.num_splits, "split %d",
            work.split_idx);
      // Why: partial() is linear from split 1 on, so splits that agree on three agree on all.
      for (int j : {0, std::min(1, first.num_splits - 1), first.num_splits - 1}) {
        CHECK(work.partial(j) == splits[j].second.partial(j), "partial result %d", work.partial(j));
      }
      CHECK(first.num_splits == 1 || work.counter == first.counter, "counter %d", work.counter);
      if (i > 0) {
        CHECK(work.kv_begin == splits[i - 1].second.kv_end, "a gap at %d", work.kv_begin);
        if (!is_static) CHECK(splits[i].first == splits[i - 1].first + 1, "not the next CTA");
      }
      // A split depends on its own request only.
      if (is_static && plan.header.split_size > 0 && first.num_splits > 1) {
        CHECK(work.kv_begin / plan.header.split_size == (work.kv_end - 1) / plan.header.split_size,
              "[%d, %d)", work.kv_begin, work.kv_end);
      }
      if (is_static && plan.header.split_size == 0) {
        CHECK(first.num_splits == 1, "%d splits", first.num_splits);
      }
    }
    for (int i = 0; first.num_splits > 1 && i < first.num_counters(); ++i) {
      CHECK(counters.insert(first.counter + i).second, "counter of two tiles");
    }
    // The range holds all tokens that the rows attend to, and no other block.
    const int begin = first.kv_begin, end = splits.back().second.kv_end;
    const int64_t end_row = std::min<int64_t>((int64_t(first.m_block) + 1) * shape.block_m,
                                              int64_t(first.q_len) * shape.group_size);
    int64_t least = INT64_MAX, most = -1;
    for (int64_t row = int64_t(first.m_block) * shape.block_m; row < end_row;
         row += shape.group_size) {
      for (int64_t r : {row, end_row - 1}) {
        const int query = int(r / shape.group_size);
        const int64_t position = int64_t(first.kv_len) - first.q_len + query;
        int64_t from = shape.window_left < 0 ? 0 : position - shape.window_left;
        int64_t to = shape.causal ? position : first.kv_len - 1;
        if (from < 0) from = 0;
        if (from > to) continue;
        CHECK(attends(shape, first.q_len, first.kv_len, query, from) &&
                  attends(shape, first.q_len, first.kv_len, query, to),
              "query %d", query);
        least = std::min(least, from);
        most = std::max(most, to);
      }
    }
    if (most < 0) {
      CHECK(begin == end, "[%d, %d) though no row attends to a token", begin, end);
    } else {
      CHECK(begin == least / kKvBlockSize * kKvBlockSize && end == most + 1,
            "[%d, %d) is not [%lld, %lld]", begin, end, (long long)least, (long long)most);
    }
  }
  // Balance: the cost of each CTA, compared with the cost of the tiles as if none were split.
  int64_t whole = 0;
  for (const auto& [key, splits] : tiles) {
    whole += tile_cost({splits[0].second.kv_begin, splits.back().second.kv_end});
  }
  if (is_static && plan.header.split_size == 0) {
    int64_t longest = 0, most = 0;
    for (const auto& [key, splits] : tiles) {
      longest = std::max(longest, tile_cost({splits[0].second.kv_begin, splits[0].second.kv_end}));
    }
    for (int64_t cost : cta_costs) most = std::max(most, cost);
    CHECK(most <= whole / shape.ctas + 4 * longest, "%lld of %lld", (long long)most,
          (long long)whole / shape.ctas);
  }
  if (!is_static) {
    CHECK(whole == (int64_t(plan.header.total_cost[1]) << 32 | uint32_t(plan.header.total_cost[0])),
          "cost %lld", (long long)whole);
    const int64_t share = whole / std::max(1, plan.header.active_ctas);
    for (int cta = 0; cta < shape.ctas; ++cta) {
      // A boundary moves by half a block, and over the constant cost of a tile; each later split
      // has the constant cost, too.
      CHECK(cta_costs[cta] <= share + 1 + 2 * kTileCost + kBlockCost + 1, "CTA %d has %lld of %lld",
            cta, (long long)cta_costs[cta], (long long)share);
    }
    // If tiles are equally long, and their number divides that of the CTAs or the reverse, then no
    // CTA has splits of two tiles.
    const int64_t count = tiles.size(), used = plan.header.active_ctas;
    bool same = count > 0;
    for (const auto& [key, splits] : tiles) {
      same = same &&
             tile_cost({splits[0].second.kv_begin, splits.back().second.kv_end}) * count == whole;
    }
    const bool divides = used % std::max<int64_t>(count, 1) == 0 || count % used == 0;
    // The plan does that if few CTAs are left out, shares are short, and all CTAs get work.
    const bool may = count > 0 && count <= shape.ctas && shape.ctas % count * 8 <= shape.ctas &&
                     whole / shape.ctas <= kLargeShare && whole / kMinCtaCost >= shape.ctas;
    if (same && may) CHECK(divides, "%lld CTAs for %lld tiles", (long long)used, (long long)count);
    same = same && divides;
    for (const auto& [key, splits] : tiles) {
      if (!same || splits.size() == 1) continue;
      for (const auto& [cta, work] : splits) {
        CHECK(cta_costs[cta] == tile_cost({work.kv_begin, work.kv_end}),
              "CTA %d has two work tiles", cta);
      }
      // Then splits are equal in blocks if whole tiles are no choice.
      if (!batch.params.always_stream_k || used % count != 0) continue;
      int least = INT32_MAX, most = 0;
      for (const auto& [cta, work] : splits) {
        const int blocks = (work.kv_end - work.kv_begin + kKvBlockSize - 1) / kKvBlockSize;
        least = std::min(least, blocks);
        most = std::max(most, blocks);
      }
      CHECK(most - least <= 1, "splits of %d and of %d blocks", least, most);
    }
  }
}

// In the order of tiles, neighbours take the same tokens for all tiles of a request.
void check_neighbours(const Batch& batch, HostPlan& plan) {
  const ScheduleShape& shape = batch.params.shape;
  if (plan.header.mode != ScheduleMode::stream_k_by_tiles) return;
  const int tiles = plan.header.num_tiles / plan.header.num_requests * shape.heads;
  const int64_t cost =
      int64_t(plan.header.total_cost[1]) << 32 | uint32_t(plan.header.total_cost[0]);
  if (plan.header.active_ctas < tiles || cost / (2 * kMinCtaCost) < shape.ctas) return;
  const int of_tile = plan.header.active_ctas / tiles;
  CHECK(tiles <= kMostNeighbours && tiles * of_tile == plan.header.active_ctas,
        "%d CTAs for %d tiles", plan.header.active_ctas, tiles);
  if (shape.causal || shape.window_left >= 0) return;  // tiles differ by a block
  const auto works_of = [&](int cta) {
    std::vector<std::tuple<int, int, int>> works;
    TileSchedulerOf<true> scheduler({plan.ints.data(), shape}, cta);
    WorkTile work = {};
    while (scheduler.get_next_work(work)) {
      works.push_back({work.request_idx, work.kv_begin, work.kv_end});
    }
    return works;
  };
  for (int cta = of_tile; cta < plan.header.active_ctas; ++cta) {
    CHECK(works_of(cta) == works_of(cta % of_tile), "CTA %d has other tokens", cta);
  }
}

// With fixed splits, or none, a request has the same splits in a batch of its own.
void check_alone(Random& random, const Batch& batch) {
  const bool is_independent = batch.params.split_size > 0 || batch.params.disable_split;
  if (batch.params.shape.batch == 0 || !is_independent) return;
  const int request = pick(random, 0, batch.params.shape.batch - 1);
  const auto splits_of = [](const PlanParams& p, int of) {
    HostPlan plan = plan_on_host(p);
    std::set<std::tuple<int, int, int, int, int, int>> found;
    for (int cta = 0; cta < p.shape.ctas; ++cta) {
      TileSchedulerOf<true> scheduler({plan.ints.data(), p.shape}, cta);
      WorkTile work = {};
      while (scheduler.get_next_work(work)) {
        if (work.request_idx != of) continue;
        found.insert(
            {work.head, work.m_block, work.split_idx, work.num_splits, work.kv_begin, work.kv_end});
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
  CHECK(splits_of(batch.params, request) == splits_of(alone, 0), "request %d", request);
}

// If the workspace is too small the splits become longer, and the plan is still correct.
void check_small_workspace(Random& random, Batch& batch) {
  if (batch.params.split_size == 0) return;
  HostPlan large = plan_on_host(batch.params);
  CHECK(large.split_size_kept, "split size %d", large.header.split_size);
  if (large.header.num_partials == 0) return;
  batch.params.max_partials = pick(random, 1, large.header.num_partials);
  HostPlan plan = plan_on_host(batch.params);
  CHECK(plan.header.num_partials <= batch.params.max_partials, "%d partial results",
        plan.header.num_partials);
  CHECK(plan.split_size_kept == (batch.params.max_partials >= large.header.num_partials), "%d",
        plan.header.split_size);
  check_plan(batch, plan);
}

// A long causal prompt: all CTAs have the same cost, and two heads are in work at a time, but for
// the entries that are not swizzled.
void check_long_prompt() {
  const int32_t length = 16384, qo_indptr[] = {0, length}, heads = 8;
  PlanParams p = {};
  p.shape = {1, 264, heads, 4, 128, -1, true};
  p.lengths = {qo_indptr, qo_indptr, nullptr, nullptr, 0, 0};
  HostPlan plan = plan_on_host(p);
  const int swizzle_size = plan.header.swizzle_size, num_swizzled = plan.header.num_swizzled;
  CHECK(swizzle_size == 132 && num_swizzled == 396, "%d entries in blocks of %d", num_swizzled,
        swizzle_size);
  int64_t most = 0, all = 0;
  for (int cta = 0; cta < p.shape.ctas; ++cta) {
    TileSchedulerOf<true> scheduler({plan.ints.data(), p.shape}, cta);
    WorkTile work = {};
    int64_t cost = 0;
    for (int round = 0; scheduler.get_next_work(work); ++round) {
      const int pair = round % (heads / 2);
      if (round < num_swizzled / swizzle_size * heads / 2) {
        CHECK(work.head / 2 == pair, "round %d: head %d", round, work.head);
      }
      cost += tile_cost({work.kv_begin, work.kv_end});
    }
    most = std::max(most, cost);
    all += cost;
  }
  CHECK(most * p.shape.ctas <= all + all / 100, "%lld of %lld", (long long)most, (long long)all);
}

}  // namespace

int main(int count, char** arguments) {
  const int cases = count > 1 ? std::atoi(arguments[1]) : 1000;
  const unsigned seed = count > 2 ? std::strtoul(arguments[2], nullptr, 10) : 1;
  int modes[3] = {}, split = 0;
  check_long_prompt();
  for (case_idx = 0; case_idx < cases && !failed; ++case_idx) {
    Random random(seed * 1000003u + case_idx);
    Batch batch = random_batch(random);
    HostPlan plan = plan_on_host(batch.params);
    check_plan(batch, plan);
    if (!failed) check_neighbours(batch, plan);
    ++modes[static_cast<int>(plan.header.mode)];
    split += plan.header.num_partials > 0;
    if (!failed) check_alone(random, batch);
    if (!failed) check_small_workspace(random, batch);
  }
  std::printf("%d cases of seed %u: %d stream_k, %d static, %d by_tiles, %d split\n", case_idx,
              seed, modes[0], modes[1], modes[2], split);
  return failed ? 1 : 0;
}
