// SPDX-License-Identifier: Apache-2.0
// Which tile a CTA of the GEMMs for every GPU computes, and of which group and weight.
#pragma once

#include "precast/gemm/gemm_groups.cuh"
#include "precast/gemm/gemm_tiles.cuh"

namespace precast {

#if defined(__CUDACC__)

struct TilePlace {
  int a_group, weight;
  int token, token_end;  // the first token of the tile in `a`, and the end of its group
  int column;            // the first of the tile
};

// Finds the group that token tile `tile` belongs to, where groups are ranges of tokens, and counts
// their tiles one after the other. All lanes of a warp call it; it looks at 32 groups at once.
// Returns false if there are fewer tiles.
template <typename Params>
__device__ __forceinline__ bool find_range(const Params& p, int tile_tokens, int tile, int& group,
                                           int& begin, int& end) {
  constexpr uint32_t kAll = 0xffffffffu;
  const int lane = threadIdx.x % 32;
  for (int first = 0; first < p.groups; first += 32) {
    const int own = first + lane;
    int own_begin = 0, own_end = 0;
    if (own < p.groups) {
      own_begin = min(max(group_number(p, own), 0), p.tokens);
      own_end = min(max(group_number(p, own + 1), own_begin), p.tokens);
    }
    int until = ceil_div(own_end - own_begin, tile_tokens);  // tiles up to this lane's group
    const int own_tiles = until;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(kAll, until, distance);
      if (lane >= distance) until += before;
    }
    const uint32_t behind = __ballot_sync(kAll, until > tile);
    if (behind != 0) {
      const int source = __ffs(behind) - 1;
      const int in_group = __shfl_sync(kAll, tile - (until - own_tiles), source);
      group = first + source;
      begin = __shfl_sync(kAll, own_begin, source) + in_group * tile_tokens;
      end = __shfl_sync(kAll, own_end, source);
      return true;
    }
    tile -= __shfl_sync(kAll, until, 31);
  }
  return false;
}

// Finds the tile of this CTA; returns whether it has one. All threads call it.
template <typename Tile, typename Params>
__device__ __forceinline__ bool place_tile(const Params& p, const GemmGrid& grid,
                                           TilePlace& place) {
  const auto [group, token_tile, column_tile] = place_in_grid(grid, blockIdx.x);
  if (token_tile >= grid.token_tiles) return false;
  place.column = column_tile * Tile::kColumns;
  place.a_group = 0;
  place.token = token_tile * Tile::kTokens;
  place.token_end = p.tokens;
  int of_weight = group;
  switch (p.kind) {
    case TokenGroups::equal:
      place.a_group = group;
      break;
    case TokenGroups::counted:
      place.a_group = group;
      place.token_end = min(max(group_number(p, group), 0), p.tokens);
      break;
    case TokenGroups::ranges:
      if (!find_range(p, Tile::kTokens, token_tile, of_weight, place.token, place.token_end)) {
        return false;
      }
      break;
    case TokenGroups::blocks:
      // Tokens of a group come first in each block, and a tile is a part of one block.
      of_weight = place.token < p.tokens ? group_number(p, place.token) : -1;
      break;
  }
  if (place.token >= place.token_end || of_weight < 0) return false;
  place.weight = weight_of_group(p, of_weight);
  return place.weight >= 0;
}

#endif  // __CUDACC__

}  // namespace precast
