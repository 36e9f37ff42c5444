// SPDX-License-Identifier: Apache-2.0
// Runs over paged and ragged keys and values of one dtype, by a plan: the same for the kernels of
// every GPU and those of sm_90a.
#pragma once

#include "attention/attention_run.h"

namespace precast {

// The .cu file of the module.
extern const DType attention_dtype_kv;

// Keys or values of the plan's sizes.
inline void check_cache(const Arg& cache, const Arg& q, const PlanShape& s, bool has_both, bool hnd,
                        Dim& pages, int64_t head_dim) {
  check_pages(TensorMatch(cache).same_device(q).dtype(attention_dtype_kv), s, has_both, hnd, pages,
              head_dim);
  check_rows(cache);
}

// The export of kernels for sm_90a.
inline const char* sm90_name(const char* name, const char* name_fp8) {
  return attention_dtype_q == DType::e4m3 ? name_fp8 : name;
}

inline int64_t kv_bytes() { return to_dl(attention_dtype_kv).bits / 8; }

template <bool kSm90>
void run_paged(TensorView q, TensorView k_cache, OptionalTensor v_cache, TensorView out,
               OptionalTensor lse, OptionalTensor sinks, TensorView block, double sm_factor,
               double out_scale, OptionalTensor qk_scale, OptionalTensor v_scale, int64_t pdl) {
  const char* op = kSm90 ? sm90_name("run_paged_sm90", "run_paged_sm90_fp8") : "run_paged";
  const Arg queries = PRECAST_ARG(op, q);
  const Arg keys = {op, v_cache.has_value() ? "paged_kv_cache[0]" : "paged_kv_cache", k_cache};
  const TensorView values_view = v_cache.has_value() ? v_cache.value() : k_cache;
  const Arg values = {op, v_cache.has_value() ? "paged_kv_cache[1]" : "paged_kv_cache",
                      values_view};
  check_cuda(queries);
  const PlanBlock& b = packed_block(PRECAST_ARG(op, block));
  check_queries(queries, b, kv_bytes(), attention_head_dim_qk);
  const PlanShape& s = b.shape;
  const bool has_both = !v_cache.has_value(), hnd = b.scores.hnd != 0;
  Dim pages("pages");
  check_cache(keys, queries, s, has_both, hnd, pages, s.head_dim_qk);
  check_cache(values, queries, s, has_both, hnd, pages, s.head_dim_vo);
  PRECAST_CHECK(s.page_size > 0 && pages <= kMostInt32 / s.page_size, ValueError)
      << keys.what() << " must have pages of at least one entry and at most " << kMostInt32
      << " entries in all, got shape " << to_string(k_cache.shape());

  AttentionParams p = b.params;
  const Run run = {b,         queries,   {op, "out", out}, lse,    sinks,
                   sm_factor, out_scale, qk_scale,         v_scale};
  if (!fill(p, run)) return;
  check_memory(run, keys, values);
  const int entry = 1 + has_both + hnd, head = 2 + has_both - hnd;
  p.k = cache_of(keys, 0, entry, head, 0, 1);
  p.v = cache_of(values, 0, entry, head, has_both, 1);
  p.num_pages = static_cast<uint32_t>(pages);
  launch_run(queries, p, pdl);
}

template <bool kSm90>
void run_ragged(TensorView q, TensorView k, TensorView v, TensorView out, OptionalTensor lse,
                OptionalTensor sinks, TensorView block, double sm_factor, double out_scale,
                OptionalTensor qk_scale, OptionalTensor v_scale, int64_t pdl) {
  const char* op = kSm90 ? sm90_name("run_ragged_sm90", "run_ragged_sm90_fp8") : "run_ragged";
  const Arg queries = PRECAST_ARG(op, q);
  const Arg keys = PRECAST_ARG(op, k);
  const Arg values = PRECAST_ARG(op, v);
  check_cuda(queries);
  const PlanBlock& b = packed_block(PRECAST_ARG(op, block));
  check_queries(queries, b, kv_bytes(), attention_head_dim_qk);
  PRECAST_CHECK(b.shape.page_size == 0, ValueError)
      << op << ": block must be of a plan without pages, got one with pages of "
      << b.shape.page_size << " tokens";
  const int64_t heads = b.shape.num_kv_heads;
  Dim tokens("tokens");
  for (const auto& [arg, head_dim] :
       {std::pair<const Arg&, int>{keys, attention_head_dim_qk}, {values, attention_head_dim_vo}}) {
    TensorMatch(arg)
        .same_device(queries)
        .dtype(attention_dtype_kv)
        .shape({tokens, heads, head_dim})
        .unit_stride();
    check_rows(arg);
  }
  PRECAST_CHECK(tokens <= kMostInt32, ValueError)
      << keys.what() << " must have at most 2^31 - 1 tokens, got shape " << to_string(k.shape());

  AttentionParams p = b.params;
  const Run run = {b,         queries,   {op, "out", out}, lse,    sinks,
                   sm_factor, out_scale, qk_scale,         v_scale};
  if (!fill(p, run)) return;
  check_memory(run, keys, values);
  p.k = cache_of(keys, 0, -1, 1, 0, 0);
  p.v = cache_of(values, 0, -1, 1, 0, 0);
  p.num_pages = static_cast<uint32_t>(tokens);
  launch_run(queries, p, pdl);
}

}  // namespace precast
