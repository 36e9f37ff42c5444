// SPDX-License-Identifier: Apache-2.0
// Tests how an all-reduce is cut, for all sizes of GPUs with and without clusters. Prints each
// failed check and returns 1.
#include <random>

#include "check.h"
#include "precast/comm/allreduce_cut.cuh"

using namespace precast;

namespace {

// What the smallest multiprocessors have: compute capability 8.6.
constexpr int kSmThreads = 1536, kSmCtas = 16, kSmSharedBytes = 100 << 10;
constexpr int kStaticSharedBytes = 1 << 10, kReservedSharedBytes = 1 << 10;  // of a CTA

// Two grids fit the GPU together, whichever kernel their alignment selects.
void check_two_grids(const AllReduceTuning& cut, int world, bool norm) {
  for (const bool aligned : {true, false}) {
    const int ctas = 2 * ctas_of_half(1000, world, norm, aligned, cut) / 1000;
    const bool any = needs_any_kernel(aligned, cut.vecs);
    const int shared = any && norm ? cut.threads * cut.vecs * kVecBytes : 0;
    CHECK(ctas_of_half(1, world, norm, aligned, cut) >= 0, "world %d", world);
    CHECK(ctas >= 1 && ctas <= kSmCtas, "%d CTAs of %d threads", ctas, cut.threads);
    CHECK(ctas * cut.threads <= kSmThreads, "%d CTAs of %d threads", ctas, cut.threads);
    CHECK(ctas * (shared + kStaticSharedBytes + kReservedSharedBytes) <= kSmSharedBytes,
          "%d CTAs of %d threads with %d vectors", ctas, cut.threads, cut.vecs);
  }
}

void check_rows(int64_t rows, int row_vecs, int world, int most_ctas, AllReduceTuning cut) {
  const AllReduceTuning asked = cut;
  const bool fits = cut_rows(rows, row_vecs, world, most_ctas, &cut);
  if (asked.vecs == 0 && asked.cluster == 0) {
    CHECK(fits, "%d vectors, world %d, clusters of %d", row_vecs, world, most_ctas);
    CHECK(most_ctas == 1 || cut.vecs <= 2, "%d vectors a thread of %d", cut.vecs, row_vecs);
  }
  if (!fits) return;
  CHECK(cut.threads % kWarpSize == 0 && cut.threads <= allreduce_threads(world), "%d threads",
        cut.threads);
  CHECK(cut.cluster >= 1 && cut.cluster <= most_ctas, "clusters of %d", cut.cluster);
  const int row_threads = cut.threads * cut.cluster;
  CHECK(row_threads <= kMaxRowThreads, "%d threads of a row", row_threads);
  CHECK(int64_t(row_threads) * cut.vecs >= row_vecs, "%d threads, %d vectors of %d", row_threads,
        cut.vecs, row_vecs);
  CHECK(cut.threads * cut.vecs * kVecBytes + kStaticSharedBytes <= 48 << 10,
        "%d threads keep %d vectors", cut.threads, cut.vecs);
  if (asked.vecs == 0) check_two_grids(cut, world, true);
}

void check_plain(int64_t vecs, int world, bool two_shot, AllReduceTuning cut) {
  const int asked = cut.vecs;
  cut_plain(vecs, world, two_shot, &cut);
  CHECK(cut.threads % kWarpSize == 0 && cut.threads <= allreduce_threads(world), "%d threads",
        cut.threads);
  CHECK(cut.cluster == 1 && (asked != 0 || cut.vecs <= 2), "%d vectors", cut.vecs);
  check_two_grids(cut, world, false);
}

// The receive buffers of a round: the rows that it takes fit, and one more does not.
void check_round(int world, bool two_shot, int64_t row_vecs, int64_t region_bytes) {
  const int64_t rows = rows_of_round(world, two_shot, row_vecs, region_bytes);
  int64_t part = 0;  // vectors of a row that one rank reduces, at most
  for (int64_t chunk = 0; chunk * kWarpSize < row_vecs; chunk += world) part += kWarpSize;
  const int64_t row_bytes =
      ((world - 1) * (two_shot ? part : row_vecs) + (two_shot ? row_vecs : 0)) * kVecBytes;
  CHECK(rows * row_bytes <= region_bytes && (rows + 1) * row_bytes > region_bytes,
        "world %d, %lld vectors, %lld rows", world, static_cast<long long>(row_vecs),
        static_cast<long long>(rows));
}

void check_phases() {
  const auto automatic = AllReduceStrategy::automatic;
  for (const auto strategy : {automatic, AllReduceStrategy::two_shot}) {
    CHECK(is_one_shot(2, int64_t(1) << 40, strategy, -1), "two ranks");
  }
  for (const int world : {4, 8}) {
    CHECK(is_one_shot(world, 64 << 10, automatic, -1), "64 KiB of %d ranks", world);
    CHECK(!is_one_shot(world, 256 << 10, automatic, -1), "256 KiB of %d ranks", world);
    CHECK(is_one_shot(world, 100, automatic, 100) && !is_one_shot(world, 101, automatic, 100),
          "a limit of 100 bytes for %d ranks", world);
    CHECK(is_one_shot(world, 1 << 30, AllReduceStrategy::one_shot, 0), "%d ranks", world);
    CHECK(!is_one_shot(world, 1, AllReduceStrategy::two_shot, -1), "%d ranks", world);
  }
}

}  // namespace

int main() {
  std::mt19937 random(1);
  const auto draw = [&](int least, int most) {
    return std::uniform_int_distribution<int>(least, most)(random);
  };
  check_phases();
  for (const int world : {2, 4, 8}) {
    for (const int most_ctas : {1, 8}) {
      for (int row_vecs = 1; row_vecs <= kMaxRowVecs; ++row_vecs) {
        for (const int64_t rows : {1, 8, 100, 100000}) {
          check_rows(rows, row_vecs, world, most_ctas, {});
        }
        check_rows(8, row_vecs, world, most_ctas, {0, 0, 1, 0});
        check_rows(8, row_vecs, world, most_ctas, {0, draw(1, 8), 1 << draw(0, 3), 0});
        check_rows(8, row_vecs, world, most_ctas, {0, draw(1, 8), 0, 0});
      }
    }
    for (int i = 0; i < 10000; ++i) {
      const int64_t vecs = int64_t(1) << draw(0, 40);
      for (const bool two_shot : {false, true}) {
        if (two_shot && world == 2) continue;
        check_plain(vecs, world, two_shot, {});
        check_plain(vecs, world, two_shot, {32 * draw(1, 16), draw(0, 8), 0, 0});
        check_round(world, two_shot, draw(1, 4 * kMaxRowVecs), draw(1 << 20, 64 << 20));
      }
    }
  }
  if (failures == 0) std::printf("all cuts fit\n");
  return failures == 0 ? 0 : 1;
}
