// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of concat_mla_k.
#include "core/ffi_export.h"
#include "core/tensor_matcher.h"
#include "precast/elementwise/concat_ops.cuh"

namespace precast {

// csrc/elementwise/concat_ops.cu
cudaError_t concat_mla_k(const ConcatMlaKParams& params, bool enable_pdl, cudaStream_t stream);

namespace {

void check_part(const Arg& part, const Arg& k) {
  TensorMatch(part).same_device(k).dtype(k.tensor.dtype()).rank(3, 3).unit_stride();
}

void concat_mla_k_entry(TensorView k, TensorView k_nope, TensorView k_rope, bool enable_pdl) {
  const Arg out = PRECAST_ARG("concat_mla_k", k);
  const Arg nope = PRECAST_ARG("concat_mla_k", k_nope);
  const Arg rope = PRECAST_ARG("concat_mla_k", k_rope);
  check_cuda(out);
  const DLDataType dtype = k.dtype();
  PRECAST_CHECK(dtype.lanes == 1 && (dtype.bits == 8 || dtype.bits == 16 || dtype.bits == 32),
                ValueError)
      << out.what() << " must have elements of 1, 2 or 4 bytes, got " << to_string(dtype);
  check_rank(out, 3, 3);
  check_columns(out, false);
  check_part(nope, out);
  check_part(rope, out);
  const int64_t tokens = k.size(0), heads = k.size(1), bytes = (dtype.bits + 7) / 8;
  PRECAST_CHECK(k_nope.size(0) == tokens && k_nope.size(1) == heads, ValueError)
      << nope.what() << " must have the tokens and heads of k, got " << to_string(k_nope.shape())
      << " for " << to_string(k.shape());
  Dim rope_dim("rope_dim");
  check_shape(rope, {tokens, 1, rope_dim});
  PRECAST_CHECK(k.size(2) == k_nope.size(2) + k_rope.size(2), ValueError)
      << out.what() << "'s last dimension must be those of k_nope and k_rope together, "
      << k_nope.size(2) << " + " << k_rope.size(2) << ", got " << k.size(2);
  if (tokens == 0 || heads == 0 || k.size(2) == 0) return;
  TensorMatch(out).elements_apart().apart(nope).apart(rope);
  constexpr int64_t kMaxRows = 0x7fffffff;
  PRECAST_CHECK(tokens <= kMaxRows / heads, ValueError)
      << out.what() << " must have at most " << kMaxRows << " rows, got shape "
      << to_string(k.shape());

  const auto stride = [&](const TensorView& t, int dim) {
    return t.size(dim) > 1 ? t.stride(dim) * bytes : int64_t(0);
  };
  ConcatMlaKParams p = {};
  p.k = data_of(k);
  p.k_nope = data_of(k_nope);
  p.k_rope = data_of(k_rope);
  p.k_strides = RowStrides{stride(k, 0), stride(k, 1)};
  p.k_nope_strides = RowStrides{stride(k_nope, 0), stride(k_nope, 1)};
  p.k_rope_stride = stride(k_rope, 0);
  p.rows.count = static_cast<uint32_t>(tokens * heads);
  p.rows.inner = FastDivmod(static_cast<uint32_t>(heads));
  p.nope = k_nope.size(2) * bytes;
  p.rope = k_rope.size(2) * bytes;
  PRECAST_CHECK(plan_items(p.rows.count, p.nope + p.rope, concat_access_bytes(p)).fits, ValueError)
      << out.what() << " must have at most " << kMaxItems << " items of " << concat_access_bytes(p)
      << " bytes, got shape " << to_string(k.shape()) << "; call on parts of it";
  launch_on(out, [&](cudaStream_t stream) { return concat_mla_k(p, enable_pdl, stream); });
}

}  // namespace

PRECAST_EXPORT(concat_mla_k, concat_mla_k_entry)

}  // namespace precast
