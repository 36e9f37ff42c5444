// SPDX-License-Identifier: Apache-2.0
// How the GEMMs for every GPU choose and place their tiles, for random problems:
//
// - each tile of each group is computed by one CTA, and every other CTA is behind the last tile
// - neighbouring CTAs of a band share a tile of columns
// - the tile holds the tokens of a group if one can, and more tokens never get a smaller one
//
// Usage: gemm_tiles <problems> <seed>
#include "precast/gemm/gemm_tiles.cuh"

#include <random>
#include <vector>

#include "check.h"

using namespace precast;

static void check_places(const GemmTileShape& tile, TokenGroups kind, int groups, int tokens,
                         int columns) {
  const GemmGrid grid(tile, kind, groups, tokens, columns);
  const int numbered = groups_of_grid(kind, groups);
  const bool is_batch = kind == TokenGroups::equal || kind == TokenGroups::counted;
  CHECK(numbered == (is_batch ? groups : 1), "%d", numbered);
  const bool has_ranges = kind == TokenGroups::ranges;
  const int rows = ceil_div(tokens, tile.tokens) + (has_ranges ? groups : 0);
  CHECK(grid.token_tiles == rows, "%d", grid.token_tiles);
  CHECK(grid.column_tiles == ceil_div(columns, tile.columns), "%d", grid.column_tiles);
  std::vector<int> times(static_cast<size_t>(numbered) * rows * grid.column_tiles);
  const int64_t ctas = grid.ctas() * numbered;
  int before = -1;
  for (int cta = 0; cta < ctas; ++cta) {
    const GridPlace at = place_in_grid(grid, cta);
    CHECK(at.group >= 0 && at.group < numbered, "%d", at.group);
    CHECK(at.column_tile >= 0 && at.column_tile < grid.column_tiles, "%d", at.column_tile);
    CHECK(at.token_tile >= 0, "%d", at.token_tile);
    if (cta % grid.height() != 0) CHECK(at.column_tile == before, "%d", cta);
    before = at.column_tile;
    if (at.token_tile >= rows) continue;
    ++times[(static_cast<size_t>(at.group) * rows + at.token_tile) * grid.column_tiles +
            at.column_tile];
  }
  for (const int count : times) CHECK(count == 1, "%d", count);
}

int main(int argc, char** argv) {
  const int problems = argc > 1 ? std::atoi(argv[1]) : 100;
  std::mt19937 random(argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1u);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int i = 0; i < problems; ++i) {
    const TokenGroups kind = static_cast<TokenGroups>(below(4));
    const int groups = 1 + below(9), tokens = 1 + below(below(2) ? 40 : 3000);
    const int columns = 1 + below(2000), sms = 1 + below(200);
    check_places(kGemmTiles[below(kNumGemmTiles)], kind, groups, tokens, columns);
    const int tile = choose_gemm_tile(groups, tokens, columns, sms);
    CHECK(tile >= 0 && tile < kNumGemmTiles, "%d", tile);
    CHECK(kGemmTiles[tile].tokens >= (tokens < 64 ? tokens : 64), "tile %d, %d tokens", tile,
          tokens);
    const int more = choose_gemm_tile(groups, tokens + 1 + below(200), columns, sms);
    CHECK(more <= tile, "tile %d, then %d", tile, more);
  }
  return failures != 0;
}
