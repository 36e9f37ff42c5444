// SPDX-License-Identifier: Apache-2.0
// What the bindings of runs share: everything but keys and values, and the launch.
#pragma once

#include "attention/attention_checks.h"
#include "attention/attention_tensors.h"
#include "attention/plan_block.h"

namespace precast {

// The .cu file of the module.
extern const DType attention_dtype_q;
extern const DType attention_dtype_o;
extern const int attention_head_dim_qk;
extern const int attention_head_dim_vo;
int attention_ctas_per_sm(int block_m);
cudaError_t attention(const AttentionParams& params, bool enable_pdl, cudaStream_t stream);

// What both kinds of runs bring.
struct Run {
  const PlanBlock& block;
  const Arg q, out;
  const OptionalTensor& lse;
  const OptionalTensor& sinks;
  double sm_factor, out_scale;
  const OptionalTensor& qk_scale;
  const OptionalTensor& v_scale;
};

// No tensor that is written shares memory with another of the call, or of the plan.
inline void check_memory(const Run& run, const Arg& keys, const Arg& values) {
  const char* op = run.q.op;
  const AttentionParams& p = run.block.params;
  const BatchLengths& lengths = run.block.plan.lengths;
  const PlanShape& s = run.block.shape;
  const int64_t batch = 4 * s.batch_size, bounds = batch + 4;  // bytes
  const TensorMemory ints(op, "int_workspace", p.schedule.plan, run.block.int_bytes);
  const TensorMemory floats(op, "float_workspace", p.partials, run.block.float_bytes);
  const TensorMemory sinks(op, "sinks", run.sinks);
  const TensorMemory qk_scale(op, "qk_scale", run.qk_scale), v_scale(op, "v_scale", run.v_scale);
  check_elements_apart(run.out);
  check_written({run.out, {op, "lse", run.lse}},
                {run.q,
                 keys,
                 values,
                 ints,
                 floats,
                 sinks,
                 qk_scale,
                 v_scale,
                 {op, "qo_indptr", lengths.qo_indptr, bounds},
                 {op, "kv_indptr", lengths.kv_indptr, bounds},
                 {op, "kv_last_page_len", lengths.last_page_len, batch},
                 {op, "kv_len", lengths.kv_len, batch},
                 {op, "kv_indices", p.kv_indices, 4 * int64_t(p.num_kv_indices)},
                 {op, "packed_mask", p.packed_mask, p.mask_bytes},
                 {op, "mask_indptr", p.mask_indptr, bounds},
                 {op, "alibi_slopes", p.alibi_slopes, 4 * s.num_qo_heads},
                 {op, "prefix_len", p.prefix_len, batch},
                 {op, "token_pos", p.token_pos, 2 * s.batch_size * p.token_pos_len}});
  // The workspaces are written, too. pack_plan() has compared them with the tensors of the plan.
  check_written({ints, floats}, {run.q, keys, values, sinks, qk_scale, v_scale});
}

// Queries of the plan's device, heads and rows; `kv_bytes`: of a key's element in shared memory;
// `columns` of a query, of which MLA has others in another tensor.
inline void check_queries(const Arg& q, const PlanBlock& block, int64_t kv_bytes, int64_t columns,
                          bool is_mla = false) {
  const PlanShape& s = block.shape;
  const DLDevice device = q.tensor.device();
  PRECAST_CHECK(device.device_id == block.device_id, ValueError)
      << q.what() << " must be on cuda:" << block.device_id << " as in plan(), got "
      << to_string(device);
  PRECAST_CHECK(s.head_dim_qk == attention_head_dim_qk && s.head_dim_vo == attention_head_dim_vo &&
                    s.kv_bytes == kv_bytes && (s.mla != 0) == is_mla,
                ValueError)
      << q.op << ": block must be of a plan " << (is_mla ? "of MLA " : "") << "for head dimensions "
      << attention_head_dim_qk << " and " << attention_head_dim_vo << " and keys of "
      << 8 * kv_bytes << " bits, got " << s.head_dim_qk << ", " << s.head_dim_vo << " and "
      << 8 * s.kv_bytes << ". Fix: call plan()";
  Dim rows("rows");
  TensorMatch(q)
      .dtype(attention_dtype_q)
      .shape({s.rows < 0 ? Extent(rows) : Extent(s.rows), s.num_qo_heads, columns})
      .unit_stride();
  check_rows(q);
}

// One number on the device, or null.
inline const float* number_or_null(const Arg& q, const char* name, const OptionalTensor& tensor) {
  return TensorMatcher(q.op).optional<const float>(
      tensor, name, [&](const TensorMatch& match) { check_one_number(match, q); });
}

// The same, or a number for each query head where queries are of 8 bits: `step` becomes 1 then.
inline const float* scale_or_null(const Arg& q, const char* name, const OptionalTensor& tensor,
                                  int64_t heads, int32_t& step) {
  if (attention_dtype_q != DType::e4m3 || !tensor.has_value() || tensor.value().numel() == 1) {
    return number_or_null(q, name, tensor);
  }
  step = 1;
  return vector_or_null<float>(q, name, tensor, to_dl(DType::f32), heads);
}

// Everything but keys and values. False if there is nothing to do.
inline bool fill(AttentionParams& p, const Run& run) {
  const Arg &q = run.q, &out = run.out;
  const int64_t tokens = q.tensor.size(0), heads = q.tensor.size(1);
  TensorMatch(out)
      .same_device(q)
      .dtype(attention_dtype_o)
      .shape({tokens, heads, attention_head_dim_vo})
      .unit_stride_output();
  check_rows(out);
  const TensorMatcher match(q.op);
  p.lse = match.optional<float>(run.lse, "lse", [&](const TensorMatch& lse) {
    lse.same_device(q).dtype(DType::f32).shape({tokens, heads}).contiguous();
  });
  PRECAST_CHECK(tokens * heads <= kMostInt32, ValueError)
      << q.what() << " must have at most 2^31 - 1 heads in all, got shape "
      << to_string(q.tensor.shape()) << "; call on parts of it";

  const ScheduleShape& shape = p.schedule.shape;
  const int ctas = attention_ctas_per_sm(shape.block_m) *
                   multiprocessors(q.op, static_cast<int>(run.block.device_id));
  PRECAST_CHECK(shape.ctas == ctas, ValueError)
      << q.op << ": block must be of a plan for " << ctas << " CTAs, got " << shape.ctas
      << ". Fix: call plan()";
  const int64_t tiles = tokens * shape.group_size / shape.block_m + shape.batch;
  PRECAST_CHECK(p.plans_itself || run.block.int_bytes / 4 >= min_plan_ints(shape, tiles),
                ValueError)
      << q.op << ": int_workspace must have at least " << 4 * min_plan_ints(shape, tiles)
      << " bytes for " << tokens << " queries of " << shape.batch << " requests, got "
      << run.block.int_bytes;

  p.sinks = vector_or_null<float>(q, "sinks", run.sinks, to_dl(DType::f32), heads);
  p.qk_scale = scale_or_null(q, "qk_scale", run.qk_scale, heads, p.qk_scale_step);
  p.v_scale = scale_or_null(q, "v_scale", run.v_scale, heads, p.v_scale_step);
  p.scale =
      finite_float(q.op, "sm_scale * q_scale * k_scale", run.block.scores.sm_scale * run.sm_factor);
  p.out_scale = finite_float(q.op, "out_scale", run.out_scale);
  PRECAST_CHECK(!p.plans_itself || is_plain(p), ValueError)
      << q.op << ": kernels that plan themselves need a positive scale and no mask but the causal "
      << "one, no soft cap and no encoding of positions, got a scale of " << p.scale
      << ". Fix: call plan()";

  if (run.block.shape.sm90 != 0) check_steps(q);
  check_span(q);
  check_span(out);
  p.q = data_of(q.tensor);
  p.q_rows = static_cast<int32_t>(tokens);
  p.q_stride = tokens > 1 ? q.tensor.stride(0) : 0;
  p.q_head_stride = heads > 1 ? q.tensor.stride(1) : 0;
  p.out = data_of(out.tensor);
  p.out_stride = tokens > 1 ? out.tensor.stride(0) : 0;
  p.out_head_stride = heads > 1 ? out.tensor.stride(1) : 0;
  return tokens > 0 && shape.batch > 0 && heads > 0;
}

// Pages of the plan's sizes, with keys and values in dimension 1 unless they are a tensor each.
inline void check_pages(const TensorMatch& match, const PlanShape& s, bool has_both, bool hnd,
                        Dim& pages, int64_t row_size) {
  const int64_t outer = hnd ? s.num_kv_heads : s.page_size;
  const int64_t inner = hnd ? s.page_size : s.num_kv_heads;
  (has_both ? match.shape({pages, 2, outer, inner, row_size})
            : match.shape({pages, outer, inner, row_size}))
      .unit_stride();
}

// Without tokens nothing is read. Should a plan know of some, all of them lie where the queries
// start: no wrong length makes a kernel read memory that is not there.
inline void place_missing_pages(AttentionParams& p) {
  if (p.num_pages > 0) return;
  p.k = p.v = AttentionCache(p.q, 0, 0, 0);
  p.num_pages = 1;
}

// `pdl` is 0 without PDL, 1 with it, 2 and 3 for the first and the second of two launches that
// overlap.
inline void launch_run(const Arg& q, AttentionParams& p, int64_t pdl) {
  p.k.head_stride <<= p.pair_shift;  // from here on a head is a pair of heads
  p.v.head_stride <<= p.pair_shift;
  place_missing_pages(p);
  PRECAST_CHECK(pdl >= 0 && pdl <= 3, ValueError)
      << q.op << ": enable_pdl must be 0, 1, 2 or 3, got " << pdl;
  p.overlap = pdl > 1 ? static_cast<Overlap>(pdl - 1) : Overlap::none;
  launch_on(q, [&](cudaStream_t stream) { return attention(p, pdl != 0, stream); });
}

}  // namespace precast
