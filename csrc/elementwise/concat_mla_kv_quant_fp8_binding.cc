// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of concat_mla_kv_quant_fp8.
#include "core/ffi_export.h"
#include "core/tensor_matcher.h"
#include "precast/elementwise/concat_mla_kv_quant_fp8.cuh"

namespace precast {

// csrc/elementwise/concat_mla_kv_quant_fp8.cu
extern const DType concat_quant_dtype;
cudaError_t concat_mla_kv_quant(const ConcatMlaKvQuantParams& params, bool enable_pdl,
                                cudaStream_t stream);

namespace {

constexpr int64_t kMaxRows = 0x7fffffff;

// The strides of tokens and heads; those that are never used are 0.
RowStrides strides_of(const TensorView& t) {
  const auto stride = [&](int dim) { return t.size(dim) > 1 ? t.stride(dim) : int64_t(0); };
  return RowStrides{stride(0), stride(1)};
}

void concat_mla_kv_quant_fp8_entry(TensorView kv_nope, TensorView k_pe, int64_t nope_dim,
                                   TensorView key, TensorView value, bool enable_pdl) {
  const char* op = "concat_mla_kv_quant_fp8";
  const Arg in = PRECAST_ARG(op, kv_nope);
  const Arg pe = PRECAST_ARG(op, k_pe);
  const Arg keys = PRECAST_ARG(op, key);
  const Arg values = PRECAST_ARG(op, value);
  TensorMatch(in).cuda().dtype(concat_quant_dtype).rank(3, 3).unit_stride();
  const int64_t tokens = kv_nope.size(0), heads = kv_nope.size(1), kv_dim = kv_nope.size(2);
  TensorMatch(pe).same_device(in).dtype(concat_quant_dtype).rank(2, 3).unit_stride();
  TensorMatch(keys).same_device(in).dtype(DType::e4m3).rank(3, 3).unit_stride_output();
  TensorMatch(values).same_device(in).dtype(DType::e4m3).rank(3, 3).unit_stride_output();
  PRECAST_CHECK(nope_dim >= 1 && nope_dim < kv_dim, ValueError)
      << op << ": nope_dim must be from 1 to below kv_nope's last dimension, " << kv_dim << ", got "
      << nope_dim;
  const int64_t rope_dim = k_pe.size(-1), v_dim = kv_dim - nope_dim;
  PRECAST_CHECK(k_pe.size(0) == tokens && (k_pe.ndim() == 2 || k_pe.size(1) == 1), ValueError)
      << pe.what() << " must have shape [" << tokens << ", rope_dim] or [" << tokens
      << ", 1, rope_dim], got " << to_string(k_pe.shape());
  check_shape(keys, {tokens, heads, nope_dim + rope_dim});
  check_shape(values, {tokens, heads, v_dim});
  check_elements_apart(keys);
  check_elements_apart(values);
  check_written({keys, values}, {in, pe});
  if (tokens == 0 || heads == 0) return;
  PRECAST_CHECK(tokens <= kMaxRows / heads && kv_dim <= kMaxRows && rope_dim <= kMaxRows,
                ValueError)
      << in.what() << " must have at most " << kMaxRows << " rows, got shape "
      << to_string(kv_nope.shape());
  ConcatMlaKvQuantParams p = {};
  p.rows.count = static_cast<uint32_t>(tokens * heads);
  p.rows.inner = FastDivmod(static_cast<uint32_t>(heads));
  const int64_t items = pack_items(nope_dim) + pack_items(rope_dim) + pack_items(v_dim);
  PRECAST_CHECK(plan_items(p.rows.count, items, 1).fits, ValueError)
      << in.what() << " must have at most " << kMaxItems << " items of " << kPackSize
      << " elements, got shape " << to_string(kv_nope.shape()) << "; call on parts of it";
  p.kv = data_of(kv_nope);
  p.pe = data_of(k_pe);
  p.key = data_of(key);
  p.value = data_of(value);
  p.kv_strides = strides_of(kv_nope);
  p.key_strides = strides_of(key);
  p.value_strides = strides_of(value);
  p.pe_stride = tokens > 1 ? k_pe.stride(0) : 0;
  p.nope = static_cast<int>(nope_dim);
  p.rope = static_cast<int>(rope_dim);
  p.v = static_cast<int>(v_dim);
  launch_on(in, [&](cudaStream_t stream) { return concat_mla_kv_quant(p, enable_pdl, stream); });
}

}  // namespace

PRECAST_EXPORT(concat_mla_kv_quant_fp8, concat_mla_kv_quant_fp8_entry)

}  // namespace precast
