// SPDX-License-Identifier: Apache-2.0
// The parameters of the attention kernels for sm_90a: those of every attention kernel, and the
// tensor maps that are made of them for each launch.
#pragma once

#include "precast/attention/params.cuh"
#include "precast/attention/sm90/tile.cuh"
#include "precast/core/sm90/tensor_map.cuh"

namespace precast {

// How a KV block is copied to shared memory, in the order of their speed.
enum class KvCopy : int {
  box,    // one TMA copy, of ragged tokens
  atoms,  // TMA copies of eight tokens each, of pages of a multiple of eight
  quads,  // TMA copies of a panel of four tokens each, of pages of other multiples of four
  rows,   // by threads: pages of any size, strides that TMA cannot express, keys to be converted
};
constexpr int kQuadRows = 4;

struct Sm90AttentionParams {
  TensorMap q;  // [kv_heads, tokens, group_size, head_dim_qk]
  // Panels of [kv_heads, panels, tokens, in panel], or [pages, kv_heads, panels, page_size, in
  // panel]. That of values is not used where they are converted.
  TensorMap k, v;
  AttentionParams p;
  KvCopy kv_copy;
};

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)

// Whether TMA can read the cache: it has no stride of 0, which one row for all tokens has.
inline bool has_strides(const AttentionParams& p, const AttentionCache& cache) {
  return (cache.page_stride != 0 || p.num_pages <= 1) &&
         (cache.entry_stride != 0 || p.page_size.value == 1) &&
         (cache.head_stride != 0 || p.kv_heads == 1);
}

template <typename Tile>
KvCopy choose_kv_copy(const AttentionParams& p) {
  if (Tile::kConvertsKeys || !has_strides(p, p.k)) return KvCopy::rows;
  if (!Tile::kConverts && !has_strides(p, p.v)) return KvCopy::rows;
  if (p.kv_indices == nullptr) return KvCopy::box;
  if (p.page_size.value % kAtomRows == 0) return KvCopy::atoms;
  return p.page_size.value % kQuadRows == 0 ? KvCopy::quads : KvCopy::rows;
}

// Encodes the map of keys or values of type T.
template <typename T, typename Layout>
cudaError_t encode_cache(TensorMap& map, const Sm90AttentionParams& params,
                         const AttentionCache& cache, int block_n) {
  constexpr uint32_t kPanel = Layout::kPanelBytes / sizeof(T), kPanels = Layout::kPanels;
  const AttentionParams& p = params.p;
  const uint64_t page = uint64_t(cache.page_stride) * 16, entry = uint64_t(cache.entry_stride) * 16,
                 head = uint64_t(cache.head_stride) * 16;
  const bool has_quads = params.kv_copy == KvCopy::quads;
  TensorMapShape shape;
  shape.dim(kPanel, 0, kPanel);
  if (p.kv_indices == nullptr) {
    shape.dim(p.num_pages, page, block_n);
    shape.dim(kPanels, Layout::kPanelBytes, kPanels);
    shape.dim(p.kv_heads, head, 1);
  } else {
    shape.dim(p.page_size.value, entry, has_quads ? kQuadRows : kAtomRows);
    shape.dim(kPanels, Layout::kPanelBytes, has_quads ? 1 : kPanels);
    shape.dim(p.kv_heads, head, 1);
    shape.dim(p.num_pages, page, 1);
  }
  return encode_tensor_map(map, TypeName<T>::value, cache.data, shape);
}

template <typename Tile>
cudaError_t encode_params(Sm90AttentionParams& params, const AttentionParams& p) {
  using Query = typename Tile::QueryElement;
  constexpr uint32_t kBytes = sizeof(Query);
  params.p = p;
  params.kv_copy = choose_kv_copy<Tile>(p);
  const uint32_t group = p.group_size.value, tokens = p.schedule.shape.block_m / group;
  TensorMapShape q;
  q.dim(Tile::kDimK, 0, Tile::kQueryPanel);
  q.dim(group, uint64_t(p.q_head_stride) * kBytes, group);
  q.dim(p.q_rows, uint64_t(p.q_stride) * kBytes, tokens);
  q.dim(p.kv_heads, uint64_t(p.q_head_stride) * kBytes * group, 1);
  cudaError_t error = encode_tensor_map(params.q, TypeName<Query>::value, p.q, q);
  if (error != cudaSuccess || params.kv_copy == KvCopy::rows) return error;
  error = encode_cache<typename Tile::Key, typename Tile::KeyLayout>(params.k, params, p.k,
                                                                     Tile::kBlockN);
  if (error != cudaSuccess || Tile::kConverts) return error;
  return encode_cache<typename Tile::Value, typename Tile::ValueLayout>(params.v, params, p.v,
                                                                        Tile::kBlockN);
}

#endif

}  // namespace precast
