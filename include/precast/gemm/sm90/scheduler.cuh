// SPDX-License-Identifier: Apache-2.0
// The tiles of a CTA of GEMM for sm_90a: a cluster takes every n-th unit, where n is
// the number of clusters. Each role of a CTA finds the same tiles by itself; they exchange nothing.
#pragma once

#include "precast/core/sm90/cluster.cuh"
#include "precast/core/sm90/mbarrier.cuh"
#include "precast/gemm/gemm_groups.cuh"
#include "precast/gemm/sm90/params.cuh"

namespace precast {

#if defined(__CUDACC__)

// The CTA of the cluster at whose stages this lane of a consumer arrives for its warp.
__device__ __forceinline__ int cta_to_release(ClusterUse use) {
  const int lane = threadIdx.x % 32;
  if (shares_operand(use)) {
    if (lane >= 2) return kNoCta;
    return lane == static_cast<int>(cluster_rank()) ? kThisCta : lane;
  }
  return lane == 0 ? kThisCta : kNoCta;
}

// The number that all lanes have, in a uniform register. Why: the compiler does not see through
// the loop over tiles, which may depend on memory, that all lanes are in the same stage; and wgmma
// takes its descriptors from uniform registers.
__device__ __forceinline__ int uniform(int x) { return __reduce_max_sync(0xffffffffu, x); }

// The value, or what a reference refers to, which the compiler cannot compute again. Why: it would
// in each block of the depth; an address in shared memory takes a special register.
template <typename T>
__device__ __forceinline__ T kept(T x) {
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(x));
  } else {
    asm volatile("" : "+r"(x));
  }
  return x;
}
template <typename T>
__device__ __forceinline__ T& kept_object(T& x) {
  return *kept(&x);
}

struct GemmTile {
  int a_group, b_group;
  int token, token_end;  // the tile's first token in `a`, and the end of its group
  int column;            // of the weight, the tile's first
};

// All lanes of a warp use it together.
template <typename Tile, typename Params = Sm90GemmParams>
class GemmScheduler {
 public:
  __device__ __forceinline__ explicit GemmScheduler(const Params& params)
      : params_(params), p_(params.p), unit_(cluster_id()) {}

  // Finds the next tile, and returns whether there is one.
  __device__ __forceinline__ bool next(GemmTile& tile) {
    for (;;) {
      int in_group, begin = 0, count = p_.tokens, token_units = params_.token_units;
      if (p_.kind == TokenGroups::counted || p_.kind == TokenGroups::ranges) {
        int group;
        if (!find_group(group, in_group, begin, count)) return false;
        token_units = units_of(count);
        tile.a_group = p_.kind == TokenGroups::counted ? group : 0;
        tile.b_group = Params::kChoosesWeights ? weight_of_group(p_, group) : group;
      } else {
        const int units = token_units * params_.column_units;
        const int groups = p_.kind == TokenGroups::blocks ? 1 : p_.groups;
        tile.a_group = tile.b_group = groups == 1 && unit_ < units ? 0 : unit_ / units;
        if (tile.a_group >= groups) return false;
        in_group = unit_ - tile.a_group * units;
      }
      unit_ += params_.clusters;
      place(tile, in_group, token_units);
      tile.token += begin;
      tile.token_end = begin + count;
      if (Params::kChoosesWeights && tile.b_group < 0) continue;
      if (p_.kind != TokenGroups::blocks) return true;
      tile.b_group = group_number(p_, tile.token);
      if (tile.b_group >= 0 && tile.b_group < p_.groups) return true;
    }
  }

 private:
  __device__ __forceinline__ int tokens_of_unit() const {
    return params_.use == ClusterUse::shares_b ? 2 * Tile::kTokens : Tile::kTokens;
  }

  // The units along so many tokens. Without a division by what is not a constant.
  __device__ __forceinline__ int units_of(int tokens) const {
    const int tiles = ceil_div(tokens, Tile::kTokens);
    return params_.use == ClusterUse::shares_b ? ceil_div(tiles, 2) : tiles;
  }

  // The group of the current unit, the number of the unit in it, and the group's tokens. Looks at
  // 32 groups at once.
  __device__ __forceinline__ bool find_group(int& group, int& in_group, int& begin, int& count) {
    constexpr uint32_t kAll = 0xffffffffu;
    const int lane = threadIdx.x % 32;
    for (; first_group_ < p_.groups; first_group_ += 32) {
      const int own = first_group_ + lane;
      int own_begin = 0, own_count = 0;
      if (own < p_.groups) {
        own_count = min(max(group_number(p_, own), 0), p_.tokens);
        if (p_.kind == TokenGroups::ranges) {
          own_begin = own_count;
          own_count = min(max(group_number(p_, own + 1), own_begin), p_.tokens) - own_begin;
        }
      }
      // The units up to the end of this lane's group.
      int until = units_of(own_count) * params_.column_units;
      const int units = until;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int before = __shfl_up_sync(kAll, until, distance);
        if (lane >= distance) until += before;
      }
      const int here = unit_ - units_before_;
      const uint32_t behind = __ballot_sync(kAll, until > here);
      if (behind != 0) {
        const int source = __ffs(behind) - 1;
        group = first_group_ + source;
        in_group = __shfl_sync(kAll, here - (until - units), source);
        begin = __shfl_sync(kAll, own_begin, source);
        count = __shfl_sync(kAll, own_count, source);
        return true;
      }
      units_before_ += __shfl_sync(kAll, until, 31);
    }
    return false;
  }

  // Where a unit of a group lies, and the tile of this CTA in it.
  __device__ __forceinline__ void place(GemmTile& tile, int unit, int token_units) const {
    const UnitPlace at = place_unit(unit, token_units, params_.column_units, params_.band);
    const int rank = static_cast<int>(cluster_rank());
    const bool shares_a = params_.use == ClusterUse::shares_a;
    const bool shares_b = params_.use == ClusterUse::shares_b;
    tile.token = at.token * tokens_of_unit() + (shares_b ? rank * Tile::kTokens : 0);
    tile.column = (shares_a ? 2 * at.column + rank : at.column) * Tile::kWeights;
  }

  const Params& params_;
  const decltype(Params::p)& p_;
  int unit_;
  // Of groups whose sizes are on the device: the units of the groups before the first that may have
  // the current unit.
  int first_group_ = 0, units_before_ = 0;
};

// The blocks of the depth that a CTA multiplies.
struct DepthRange {
  int begin, end;

  template <typename Params>
  __device__ __forceinline__ explicit DepthRange(const Params& params) {
    const int rank = params.use == ClusterUse::splits_k ? static_cast<int>(cluster_rank()) : 0;
    begin = rank * params.blocks + min(rank, params.ctas_with_more);
    end = begin + params.blocks + (rank < params.ctas_with_more ? 1 : 0);
  }
  __device__ __forceinline__ int count() const { return end - begin; }
};

#endif  // __CUDACC__

}  // namespace precast
