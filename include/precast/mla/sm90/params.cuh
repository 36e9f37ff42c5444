// SPDX-License-Identifier: Apache-2.0
// The parameters of the MLA kernels for sm_90a: those of every MLA kernel, and the tensor maps that
// are made of them for each launch.
#pragma once

#include "precast/attention/plan.cuh"
#include "precast/core/sm90/tensor_map.cuh"
#include "precast/mla/sm90/tile.cuh"

namespace precast {

struct MlaSm90Params {
  TensorMap q, q_pe;   // [tokens, heads, dim]; boxes of query_box_rows heads and a panel
  TensorMap ckv, kpe;  // [pages, page_size, dim]; boxes of box_rows tokens and a panel
  MlaParams p;
  // The tokens of a TMA copy: the largest power of two that divides the page size, at most
  // most_box_rows(). 0: threads copy, because that is less than four, because TMA lacks the
  // strides, or because they convert.
  int32_t box_rows;
  // The packed rows of a TMA copy: so many never have two tokens, wherever in a token a tile
  // begins.
  int32_t query_box_rows;
};

constexpr int kLeastBoxRows = 4;  // for fewer tokens, copies by threads are faster

// The largest power of two that divides x, at most `most`, a power of two.
constexpr uint32_t power_of_two_in(uint32_t x, uint32_t most) {
  const uint32_t power = x & (0u - x);
  return power < most ? power : most;
}
static_assert(power_of_two_in(48, 64) == 16 && power_of_two_in(7, 64) == 1 &&
                  power_of_two_in(640, 64) == 64,
              "boxes");

// The CTAs of a cluster, in a grid of `ctas` where `heads` neighbours take the same tokens of a
// request (share_of_cta()). Clusters have no memory and no barrier of their own, but their CTAs
// begin together, on SMs that are near each other: measured faster (docs/decisions.md).
constexpr int32_t cluster_ctas_of(int32_t heads, int32_t ctas) {
  return heads % 2 == 0 && ctas % 2 == 0 ? 2 : 1;
}
static_assert(cluster_ctas_of(2, 132) == 2 && cluster_ctas_of(4, 78) == 2,
              "pairs of heads are clusters");
static_assert(cluster_ctas_of(1, 132) == 1 && cluster_ctas_of(3, 132) == 1,
              "no cluster has two requests");
static_assert(cluster_ctas_of(2, 131) == 1, "a grid consists of whole clusters");

#if defined(__CUDACC__)

// Which share of the work this CTA has. The shares of one head stand before those of the next one,
// whose tokens are the same: so neighbours get the same tokens for all heads, and for all tiles of
// a request if the plan is in the order of tiles. Why: what two SMs of a TPC ask for at about the
// same time L2 is asked for once.
__device__ __forceinline__ int32_t share_of_cta(const MlaParams& p) {
  const ScheduleShape& shape = p.schedule.shape;
  const int32_t cta = blockIdx.x;
  int32_t heads = shape.heads;
  // Why: reading the plan takes time, and a request has one tile here.
  if (heads == 1 && int64_t(p.q_rows) * shape.group_size <= int64_t(shape.batch) * shape.block_m) {
    return cta;
  }
  // Whatever is there where no plan is.
  const PlanHeader* const plan = reinterpret_cast<const PlanHeader*>(p.schedule.plan);
  if (plan->mode == ScheduleMode::stream_k_by_tiles) {
    heads *= min(max(plan->num_tiles / max(plan->num_requests, 1), 1), kMostNeighbours);
  }
  if (heads == 1) return cta;
  const int32_t of_head = min(max(plan->active_ctas, 0), shape.ctas) / heads;
  return cta < of_head * heads ? cta % heads * of_head + cta / heads : cta;
}

#endif

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__) && defined(PRECAST_SM)

// Why half a KV block where several tiles read it: measured faster (docs/decisions.md).
inline int32_t most_box_rows(const MlaParams& p) {
  return p.kv_heads > 1 ? kKvBlockSize / 2 : kKvBlockSize;
}

// The box_rows of caches of Q's type.
template <int kDimKpe>
int32_t box_rows_of(const MlaParams& p) {
  const auto has_strides = [&](const AttentionCache& cache) {
    return (cache.page_stride != 0 || p.num_pages <= 1) &&
           (cache.entry_stride != 0 || p.page_size.value == 1);
  };
  const uint32_t rows = power_of_two_in(p.page_size.value, most_box_rows(p));
  const bool is_possible =
      has_strides(p.v) && (kDimKpe == 0 || has_strides(p.k)) && rows >= kLeastBoxRows;
  return is_possible ? static_cast<int32_t>(rows) : 0;
}

template <typename Tile>
cudaError_t encode_params(MlaSm90Params& params, const MlaParams& p) {
  using Query = typename Tile::Query;
  constexpr uint64_t kBytes = sizeof(Query);
  constexpr uint32_t kPanel = Tile::kPanelColumns;
  params.p = p;
  params.box_rows = Tile::kCopiesBoxes ? box_rows_of<Tile::kDimKpe>(p) : 0;
  params.query_box_rows = static_cast<int32_t>(power_of_two_in(p.group_size.value, Tile::kBlockM));
  const auto encode_queries = [&](TensorMap& map, const void* data, int dim, int64_t stride,
                                  int64_t head_stride) {
    TensorMapShape q;
    q.dim(dim, 0, kPanel);
    q.dim(uint64_t(p.kv_heads) * p.group_size.value, uint64_t(head_stride) * kBytes,
          params.query_box_rows);
    q.dim(p.q_rows, uint64_t(stride) * kBytes, 1);
    q.dim(1, 0, 1);
    return encode_tensor_map(map, TypeName<Query>::value, data, q);
  };
  const auto encode_cache = [&](TensorMap& map, const AttentionCache& cache, int dim) {
    TensorMapShape kv;
    kv.dim(dim, 0, kPanel);
    kv.dim(p.page_size.value, uint64_t(cache.entry_stride) * 16, params.box_rows);
    kv.dim(p.num_pages, uint64_t(cache.page_stride) * 16, 1);
    kv.dim(1, 0, 1);
    return encode_tensor_map(map, TypeName<Query>::value, cache.data, kv);
  };
  cudaError_t error = encode_queries(params.q, p.q, Tile::kDimCkv, p.q_stride, p.q_head_stride);
  if (error == cudaSuccess && Tile::kDimKpe > 0) {
    error = encode_queries(params.q_pe, p.q_pe, Tile::kDimKpe, p.q_pe_stride, p.q_pe_head_stride);
  }
  if (error != cudaSuccess || !Tile::kCopiesBoxes) return error;
  error = encode_cache(params.ckv, p.v, Tile::kDimCkv);
  if (error != cudaSuccess || Tile::kDimKpe == 0) return error;
  return encode_cache(params.kpe, p.k, Tile::kDimKpe);
}

#endif

}  // namespace precast
