// SPDX-License-Identifier: Apache-2.0
// The entry points of the products of FP8 matrices with scales of rows or of whole matrices,
// whatever kernels compute them.
#pragma once

#include "gemm/gemm_call.h"

namespace precast {

// One scale in any shape, or with `dim` >= 0 a column (0) or a row (1) of `rows` scales.
PRECAST_ONE_COPY RowScales row_scales_of(const TensorMatch& match, const Arg& operand, int dim,
                                         int64_t rows) {
  match.same_device(operand).dtype(DType::f32);
  const Arg& arg = match;
  const TensorView& t = arg.tensor;
  RowScales scales = {};
  scales.data = static_cast<const float*>(data_of(t));
  if (t.numel() == 1) return scales;
  const bool is_vector = dim >= 0 && t.ndim() == 2 && t.size(dim) == rows && t.size(1 - dim) == 1;
  const std::string vector = dim < 0    ? ""
                             : dim == 0 ? " or have shape [" + std::to_string(rows) + ", 1]"
                                        : " or have shape [1, " + std::to_string(rows) + "]";
  PRECAST_CHECK(is_vector, ValueError)
      << arg.what() << " must be one number" << vector << ", got shape " << to_string(t.shape());
  scales.row_stride = t.stride(dim);
  return scales;
}

// One number that multiplies the result, or null.
PRECAST_ONE_COPY const float* alpha_of(const TensorMatcher& match, const OptionalTensor& alpha,
                                       const Arg& operand) {
  return match.optional<const float>(
      alpha, "alpha", [&](const TensorMatch& by) { row_scales_of(by, operand, -1, 1); });
}

// The exported functions. `Kernels` has
//
//   static DType dtype_a();  of the module's operands
//   static DType dtype_b();
//   static DType dtype_o();  and of its outputs
//   static void run(const GemmCall& call, const GemmParams& params);
//
// where run() checks sizes and memory, and launches the product.
template <typename Kernels>
struct ScaledGemmEntries {
  static void scaled_mm(TensorView a, TensorView b, TensorView scale_a, TensorView scale_b,
                        TensorView out, OptionalTensor bias, int64_t tactic, bool enable_pdl) {
    Dim m("m"), n("n"), k("k");
    const TensorMatcher match("scaled_mm");
    const TensorMatch in = match(a, "a");
    const TensorMatch by = match(b, "b");
    const TensorMatch of_a = match(scale_a, "scale_a");
    const TensorMatch of_b = match(scale_b, "scale_b");
    const TensorMatch to = match(out, "out");
    in.cuda().dtype(Kernels::dtype_a()).shape({m, k});
    by.same_device(in).dtype(Kernels::dtype_b()).shape({k, n});
    GemmParams params = {};
    params.a_scale = row_scales_of(of_a, in, 0, m);
    params.b_scale = row_scales_of(of_b, in, 1, n);
    params.bias = match.optional<void>(bias, "bias", [&](const TensorMatch& with) {
      with.same_device(in).dtype(Kernels::dtype_o()).shape({n}).contiguous();
    });
    to.same_device(in).dtype(Kernels::dtype_o()).shape({m, n}).elements_apart();
    check_written({TensorMemory(to)}, {TensorMemory(of_a), TensorMemory(of_b),
                                       TensorMemory("scaled_mm", "bias", bias)});
    params.kind = TokenGroups::equal;
    Kernels::run({in, to, weight_of(by, false), by, n, 1, 1, m, tactic, enable_pdl}, params);
  }

  static void bmm_fp8(TensorView A, TensorView B, TensorView A_scale, TensorView B_scale,
                      TensorView out, int64_t tactic, bool enable_pdl) {
    Dim batch("b"), m("m"), n("n"), k("k");
    const TensorMatcher match("bmm_fp8");
    const TensorMatch in = match(A, "A");
    const TensorMatch by = match(B, "B");
    const TensorMatch of_a = match(A_scale, "A_scale");
    const TensorMatch of_b = match(B_scale, "B_scale");
    const TensorMatch to = match(out, "out");
    in.cuda().dtype(Kernels::dtype_a()).shape({batch, m, k});
    by.same_device(in).dtype(Kernels::dtype_b()).shape({batch, k, n});
    GemmParams params = {};
    params.a_scale = row_scales_of(of_a, in, -1, 1);
    params.b_scale = row_scales_of(of_b, in, -1, 1);
    to.same_device(in).dtype(Kernels::dtype_o()).shape({batch, m, n}).elements_apart();
    check_written({TensorMemory(to)}, {TensorMemory(of_a), TensorMemory(of_b)});
    params.kind = TokenGroups::equal;
    Kernels::run({in, to, weight_of(by, false), by, n, batch, batch, m, tactic, enable_pdl},
                 params);
  }

  static void mm_fp8(TensorView a, TensorView b, OptionalTensor alpha, TensorView out,
                     int64_t tactic, bool enable_pdl) {
    Dim m("m"), n("n"), k("k");
    const TensorMatcher match("mm_fp8");
    const TensorMatch in = match(a, "a");
    const TensorMatch by = match(b, "b");
    const TensorMatch to = match(out, "out");
    in.cuda().dtype(Kernels::dtype_a()).shape({m, k});
    by.same_device(in).dtype(Kernels::dtype_b()).shape({n, k});
    GemmParams params = {};
    params.alpha = alpha_of(match, alpha, in);
    to.same_device(in).dtype(Kernels::dtype_o()).shape({m, n}).elements_apart();
    check_written({TensorMemory(to)}, {TensorMemory("mm_fp8", "alpha", alpha)});
    params.kind = TokenGroups::equal;
    Kernels::run({in, to, {rows_of(by), false}, by, n, 1, 1, m, tactic, enable_pdl}, params);
  }

  // Groups of consecutive rows, from one number of m_indptr to the next.
  static void grouped_mm_fp8(TensorView a, TensorView b, TensorView m_indptr, OptionalTensor alpha,
                             TensorView out, int64_t tactic, bool enable_pdl) {
    Dim m("m"), n("n"), k("k"), groups("groups");
    const TensorMatcher match("grouped_mm_fp8");
    const TensorMatch in = match(a, "a");
    const TensorMatch by = match(b, "b");
    const TensorMatch starts = match(m_indptr, "m_indptr");
    const TensorMatch to = match(out, "out");
    in.cuda().dtype(Kernels::dtype_a()).shape({m, k});
    by.same_device(in).dtype(Kernels::dtype_b()).shape({groups, n, k});
    starts.same_device(in).dtype(kInt32);
    GemmParams params = {};
    params.alpha = alpha_of(match, alpha, in);
    to.same_device(in).dtype(Kernels::dtype_o()).shape({m, n}).elements_apart();
    check_written({TensorMemory(to)},
                  {TensorMemory(starts), TensorMemory("grouped_mm_fp8", "alpha", alpha)});
    params.kind = TokenGroups::ranges;
    params.group_info = numbers_of(starts, groups + 1, params.info_is_int64);
    const int64_t expected = groups > 0 ? (m + groups - 1) / groups : 0;
    Kernels::run(
        {in, to, {rows_of(by), false}, by, n, groups, groups, expected, tactic, enable_pdl},
        params);
  }
};

}  // namespace precast
