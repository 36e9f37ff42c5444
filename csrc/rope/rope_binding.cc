// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of RoPE in 16-bit types.
#include <cmath>

#include "core/ffi_export.h"
#include "precast/rope/qk_rmsnorm_rope.cuh"
#include "rope/rope_checks.h"

namespace precast {

// csrc/rope/rope.cu
extern const DType rope_dtype;
cudaError_t rope(RopeAngles angles, const RopeParams& params, bool enable_pdl, cudaStream_t stream);
cudaError_t qk_rmsnorm_rope(const QkRmsNormRopeParams& params, bool enable_pdl,
                            cudaStream_t stream);

namespace {

// Queries and keys, and their outputs, which are the same tensors if the op works in place.
struct QueryAndKey {
  Arg q, k, q_out, k_out;
};

// Checks the tensors and lists the segments. source.rotary_dim must be set. `angles` are the other
// tensors of the call.
RopeParams make_params(const QueryAndKey& args, const Heads& q, const Heads& k,
                       const RopeAngleSource& source, bool interleave,
                       std::initializer_list<TensorMemory> angles) {
  const bool in_place = args.q_out.name == args.q.name;
  check_head_dim(q);
  PRECAST_CHECK(k.dim == q.dim, ValueError) << args.k.what() << " must have " << args.q.name
                                            << "'s head size " << q.dim << ", got " << k.dim;
  check_same_tokens(k, q);
  check_rotary_dim(args.q.op, source.rotary_dim, q.dim);
  const Heads q_out = heads_of(args.q_out, q.dim);
  const Heads k_out = heads_of(args.k_out, q.dim);
  check_out_rows(q_out.arg);
  check_out_rows(k_out.arg);
  check_memory_apart(k_out.arg, q_out.arg);
  if (!in_place) {
    check_same_or_apart(q_out.arg, q.arg);
    check_same_or_apart(k_out.arg, k.arg);
    check_memory_apart(q_out.arg, k.arg);
    check_memory_apart(k_out.arg, q.arg);
  }
  check_written({args.q_out, args.k_out}, angles);
  RopeParams params = {};
  params.tokens = static_cast<uint32_t>(q.tokens);
  params.interleave = interleave;
  params.source = source;
  const int64_t rotary_dim = source.rotary_dim;
  add_segment(params, q, q_out, 0, rotary_dim, true, 1.0f);
  add_segment(params, k, k_out, 0, rotary_dim, true, 1.0f);
  if (!in_place && rotary_dim < q.dim) {
    add_segment(params, q, q_out, rotary_dim, q.dim - rotary_dim, false, 1.0f);
    add_segment(params, k, k_out, rotary_dim, q.dim - rotary_dim, false, 1.0f);
  }
  check_rope_items(args.q, params);
  return params;
}

void check_query_and_key(const QueryAndKey& args, bool query_is_first) {
  if (query_is_first) {
    check_cuda(args.q);
  }
  check_dtype(args.q, rope_dtype);
  for (const Arg& arg : {args.k, args.q_out, args.k_out}) {
    check_same_device(arg, args.q);
    check_dtype(arg, rope_dtype);
  }
  if (args.q_out.name != args.q.name) {
    check_same_shape(args.q_out, args.q);
    check_same_shape(args.k_out, args.k);
  }
}

void run(const Arg& q, RopeAngles angles, const RopeParams& params) {
  if (params.tokens == 0) return;
  launch_on(q, [&](cudaStream_t stream) { return rope(angles, params, true, stream); });
}

// -- cosines and sines from a cache ---------------------------------------------------------------

void cached_entry(const Arg& positions, const QueryAndKey& args, int64_t head_size,
                  const Arg& cache, bool is_neox) {
  check_cuda(positions);
  check_same_device(args.q, positions);
  check_query_and_key(args, false);
  PRECAST_CHECK(head_size > 0, ValueError)
      << args.q.op << ": head_size must be positive, got " << head_size;
  const Heads q = heads_of(args.q, head_size);
  const Heads k = heads_of(args.k, head_size);
  PRECAST_CHECK(q.dim == head_size, ValueError)
      << args.q.what() << " must have heads of head_size " << head_size << ", got shape "
      << to_string(args.q.tensor.shape());
  RopeAngleSource source = {};
  set_cache(source, cache, args.q);
  source.positions.ids = check_index(positions, args.q, q.tokens);
  run(args.q, RopeAngles::cached, make_params(args, q, k, source, !is_neox, {positions, cache}));
}

void apply_rope_with_cos_sin_cache(TensorView positions, TensorView query, TensorView key,
                                   int64_t head_size, TensorView cos_sin_cache, bool is_neox,
                                   TensorView query_out, TensorView key_out) {
  const char* op = "apply_rope_with_cos_sin_cache";
  cached_entry(PRECAST_ARG(op, positions),
               {PRECAST_ARG(op, query), PRECAST_ARG(op, key), PRECAST_ARG(op, query_out),
                PRECAST_ARG(op, key_out)},
               head_size, PRECAST_ARG(op, cos_sin_cache), is_neox);
}

void apply_rope_with_cos_sin_cache_inplace(TensorView positions, TensorView query, TensorView key,
                                           int64_t head_size, TensorView cos_sin_cache,
                                           bool is_neox) {
  const char* op = "apply_rope_with_cos_sin_cache_inplace";
  const Arg q = PRECAST_ARG(op, query);
  const Arg k = PRECAST_ARG(op, key);
  cached_entry(PRECAST_ARG(op, positions), {q, k, q, k}, head_size, PRECAST_ARG(op, cos_sin_cache),
               is_neox);
}

// -- cosines and sines from frequencies -----------------------------------------------------------

struct Frequencies {
  int64_t rotary_dim;
  bool interleave;
  double scale, theta;
  // For Llama 3.1 only; without effect if the context length is 0.
  double low = 1.0, high = 4.0;
  int64_t old_context_len = 0;
};

RopeFrequencies frequencies_of(const char* op, const Frequencies& f) {
  PRECAST_CHECK(f.scale > 0.0, ValueError)
      << op << ": rope_scale must be positive, got " << f.scale;
  PRECAST_CHECK(f.theta > 0.0, ValueError)
      << op << ": rope_theta must be positive, got " << f.theta;
  RopeFrequencies result = {};
  result.log2_step = -2.0 * std::log2(f.theta) / static_cast<double>(f.rotary_dim);
  result.inverse_scale = 1.0 / f.scale;
  if (f.old_context_len != 0) {
    PRECAST_CHECK(f.high > f.low, ValueError)
        << op << ": high_freq_factor must exceed low_freq_factor " << f.low << ", got " << f.high;
    constexpr double kTwoPi = 6.283185307179586;
    result.smooth_a = static_cast<double>(f.old_context_len) / (kTwoPi * (f.high - f.low));
    result.smooth_b = -f.low / (f.high - f.low);
  }
  return result;
}

void computed_entry(const QueryAndKey& args, const Heads& q, const RopePositions& positions,
                    std::initializer_list<TensorMemory> places, const Frequencies& f) {
  const Heads k = heads_of(args.k, q.dim);
  check_head_dim(q);
  check_rotary_dim(args.q.op, f.rotary_dim, q.dim);
  RopeAngleSource source = {};
  source.positions = positions;
  source.frequencies = frequencies_of(args.q.op, f);
  source.rotary_dim = static_cast<int>(f.rotary_dim);
  run(args.q, RopeAngles::computed, make_params(args, q, k, source, f.interleave, places));
}

Heads query_heads(const QueryAndKey& args) {
  check_query_and_key(args, true);
  check_rank(args.q, 3, 3);
  check_rank(args.k, 3, 3);
  return heads_of(args.q, args.q.tensor.size(-1));
}

void by_requests(const QueryAndKey& args, const Arg& indptr, const Arg& offsets,
                 const Frequencies& f) {
  const Heads q = query_heads(args);
  computed_entry(args, q, check_requests(indptr, offsets, args.q), {indptr, offsets}, f);
}

void by_ids(const QueryAndKey& args, const Arg& pos_ids, const Frequencies& f) {
  const Heads q = query_heads(args);
  RopePositions positions = {};
  positions.ids = check_index(pos_ids, args.q, q.tokens);
  computed_entry(args, q, positions, {pos_ids}, f);
}

QueryAndKey in_place(const char* op, const TensorView& q, const TensorView& k) {
  const Arg query = PRECAST_ARG(op, q);
  const Arg key = PRECAST_ARG(op, k);
  return {query, key, query, key};
}

QueryAndKey out_of_place(const char* op, const TensorView& q, const TensorView& k,
                         const TensorView& q_rope, const TensorView& k_rope) {
  return {PRECAST_ARG(op, q), PRECAST_ARG(op, k), PRECAST_ARG(op, q_rope), PRECAST_ARG(op, k_rope)};
}

void apply_rope(TensorView q, TensorView k, TensorView indptr, TensorView offsets,
                int64_t rotary_dim, bool interleave, double rope_scale, double rope_theta,
                TensorView q_rope, TensorView k_rope) {
  const char* op = "apply_rope";
  by_requests(out_of_place(op, q, k, q_rope, k_rope), PRECAST_ARG(op, indptr),
              PRECAST_ARG(op, offsets), {rotary_dim, interleave, rope_scale, rope_theta});
}

void apply_rope_inplace(TensorView q, TensorView k, TensorView indptr, TensorView offsets,
                        int64_t rotary_dim, bool interleave, double rope_scale, double rope_theta) {
  const char* op = "apply_rope_inplace";
  by_requests(in_place(op, q, k), PRECAST_ARG(op, indptr), PRECAST_ARG(op, offsets),
              {rotary_dim, interleave, rope_scale, rope_theta});
}

void apply_rope_pos_ids(TensorView q, TensorView k, TensorView pos_ids, int64_t rotary_dim,
                        bool interleave, double rope_scale, double rope_theta, TensorView q_rope,
                        TensorView k_rope) {
  const char* op = "apply_rope_pos_ids";
  by_ids(out_of_place(op, q, k, q_rope, k_rope), PRECAST_ARG(op, pos_ids),
         {rotary_dim, interleave, rope_scale, rope_theta});
}

void apply_rope_pos_ids_inplace(TensorView q, TensorView k, TensorView pos_ids, int64_t rotary_dim,
                                bool interleave, double rope_scale, double rope_theta) {
  const char* op = "apply_rope_pos_ids_inplace";
  by_ids(in_place(op, q, k), PRECAST_ARG(op, pos_ids),
         {rotary_dim, interleave, rope_scale, rope_theta});
}

// `old_context_len` must be positive.
Frequencies llama31(const char* op, int64_t rotary_dim, bool interleave, double rope_scale,
                    double rope_theta, double low, double high, int64_t old_context_len) {
  PRECAST_CHECK(old_context_len > 0, ValueError)
      << op << ": old_context_len must be positive, got " << old_context_len;
  return {rotary_dim, interleave, rope_scale, rope_theta, low, high, old_context_len};
}

void apply_llama31_rope(TensorView q, TensorView k, TensorView indptr, TensorView offsets,
                        int64_t rotary_dim, bool interleave, double rope_scale, double rope_theta,
                        double low_freq_factor, double high_freq_factor, int64_t old_context_len,
                        TensorView q_rope, TensorView k_rope) {
  const char* op = "apply_llama31_rope";
  const QueryAndKey args = out_of_place(op, q, k, q_rope, k_rope);
  check_cuda(args.q);
  by_requests(args, PRECAST_ARG(op, indptr), PRECAST_ARG(op, offsets),
              llama31(op, rotary_dim, interleave, rope_scale, rope_theta, low_freq_factor,
                      high_freq_factor, old_context_len));
}

void apply_llama31_rope_inplace(TensorView q, TensorView k, TensorView indptr, TensorView offsets,
                                int64_t rotary_dim, bool interleave, double rope_scale,
                                double rope_theta, double low_freq_factor, double high_freq_factor,
                                int64_t old_context_len) {
  const char* op = "apply_llama31_rope_inplace";
  const QueryAndKey args = in_place(op, q, k);
  check_cuda(args.q);
  by_requests(args, PRECAST_ARG(op, indptr), PRECAST_ARG(op, offsets),
              llama31(op, rotary_dim, interleave, rope_scale, rope_theta, low_freq_factor,
                      high_freq_factor, old_context_len));
}

void apply_llama31_rope_pos_ids(TensorView q, TensorView k, TensorView pos_ids, int64_t rotary_dim,
                                bool interleave, double rope_scale, double rope_theta,
                                double low_freq_factor, double high_freq_factor,
                                int64_t old_context_len, TensorView q_rope, TensorView k_rope) {
  const char* op = "apply_llama31_rope_pos_ids";
  const QueryAndKey args = out_of_place(op, q, k, q_rope, k_rope);
  check_cuda(args.q);
  by_ids(args, PRECAST_ARG(op, pos_ids),
         llama31(op, rotary_dim, interleave, rope_scale, rope_theta, low_freq_factor,
                 high_freq_factor, old_context_len));
}

void apply_llama31_rope_pos_ids_inplace(TensorView q, TensorView k, TensorView pos_ids,
                                        int64_t rotary_dim, bool interleave, double rope_scale,
                                        double rope_theta, double low_freq_factor,
                                        double high_freq_factor, int64_t old_context_len) {
  const char* op = "apply_llama31_rope_pos_ids_inplace";
  const QueryAndKey args = in_place(op, q, k);
  check_cuda(args.q);
  by_ids(args, PRECAST_ARG(op, pos_ids),
         llama31(op, rotary_dim, interleave, rope_scale, rope_theta, low_freq_factor,
                 high_freq_factor, old_context_len));
}

// -- per-head norm followed by the rotation
// --------------------------------------------------------

void qk_rmsnorm_rope_entry(TensorView qkv, TensorView q_weight, TensorView k_weight,
                           TensorView positions, TensorView cos_sin_cache, int64_t num_q_heads,
                           int64_t num_k_heads, double eps, double weight_bias, bool is_neox,
                           bool enable_pdl) {
  const char* op = "qk_rmsnorm_rope";
  const Arg packed = PRECAST_ARG(op, qkv);
  const Arg weight = PRECAST_ARG(op, q_weight);
  const Arg key_weight = PRECAST_ARG(op, k_weight);
  const Arg cache = PRECAST_ARG(op, cos_sin_cache);
  const Arg places = PRECAST_ARG(op, positions);
  TensorMatch(packed).cuda().dtype(rope_dtype).rank(2, 2).unit_stride_output();
  check_at_least(op, "eps", eps, 0.0);
  check_not_nan(op, "weight_bias", weight_bias);
  Dim head_dim("head_dim");
  check_shape(weight, {head_dim});
  PRECAST_CHECK(head_dim > 0 && head_dim % kRopeVec == 0 && head_dim <= kMaxHeadDim, ValueError)
      << weight.what() << "'s size, the head size, must be a multiple of " << kRopeVec << " up to "
      << kMaxHeadDim << ", got " << head_dim;
  for (const Arg& arg : {weight, key_weight}) {
    TensorMatch(arg).same_device(packed).dtype(rope_dtype).shape({head_dim}).contiguous();
  }
  PRECAST_CHECK(num_q_heads >= 0 && num_k_heads >= 0 && num_q_heads <= kMaxTokens &&
                    num_k_heads <= kMaxTokens - num_q_heads,
                ValueError)
      << op << ": num_q_heads and num_k_heads must not be negative, got " << num_q_heads << " and "
      << num_k_heads;
  const int64_t heads = num_q_heads + num_k_heads;
  PRECAST_CHECK(qkv.size(1) % head_dim == 0 && qkv.size(1) / head_dim >= heads, ValueError)
      << packed.what() << "'s rows must hold whole heads of " << head_dim << " elements, at least "
      << heads << ", got shape " << to_string(qkv.shape());
  Heads all = heads_of(packed, head_dim);
  check_out_rows(all.arg);
  PRECAST_CHECK(heads == 0 || all.tokens <= kMaxTokens / heads, ValueError)
      << packed.what() << " must have at most " << kMaxTokens << " heads in all, got shape "
      << to_string(qkv.shape()) << "; call on parts of it";
  QkRmsNormRopeParams params = {};
  set_cache(params.source, cache, packed);
  const int64_t rotary_dim = params.source.rotary_dim;
  PRECAST_CHECK(rotary_dim >= 2 && rotary_dim % 2 == 0 && rotary_dim <= head_dim, ValueError)
      << op
      << ": cos_sin_cache's last dimension, the rotary size, must be even, from 2 to the head "
      << "size " << head_dim << ", got " << rotary_dim;
  PRECAST_CHECK(rotary_dim % 16 == 0 || head_dim <= kMaxHeadDim - 16, ValueError)
      << op << ": cos_sin_cache's last dimension, the rotary size, must be a multiple of 16 for "
      << "heads of more than " << kMaxHeadDim - 16 << " elements, got " << rotary_dim;
  params.source.positions.ids = check_index(places, packed, all.tokens);
  check_written({packed}, {weight, key_weight, places, cache});
  if (all.tokens == 0 || heads == 0) return;
  params.qkv = data_of(qkv);
  params.q_weight = data_of(q_weight);
  params.k_weight = data_of(k_weight);
  params.token_stride = all.token_stride;
  params.head_stride = head_dim;
  params.tokens = static_cast<uint32_t>(all.tokens);
  params.q_heads = static_cast<int>(num_q_heads);
  params.k_heads = static_cast<int>(num_k_heads);
  params.head_dim = static_cast<int>(head_dim);
  params.eps = static_cast<float>(eps);
  params.weight_bias = static_cast<float>(weight_bias);
  params.interleave = !is_neox;
  launch_on(packed,
            [&](cudaStream_t stream) { return qk_rmsnorm_rope(params, enable_pdl, stream); });
}

}  // namespace

PRECAST_EXPORT(apply_rope, apply_rope)
PRECAST_EXPORT(apply_rope_inplace, apply_rope_inplace)
PRECAST_EXPORT(apply_rope_pos_ids, apply_rope_pos_ids)
PRECAST_EXPORT(apply_rope_pos_ids_inplace, apply_rope_pos_ids_inplace)
PRECAST_EXPORT(apply_llama31_rope, apply_llama31_rope)
PRECAST_EXPORT(apply_llama31_rope_inplace, apply_llama31_rope_inplace)
PRECAST_EXPORT(apply_llama31_rope_pos_ids, apply_llama31_rope_pos_ids)
PRECAST_EXPORT(apply_llama31_rope_pos_ids_inplace, apply_llama31_rope_pos_ids_inplace)
PRECAST_EXPORT(apply_rope_with_cos_sin_cache, apply_rope_with_cos_sin_cache)
PRECAST_EXPORT(apply_rope_with_cos_sin_cache_inplace, apply_rope_with_cos_sin_cache_inplace)
PRECAST_EXPORT(qk_rmsnorm_rope, qk_rmsnorm_rope_entry)

}  // namespace precast
