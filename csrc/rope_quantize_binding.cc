// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of RoPE with quantisation to fp8.
#include <algorithm>

#include "ffi_export.h"
#include "rope_checks.h"

namespace precast {

// csrc/rope_quantize.cu
extern const DType rope_quantize_dtype;
cudaError_t rope_quantize(DType out, const RopeParams& params, bool enable_pdl,
                          cudaStream_t stream);

namespace {

// Queries and keys in two parts each: the columns that turn, and the others.
struct Inputs {
  Arg q_rope, k_rope, q_nope, k_nope;
};

struct Scales {
  double q, kv;
};

// The columns that turn, and those that do not, of queries or of keys.
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

// The fp8 type of the first output; all others must have it.
DType quantized_type(const Arg& out) {
  const bool known = has_dtype(out, DType::e4m3) || has_dtype(out, DType::e5m2);
  PRECAST_CHECK(known, ValueError) << out.what() << " must be float8_e4m3fn or float8_e5m2, got "
                                   << to_string(out.tensor.dtype());
  return has_dtype(out, DType::e4m3) ? DType::e4m3 : DType::e5m2;
}

Heads output_heads(const Arg& out, const Arg& like, DType dtype) {
  check_same_device(out, like);
  check_dtype(out, dtype);
  check_same_shape(out, like);
  const Heads heads = heads_of(out, out.tensor.size(-1));
  check_out_rows(out);
  return heads;
}

void check_outputs_apart(std::initializer_list<Heads> outputs,
                         std::initializer_list<Heads> inputs) {
  for (const Heads* out = outputs.begin(); out != outputs.end(); ++out) {
    for (const Heads* other = outputs.begin(); other != out; ++other) {
      check_memory_apart(out->arg, other->arg);
    }
    for (const Heads& input : inputs) check_memory_apart(out->arg, input.arg);
  }
}

// Everything but where it goes.
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
  params.source.positions.ids = check_indices(pos_ids, in.q_rope, q.rope.tokens);
  return params;
}

void run(const Arg& arg, DType dtype, const RopeParams& params, bool enable_pdl) {
  check_rope_items(arg, params);
  if (params.tokens == 0) return;
  launch_on(arg,
            [&](cudaStream_t stream) { return rope_quantize(dtype, params, enable_pdl, stream); });
}

void quantize_entry(const Inputs& in, int key_rank, const Arg& cache, const Arg& pos_ids,
                    bool is_neox, Scales scales, const Inputs& out, bool enable_pdl) {
  check_cuda(in.q_rope);
  const Parts q = parts_of(in.q_rope, in.q_nope, in.q_rope, 3);
  const Parts k = parts_of(in.k_rope, in.k_nope, in.q_rope, key_rank);
  RopeParams params = make_params(in, q, k, cache, pos_ids, is_neox);
  const DType dtype = quantized_type(out.q_rope);
  const Heads q_rope = output_heads(out.q_rope, in.q_rope, dtype);
  const Heads k_rope = output_heads(out.k_rope, in.k_rope, dtype);
  const Heads q_nope = output_heads(out.q_nope, in.q_nope, dtype);
  const Heads k_nope = output_heads(out.k_nope, in.k_nope, dtype);
  check_outputs_apart({q_rope, k_rope, q_nope, k_nope}, {q.rope, k.rope, q.nope, k.nope});
  const float q_scale = static_cast<float>(scales.q);
  const float kv_scale = static_cast<float>(scales.kv);
  add_segment(params, q.rope, q_rope, 0, q.rope.dim, true, q_scale);
  add_segment(params, k.rope, k_rope, 0, k.rope.dim, true, kv_scale);
  add_segment(params, q.nope, q_nope, 0, q.nope.dim, false, q_scale);
  add_segment(params, k.nope, k_nope, 0, k.nope.dim, false, kv_scale);
  run(in.q_rope, dtype, params, enable_pdl);
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

// A cache as the output of a segment: an entry stands for a token.
struct Pages {
  Heads heads;
  int64_t page_stride;
};

// [pages, page_size, dim] for MLA, else [pages, page_size, heads, dim] or, for HND,
// [pages, heads, page_size, dim].
Pages pages_of(const Arg& cache, const Arg& like, DType dtype, bool is_mla, bool is_hnd,
               int64_t page_size, int64_t heads, int64_t dim) {
  const TensorView& t = cache.tensor;
  check_same_device(cache, like);
  check_dtype(cache, dtype);
  const int rank = is_mla ? 3 : 4;
  PRECAST_CHECK(t.ndim() == rank, ValueError)
      << cache.what() << " must have " << rank << " dimensions, got shape " << to_string(t.shape());
  check_columns(cache, true);
  const int entries = is_hnd && !is_mla ? 2 : 1;
  const int head = is_hnd ? 1 : 2;
  const bool fits =
      t.size(entries) == page_size && (is_mla || t.size(head) == heads) && t.size(rank - 1) == dim;
  const char* shape = is_mla   ? "[pages, page_size, dim]"
                      : is_hnd ? "[pages, heads, page_size, dim]"
                               : "[pages, page_size, heads, dim]";
  PRECAST_CHECK(fits, ValueError) << cache.what() << " must have the shape " << shape
                                  << " with page_size " << page_size << ", heads " << heads
                                  << " and dim " << dim << ", got " << to_string(t.shape());
  const int64_t head_stride = is_mla || heads <= 1 ? 0 : t.stride(head);
  const int64_t entry_stride = page_size <= 1 ? 0 : t.stride(entries);
  return {{cache, t.size(0), heads, dim, entry_stride, head_stride},
          t.size(0) <= 1 ? 0 : t.stride(0)};
}

void add_paged_segment(RopeParams& params, const Heads& in, const Pages& pages, int64_t out_column,
                       bool turns, float scale) {
  RopeSegment& segment = add_segment(params, in, pages.heads, 0, in.dim, turns, scale);
  segment.out = static_cast<char*>(segment.out) + out_column;  // fp8: a byte a column
  segment.is_paged = true;
  segment.out_page_stride = pages.page_stride;
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
  RopeParams params =
      make_params(in, q, k, PRECAST_ARG(op, cos_sin_cache), PRECAST_ARG(op, pos_ids), is_neox);
  const Arg q_rope_to = PRECAST_ARG(op, q_rope_out);
  const Arg q_nope_to = PRECAST_ARG(op, q_nope_out);
  const DType dtype = quantized_type(q_rope_to);
  const Heads q_rope_heads = output_heads(q_rope_to, in.q_rope, dtype);
  const Heads q_nope_heads = output_heads(q_nope_to, in.q_nope, dtype);
  check_outputs_apart({q_rope_heads, q_nope_heads}, {q.rope, k.rope, q.nope, k.nope});

  PRECAST_CHECK(page_size > 0 && page_size <= kMaxTokens, ValueError)
      << op << ": page_size must be positive, got " << page_size;
  const Arg indices = PRECAST_ARG(op, kv_indices);
  const Arg indptr = PRECAST_ARG(op, kv_indptr);
  PRECAST_CHECK(kv_indices.ndim() == 1 && kv_indptr.ndim() == 1, ValueError)
      << op << ": kv_indices and kv_indptr must have 1 dimension, got shapes "
      << to_string(kv_indices.shape()) << " and " << to_string(kv_indptr.shape());
  params.pages.page_indices = check_indices(indices, in.q_rope, kv_indices.size(0));
  params.pages.page_indptr = check_indices(indptr, in.q_rope, kv_indptr.size(0));
  params.pages.batch_indices =
      check_indices(PRECAST_ARG(op, batch_indices), in.q_rope, q.rope.tokens);
  params.pages.positions = check_indices(PRECAST_ARG(op, positions), in.q_rope, q.rope.tokens);
  params.pages.page_size = Divisor(static_cast<uint32_t>(page_size));
  PRECAST_CHECK(kv_indptr.size(0) >= 1 && kv_indptr.size(0) <= kMaxTokens, ValueError)
      << indptr.what() << " must have shape [requests + 1], got " << to_string(kv_indptr.shape());
  params.pages.requests = static_cast<uint32_t>(kv_indptr.size(0) - 1);
  params.pages.index_count =
      static_cast<uint32_t>(kv_indices.size(0) < kMaxTokens ? kv_indices.size(0) : kMaxTokens);

  const float q_scale = static_cast<float>(quant_scale_q);
  const float kv_scale = static_cast<float>(quant_scale_kv);
  const Arg first = PRECAST_ARG(op, k_cache);
  const Arg second = PRECAST_ARG(op, v_cache);
  const int64_t pages = std::min(first.tensor.ndim() > 0 ? k_cache.size(0) : 0,
                                 second.tensor.ndim() > 0 ? v_cache.size(0) : 0);
  params.pages.pages = static_cast<uint32_t>(std::min(pages, kMaxTokens));
  add_segment(params, q.rope, q_rope_heads, 0, q.rope.dim, true, q_scale);
  if (is_mla) {  // k_cache holds what does not turn, v_cache what does
    const Pages nope = pages_of(first, in.q_rope, dtype, true, false, page_size, 1, k.nope.dim);
    const Pages rope = pages_of(second, in.q_rope, dtype, true, false, page_size, 1, k.rope.dim);
    add_paged_segment(params, k.rope, rope, 0, true, kv_scale);
    add_segment(params, q.nope, q_nope_heads, 0, q.nope.dim, false, q_scale);
    add_paged_segment(params, k.nope, nope, 0, false, kv_scale);
  } else {
    const Arg value = PRECAST_ARG(op, v);
    const Heads values = input_heads(value, in.q_rope, 3);
    check_same_tokens(values, k.rope);
    const Pages keys = pages_of(first, in.q_rope, dtype, false, is_hnd, page_size, k.rope.heads,
                                k.rope.dim + k.nope.dim);
    const Pages to =
        pages_of(second, in.q_rope, dtype, false, is_hnd, page_size, values.heads, values.dim);
    add_paged_segment(params, k.rope, keys, 0, true, kv_scale);
    add_segment(params, q.nope, q_nope_heads, 0, q.nope.dim, false, q_scale);
    add_paged_segment(params, k.nope, keys, k.rope.dim, false, kv_scale);
    add_paged_segment(params, values, to, 0, false, kv_scale);
  }
  run(in.q_rope, dtype, params, enable_pdl);
}

}  // namespace

PRECAST_EXPORT(rope_quantize_fp8, rope_quantize_fp8)
PRECAST_EXPORT(mla_rope_quantize_fp8, mla_rope_quantize_fp8)
PRECAST_EXPORT(rope_quantize_fp8_append_paged_kv_cache, rope_quantize_fp8_append_paged_kv_cache)

}  // namespace precast
