// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of attention over paged and ragged keys and values, by a plan.
#include "attention/attention_checks.h"
#include "attention/attention_tensors.h"
#include "attention/plan_block.h"
#include "core/ffi_export.h"

namespace precast {

// csrc/attention/attention.cu
extern const DType attention_dtype_q;
extern const DType attention_dtype_kv;
extern const int attention_head_dim_qk;
extern const int attention_head_dim_vo;
int attention_ctas_per_sm(int block_m);
cudaError_t attention(const AttentionParams& params, bool enable_pdl, cudaStream_t stream);

namespace {

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
void check_memory(const Run& run, const Arg& keys, const Arg& values) {
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

// Queries of the plan's device, heads and rows.
void check_queries(const Arg& q, const PlanBlock& block) {
  const PlanShape& s = block.shape;
  const DLDevice device = q.tensor.device();
  PRECAST_CHECK(device.device_id == block.device_id, ValueError)
      << q.what() << " must be on cuda:" << block.device_id << " as in plan(), got "
      << to_string(device);
  PRECAST_CHECK(s.head_dim_qk == attention_head_dim_qk && s.head_dim_vo == attention_head_dim_vo &&
                    s.kv_bytes * 8 == to_dl(attention_dtype_kv).bits,
                ValueError)
      << q.op << ": block must be of a plan for head dimensions " << attention_head_dim_qk
      << " and " << attention_head_dim_vo << " and keys of " << int(to_dl(attention_dtype_kv).bits)
      << " bits, got " << s.head_dim_qk << ", " << s.head_dim_vo << " and " << 8 * s.kv_bytes
      << ". Fix: call plan()";
  Dim rows("rows");
  TensorMatch(q)
      .dtype(attention_dtype_q)
      .shape({s.rows < 0 ? Extent(rows) : Extent(s.rows), s.num_qo_heads, s.head_dim_qk})
      .unit_stride();
  check_rows(q);
}

// One number on the device, or null.
const float* number_or_null(const Arg& q, const char* name, const OptionalTensor& tensor) {
  return TensorMatcher(q.op).optional<const float>(
      tensor, name, [&](const TensorMatch& match) { check_one_number(match, q); });
}

// Everything but keys and values. False if there is nothing to do.
bool fill(AttentionParams& p, const Run& run) {
  const Arg &q = run.q, &out = run.out;
  const int64_t tokens = q.tensor.size(0), heads = q.tensor.size(1);
  TensorMatch(out)
      .same_device(q)
      .dtype(attention_dtype_q)
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
  p.qk_scale = number_or_null(q, "qk_scale", run.qk_scale);
  p.v_scale = number_or_null(q, "v_scale", run.v_scale);
  p.scale =
      finite_float(q.op, "sm_scale * q_scale * k_scale", run.block.scores.sm_scale * run.sm_factor);
  p.out_scale = finite_float(q.op, "out_scale", run.out_scale);
  PRECAST_CHECK(!p.plans_itself || is_plain(p), ValueError)
      << q.op << ": kernels that plan themselves need a positive scale and no mask but the causal "
      << "one, no soft cap and no encoding of positions, got a scale of " << p.scale
      << ". Fix: call plan()";

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
void check_cache(const Arg& cache, const Arg& q, const PlanShape& s, bool has_both, bool hnd,
                 Dim& pages, int64_t head_dim) {
  const int64_t outer = hnd ? s.num_kv_heads : s.page_size;
  const int64_t inner = hnd ? s.page_size : s.num_kv_heads;
  const TensorMatch match = TensorMatch(cache).same_device(q).dtype(attention_dtype_kv);
  (has_both ? match.shape({pages, 2, outer, inner, head_dim})
            : match.shape({pages, outer, inner, head_dim}))
      .unit_stride();
  check_rows(cache);
}

void launch_run(const Arg& q, AttentionParams& p, bool enable_pdl) {
  if (p.num_pages == 0) {
    // Without tokens nothing is read. Should a plan know of some, all of them lie where the queries
    // start: no wrong length makes a kernel read memory that is not there.
    p.k = p.v = AttentionCache(p.q, 0, 0, 0);
    p.num_pages = 1;
  }
  launch_on(q, [&](cudaStream_t stream) { return attention(p, enable_pdl, stream); });
}

void run_paged(TensorView q, TensorView k_cache, OptionalTensor v_cache, TensorView out,
               OptionalTensor lse, OptionalTensor sinks, TensorView block, double sm_factor,
               double out_scale, OptionalTensor qk_scale, OptionalTensor v_scale, bool enable_pdl) {
  const Arg queries = PRECAST_ARG("run_paged", q);
  const Arg keys = {"run_paged", v_cache.has_value() ? "paged_kv_cache[0]" : "paged_kv_cache",
                    k_cache};
  const TensorView values_view = v_cache.has_value() ? v_cache.value() : k_cache;
  const Arg values = {"run_paged", v_cache.has_value() ? "paged_kv_cache[1]" : "paged_kv_cache",
                      values_view};
  check_cuda(queries);
  const PlanBlock& b = packed_block(PRECAST_ARG("run_paged", block));
  check_queries(queries, b);
  const PlanShape& s = b.shape;
  const bool has_both = !v_cache.has_value(), hnd = b.scores.hnd != 0;
  Dim pages("pages");
  check_cache(keys, queries, s, has_both, hnd, pages, s.head_dim_qk);
  check_cache(values, queries, s, has_both, hnd, pages, s.head_dim_vo);
  PRECAST_CHECK(s.page_size > 0 && pages <= kMostInt32 / s.page_size, ValueError)
      << keys.what() << " must have pages of at least one entry and at most " << kMostInt32
      << " entries in all, got shape " << to_string(k_cache.shape());

  AttentionParams p = b.params;
  const Run run = {b,        queries, {"run_paged", "out", out}, lse, sinks, sm_factor, out_scale,
                   qk_scale, v_scale};
  if (!fill(p, run)) return;
  check_memory(run, keys, values);
  const int entry = 1 + has_both + hnd, head = 2 + has_both - hnd;
  p.k = cache_of(keys, 0, entry, head, 0, 1);
  p.v = cache_of(values, 0, entry, head, has_both, 1);
  p.num_pages = static_cast<uint32_t>(pages);
  launch_run(queries, p, enable_pdl);
}

void run_ragged(TensorView q, TensorView k, TensorView v, TensorView out, OptionalTensor lse,
                OptionalTensor sinks, TensorView block, double sm_factor, double out_scale,
                OptionalTensor qk_scale, OptionalTensor v_scale, bool enable_pdl) {
  const Arg queries = PRECAST_ARG("run_ragged", q);
  const Arg keys = PRECAST_ARG("run_ragged", k);
  const Arg values = PRECAST_ARG("run_ragged", v);
  check_cuda(queries);
  const PlanBlock& b = packed_block(PRECAST_ARG("run_ragged", block));
  check_queries(queries, b);
  PRECAST_CHECK(b.shape.page_size == 0, ValueError)
      << "run_ragged: block must be of a plan without pages, got one with pages of "
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
  const Run run = {b,        queries, {"run_ragged", "out", out}, lse, sinks, sm_factor, out_scale,
                   qk_scale, v_scale};
  if (!fill(p, run)) return;
  check_memory(run, keys, values);
  p.k = cache_of(keys, 0, -1, 1, 0, 0);
  p.v = cache_of(values, 0, -1, 1, 0, 0);
  p.num_pages = static_cast<uint32_t>(tokens);
  launch_run(queries, p, enable_pdl);
}

}  // namespace

PRECAST_EXPORT(run_paged, run_paged)
PRECAST_EXPORT(run_ragged, run_ragged)

}  // namespace precast
