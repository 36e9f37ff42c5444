// SPDX-License-Identifier: Apache-2.0
// The parameters of an MLA kernel: those of attention with one KV head, whose values are the first
// columns of the keys.
//
//   key of a token    its row of ckv, then its row of kpe      value of a token    its row of ckv
//
// In AttentionParams here
//   q            q_nope [q_rows, heads, head_dim_ckv]
//   v            ckv [pages, page_size, head_dim_ckv], which a kernel reads once for both products
//   k            kpe [pages, page_size, head_dim_kpe]; its data is null if head_dim_kpe is 0
//   kv_heads     1, or on sm_90a, where heads fill whole tiles, the number of tiles of a token
//   group_size   the heads of each: a tile is schedule.shape.block_m packed rows (token, head)
// and there are no masks but the causal one, no window, no soft cap and no positions.
#pragma once

#include "precast/attention/params.cuh"
#include "precast/core/math.cuh"

namespace precast {

// Rows of a tile of the kernels for sm_90a, of which an SM holds one CTA.
constexpr int kMlaSm90BlockM = 64;

// Columns of ckv that share a number of ckv_scales.
constexpr int kMlaScaleColumns = 128;

struct MlaParams : AttentionParams {
  const void* q_pe = nullptr;                     // [q_rows, heads, head_dim_kpe]
  int64_t q_pe_stride = 0, q_pe_head_stride = 0;  // elements

  // With ckv and kpe of 8 bits a logit is
  //
  //   scale * *qk_scale * (q_nope . ckv + kpe_ratio * q_pe . kpe)
  //
  // where kpe_ratio is the scale of kpe divided by that of ckv, which `scale` and *qk_scale contain
  // (and out_scale and *v_scale, too). If kpe_scale is not null, the number there takes the place
  // of *qk_scale in front of q_pe . kpe.
  float kpe_ratio = 1.0f;
  const float* kpe_scale = nullptr;
  // [pages, page_size, head_dim_ckv / kMlaScaleColumns], contiguous, or null: what the columns of a
  // token's ckv are multiplied by, in keys and in values.
  const float* ckv_scales = nullptr;
};

#if defined(__CUDACC__)

// The factors of the two products of a score, without sm_scale, as they lie in global memory.
struct MlaScales {
  float logits;     // of both, so that scores times it are logits in base 2
  float kpe_ratio;  // of q_pe . kpe, relative to q_nope . ckv
};

__device__ __forceinline__ MlaScales load_mla_scales(const MlaParams& p) {
  const float device = p.qk_scale == nullptr ? 1.0f : *p.qk_scale;
  const float ratio = p.kpe_scale == nullptr ? 1.0f : *p.kpe_scale / device;
  return {p.scale * device * kLog2E, p.kpe_ratio * ratio};
}

#endif  // __CUDACC__

}  // namespace precast
