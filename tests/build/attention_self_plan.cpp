// SPDX-License-Identifier: Apache-2.0
// Tests the work that CTAs find without a plan, with random batches: it is that of a plan, field by
// field. Prints the first difference and returns 1; otherwise how many tiles were split.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "precast/attention/plan_host.cuh"
#include "precast/attention/self_plan.cuh"

using namespace precast;

namespace {

std::mt19937 generator;

int pick(int least, int most) { return std::uniform_int_distribution<int>(least, most)(generator); }

int pick_of(std::initializer_list<int> from) {
  return from.begin()[pick(0, static_cast<int>(from.size()) - 1)];
}

// A batch over a block table of `step` pages a request. Lengths may be negative or too long.
struct Batch {
  std::vector<int32_t> kv_indptr, kv_len;
  PlanParams params = {};
};

Batch random_batch() {
  Batch batch;
  PlanParams& p = batch.params;
  ScheduleShape& shape = p.shape;
  shape.batch = pick_of({1, 1, 2, 3, 7, 16, 31, 32, 33, 64, 100, 256});
  shape.ctas = pick_of({1, 2, 7, 132, 264, 264, 396});
  shape.heads = pick_of({1, 1, 2, 5, 8, 32});
  shape.group_size = pick_of({1, 2, 3, 4, 7, 8, 16});
  shape.block_m = kDecodeBlockM;
  shape.causal = pick(0, 1) == 1;
  shape.window_left = pick(0, 2) == 0 ? pick_of({0, 1, 63, 64, 1000, 0x7fffffff}) : -1;
  p.lengths.q_len_per_req = pick(1, kDecodeBlockM / shape.group_size);
  p.lengths.page_size = pick_of({1, 3, 16, 64});
  const int step = pick_of({0, 1, 40, 1000, 3000000});
  const int most = pick_of({1, 70, 1000, 100000, 1 << 26}),
            same = pick(0, 3) == 0 ? pick(0, most) : -1;
  for (int i = 0; i <= shape.batch; ++i) batch.kv_indptr.push_back(i * step);
  for (int i = 0; i < shape.batch; ++i) {
    const int kind = pick(0, 40);
    batch.kv_len.push_back(same >= 0   ? same
                           : kind == 0 ? -pick(1, 1 << 30)
                           : kind == 1 ? 0x7fffffff
                           : kind < 10 ? 0
                           : kind < 20 ? pick(1, 40) * 64 + pick(-1, 1)
                                       : pick(0, most));
  }
  p.lengths.kv_indptr = batch.kv_indptr.data();
  p.lengths.kv_len = batch.kv_len.data();
  p.max_partials = 2 * int64_t(shape.ctas);
  return batch;
}

bool same_work(const WorkTile& a, const WorkTile& b) {
  return std::memcmp(&a, &b, sizeof(WorkTile)) == 0;
}

// The number of split tiles.
int check(int number, const Batch& batch) {
  const ScheduleShape& shape = batch.params.shape;
  const auto failed = [&](int cta, const char* what) {
    std::printf("case %d, CTA %d of %d: %s\n", number, cta, shape.ctas, what);
    std::exit(1);
  };
  if (!can_plan_itself(batch.params)) failed(0, "this batch needs a plan");
  HostPlan plan = plan_on_host(batch.params);
  if (plan.header.mode != ScheduleMode::stream_k) failed(0, "the plan has another mode");
  std::vector<int64_t> costs = {0};
  TileTotals totals;
  totals.num_requests = totals.num_tiles = shape.batch;
  for (int i = 0; i < shape.batch; ++i) {
    const PlannedRequest request = batch.params.lengths.request(i, shape.group_size);
    const int64_t cost = tile_cost(kv_range_of_request(shape, request));
    totals.max_cost = std::max(totals.max_cost, cost);
    totals.cost += cost;
    costs.push_back(totals.cost);
  }
  const StreamKPartition partition(totals.cost * shape.heads, num_stream_k_ctas(shape, totals));
  if (2 * partition.ctas > batch.params.max_partials) failed(0, "too many partial results");
  int splits = 0;
  for (int cta = 0; cta < shape.ctas; ++cta) {
    TileScheduler planned({plan.ints.data(), shape}, cta);
    SelfPlannedScheduler found(shape, batch.params.lengths, cta,
                               find_tile_start(shape, totals, costs.data(), cta),
                               find_tile_start(shape, totals, costs.data(), cta + 1));
    while (true) {
      WorkTile want = {}, got = {};
      const bool more = planned.get_next_work(want);
      if (found.get_next_work(got) != more) failed(cta, more ? "work is missing" : "more work");
      if (!more) break;
      if (!same_work(got, want)) failed(cta, "another work tile");
      if (want.num_splits > 1 && want.counter >= shape.ctas) failed(cta, "no such counter");
      splits += want.num_splits > 1 && want.split_idx == 0;
    }
  }
  return splits;
}

// What CTAs cannot plan themselves.
void check_limits() {
  const Batch batch = random_batch();
  const auto refused = [&](const char* what, auto change) {
    PlanParams p = batch.params;
    p.shape.group_size = 4;
    p.lengths.q_len_per_req = 4;
    change(p);
    if (!can_plan_itself(p)) return;
    std::printf("%s is not refused\n", what);
    std::exit(1);
  };
  refused("a second tile", [](PlanParams& p) { p.lengths.q_len_per_req = 5; });
  refused("a batch without queries", [](PlanParams& p) { p.lengths.q_len_per_req = 0; });
  refused("ragged queries", [&](PlanParams& p) { p.lengths.qo_indptr = p.lengths.kv_indptr; });
  refused("a larger tile", [](PlanParams& p) { p.shape.block_m = 64; });
  refused("a large batch", [](PlanParams& p) { p.shape.batch = kMostSelfPlannedRequests + 1; });
  refused("a fixed split", [](PlanParams& p) { p.split_size = 64; });
  refused("no split", [](PlanParams& p) { p.disable_split = true; });
  refused("a small workspace", [](PlanParams& p) { --p.max_partials; });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  int64_t splits = 0;
  for (int number = 0; number < std::atoi(argv[1]); ++number) {
    generator.seed(static_cast<uint32_t>(std::atoll(argv[2])) + static_cast<uint32_t>(number));
    splits += check(number, random_batch());
  }
  check_limits();
  std::printf("%lld split tiles are right\n", static_cast<long long>(splits));
  return 0;
}
