// SPDX-License-Identifier: Apache-2.0
// How the block-scaled GEMM for sm_90a chooses and places its tiles, for random problems:
//
// - each tile of the output is computed by one CTA, and no other is, but for the second tile of a
//   pair that shares an operand
// - the choice is legal, is that of the fewest expected clocks, and is always the same
// - more tokens are never expected to take less time
//
// Usage: fp8_gemm_choice <problems> <seed>; prints the number of choices. With a third argument it
// prints instead, for each problem, its numbers and each legal choice with its clocks.
#include "precast/gemm/sm90/choose.cuh"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

using namespace precast;

#define REQUIRE(condition)                                                       \
  do {                                                                           \
    if (!(condition)) {                                                          \
      std::printf("line %d: %s; problem %d\n", __LINE__, #condition, g_problem); \
      std::exit(1);                                                              \
    }                                                                            \
  } while (false)

static int g_problem;

static void check_places(const Fp8GemmChoice& choice, const Fp8GemmProblem& problem) {
  const Fp8GemmUnits units(choice, problem.tokens, problem.columns);
  const int tokens = choice.shape().tokens(), weights = choice.shape().weights();
  const int rows = ceil_div(problem.tokens, tokens), columns = ceil_div(problem.columns, weights);
  const int band = fp8_gemm_band(choice, units.tokens, problem.sms);
  REQUIRE(band >= 1 && band <= units.tokens);
  const ClusterUse use = choice.clusters().use;
  const int down = use == ClusterUse::shares_b ? 2 : 1, right = use == ClusterUse::shares_a ? 2 : 1;
  std::vector<int> times(static_cast<size_t>(rows) * columns);
  for (int unit = 0; unit < units.tokens * units.columns; ++unit) {
    const UnitPlace at = place_unit(unit, units.tokens, units.columns, band);
    REQUIRE(at.token >= 0 && at.token < units.tokens);
    REQUIRE(at.column >= 0 && at.column < units.columns);
    for (int rank = 0; rank < down * right; ++rank) {
      const int row = at.token * down + rank % down, column = at.column * right + rank / down;
      if (row < rows && column < columns) {
        ++times[static_cast<size_t>(row) * columns + column];
      } else {
        REQUIRE(rank == 1);
      }
    }
  }
  for (const int count : times) REQUIRE(count == 1);
}

static void print_clocks(const Fp8GemmProblem& problem) {
  std::printf("%d %d %d %d %d %d: %d", static_cast<int>(problem.kind), problem.groups,
              problem.tokens, problem.columns, problem.depth, problem.sms,
              choose_fp8_gemm(problem).number());
  for (int number = 0; number < kNumFp8Choices; ++number) {
    const Fp8GemmChoice choice = Fp8GemmChoice::of(number);
    if (is_legal(choice, problem.kind)) {
      std::printf(" %d=%.17g", number, fp8_gemm_clocks(choice, problem));
    }
  }
  std::printf("\n");
}

int main(int argc, char** argv) {
  const int problems = argc > 1 ? std::atoi(argv[1]) : 100;
  std::mt19937 random(argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1u);
  const bool prints = argc > 3;
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int number = 0; number < kNumFp8Choices; ++number) {
    REQUIRE(Fp8GemmChoice::of(number).number() == number);
    const Fp8TileShape& tile = Fp8GemmChoice::of(number).shape();
    // Columns of a tile are in at most two blocks of 128, whose scales a stage has.
    for (int column = 0; column < 1024; column += tile.weights()) {
      REQUIRE((column + tile.weights() - 1) / kFp8Block - column / kFp8Block <= 1);
    }
    REQUIRE(!tile.swapped || kFp8Block % tile.weights() == 0);
  }
  for (g_problem = 0; g_problem < problems; ++g_problem) {
    const bool few = below(2) == 0;
    Fp8GemmProblem problem = {};
    problem.kind = static_cast<TokenGroups>(below(4));
    problem.groups = below(3) == 0 ? 1 + below(64) : 1;
    problem.tokens = 1 + below(few ? 128 : 8192);
    problem.columns = 8 * (1 + below(2048));
    problem.depth = 16 * (1 + below(1024));
    problem.sms = below(4) == 0 ? 1 + below(160) : 132;
    if (prints) {
      print_clocks(problem);
      continue;
    }
    const Fp8GemmChoice best = choose_fp8_gemm(problem);
    REQUIRE(is_legal(best, problem.kind));
    REQUIRE(best.clocks > 0);
    REQUIRE(best.number() == choose_fp8_gemm(problem).number());
    for (int number = 0; number < kNumFp8Choices; ++number) {
      const Fp8GemmChoice choice = Fp8GemmChoice::of(number);
      if (!is_legal(choice, problem.kind)) continue;
      const ClusterUse use = choice.clusters().use;
      REQUIRE(use != ClusterUse::shares_b || problem.kind != TokenGroups::blocks);
      REQUIRE(choice.shape().tokens() <= kFp8Block || problem.kind != TokenGroups::blocks);
      REQUIRE(use != ClusterUse::splits_k || problem.kind == TokenGroups::equal);
      REQUIRE(best.clocks <= fp8_gemm_clocks(choice, problem));
      if (number % 7 == g_problem % 7) check_places(choice, problem);
    }
    Fp8GemmProblem more = problem;
    more.tokens += 1 + below(512);
    REQUIRE(choose_fp8_gemm(more).clocks >= best.clocks);
  }
  if (!prints) std::printf("%d choices, %d tiles\n", kNumFp8Choices, kNumFp8Tiles);
  return 0;
}
