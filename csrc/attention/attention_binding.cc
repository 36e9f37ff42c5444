// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of attention over paged and ragged keys and values, by a plan.
#include <cmath>

#include "attention/attention_checks.h"
#include "attention/attention_tensors.h"
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

// What both entry points take behind keys, values and lengths, in this order.
struct Call {
  const char* op;
  const TensorView& q;
  const TensorView& int_workspace;
  const TensorView& float_workspace;
  const TensorView& out;
  const OptionalTensor& lse;
  int64_t tile_rows;
  bool plan_causal;
  int64_t plan_window_left, q_len_per_req, mask_mode;
  const OptionalTensor& packed_mask;
  const OptionalTensor& mask_indptr;
  int64_t window_left, pos_encoding;
  const OptionalTensor& alibi_slopes;
  double rope_scale, rope_theta, logits_soft_cap, sm_scale, out_scale;
  const OptionalTensor& qk_scale;
  const OptionalTensor& v_scale;
  const OptionalTensor& sinks;
  const OptionalTensor& prefix_len;
  const OptionalTensor& token_pos;
  int64_t token_pos_len;
  const OptionalTensor& max_item_len;
};

// No tensor that is written shares memory with another of the call.
void check_memory(const Call& c, const Arg& keys, const Arg& values) {
  const Arg q = {c.op, "q", c.q}, out = {c.op, "out", c.out};
  const Arg ints = {c.op, "int_workspace", c.int_workspace};
  const Arg floats = {c.op, "float_workspace", c.float_workspace};
  const TensorMemory results(out), partials(floats);
  const TensorMemory read[] = {q, keys, values, ints};
  check_elements_apart(results);
  for (const TensorMemory& other : read) check_memory_apart(results, other);
  check_memory_apart(results, partials);
  check_memory_apart(partials, read[3]);
  if (!c.lse.has_value()) return;
  const TensorView& view = c.lse.value();
  const Arg lse = {c.op, "lse", view};
  const TensorMemory sums(lse);
  for (const TensorMemory& other : read) check_memory_apart(sums, other);
  check_memory_apart(sums, partials);
  check_memory_apart(sums, results);
}

// Masks, positions and scales.
void fill_scores(AttentionParams& p, const Call& c, const Arg& q, int64_t batch) {
  PRECAST_CHECK(c.mask_mode >= 0 && c.mask_mode <= 3, ValueError)
      << c.op << ": mask_mode must be 0 to 3, got " << c.mask_mode;
  PRECAST_CHECK(c.pos_encoding >= 0 && c.pos_encoding <= 2, ValueError)
      << c.op << ": pos_encoding must be 0 to 2, got " << c.pos_encoding;
  PRECAST_CHECK(!c.plan_causal || c.mask_mode % 2 == 1, ValueError)
      << c.op << ": mask_mode must be causal (1) or multi-item (3) as plan() had it, got "
      << c.mask_mode << "; plan again with causal=False";
  const int64_t planned = c.plan_window_left;
  PRECAST_CHECK(planned < 0 || (c.window_left >= 0 && c.window_left <= planned), ValueError)
      << c.op << ": window_left must be 0 to " << planned << " as plan() had it, got "
      << c.window_left << "; plan again with the wider window";
  p.mask = static_cast<AttentionMask>(c.mask_mode);
  p.positions = static_cast<PositionEncoding>(c.pos_encoding);
  if (p.mask == AttentionMask::custom) {
    check_given(c.op, "packed_mask", c.packed_mask, "a custom mask");
    check_given(c.op, "mask_indptr", c.mask_indptr, "a custom mask");
    check_optional(c.op, "mask_indptr", c.mask_indptr, q, kInt32, batch + 1);
    const TensorView& view = c.packed_mask.value();
    const Arg mask = {c.op, "packed_mask", view};
    check_same_device(mask, q);
    check_rank(mask, 1, 1);
    check_numbers(mask, kUint8, view.size(0));
    p.packed_mask = static_cast<const uint8_t*>(data_of(view));
    p.mask_bytes = view.size(0);
    p.mask_indptr = data_or_null<const int32_t>(c.mask_indptr);
  }
  if (p.mask == AttentionMask::items) {
    check_given(c.op, "prefix_len", c.prefix_len, "multi-item scoring");
    check_given(c.op, "token_pos", c.token_pos, "multi-item scoring");
    PRECAST_CHECK(c.token_pos_len >= 0 && c.token_pos_len <= 0x7fffffff, ValueError)
        << c.op << ": token_pos_len must not be negative, got " << c.token_pos_len;
    check_wide_numbers(c.op, "prefix_len", c.prefix_len, q, 32, batch);
    check_wide_numbers(c.op, "token_pos", c.token_pos, q, 16, batch * c.token_pos_len);
    // These kernels have no use for it.
    check_wide_numbers(c.op, "max_item_len", c.max_item_len, q, 16, batch);
    p.prefix_len = data_or_null<const uint32_t>(c.prefix_len);
    p.token_pos = data_or_null<const uint16_t>(c.token_pos);
    p.token_pos_len = static_cast<int32_t>(c.token_pos_len);
  }
  if (p.positions == PositionEncoding::rope) {
    PRECAST_CHECK(c.rope_scale > 0 && c.rope_theta > 0, ValueError)
        << c.op << ": rope_scale and rope_theta must be positive, got " << c.rope_scale << " and "
        << c.rope_theta;
    p.rope_inverse_scale = static_cast<float>(1.0 / c.rope_scale);
    p.rope_log2_theta = static_cast<float>(std::log2(c.rope_theta));
  }
  if (p.positions == PositionEncoding::alibi) {
    check_given(c.op, "alibi_slopes", c.alibi_slopes, "ALiBi");
    check_optional(c.op, "alibi_slopes", c.alibi_slopes, q, kFloat32, c.q.size(1));
    p.alibi_slopes = data_or_null<const float>(c.alibi_slopes);
  }
  check_optional(c.op, "sinks", c.sinks, q, kFloat32, c.q.size(1));
  for (const auto& [name, scale] :
       {std::pair<const char*, const OptionalTensor*>{"qk_scale", &c.qk_scale},
        {"v_scale", &c.v_scale}}) {
    if (!scale->has_value()) continue;
    const TensorView& view = scale->value();
    check_one_number({c.op, name, view}, q);
  }
  p.scale = static_cast<float>(c.sm_scale);
  p.out_scale = static_cast<float>(c.out_scale);
  p.qk_scale = data_or_null<const float>(c.qk_scale);
  p.v_scale = data_or_null<const float>(c.v_scale);
  p.window_left = c.window_left < 0            ? -1
                  : c.window_left > 0x7fffffff ? 0x7fffffff
                                               : static_cast<int32_t>(c.window_left);
  p.sinks = data_or_null<const float>(c.sinks);
  p.soft_cap = c.logits_soft_cap > 0 ? static_cast<float>(c.logits_soft_cap) : 0.0f;
}

// Everything but keys and values. False if there is nothing to do.
bool fill(AttentionParams& p, const Call& c, int64_t batch, int64_t kv_heads) {
  const Arg q = {c.op, "q", c.q};
  const Arg out = {c.op, "out", c.out};
  const int64_t heads = c.q.size(1), tokens = c.q.size(0);
  check_same_device(out, q);
  check_rows(out, attention_dtype_q, 3, attention_head_dim_vo, true);
  PRECAST_CHECK(c.out.size(0) == tokens && c.out.size(1) == heads, ValueError)
      << out.what() << " must have shape [" << tokens << ", " << heads << ", "
      << attention_head_dim_vo << "], got " << to_string(c.out.shape());
  if (c.lse.has_value()) {
    const TensorView& view = c.lse.value();
    const Arg lse = {c.op, "lse", view};
    check_same_device(lse, q);
    check_dtype(lse, DType::f32);
    PRECAST_CHECK(view.ndim() == 2 && view.size(0) == tokens && view.size(1) == heads, ValueError)
        << lse.what() << " must have shape [" << tokens << ", " << heads << "], got "
        << to_string(view.shape());
    check_contiguous(lse);
    p.lse = static_cast<float*>(data_of(view));
  }
  PRECAST_CHECK(c.q_len_per_req <= 0 || tokens == c.q_len_per_req * batch, ValueError)
      << q.what() << " must have " << c.q_len_per_req << " rows for each of " << batch
      << " requests, got shape " << to_string(c.q.shape());
  PRECAST_CHECK(tokens * heads <= 0x7fffffff, ValueError)
      << q.what() << " must have at most 2^31 - 1 heads in all, got shape "
      << to_string(c.q.shape()) << "; call on parts of it";

  const int per_sm = attention_ctas_per_sm(static_cast<int>(c.tile_rows));
  PRECAST_CHECK(per_sm > 0, ValueError)
      << c.op << ": there is no kernel of tiles of " << c.tile_rows << " rows; call plan()";
  const int sms = multiprocessors(c.op, c.q.device().device_id);
  ScheduleShape& shape = p.schedule.shape;
  shape = shape_of(c.op, {heads, kv_heads, attention_head_dim_vo}, batch, c.tile_rows, sms * per_sm,
                   c.plan_causal, c.plan_window_left);
  const Arg ints = {c.op, "int_workspace", c.int_workspace};
  const Arg floats = {c.op, "float_workspace", c.float_workspace};
  const int64_t room = check_workspace(ints, q) / 4;
  const int64_t float_bytes = check_workspace(floats, q);
  const int64_t tiles = tokens * shape.group_size / shape.block_m + batch;
  PRECAST_CHECK(room >= min_plan_ints(shape, tiles), ValueError)
      << ints.what() << " must have at least " << 4 * min_plan_ints(shape, tiles) << " bytes for "
      << tokens << " queries of " << batch << " requests, got " << 4 * room;
  p.schedule.plan = static_cast<int32_t*>(data_of(c.int_workspace));
  p.partials = static_cast<float*>(data_of(c.float_workspace));
  p.slots = float_bytes / slot_bytes(c.tile_rows, attention_head_dim_vo);

  fill_scores(p, c, q, batch);

  check_span(q);
  check_span(out);
  p.q = data_of(c.q);
  p.q_rows = static_cast<int32_t>(tokens);
  p.q_stride = tokens > 1 ? c.q.stride(0) : 0;
  p.q_head_stride = heads > 1 ? c.q.stride(1) : 0;
  p.group = FastDivmod(static_cast<uint32_t>(shape.group_size));
  p.kv_heads = static_cast<int32_t>(kv_heads);
  p.out = data_of(c.out);
  p.out_stride = tokens > 1 ? c.out.stride(0) : 0;
  p.out_head_stride = heads > 1 ? c.out.stride(1) : 0;
  return tokens > 0 && batch > 0 && heads > 0;
}

void check_queries(const Arg& q) {
  check_cuda(q);
  check_rows(q, attention_dtype_q, 3, attention_head_dim_qk, false);
}

// Requests of an indptr of pages or tokens.
int64_t batch_of(const Arg& indptr, const Arg& q) {
  check_same_device(indptr, q);
  PRECAST_CHECK(indptr.tensor.ndim() == 1 && indptr.tensor.size(0) >= 1, ValueError)
      << indptr.what() << " must have shape [batch_size + 1], got "
      << to_string(indptr.tensor.shape());
  check_numbers(indptr, kInt32, indptr.tensor.size(0));
  return indptr.tensor.size(0) - 1;
}

void launch_call(const Arg& q, AttentionParams& p, bool enable_pdl) {
  if (p.page_count == 0) {
    // Without tokens nothing is read. Should a plan know of some, all of them lie where the queries
    // start: no wrong length makes a kernel read memory that is not there.
    p.k = p.v = AttentionCache(p.q, 0, 0, 0);
    p.page_count = 1;
  }
  launch_on(q, [&](cudaStream_t stream) { return attention(p, enable_pdl, stream); });
}

// Lengths are in the plan: qo_indptr, kv_last_page_len and kv_len are for references, which have
// none.
void run_paged(TensorView q, TensorView k_cache, OptionalTensor v_cache, bool hnd,
               OptionalTensor qo_indptr, TensorView kv_indptr, TensorView kv_indices,
               OptionalTensor kv_last_page_len, OptionalTensor kv_len, TensorView int_workspace,
               TensorView float_workspace, TensorView out, OptionalTensor lse, int64_t tile_rows,
               bool plan_causal, int64_t plan_window_left, int64_t q_len_per_req, int64_t mask_mode,
               OptionalTensor packed_mask, OptionalTensor mask_indptr, int64_t window_left,
               int64_t pos_encoding, OptionalTensor alibi_slopes, double rope_scale,
               double rope_theta, double logits_soft_cap, double sm_scale, double out_scale,
               OptionalTensor qk_scale, OptionalTensor v_scale, OptionalTensor sinks,
               OptionalTensor prefix_len, OptionalTensor token_pos, int64_t token_pos_len,
               OptionalTensor max_item_len, bool enable_pdl) {
  const Arg queries = PRECAST_ARG("run_paged", q);
  const Arg keys = {"run_paged", v_cache.has_value() ? "paged_kv_cache[0]" : "paged_kv_cache",
                    k_cache};
  const TensorView values_view = v_cache.has_value() ? v_cache.value() : k_cache;
  const Arg values = {"run_paged", v_cache.has_value() ? "paged_kv_cache[1]" : "paged_kv_cache",
                      values_view};
  const Arg indices = PRECAST_ARG("run_paged", kv_indices);
  check_queries(queries);
  const int both = v_cache.has_value() ? 0 : 1;  // keys and values in dimension 1
  check_same_device(keys, queries);
  check_same_device(values, queries);
  check_rows(keys, attention_dtype_kv, 4 + both, attention_head_dim_qk, false);
  check_rows(values, attention_dtype_kv, 4 + both, attention_head_dim_vo, false);
  PRECAST_CHECK(!both || k_cache.size(1) == 2, ValueError)
      << keys.what() << " must hold keys and values in dimension 1 of size 2, got shape "
      << to_string(k_cache.shape());
  const int entry = 1 + both + hnd, head = 2 + both - hnd;
  check_sizes(values, keys, {0, entry, head});
  const int64_t batch = batch_of(PRECAST_ARG("run_paged", kv_indptr), queries);
  check_same_device(indices, queries);
  check_rank(indices, 1, 1);
  check_numbers(indices, kInt32, kv_indices.size(0));
  check_optional("run_paged", "qo_indptr", qo_indptr, queries, kInt32, batch + 1);
  check_optional("run_paged", "kv_last_page_len", kv_last_page_len, queries, kInt32, batch);
  check_optional("run_paged", "kv_len", kv_len, queries, kInt32, batch);
  const int64_t pages = k_cache.size(0), page_size = k_cache.size(entry);
  constexpr int64_t kMost = 0x7fffffff;
  PRECAST_CHECK(page_size > 0 && pages <= kMost / page_size && kv_indices.size(0) <= kMost,
                ValueError)
      << keys.what() << " must have pages of at least one entry and at most " << kMost
      << " entries in all, got shape " << to_string(k_cache.shape());

  AttentionParams p;
  const Call call = {
      "run_paged",     q,           int_workspace,    float_workspace, out,        lse,
      tile_rows,       plan_causal, plan_window_left, q_len_per_req,   mask_mode,  packed_mask,
      mask_indptr,     window_left, pos_encoding,     alibi_slopes,    rope_scale, rope_theta,
      logits_soft_cap, sm_scale,    out_scale,        qk_scale,        v_scale,    sinks,
      prefix_len,      token_pos,   token_pos_len,    max_item_len};
  if (!fill(p, call, batch, k_cache.size(head))) return;
  check_memory(call, keys, values);
  p.k = cache_of(keys, 0, entry, head, 0, 1);
  p.v = cache_of(values, 0, entry, head, both, 1);
  p.pages = static_cast<const int32_t*>(data_of(kv_indices));
  p.page_entries = static_cast<uint32_t>(kv_indices.size(0));
  p.page_size = FastDivmod(static_cast<uint32_t>(page_size));
  p.page_count = static_cast<uint32_t>(pages);
  launch_call(queries, p, enable_pdl);
}

void run_ragged(TensorView q, TensorView k, TensorView v, OptionalTensor qo_indptr,
                TensorView kv_indptr, TensorView int_workspace, TensorView float_workspace,
                TensorView out, OptionalTensor lse, int64_t tile_rows, bool plan_causal,
                int64_t plan_window_left, int64_t q_len_per_req, int64_t mask_mode,
                OptionalTensor packed_mask, OptionalTensor mask_indptr, int64_t window_left,
                int64_t pos_encoding, OptionalTensor alibi_slopes, double rope_scale,
                double rope_theta, double logits_soft_cap, double sm_scale, double out_scale,
                OptionalTensor qk_scale, OptionalTensor v_scale, OptionalTensor sinks,
                OptionalTensor prefix_len, OptionalTensor token_pos, int64_t token_pos_len,
                OptionalTensor max_item_len, bool enable_pdl) {
  const Arg queries = PRECAST_ARG("run_ragged", q);
  const Arg keys = PRECAST_ARG("run_ragged", k);
  const Arg values = PRECAST_ARG("run_ragged", v);
  check_queries(queries);
  check_same_device(keys, queries);
  check_same_device(values, queries);
  check_rows(keys, attention_dtype_kv, 3, attention_head_dim_qk, false);
  check_rows(values, attention_dtype_kv, 3, attention_head_dim_vo, false);
  PRECAST_CHECK(v.size(0) == k.size(0) && v.size(1) == k.size(1), ValueError)
      << values.what() << " must have the tokens and heads of k, got " << to_string(v.shape())
      << " for " << to_string(k.shape());
  const int64_t batch = batch_of(PRECAST_ARG("run_ragged", kv_indptr), queries);
  check_optional("run_ragged", "qo_indptr", qo_indptr, queries, kInt32, batch + 1);
  PRECAST_CHECK(k.size(0) <= 0x7fffffff, ValueError)
      << keys.what() << " must have at most 2^31 - 1 tokens, got shape " << to_string(k.shape());

  AttentionParams p;
  const Call call = {
      "run_ragged",    q,           int_workspace,    float_workspace, out,        lse,
      tile_rows,       plan_causal, plan_window_left, q_len_per_req,   mask_mode,  packed_mask,
      mask_indptr,     window_left, pos_encoding,     alibi_slopes,    rope_scale, rope_theta,
      logits_soft_cap, sm_scale,    out_scale,        qk_scale,        v_scale,    sinks,
      prefix_len,      token_pos,   token_pos_len,    max_item_len};
  if (!fill(p, call, batch, k.size(1))) return;
  check_memory(call, keys, values);
  p.k = cache_of(keys, 0, -1, 1, 0, 0);
  p.v = cache_of(values, 0, -1, 1, 0, 0);
  p.page_size = FastDivmod(1);
  p.page_count = static_cast<uint32_t>(k.size(0));
  launch_call(queries, p, enable_pdl);
}

}  // namespace

PRECAST_EXPORT(run_paged, run_paged)
PRECAST_EXPORT(run_ragged, run_ragged)

}  // namespace precast
