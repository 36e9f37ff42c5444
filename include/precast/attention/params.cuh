// SPDX-License-Identifier: Apache-2.0
// The parameters of an attention kernel: tensors with their strides, and the options of a call.
// Strides of queries and outputs count elements, those of keys and values 16 bytes.
#pragma once

#include "precast/attention/batch_lengths.cuh"
#include "precast/attention/scheduler.cuh"
#include "precast/core/overlap.cuh"
#include "precast/core/rows.cuh"

namespace precast {

enum class AttentionMask : int { none, causal, custom, multi_item };
enum class PositionEncoding : int { none, rope, alibi };

// Keys or values: [pages, page_size, heads, dim] in any order of strides. Ragged tensors are pages
// of one token. Why strides count units of 16 bytes: a kernel copies 16 bytes at once, and in this
// unit 32 bits hold the strides of pages and entries.
struct AttentionCache {
  const void* data = nullptr;
  int64_t head_stride = 0;                     // units of 16 bytes
  uint32_t page_stride = 0, entry_stride = 0;  // units of 16 bytes

  AttentionCache() = default;
  // The arguments count bytes: multiples of 16, up to 2^36.
  AttentionCache(const void* memory, int64_t page_bytes, int64_t entry_bytes, int64_t head_bytes)
      : data(memory),
        head_stride(head_bytes / 16),
        page_stride(static_cast<uint32_t>(page_bytes / 16)),
        entry_stride(static_cast<uint32_t>(entry_bytes / 16)) {}
};

// The block scales of such a cache in NVFP4, [pages, page_size, heads, dim / 16], e4m3.
struct AttentionScales {
  const unsigned char* data = nullptr;
  int64_t page_stride = 0, entry_stride = 0, head_stride = 0;  // bytes
};

struct AttentionParams {
  TileSchedulerParams schedule;
  float* partials = nullptr;  // partial results of attention_partial_floats() each
  int64_t max_partials = 0;   // that fit in the split workspace
  const void* q = nullptr;    // [q_rows, heads, head_dim_qk]
  int32_t q_rows = 0;
  int64_t q_stride = 0, q_head_stride = 0;  // elements
  AttentionCache k, v;
  const int32_t* kv_indices = nullptr;  // null: the pages of a request follow one another
  uint32_t num_kv_indices = 0;
  FastDivmod page_size;
  uint32_t num_pages = 0;  // a page beyond them counts as page 0
  FastDivmod group_size;   // query heads of a KV head
  int32_t kv_heads = 0;
  void* out = nullptr;                          // [tokens, heads, head_dim_vo]
  int64_t out_stride = 0, out_head_stride = 0;  // elements
  float* lse = nullptr;                         // [tokens, heads] base 2, or null
  float lse_factor = 1.0f;                      // ln(2) where lse is to be in base e
  float scale = 1.0f;                           // of the logits
  float out_scale = 1.0f;
  const float* qk_scale = nullptr;  // more of both, in memory of the device; > 0
  const float* v_scale = nullptr;
  // 1 where the scale is a vector with a number for each query head, else 0.
  int32_t qk_scale_step = 0, v_scale_step = 0;
  AttentionMask mask = AttentionMask::none;
  int32_t window_left = -1;      // -1: none
  const float* sinks = nullptr;  // [heads], natural logarithms
  Overlap overlap = Overlap::none;

  // The general kernels alone.
  float soft_cap = 0.0f;  // 0: none
  PositionEncoding positions = PositionEncoding::none;
  const float* alibi_slopes = nullptr;  // [heads]
  float rope_inverse_scale = 1.0f;
  float rope_log2_theta = 0.0f;
  const unsigned char* packed_mask = nullptr;  // see attention/mask_row.cuh
  int64_t mask_bytes = 0;
  const int32_t* mask_indptr = nullptr;       // [batch + 1] bytes; null: a mask of drafts
  const uint32_t* prefix_len = nullptr;       // [batch], of multi-item scoring
  const unsigned short* token_pos = nullptr;  // [batch, token_pos_len]
  int32_t token_pos_len = 0;
  int32_t mask_row_bytes = 0;  // of a mask of drafts, else 0

  // The kernels that plan themselves (attention/self_plan.cuh): `schedule.plan` is split counters.
  bool plans_itself = false;
  BatchLengths lengths = {};

  // The kernels of NVFP4 alone.
  AttentionScales k_scales, v_scales;

  // 1 where a tile has the rows of two neighbouring KV heads. A KV block then has the rows of half
  // as many tokens, each for both heads, and group_size, kv_heads and head strides count pairs.
  // Else 0.
  int32_t pair_shift = 0;
};

// Whether causal mask and window are all that changes scores.
PRECAST_HOST_DEVICE inline bool has_plain_scores(const AttentionParams& p) {
  return p.mask != AttentionMask::custom && p.mask != AttentionMask::multi_item &&
         p.positions == PositionEncoding::none && p.soft_cap <= 0.0f;
}

// Whether the plain kernels compute a call.
PRECAST_HOST_DEVICE inline bool is_plain(const AttentionParams& p) {
  return has_plain_scores(p) && (p.scale > 0.0f || p.pair_shift > 0);
}

}  // namespace precast
