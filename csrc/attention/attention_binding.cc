// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of attention over paged and ragged keys and values, by a plan.
#include "attention/attention_checks.h"
#include "attention/attention_tensors.h"
#include "attention/plan_block.h"
#include "core/ffi_export.h"
#include "core/memory_checks.h"

namespace precast {

// csrc/attention/attention.cu
extern const DType attention_dtype_q;
extern const DType attention_dtype_kv;
extern const int attention_head_dim_qk;
extern const int attention_head_dim_vo;
int attention_ctas_per_sm(int tile_rows);
cudaError_t attention(const AttentionParams& params, bool enable_pdl, cudaStream_t stream);

namespace {

// What a run brings besides keys and values.
struct Run {
  const PlanBlock& block;
  const Arg q, out;
  const OptionalTensor& lse;
  const OptionalTensor& sinks;
  double sm_factor, out_scale;
  const OptionalTensor& qk_scale;
  const OptionalTensor& v_scale;
};

// The bytes of a workspace, whose tensor pack_plan() had.
class Workspace {
 public:
  Workspace(const Arg& with, const char* name, const void* data, const int64_t& bytes)
      : tensor_{const_cast<void*>(data),      with.tensor.device(),           1, kUint8,
                const_cast<int64_t*>(&bytes), const_cast<int64_t*>(&kStride), 0},
        view_(&tensor_),
        arg_{with.op, name, view_},
        memory(arg_) {}
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

 private:
  static constexpr int64_t kStride = 1;
  DLTensor tensor_;
  TensorView view_;
  Arg arg_;

 public:
  TensorMemory memory;
};

// No tensor that is written shares memory with another of the call.
void check_memory(const Run& run, const Arg& keys, const Arg& values) {
  const AttentionParams& p = run.block.params;
  const Workspace ints(run.q, "int_workspace", p.schedule.plan, run.block.int_bytes);
  const Workspace floats(run.q, "float_workspace", p.partials, run.block.float_bytes);
  const TensorMemory results(run.out);
  const TensorMemory read[] = {run.q, keys, values};
  check_elements_apart(results);
  for (const TensorMemory& other : read) check_memory_apart(results, other);
  for (const Workspace* other : {&ints, &floats}) check_memory_apart(results, other->memory);
  if (!run.lse.has_value()) return;
  const TensorView& view = run.lse.value();
  const Arg lse = {run.q.op, "lse", view};
  const TensorMemory sums(lse);
  for (const TensorMemory& other : read) check_memory_apart(sums, other);
  for (const Workspace* other : {&ints, &floats}) check_memory_apart(sums, other->memory);
  check_memory_apart(sums, results);
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
  check_rows(q, attention_dtype_q, 3, attention_head_dim_qk, false);
  PRECAST_CHECK(q.tensor.size(1) == s.num_qo_heads, ValueError)
      << q.what() << " must have " << s.num_qo_heads << " heads as in plan(), got shape "
      << to_string(q.tensor.shape());
  PRECAST_CHECK(s.rows < 0 || q.tensor.size(0) == s.rows, ValueError)
      << q.what() << " must have " << s.rows << " rows as in plan(), got shape "
      << to_string(q.tensor.shape());
}

// Everything but keys and values. False if there is nothing to do.
bool fill(AttentionParams& p, const Run& run) {
  const Arg &q = run.q, &out = run.out;
  const int64_t heads = q.tensor.size(1), tokens = q.tensor.size(0);
  check_same_device(out, q);
  check_rows(out, attention_dtype_q, 3, attention_head_dim_vo, true);
  PRECAST_CHECK(out.tensor.size(0) == tokens && out.tensor.size(1) == heads, ValueError)
      << out.what() << " must have shape [" << tokens << ", " << heads << ", "
      << attention_head_dim_vo << "], got " << to_string(out.tensor.shape());
  if (run.lse.has_value()) {
    const TensorView& view = run.lse.value();
    const Arg lse = {q.op, "lse", view};
    check_same_device(lse, q);
    check_dtype(lse, DType::f32);
    PRECAST_CHECK(view.ndim() == 2 && view.size(0) == tokens && view.size(1) == heads, ValueError)
        << lse.what() << " must have shape [" << tokens << ", " << heads << "], got "
        << to_string(view.shape());
    check_contiguous(lse);
    p.lse = static_cast<float*>(data_of(view));
  }
  PRECAST_CHECK(tokens * heads <= 0x7fffffff, ValueError)
      << q.what() << " must have at most 2^31 - 1 heads in all, got shape "
      << to_string(q.tensor.shape()) << "; call on parts of it";

  const ScheduleShape& shape = p.schedule.shape;
  const int ctas = attention_ctas_per_sm(shape.block_m) *
                   multiprocessors(q.op, static_cast<int>(run.block.device_id));
  PRECAST_CHECK(shape.ctas == ctas, ValueError)
      << q.op << ": block must be of a plan for " << ctas << " CTAs, got " << shape.ctas
      << ". Fix: call plan()";
  const int64_t tiles = tokens * shape.group_size / shape.block_m + shape.batch;
  PRECAST_CHECK(run.block.int_bytes / 4 >= min_plan_ints(shape, tiles), ValueError)
      << q.op << ": int_workspace must have at least " << 4 * min_plan_ints(shape, tiles)
      << " bytes for " << tokens << " queries of " << shape.batch << " requests, got "
      << run.block.int_bytes;

  check_optional(q.op, "sinks", run.sinks, q, kFloat32, heads);
  for (const auto& [name, scale] :
       {std::pair<const char*, const OptionalTensor*>{"qk_scale", &run.qk_scale},
        {"v_scale", &run.v_scale}}) {
    if (!scale->has_value()) continue;
    const TensorView& view = scale->value();
    check_one_number({q.op, name, view}, q);
  }
  p.scale = static_cast<float>(run.block.scores.sm_scale * run.sm_factor);
  p.out_scale = static_cast<float>(run.out_scale);
  p.qk_scale = data_or_null<const float>(run.qk_scale);
  p.v_scale = data_or_null<const float>(run.v_scale);
  p.sinks = data_or_null<const float>(run.sinks);

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

void launch_run(const Arg& q, AttentionParams& p, bool enable_pdl) {
  if (p.page_count == 0) {
    // Without tokens nothing is read. Should a plan know of some, all of them lie where the queries
    // start: no wrong length makes a kernel read memory that is not there.
    p.k = p.v = AttentionCache(p.q, 0, 0, 0);
    p.page_count = 1;
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
  const int both = v_cache.has_value() ? 0 : 1;  // keys and values in dimension 1
  const int hnd = b.scores.hnd != 0;
  check_same_device(keys, queries);
  check_same_device(values, queries);
  check_rows(keys, attention_dtype_kv, 4 + both, attention_head_dim_qk, false);
  check_rows(values, attention_dtype_kv, 4 + both, attention_head_dim_vo, false);
  PRECAST_CHECK(!both || k_cache.size(1) == 2, ValueError)
      << keys.what() << " must hold keys and values in dimension 1 of size 2, got shape "
      << to_string(k_cache.shape());
  const int entry = 1 + both + hnd, head = 2 + both - hnd;
  check_sizes(values, keys, {0, entry, head});
  const int64_t pages = k_cache.size(0), page_size = k_cache.size(entry);
  PRECAST_CHECK(page_size == b.shape.page_size && k_cache.size(head) == b.shape.num_kv_heads,
                ValueError)
      << keys.what() << " must have " << b.shape.num_kv_heads << " heads and pages of "
      << b.shape.page_size << " tokens as in plan(), in layout " << (hnd ? "HND" : "NHD")
      << ", got shape " << to_string(k_cache.shape());
  constexpr int64_t kMost = 0x7fffffff;
  PRECAST_CHECK(page_size > 0 && pages <= kMost / page_size, ValueError)
      << keys.what() << " must have pages of at least one entry and at most " << kMost
      << " entries in all, got shape " << to_string(k_cache.shape());

  AttentionParams p = b.params;
  const Run run = {b,        queries, {"run_paged", "out", out}, lse, sinks, sm_factor, out_scale,
                   qk_scale, v_scale};
  if (!fill(p, run)) return;
  check_memory(run, keys, values);
  p.k = cache_of(keys, 0, entry, head, 0, 1);
  p.v = cache_of(values, 0, entry, head, both, 1);
  p.page_count = static_cast<uint32_t>(pages);
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
  check_same_device(keys, queries);
  check_same_device(values, queries);
  check_rows(keys, attention_dtype_kv, 3, attention_head_dim_qk, false);
  check_rows(values, attention_dtype_kv, 3, attention_head_dim_vo, false);
  PRECAST_CHECK(v.size(0) == k.size(0) && v.size(1) == k.size(1), ValueError)
      << values.what() << " must have the tokens and heads of k, got " << to_string(v.shape())
      << " for " << to_string(k.shape());
  PRECAST_CHECK(k.size(1) == b.shape.num_kv_heads, ValueError)
      << keys.what() << " must have " << b.shape.num_kv_heads << " heads as in plan(), got shape "
      << to_string(k.shape());
  PRECAST_CHECK(k.size(0) <= 0x7fffffff, ValueError)
      << keys.what() << " must have at most 2^31 - 1 tokens, got shape " << to_string(k.shape());

  AttentionParams p = b.params;
  const Run run = {b,        queries, {"run_ragged", "out", out}, lse, sinks, sm_factor, out_scale,
                   qk_scale, v_scale};
  if (!fill(p, run)) return;
  check_memory(run, keys, values);
  p.k = cache_of(keys, 0, -1, 1, 0, 0);
  p.v = cache_of(values, 0, -1, 1, 0, 0);
  p.page_count = static_cast<uint32_t>(k.size(0));
  launch_run(queries, p, enable_pdl);
}

}  // namespace

PRECAST_EXPORT(run_paged, run_paged)
PRECAST_EXPORT(run_ragged, run_ragged)

}  // namespace precast
