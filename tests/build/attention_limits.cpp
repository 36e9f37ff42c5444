// SPDX-License-Identifier: Apache-2.0
// Plans and walks of attention kernels where lengths are garbage, or the plan is another call's.
// Prints what fails, and returns 1.
#include <cstdio>
#include <set>

#include "precast/attention/plan.cuh"

using namespace precast;

namespace {

int failures = 0;

#define CHECK(condition, ...)                             \
  do {                                                    \
    if (!(condition)) {                                   \
      std::printf("line %d: %s: ", __LINE__, #condition); \
      std::printf(__VA_ARGS__);                           \
      std::printf("\n");                                  \
      if (++failures > 20) std::exit(1);                  \
    }                                                     \
  } while (0)

constexpr int32_t kMost = 0x7fffffff;
constexpr int kMostPieces = 1 << 20;  // of a CTA: a walk of more does not end

PlanParams params_of(const ScheduleShape& shape, const int32_t* qo_indptr, int32_t q_len_per_req,
                     const int32_t* kv_indptr, const int32_t* last_page_len) {
  PlanParams p = {};
  p.shape = shape;
  p.lengths = {qo_indptr, kv_indptr,     last_page_len,
               nullptr,   q_len_per_req, last_page_len == nullptr ? 0 : 16};
  return p;
}

// The pieces that all CTAs take; none after one that does not end.
std::vector<Piece> walk(const HostPlan& plan, const ScheduleShape& shape) {
  std::vector<int32_t> ints = plan.ints;
  std::vector<Piece> all;
  for (int cta = 0; cta < shape.ctas; ++cta) {
    PieceIterator pieces({ints.data(), shape}, cta);
    Piece piece = {};
    for (int count = 0; pieces.next(piece); ++count) {
      if (count == kMostPieces) {
        CHECK(false, "CTA %d does not end", cta);
        return all;
      }
      all.push_back(piece);
    }
  }
  return all;
}

// A plan is for one shape and its slots, and a walk of it ends whatever the shape.
void other_shapes() {
  const int32_t kv_pages[] = {0, 10, 20, 30, 40}, last[] = {16, 16, 16, 16};
  const int32_t qo[] = {0, 200}, kv_tokens[] = {0, 60000};
  const PlanParams calls[] = {
      params_of({4, 264, 8, 4, 16, -1, false}, nullptr, 1, kv_pages, last),
      params_of({1, 264, 8, 4, 64, -1, false}, qo, 0, kv_tokens, nullptr),
      params_of({1, 264, 8, 2, 64, 100, true}, qo, 0, kv_tokens, nullptr),
  };
  for (const PlanParams& p : calls) {
    HostPlan plan = plan_on_host(p);
    CHECK(plan.header.mode == ScheduleMode::stream && plan.header.slots > 0, "not cut");
    const auto planned = [&](const ScheduleShape& shape, int64_t slots) {
      return is_planned({plan.ints.data(), shape}, slots);
    };
    CHECK(planned(p.shape, plan.header.slots), "the call of the plan");
    CHECK(!planned(p.shape, plan.header.slots - 1), "too few slots");
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
      walk(plan, other([&](ScheduleShape& s) { s.heads = heads; }));
      walk(plan, other([&](ScheduleShape& s) { s.heads = heads, s.group = 32 / heads; }));
    }
    for (int group : {1, 16}) walk(plan, other([&](ScheduleShape& s) { s.group = group; }));
    for (int rows : {32, 128}) walk(plan, other([&](ScheduleShape& s) { s.tile_rows = rows; }));
    walk(plan, other([](ScheduleShape& s) { s.window_left = 7; }));
    walk(plan, other([](ScheduleShape& s) { s.causal = !s.causal; }));
    for (const ScheduleShape& shape : others) {
      CHECK(!planned(shape, plan.header.slots), "heads %d of %d, %d rows", shape.heads, shape.group,
            shape.tile_rows);
    }
  }
  std::vector<int32_t> zeros(1 << 16);
  CHECK(!is_planned({zeros.data(), calls[0].shape}, kMost), "no plan at all");
}

// A request of more tokens than there can be leaves the others their work.
void huge_tokens() {
  const int32_t kv_pages[] = {0, 4, kMost}, last[] = {16, 16};
  const int32_t kv_tokens[] = {0, 64, kMost}, qo[] = {0, 100, 200};
  for (bool paged : {true, false}) {
    for (int rows : {16, 128}) {
      for (bool causal : {false, true}) {
        for (int mode = 0; mode < 3; ++mode) {
          PlanParams p = params_of({2, 264, 8, 4, rows, -1, causal}, qo, 0,
                                   paged ? kv_pages : kv_tokens, paged ? last : nullptr);
          p.whole = mode == 1;
          p.chunk = mode == 2 ? 1 << 24 : 0;
          const HostPlan plan = plan_on_host(p);
          std::set<int> requests;
          for (const Piece& piece : walk(plan, p.shape)) {
            requests.insert(piece.request);
            CHECK(piece.kv_begin >= 0 && piece.kv_begin <= piece.kv_end &&
                      piece.kv_end <= (piece.request == 0 ? 64 : 1 << 30),
                  "[%d, %d)", piece.kv_begin, piece.kv_end);
          }
          CHECK(requests.size() == 2, "%zu requests", requests.size());
        }
      }
    }
  }
}

// Costs of more than a line of CTAs can be cut into.
void huge_batches() {
  constexpr int kBatch = (1 << 11) + 2;
  std::vector<int32_t> kv(kBatch + 1);
  for (int i = 0; i <= kBatch; ++i) kv[i] = i % 2 == 0 ? 0 : kMost;
  const PlanParams p =
      params_of({kBatch, 1 << 15, 1 << 12, 4, 16, -1, false}, nullptr, 1, kv.data(), nullptr);
  for (const Piece& piece : walk(plan_on_host(p), p.shape)) {
    CHECK(piece.kv_head >= 0 && piece.kv_head < p.shape.heads && piece.tile == 0, "head %d",
          piece.kv_head);
    if (failures > 0) return;
  }
}

// Queries before the first one are nobody's, and packed rows are counted in 31 bits.
void wild_queries() {
  const int32_t kv[] = {0, 64, 128};
  const int32_t starts[][3] = {{-5, 5, 10}, {-5, kMost, 10}, {-kMost, -5, kMost}, {5, 0, 10}};
  for (const auto& qo : starts) {
    const PlanParams p = params_of({2, 264, 8, 4, 64, -1, true}, qo, 0, kv, nullptr);
    for (int number = 0; number < 2; ++number) {
      const PlannedRequest request = p.lengths.request(number, p.shape.group);
      const bool exists = qo[number] >= 0 && qo[number + 1] > qo[number];
      CHECK((request.q_len > 0) == exists, "request %d has %d queries from %d", number,
            request.q_len, qo[number]);
    }
  }
  const int32_t all[] = {0, kMost};
  for (int group : {1, 3, 8, 128}) {
    const PlanParams p = params_of({1, 264, 8, group, 16, -1, true}, all, 0, kv, nullptr);
    const int32_t q_len = p.lengths.request(0, group).q_len;
    CHECK(int64_t(q_len) * group <= kMost && (int64_t(q_len) + 1) * group > kMost, "%d", q_len);
  }
}

}  // namespace

int main() {
  other_shapes();
  huge_tokens();
  huge_batches();
  wild_queries();
  std::printf("%d failures\n", failures);
  return failures > 0;
}
