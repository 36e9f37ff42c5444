// SPDX-License-Identifier: Apache-2.0
// The parameters of the attention kernels for sm_90a: those of every attention kernel, and the
// tensor maps that are made of them for each launch.
#pragma once

#include "precast/attention/params.cuh"
#include "precast/attention/sm90/tile.cuh"
#include "precast/core/sm90/tensor_map.cuh"

namespace precast {

struct Sm90AttentionParams {
  TensorMap q;     // [kv_heads, tokens, group_size, head_dim_qk]
  TensorMap k, v;  // [kv_heads, panels, tokens, 64], or [pages, kv_heads, panels, page_size, 64]
  AttentionParams p;
};

// Whether keys and values lie one token behind the other, so that one copy takes a whole block.
// Otherwise a copy takes eight tokens of a page.
PRECAST_HOST_DEVICE inline bool is_ragged(const AttentionParams& p) {
  return p.kv_indices == nullptr;
}

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)

inline cudaError_t encode_cache(TensorMap& map, DType dtype, const AttentionParams& p,
                                const AttentionCache& cache, int head_dim, int block_n) {
  const uint64_t page = uint64_t(cache.page_stride) * 16, entry = uint64_t(cache.entry_stride) * 16,
                 head = uint64_t(cache.head_stride) * 16;
  const uint32_t panels = head_dim / kPanel;
  // Without strides there is one row at most: see launch_run().
  const bool has_rows = (page | entry | head) != 0;
  const auto size = [&](uint64_t count) { return has_rows ? count : 1; };
  TensorMapShape shape;
  shape.dim(kPanel, 0, kPanel);
  if (is_ragged(p)) {
    shape.dim(size(p.num_pages), page, block_n);
    shape.dim(panels, kPanelBytes, panels);
    shape.dim(size(p.kv_heads), head, 1);
  } else {
    shape.dim(size(p.page_size.value), entry, kAtomRows);
    shape.dim(panels, kPanelBytes, panels);
    shape.dim(size(p.kv_heads), head, 1);
    shape.dim(size(p.num_pages), page, 1);
  }
  return encode_tensor_map(map, dtype, cache.data, shape);
}

template <typename Tile>
cudaError_t encode_params(Sm90AttentionParams& params, const AttentionParams& p) {
  constexpr DType kType = TypeName<typename Tile::Element>::value;
  params.p = p;
  const uint32_t group = p.group_size.value, tokens = p.schedule.shape.block_m / group;
  TensorMapShape q;
  q.dim(Tile::kDimK, 0, kPanel);
  q.dim(group, uint64_t(p.q_head_stride) * 2, group);
  q.dim(p.q_rows, uint64_t(p.q_stride) * 2, tokens);
  q.dim(p.kv_heads, uint64_t(p.q_head_stride) * 2 * group, 1);
  cudaError_t error = encode_tensor_map(params.q, kType, p.q, q);
  if (error != cudaSuccess) return error;
  error = encode_cache(params.k, kType, p, p.k, Tile::kDimK, Tile::kBlockN);
  if (error != cudaSuccess) return error;
  return encode_cache(params.v, kType, p, p.v, Tile::kDimV, Tile::kBlockN);
}

#endif

}  // namespace precast
