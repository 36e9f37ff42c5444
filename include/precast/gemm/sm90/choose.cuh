// SPDX-License-Identifier: Apache-2.0
// The tiles that the GEMMs for sm_90a are compiled for, and which of them a problem takes, by a
// model of its time. Host code without CUDA; the same problem always gets the same
// answer.
//
// The model: a CTA computes one tile after the other, and a tile block of the depth by block. A
// block takes the longest of what its consumers do one after the other, and of what the CTAs of an
// SM share: the tensor cores, and the way of the operands from L2. All blocks together take at
// least the reading of everything from memory. What a tile needs besides is not hidden.
#pragma once

#if !defined(__CUDACC_RTC__)
#include <algorithm>
#include <cmath>
#endif

#include "precast/gemm/fp8_params.cuh"
#include "precast/gemm/sm90/costs.cuh"

namespace precast {

// What the CTAs of a cluster do together.
enum class ClusterUse : int {
  none,
  shares_a,  // two tiles of the same tokens; each CTA copies half of their `a` to both
  shares_b,  // two tiles of the same columns of the weight; the same for `b`
  splits_k,  // one tile; each CTA multiplies a part of the depth
};

// Whether the CTAs of a cluster copy an operand for each other.
PRECAST_HOST_DEVICE constexpr bool shares_operand(ClusterUse use) {
  return use == ClusterUse::shares_a || use == ClusterUse::shares_b;
}

struct Sm90TileShape {
  int rows;  // 64, or a multiple of 128
  int columns;
  bool swapped;  // rows are columns of the weight, and columns are tokens
  int ctas = 0;  // that fit on an SM; 0: as ctas_per_sm() says

  constexpr int tokens() const { return swapped ? columns : rows; }
  constexpr int weights() const { return swapped ? rows : columns; }
  // Tiles of few tokens wait for memory and for the latency of their few wgmma: two CTAs fit on an
  // SM, of which one may be of the next kernel, which prepares itself while this one ends.
  constexpr int ctas_per_sm() const {
    return ctas > 0 ? ctas : swapped && columns <= (rows == 64 ? 128 : 32) ? 2 : 1;
  }
};

// The index is that of Fp8GemmChoice::tile, which tests and tuning tables know.
constexpr Sm90TileShape kFp8Tiles[] = {
    {128, 192, false}, {128, 160, false}, {128, 128, false}, {128, 96, false},  {128, 64, false},
    {64, 128, false},  {64, 96, false},   {64, 64, false},   {64, 32, false},   {128, 16, true},
    {64, 64, true},    {64, 32, true},    {64, 16, true},    {256, 128, false},
};
constexpr int kNumFp8Tiles = sizeof(kFp8Tiles) / sizeof(kFp8Tiles[0]);

// Whether a warpgroup multiplies the next block of the depth while it adds the last one. It takes a
// second accumulator, for which registers are too few if there are many columns.
constexpr bool fp8_tile_overlaps(int rows, int columns) {
  return rows <= 128 && columns <= (rows == 128 ? 128 : 96);
}

struct Sm90ClusterShape {
  ClusterUse use;
  int ctas;
};
constexpr Sm90ClusterShape kSm90Clusters[] = {
    {ClusterUse::none, 1},     {ClusterUse::shares_a, 2}, {ClusterUse::shares_b, 2},
    {ClusterUse::splits_k, 2}, {ClusterUse::splits_k, 4}, {ClusterUse::splits_k, 8},
};
constexpr int kNumSm90Clusters = sizeof(kSm90Clusters) / sizeof(kSm90Clusters[0]);
constexpr int kNumFp8Choices = kNumFp8Tiles * kNumSm90Clusters;

// A tile of a family and a kind of cluster. A family has its tiles, the bytes of an element of its
// operands, and the costs by which the model chooses.
template <typename GemmFamily>
struct Sm90GemmChoice {
  using Family = GemmFamily;
  static constexpr int kChoices = Family::kTiles * kNumSm90Clusters;

  int tile;
  int cluster;
  double clocks;

  // `number` is below kChoices.
  static constexpr Sm90GemmChoice of(int number) {
    return {number / kNumSm90Clusters, number % kNumSm90Clusters, 0.0};
  }
  constexpr int number() const { return tile * kNumSm90Clusters + cluster; }
  constexpr const Sm90TileShape& shape() const { return Family::tile(tile); }
  constexpr const Sm90ClusterShape& clusters() const { return kSm90Clusters[cluster]; }
};

// What families have that are compiled for all their tiles. A tile without a kernel is never the
// fastest; a launch that is told to take it takes the next wider one.
struct Sm90GemmFamily {
  static constexpr bool has_kernel(int) { return true; }
};

struct Fp8GemmFamily : Sm90GemmFamily {
  using Costs = Fp8GemmCosts;
  using FewCosts = Costs;
  static constexpr int kTiles = kNumFp8Tiles, kElementBytes = 1;
  static constexpr const Sm90TileShape& tile(int index) { return kFp8Tiles[index]; }
};
using Fp8GemmChoice = Sm90GemmChoice<Fp8GemmFamily>;

struct Fp8GemmProblem {
  TokenGroups kind;
  int groups;
  int tokens;  // of a group, as far as the host knows
  int columns;
  int depth;
  int sms;

  constexpr bool operator==(const Fp8GemmProblem& other) const {
    return kind == other.kind && groups == other.groups && tokens == other.tokens &&
           columns == other.columns && depth == other.depth && sms == other.sms;
  }
};

// Whether a choice computes a kind of problem at all. Two neighbouring blocks of 128 tokens may
// have different weights if each token says its own; and CTAs that split the depth know how many
// tiles there are.
template <typename Choice>
constexpr bool is_legal(const Choice& choice, TokenGroups kind) {
  const ClusterUse use = choice.clusters().use;
  if (kind == TokenGroups::blocks && choice.shape().tokens() > kFp8Block) return false;
  if (use == ClusterUse::shares_b) return kind != TokenGroups::blocks;
  if (use == ClusterUse::splits_k) return kind == TokenGroups::equal;
  return true;
}

// The most units that a launch has: kernels count them, and a cluster adds its step, in 32 bits.
constexpr int64_t kMostGemmUnits = int64_t(1) << 30;

// Units, the tiles of a cluster, of a group.
struct Sm90GemmUnits {
  int tokens, columns;

  template <typename Choice>
  constexpr Sm90GemmUnits(const Choice& choice, int tokens_of_group, int all_columns)
      : tokens(ceil_div(
            tokens_of_group,
            choice.shape().tokens() * (choice.clusters().use == ClusterUse::shares_b ? 2 : 1))),
        columns(ceil_div(
            all_columns,
            choice.shape().weights() * (choice.clusters().use == ClusterUse::shares_a ? 2 : 1))) {}
};

#if !defined(__CUDACC_RTC__)

// The clocks that the model expects with these costs.
template <typename Choice, typename Costs>
double sm90_gemm_clocks(const Choice& choice, const Fp8GemmProblem& problem, const Costs& costs) {
  constexpr int kElementBytes = Choice::Family::kElementBytes;
  constexpr int kBlock = 128 / kElementBytes;  // of the depth, 128 bytes
  const Sm90TileShape& tile = choice.shape();
  const Sm90ClusterShape& cluster = choice.clusters();
  const bool shares = shares_operand(cluster.use);
  const int parts = cluster.use == ClusterUse::splits_k ? cluster.ctas : 1;
  const Sm90GemmUnits units(choice, problem.tokens, problem.columns);
  const double ctas = double(problem.groups) * units.tokens * units.columns * cluster.ctas;
  // A cluster lies in one GPC, of whose SMs some are left over.
  const double used = cluster.ctas == 8 ? costs.used_by_8 : cluster.ctas == 4 ? costs.used_by_4 : 1;
  const double slots = std::floor(problem.sms * tile.ctas_per_sm() * used / cluster.ctas);
  const double waves = std::ceil(ctas / cluster.ctas / std::max(1.0, slots));
  const double busy = std::min<double>(tile.ctas_per_sm(), std::ceil(ctas / problem.sms));

  // 32 bytes of the depth are one wgmma of 64 rows, whose operands come from shared memory.
  const double wgmma = std::max(tile.columns / 2.0, (64 + tile.columns) * 32 / costs.shared_bytes);
  const double multiply = 4 * wgmma * (tile.rows / 64);
  // Each CTA takes all bytes of a stage that exist, but asks L2 for half of what two share.
  const int tokens = std::min(tile.tokens(), problem.tokens);
  const int weights = std::min(tile.weights(), problem.columns);
  const double taken = 128.0 * (tokens + weights);
  const double asked = taken - 64.0 * (cluster.use == ClusterUse::shares_a   ? tokens
                                       : cluster.use == ClusterUse::shares_b ? weights
                                                                             : 0);
  const double copy = taken / costs.fill_bytes + asked / costs.l2_bytes;
  // Things that go on at the same time take a little longer than the longest of them.
  const auto together = [](double x, double y) {
    return std::sqrt(std::sqrt(x * x * x * x + y * y * y * y));
  };
  double block = together(costs.consumer[choice.tile], busy * together(multiply, copy));
  if (shares) block *= 1 + costs.share;

  const double depth = problem.depth, groups = problem.groups;
  // CTAs that are not there ask for nothing meanwhile.
  const double missing = 1 - std::min(1.0, ctas / (problem.sms * tile.ctas_per_sm()));
  const double read = groups *
                      (kElementBytes * depth * (double(problem.tokens) + problem.columns) +
                       2.0 * problem.tokens * problem.columns) /
                      costs.dram_bytes * (1 + costs.missing * missing);
  double of_tile = costs.tile[choice.tile] + (shares ? costs.pair : 0.0);
  if (parts > 1) {
    of_tile += costs.split[parts == 2   ? 0
                           : parts == 4 ? 1
                                        : 2] +
               costs.split_byte * 4.0 * tile.rows * tile.columns;
  }
  const int blocks = ceil_div(ceil_div(problem.depth, kBlock), parts);
  return costs.start + together(waves * blocks * block, read) + waves * of_tile;
}

// One product of few tokens has costs of its own, if its family has some: it waits for memory and
// for the grids before and behind it, where other products wait for their SM.
constexpr int kFewGemmTokens = 128;
constexpr bool has_few_tokens(const Fp8GemmProblem& problem) {
  return problem.kind == TokenGroups::equal && problem.groups == 1 &&
         problem.tokens <= kFewGemmTokens;
}
template <typename Choice>
double sm90_gemm_clocks(const Choice& choice, const Fp8GemmProblem& problem) {
  using Family = typename Choice::Family;
  if (has_few_tokens(problem)) {
    return sm90_gemm_clocks(choice, problem, typename Family::FewCosts());
  }
  return sm90_gemm_clocks(choice, problem, typename Family::Costs());
}

// The choice that the model expects to be the fastest; the first one of equals.
template <typename Choice>
Choice choose_sm90_gemm(const Fp8GemmProblem& problem) {
  Choice best = {};
  for (int number = 0; number < Choice::kChoices; ++number) {
    Choice choice = Choice::of(number);
    if (!is_legal(choice, problem.kind) || !Choice::Family::has_kernel(choice.tile)) continue;
    choice.clocks = sm90_gemm_clocks(choice, problem);
    if (number == 0 || choice.clocks < best.clocks) best = choice;
  }
  return best;
}

// Units in a band of the tokens, so that the tiles that are computed at a time form about a square:
// then they read the fewest bytes.
template <typename Choice>
int sm90_gemm_band(const Choice& choice, int token_units, int sms) {
  const double clusters = std::max(1, sms / choice.clusters().ctas);
  const double tokens =
      choice.shape().tokens() * (choice.clusters().use == ClusterUse::shares_b ? 2.0 : 1.0);
  const double columns =
      choice.shape().weights() * (choice.clusters().use == ClusterUse::shares_a ? 2.0 : 1.0);
  const int band = static_cast<int>(std::lround(std::sqrt(clusters * columns / tokens)));
  return std::max(1, std::min(band, token_units));
}

#endif  // !__CUDACC_RTC__

// Where a unit of a group lies, counted in units.
struct UnitPlace {
  int token, column;
};

// Units are numbered in bands along the tokens, in a band column by column.
PRECAST_HOST_DEVICE constexpr UnitPlace place_unit(int unit, int token_units, int column_units,
                                                   int band) {
  const int units_of_band = band * column_units;
  // Few tokens have one band, of one unit: nothing to divide.
  const int number = unit < units_of_band ? 0 : unit / units_of_band;
  const int in_band = unit - number * units_of_band;
  const int left = token_units - number * band;
  const int height = left < band ? left : band;  // of this band
  const int column = height == 1 ? in_band : in_band / height;
  return {number * band + in_band - column * height, column};
}

}  // namespace precast
