// SPDX-License-Identifier: Apache-2.0
// How the GEMMs for sm_90a choose and place their tiles, for random problems:
//
// - each tile of the output is computed by one CTA, and no other is, but for the second tile of a
//   pair that shares an operand
// - the choice is legal, is that of the fewest expected clocks, and is always the same
// - more tokens are never expected to take less time
//
// Usage: fp8_gemm_choice <problems> <seed>; prints the numbers of choices. With a third argument,
// what the operands are, it prints instead, for each problem, its numbers and each legal choice
// with its clocks.
#include "precast/gemm/sm90/gemm16_choose.cuh"
#include "precast/gemm/sm90/scaled_choose.cuh"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
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

template <typename Choice>
static void check_places(const Choice& choice, const Fp8GemmProblem& problem) {
  const Sm90GemmUnits units(choice, problem.tokens, problem.columns);
  const int tokens = choice.shape().tokens(), weights = choice.shape().weights();
  const int rows = ceil_div(problem.tokens, tokens), columns = ceil_div(problem.columns, weights);
  const int band = sm90_gemm_band(choice, units.tokens, problem.sms);
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

template <typename Below>
static Fp8GemmProblem random_problem(const Below& below) {
  const bool few = below(2) == 0;
  Fp8GemmProblem problem = {};
  problem.kind = static_cast<TokenGroups>(below(4));
  problem.groups = below(3) == 0 ? 1 + below(64) : 1;
  problem.tokens = 1 + below(few ? 128 : 8192);
  problem.columns = 8 * (1 + below(2048));
  problem.depth = 16 * (1 + below(1024));
  problem.sms = below(4) == 0 ? 1 + below(160) : 132;
  return problem;
}

static std::function<int(int)> numbers_of(unsigned seed) {
  return [random = std::mt19937(seed)](int n) mutable {
    return static_cast<int>(random() % static_cast<unsigned>(n));
  };
}

template <typename Choice>
static void print_clocks(int problems, unsigned seed) {
  const auto below = numbers_of(seed);
  for (int i = 0; i < problems; ++i) {
    const Fp8GemmProblem problem = random_problem(below);
    std::printf("%d %d %d %d %d %d: %d", static_cast<int>(problem.kind), problem.groups,
                problem.tokens, problem.columns, problem.depth, problem.sms,
                choose_sm90_gemm<Choice>(problem).number());
    for (int number = 0; number < Choice::kChoices; ++number) {
      const Choice choice = Choice::of(number);
      if (is_legal(choice, problem.kind)) {
        std::printf(" %d=%.17g", number, sm90_gemm_clocks(choice, problem));
      }
    }
    std::printf("\n");
  }
}

// What the scales of blocks need of the tiles.
static void check_scales() {
  for (int number = 0; number < kNumFp8Tiles; ++number) {
    const Sm90TileShape& tile = kFp8Tiles[number];
    // Columns of a tile are in at most two blocks of 128, whose scales a stage has.
    for (int column = 0; column < 1024; column += tile.weights()) {
      REQUIRE((column + tile.weights() - 1) / kFp8Block - column / kFp8Block <= 1);
    }
    REQUIRE(!tile.swapped || kFp8Block % tile.weights() == 0);
  }
}

template <typename Choice>
static void check_choices(int problems, unsigned seed) {
  const auto below = numbers_of(seed);
  for (int number = 0; number < Choice::kChoices; ++number) {
    REQUIRE(Choice::of(number).number() == number);
  }
  for (g_problem = 0; g_problem < problems; ++g_problem) {
    const Fp8GemmProblem problem = random_problem(below);
    const Choice best = choose_sm90_gemm<Choice>(problem);
    REQUIRE(is_legal(best, problem.kind));
    REQUIRE(Choice::Family::has_kernel(best.tile));
    REQUIRE(best.clocks > 0);
    REQUIRE(best.number() == choose_sm90_gemm<Choice>(problem).number());
    for (int number = 0; number < Choice::kChoices; ++number) {
      const Choice choice = Choice::of(number);
      if (!is_legal(choice, problem.kind)) continue;
      const ClusterUse use = choice.clusters().use;
      REQUIRE(use != ClusterUse::shares_b || problem.kind != TokenGroups::blocks);
      REQUIRE(choice.shape().tokens() <= kFp8Block || problem.kind != TokenGroups::blocks);
      REQUIRE(use != ClusterUse::splits_k || problem.kind == TokenGroups::equal);
      REQUIRE(!Choice::Family::has_kernel(choice.tile) ||
              best.clocks <= sm90_gemm_clocks(choice, problem));
      if (number % 7 == g_problem % 7) check_places(choice, problem);
    }
    Fp8GemmProblem more = problem;
    more.tokens += 1 + below(512);
    // More tokens may have more CTAs, which read faster by so much at most.
    using Family = typename Choice::Family;
    const double faster = 1 + (has_few_tokens(problem) ? typename Family::FewCosts().missing
                                                       : typename Family::Costs().missing);
    // Clocks of other costs are not to be compared.
    REQUIRE(has_few_tokens(more) != has_few_tokens(problem) ||
            choose_sm90_gemm<Choice>(more).clocks * faster >= best.clocks);
  }
}

int main(int argc, char** argv) {
  const int problems = argc > 1 ? std::atoi(argv[1]) : 100;
  const unsigned seed = argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1u;
  if (argc > 3) {
    const auto print = std::strcmp(argv[3], "bf16") == 0      ? print_clocks<Gemm16Choice>
                       : std::strcmp(argv[3], "fp8_row") == 0 ? print_clocks<ScaledGemmChoice>
                                                              : print_clocks<Fp8GemmChoice>;
    print(problems, seed);
    return 0;
  }
  check_scales();
  check_choices<Fp8GemmChoice>(problems, seed);
  check_choices<Gemm16Choice>(problems, seed);
  check_choices<ScaledGemmChoice>(problems, seed);
  check_choices<GatedGemmChoice>(problems, seed);
  static_assert(int(ScaledGemmChoice::kChoices) == int(Gemm16Choice::kChoices), "CHOICES");
  std::printf("%d and %d choices\n", Fp8GemmChoice::kChoices, Gemm16Choice::kChoices);
  return 0;
}
