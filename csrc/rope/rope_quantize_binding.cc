// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of RoPE with quantisation to fp8.
#include "core/ffi_export.h"
#include "rope/rope_checks.h"

namespace precast {

// csrc/rope/rope_quantize.cu
extern const DType rope_quantize_dtype;
extern const DType rope_quantize_dtype_out;
cudaError_t rope_quantize(const RopeParams& params, bool enable_pdl, cudaStream_t stream);

namespace {

// Queries and keys in two parts each: the rotated columns, and the others.
struct Inputs {
  Arg q_rope, k_rope, q_nope, k_nope;
};

struct Scales {
  double q, kv;
};

// The rotated columns and the others, of queries or of keys.
struct Parts {
  Heads rope, nope;
};

Heads input_heads(const Arg& arg, const Arg& first, int rank) {
  check_same_device(arg, first);
  check_dtype(arg, rope_quantize_dtype);
  check_rank(arg, rank, rank);
  return heads_of(arg, arg.tensor.size(-1));
}

Parts parts_of(const Arg& rope, const Arg& nope, const Arg& first, int rank) {
  const Parts parts = {input_heads(rope, first, rank), input_heads(nope, first, rank)};
  check_same_tokens(parts.nope, parts.rope);
  PRECAST_CHECK(parts.nope.heads == parts.rope.heads, ValueError)
      << nope.what() << " must have " << parts.rope.heads << " heads as " << rope.name << ", got "
      << parts.nope.heads;
  PRECAST_CHECK(parts.nope.dim <= kMaxTokens, ValueError)
      << nope.what() << " must have at most " << kMaxTokens << " columns, got " << parts.nope.dim;
  return parts;
}

Heads output_heads(const Arg& out, const Arg& like) {
  check_same_device(out, like);
  check_dtype(out, rope_quantize_dtype_out);
  check_same_shape(out, like);
  const Heads heads = heads_of(out, out.tensor.size(-1));
  check_out_rows(out);
  return heads;
}

// Sets everything except the outputs.
RopeParams make_params(const Inputs& in, const Parts& q, const Parts& k, const Arg& cache,
                       const Arg& pos_ids, bool is_neox) {
  check_same_tokens(k.rope, q.rope);
  RopeParams params = {};
  params.tokens = static_cast<uint32_t>(q.rope.tokens);
  params.interleave = !is_neox;
  set_cache(params.source, cache, in.q_rope);
  const int64_t rotary_dim = params.source.rotary_dim;
  check_rotary_dim(in.q_rope.op, rotary_dim, kMaxHeadDim);
  for (const Heads* heads : {&q.rope, &k.rope}) {
    PRECAST_CHECK(heads->dim == rotary_dim, ValueError)
        << heads->arg.what() << "'s last dimension must be cos_sin_cache's " << rotary_dim
        << ", got " << heads->dim;
  }
  params.source.positions.ids = check_index(pos_ids, in.q_rope, q.rope.tokens);
  return params;
}

void run(const Arg& arg, const RopeParams& params, bool enable_pdl) {
  check_rope_items(arg, params);
  if (params.tokens == 0) return;
  launch_on(arg, [&](cudaStream_t stream) { return rope_quantize(params, enable_pdl, stream); });
}

void quantize_entry(const Inputs& in, int key_rank, const Arg& cache, const Arg& pos_ids,
                    bool is_neox, Scales scales, const Inputs& out, bool enable_pdl) {
  check_cuda(in.q_rope);
  const Parts q = parts_of(in.q_rope, in.q_nope, in.q_rope, 3);
  const Parts k = parts_of(in.k_rope, in.k_nope, in.q_rope, key_rank);
  RopeParams params = make_params(in, q, k, cache, pos_ids, is_neox);
  const Heads q_rope = output_heads(out.q_rope, in.q_rope);
  const Heads k_rope = output_heads(out.k_rope, in.k_rope);
  const Heads q_nope = output_heads(out.q_nope, in.q_nope);
  const Heads k_nope = output_heads(out.k_nope, in.k_nope);
  check_written({out.q_rope, out.k_rope, out.q_nope, out.k_nope},
                {in.q_rope, in.k_rope, in.q_nope, in.k_nope, cache, pos_ids});
  const float q_scale = static_cast<float>(scales.q);
  const float kv_scale = static_cast<float>(scales.kv);
  add_segment(params, q.rope, q_rope, 0, q.rope.dim, true, q_scale);
  add_segment(params, k.rope, k_rope, 0, k.rope.dim, true, kv_scale);
  add_segment(params, q.nope, q_nope, 0, q.nope.dim, false, q_scale);
  add_segment(params, k.nope, k_nope, 0, k.nope.dim, false, kv_scale);
  run(in.q_rope, params, enable_pdl);
}

void rope_quantize_fp8(TensorView q_rope, TensorView k_rope, TensorView q_nope, TensorView k_nope,
                       TensorView cos_sin_cache, TensorView pos_ids, bool is_neox,
                       double quant_scale_q, double quant_scale_kv, TensorView q_rope_out,
                       TensorView k_rope_out, TensorView q_nope_out, TensorView k_nope_out,
                       bool enable_pdl) {
  const char* op = "rope_quantize_fp8";
  const Arg keys = PRECAST_ARG(op, k_rope);
  check_cuda(PRECAST_ARG(op, q_rope));
  check_rank(keys, 2, 3);
  quantize_entry({PRECAST_ARG(op, q_rope), keys, PRECAST_ARG(op, q_nope), PRECAST_ARG(op, k_nope)},
                 k_rope.ndim(), PRECAST_ARG(op, cos_sin_cache), PRECAST_ARG(op, pos_ids), is_neox,
                 {quant_scale_q, quant_scale_kv},
                 {PRECAST_ARG(op, q_rope_out), PRECAST_ARG(op, k_rope_out),
                  PRECAST_ARG(op, q_nope_out), PRECAST_ARG(op, k_nope_out)},
                 enable_pdl);
}

void mla_rope_quantize_fp8(TensorView q_rope, TensorView k_rope, TensorView q_nope,
                           TensorView k_nope, TensorView cos_sin_cache, TensorView pos_ids,
                           bool is_neox, double quant_scale_q, double quant_scale_kv,
                           TensorView q_rope_out, TensorView k_rope_out, TensorView q_nope_out,
                           TensorView k_nope_out, bool enable_pdl) {
  const char* op = "mla_rope_quantize_fp8";
  quantize_entry({PRECAST_ARG(op, q_rope), PRECAST_ARG(op, k_rope), PRECAST_ARG(op, q_nope),
                  PRECAST_ARG(op, k_nope)},
                 2, PRECAST_ARG(op, cos_sin_cache), PRECAST_ARG(op, pos_ids), is_neox,
                 {quant_scale_q, quant_scale_kv},
                 {PRECAST_ARG(op, q_rope_out), PRECAST_ARG(op, k_rope_out),
                  PRECAST_ARG(op, q_nope_out), PRECAST_ARG(op, k_nope_out)},
                 enable_pdl);
}

// -- keys and values into the pages of a KV cache -------------------------------------------------

// Views a cache in the module's fp8 type for the rows of `rows`.
CacheView view_fp8_cache(const Arg& cache, bool is_hnd, bool is_mla, const AppendArg& rows) {
  check_same_device(cache, rows.arg);
  check_dtype(cache, rope_quantize_dtype_out);
  return view_cache(cache, {is_hnd, -1, is_mla}, rows);
}

// The segment starts at column `column` of the cache's rows.
void add_paged_segment(RopeParams& params, const Heads& in, const CacheView& cache, int64_t column,
                       bool rotates, float scale) {
  RopeSegment& segment = add_segment(params, in, in, 0, in.dim, rotates, scale);
  segment.out = static_cast<char*>(cache.data) + column;  // an fp8 column has one byte
  segment.is_paged = true;
  segment.out_token_stride = cache.entry_stride;
  segment.out_head_stride = cache.head_stride;
  segment.out_page_stride = cache.page_stride;
}

// Sets everything except the pages and their size, which come from the caches.
void set_table(SlotMapping& slots, const Arg& indices, const Arg& indptr, const Arg& batch_indices,
               const Arg& positions, const Arg& device_of, int64_t tokens) {
  check_rank(indptr, 1, 1);
  check_rank(indices, 1, 1);
  const int64_t size = indptr.tensor.size(0);
  PRECAST_CHECK(size >= 1 && size <= kMaxTokens, ValueError)
      << indptr.what() << " must have shape [batch_size + 1], got "
      << to_string(indptr.tensor.shape());
  slots.tokens = check_index(batch_indices, device_of, tokens);
  slots.positions = check_index(positions, device_of, tokens);
  slots.kv_indptr = check_index(indptr, device_of, size);
  slots.kv_indices = check_index(indices, device_of, indices.tensor.size(0));
  slots.batch = static_cast<uint32_t>(size - 1);
  slots.kv_indices_count = indices.tensor.size(0);
}

void rope_quantize_fp8_append_paged_kv_cache(
    TensorView q_rope, TensorView k_rope, TensorView q_nope, TensorView k_nope, TensorView v,
    TensorView cos_sin_cache, TensorView pos_ids, TensorView k_cache, TensorView v_cache,
    TensorView kv_indices, TensorView kv_indptr, TensorView batch_indices, TensorView positions,
    bool is_neox, double quant_scale_q, double quant_scale_kv, int64_t page_size, bool is_hnd,
    TensorView q_rope_out, TensorView q_nope_out, bool enable_pdl) {
  const char* op = "rope_quantize_fp8_append_paged_kv_cache";
  const Inputs in = {PRECAST_ARG(op, q_rope), PRECAST_ARG(op, k_rope), PRECAST_ARG(op, q_nope),
                     PRECAST_ARG(op, k_nope)};
  check_cuda(in.q_rope);
  check_rank(in.k_rope, 2, 3);
  const bool is_mla = k_rope.ndim() == 2;
  const Parts q = parts_of(in.q_rope, in.q_nope, in.q_rope, 3);
  const Parts k = parts_of(in.k_rope, in.k_nope, in.q_rope, k_rope.ndim());
  const Arg angles = PRECAST_ARG(op, cos_sin_cache);
  const Arg ids = PRECAST_ARG(op, pos_ids);
  RopeParams params = make_params(in, q, k, angles, ids, is_neox);
  // For MLA, which has no values, this is a view of the keys without columns.
  const Arg value = PRECAST_ARG(op, v);
  const Heads values = input_heads(value, in.q_rope, is_mla ? 2 : 3);
  check_same_tokens(values, k.rope);
  const Arg q_rope_to = PRECAST_ARG(op, q_rope_out);
  const Arg q_nope_to = PRECAST_ARG(op, q_nope_out);
  const Heads q_rope_heads = output_heads(q_rope_to, in.q_rope);
  const Heads q_nope_heads = output_heads(q_nope_to, in.q_nope);
  const Arg indices = PRECAST_ARG(op, kv_indices);
  const Arg indptr = PRECAST_ARG(op, kv_indptr);
  const Arg batches = PRECAST_ARG(op, batch_indices);
  const Arg places = PRECAST_ARG(op, positions);
  check_written({q_rope_to, q_nope_to}, {in.q_rope, in.k_rope, in.q_nope, in.k_nope, value});

  set_table(params.slots, indices, indptr, batches, places, in.q_rope, q.rope.tokens);
  // For MLA the first cache holds the columns that are not rotated, the second those that are.
  const Arg first = {op, "paged_kv_cache[0]", k_cache};
  const Arg second = {op, "paged_kv_cache[1]", v_cache};
  const AppendArg key_rows = {is_mla ? in.k_nope : in.k_rope, is_mla ? 0 : k_nope.size(-1)};
  const CacheView keys = view_fp8_cache(first, is_hnd, is_mla, key_rows);
  const CacheView others = view_fp8_cache(second, is_hnd, is_mla, {is_mla ? in.k_rope : value});
  check_same_pages(second, others, first, keys);
  PRECAST_CHECK(page_size > 0 && page_size == keys.page_size, ValueError)
      << op << ": page_size must be positive and " << keys.page_size
      << " as paged_kv_cache[0] has, "
      << "got " << page_size;
  check_elements_apart(first);
  check_elements_apart(second);
  check_written({q_rope_to, q_nope_to, first, second},
                {in.q_rope, in.k_rope, in.q_nope, in.k_nope, value, angles, ids, indices, indptr,
                 batches, places});
  params.slots.pages = keys.pages;
  params.slots.page_size = FastDivmod(static_cast<uint32_t>(page_size));

  const float q_scale = static_cast<float>(quant_scale_q);
  const float kv_scale = static_cast<float>(quant_scale_kv);
  add_segment(params, q.rope, q_rope_heads, 0, q.rope.dim, true, q_scale);
  add_paged_segment(params, k.rope, is_mla ? others : keys, 0, true, kv_scale);
  add_segment(params, q.nope, q_nope_heads, 0, q.nope.dim, false, q_scale);
  add_paged_segment(params, k.nope, keys, is_mla ? 0 : k.rope.dim, false, kv_scale);
  if (!is_mla) add_paged_segment(params, values, others, 0, false, kv_scale);
  run(in.q_rope, params, enable_pdl);
}

}  // namespace

PRECAST_EXPORT(rope_quantize_fp8, rope_quantize_fp8)
PRECAST_EXPORT(mla_rope_quantize_fp8, mla_rope_quantize_fp8)
PRECAST_EXPORT(rope_quantize_fp8_append_paged_kv_cache, rope_quantize_fp8_append_paged_kv_cache)

}  // namespace precast
