// SPDX-License-Identifier: Apache-2.0
// Tests the attention plan and the tile scheduler with lengths that are garbage, and with plans
// that were made for another call. Prints each failed check and returns 1.
#include <set>

#include "check.h"
#include "precast/attention/plan_host.cuh"

using namespace precast;

namespace {

constexpr int32_t kMaxInt = 0x7fffffff;
constexpr int kMaxWorkTiles = 1 << 20;  // of a CTA; a scheduler that gives more does not end

PlanParams make_params(const ScheduleShape& shape, const int32_t* qo_indptr, int32_t q_len_per_req,
                       const int32_t* kv_indptr, const int32_t* last_page_len) {
  PlanParams p = {};
  p.shape = shape;
  p.lengths = {qo_indptr, kv_indptr,     last_page_len,
               nullptr,   q_len_per_req, last_page_len == nullptr ? 0 : 16};
  return p;
}

// The work tiles of all CTAs, up to the first CTA whose scheduler does not end.
std::vector<WorkTile> all_work(const HostPlan& plan, const ScheduleShape& shape) {
  std::vector<int32_t> ints = plan.ints;
  std::vector<WorkTile> all;
  for (int cta = 0; cta < shape.ctas; ++cta) {
    TileSchedulerOf<true> scheduler({ints.data(), shape}, cta);
    WorkTile work = {};
    for (int count = 0; scheduler.get_next_work(work); ++count) {
      if (count == kMaxWorkTiles) {
        CHECK(false, "CTA %d does not end", cta);
        return all;
      }
      all.push_back(work);
    }
  }
  return all;
}

// is_planned() accepts one shape and a workspace that is large enough, and the scheduler ends for
// any shape.
void test_other_shapes() {
  const int32_t kv_pages[] = {0, 10, 20, 30, 40}, last[] = {16, 16, 16, 16};
  const int32_t qo[] = {0, 200}, kv_tokens[] = {0, 60000};
  const PlanParams calls[] = {
      make_params({4, 264, 8, 4, 16, -1, false}, nullptr, 1, kv_pages, last),
      make_params({1, 264, 8, 4, 64, -1, false}, qo, 0, kv_tokens, nullptr),
      make_params({1, 264, 8, 2, 64, 9000, true}, qo, 0, kv_tokens, nullptr),
  };
  for (const PlanParams& p : calls) {
    HostPlan plan = plan_on_host(p);
    CHECK(plan.header.mode == ScheduleMode::stream_k && plan.header.num_partials > 0,
          "no tile is split");
    const auto planned = [&](const ScheduleShape& shape, int64_t max_partials) {
      return is_planned({plan.ints.data(), shape}, max_partials);
    };
    CHECK(planned(p.shape, plan.header.num_partials), "the shape of the plan");
    CHECK(!planned(p.shape, plan.header.num_partials - 1), "the workspace is too small");
    std::vector<ScheduleShape> others;
    const auto other = [&](auto change) {
      ScheduleShape shape = p.shape;
      change(shape);
      others.push_back(shape);
      return shape;
    };
    other([](ScheduleShape& s) { ++s.batch; });
    other([](ScheduleShape& s) { --s.ctas; });
    for (int heads : {1, 4, 16}) {
      all_work(plan, other([&](ScheduleShape& s) { s.heads = heads; }));
      all_work(plan, other([&](ScheduleShape& s) { s.heads = heads, s.group_size = 32 / heads; }));
    }
    for (int group_size : {1, 16}) {
      all_work(plan, other([&](ScheduleShape& s) { s.group_size = group_size; }));
    }
    for (int rows : {32, 128}) all_work(plan, other([&](ScheduleShape& s) { s.block_m = rows; }));
    all_work(plan, other([](ScheduleShape& s) { s.window_left = 7; }));
    all_work(plan, other([](ScheduleShape& s) { s.causal = !s.causal; }));
    for (const ScheduleShape& shape : others) {
      CHECK(!planned(shape, plan.header.num_partials), "heads %d of %d, %d rows", shape.heads,
            shape.group_size, shape.block_m);
    }
  }
  std::vector<int32_t> zeros(1 << 16);
  CHECK(!is_planned({zeros.data(), calls[0].shape}, kMaxInt), "the memory holds no plan");
}

// A request with more tokens than are possible leaves the work of the other requests as it is.
void test_huge_lengths() {
  const int32_t kv_pages[] = {0, 4, kMaxInt}, last[] = {16, 16};
  const int32_t kv_tokens[] = {0, 64, kMaxInt}, qo[] = {0, 100, 200};
  for (bool paged : {true, false}) {
    for (int rows : {16, 128}) {
      for (bool causal : {false, true}) {
        for (int mode = 0; mode < 3; ++mode) {
          PlanParams p = make_params({2, 264, 8, 4, rows, -1, causal}, qo, 0,
                                     paged ? kv_pages : kv_tokens, paged ? last : nullptr);
          p.disable_split = mode == 1;
          p.split_size = mode == 2 ? 1 << 24 : 0;
          const HostPlan plan = plan_on_host(p);
          std::set<int> requests;
          for (const WorkTile& work : all_work(plan, p.shape)) {
            requests.insert(work.request_idx);
            CHECK(work.kv_begin >= 0 && work.kv_begin <= work.kv_end &&
                      work.kv_end <= (work.request_idx == 0 ? 64 : 1 << 30),
                  "[%d, %d)", work.kv_begin, work.kv_end);
          }
          CHECK(requests.size() == 2, "%zu requests", requests.size());
        }
      }
    }
  }
}

// The total cost is more than stream-K can distribute.
void test_huge_costs() {
  constexpr int kBatch = (1 << 11) + 2;
  std::vector<int32_t> kv(kBatch + 1);
  for (int i = 0; i <= kBatch; ++i) kv[i] = i % 2 == 0 ? 0 : kMaxInt;
  const PlanParams p =
      make_params({kBatch, 1 << 15, 1 << 12, 4, 16, -1, false}, nullptr, 1, kv.data(), nullptr);
  for (const WorkTile& work : all_work(plan_on_host(p), p.shape)) {
    CHECK(work.head >= 0 && work.head < p.shape.heads && work.m_block == 0, "head %d", work.head);
    if (failures > 0) return;
  }
}

// A request that begins before query 0 has no queries, and packed rows are counted in 31 bits.
void test_wild_queries() {
  const int32_t kv[] = {0, 64, 128};
  const int32_t starts[][3] = {{-5, 5, 10}, {-5, kMaxInt, 10}, {-kMaxInt, -5, kMaxInt}, {5, 0, 10}};
  for (const auto& qo : starts) {
    const PlanParams p = make_params({2, 264, 8, 4, 64, -1, true}, qo, 0, kv, nullptr);
    for (int i = 0; i < 2; ++i) {
      const PlannedRequest request = p.lengths.request(i, p.shape.group_size);
      const bool exists = qo[i] >= 0 && qo[i + 1] > qo[i];
      CHECK((request.q_len > 0) == exists, "request %d has %d queries from %d", i, request.q_len,
            qo[i]);
    }
  }
  const int32_t all[] = {0, kMaxInt};
  for (int group : {1, 3, 8, 128}) {
    const PlanParams p = make_params({1, 264, 8, group, 16, -1, true}, all, 0, kv, nullptr);
    const int32_t q_len = p.lengths.request(0, group).q_len;
    CHECK(int64_t(q_len) * group <= kMaxInt && (int64_t(q_len) + 1) * group > kMaxInt, "%d", q_len);
  }
}

}  // namespace

int main() {
  test_other_shapes();
  test_huge_lengths();
  test_huge_costs();
  test_wild_queries();
  std::printf("%d failures\n", failures);
  return failures > 0;
}
