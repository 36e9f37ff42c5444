// SPDX-License-Identifier: Apache-2.0
// The entry points of the products of 16-bit matrices, whatever kernels compute them.
#pragma once

#include "gemm/gemm_call.h"

namespace precast {

// The exported functions. `Kernels` has
//
//   static constexpr bool kTakesRowMajor;  whether weights may be [depth, columns]
//   static DType dtype();                  of the module's operands
//   static DType dtype_o();                and of its outputs
//   static void run(const GemmCall& call, const GemmParams& params);
//
// where run() checks sizes and memory, and launches the product.
template <typename Kernels>
struct GemmEntries {
  static void mm_bf16(TensorView a, TensorView b, OptionalTensor bias, TensorView out,
                      int64_t tactic, bool pdl) {
    Dim m("m"), n("n"), k("k");
    const TensorMatcher match("mm_bf16");
    const TensorMatch in = match(a, "a");
    const TensorMatch by = match(b, "b");
    const TensorMatch to = match(out, "out");
    in.cuda().dtype(DType::bf16).shape({m, k});
    by.same_device(in).dtype(DType::bf16).shape({k, n});
    GemmParams params = {};
    params.bias = match.optional<void>(bias, "bias", [&](const TensorMatch& with) {
      with.same_device(in).dtype(DType::bf16).shape({n}).contiguous();
    });
    to.same_device(in).dtype(Kernels::dtype_o()).shape({m, n}).elements_apart();
    to.apart(TensorMemory("mm_bf16", "bias", bias));
    params.kind = TokenGroups::equal;
    Kernels::run({in, to, weight_of(by, Kernels::kTakesRowMajor), by, n, 1, 1, m, tactic, pdl},
                 params);
  }

  static void bmm_bf16(TensorView A, TensorView B, TensorView out, int64_t tactic,
                       bool enable_pdl) {
    Dim batch("b"), m("m"), n("n"), k("k");
    const TensorMatcher match("bmm_bf16");
    const TensorMatch in = match(A, "A");
    const TensorMatch by = match(B, "B");
    const TensorMatch to = match(out, "out");
    in.cuda().dtype(DType::bf16).shape({batch, m, k});
    by.same_device(in).dtype(DType::bf16).shape({batch, k, n});
    to.same_device(in).dtype(Kernels::dtype_o()).shape({batch, m, n}).elements_apart();
    GemmParams params = {};
    params.kind = TokenGroups::equal;
    Kernels::run({in, to, weight_of(by, Kernels::kTakesRowMajor), by, n, batch, batch, m, tactic,
                  enable_pdl},
                 params);
  }

  // Groups of consecutive rows, from one number of m_indptr to the next.
  static void grouped_mm_bf16(TensorView a, TensorView b, TensorView m_indptr, TensorView out,
                              int64_t tactic, bool enable_pdl) {
    Dim m("m"), n("n"), k("k"), groups("groups");
    const TensorMatcher match("grouped_mm_bf16");
    const TensorMatch in = match(a, "a");
    const TensorMatch by = match(b, "b");
    const TensorMatch starts = match(m_indptr, "m_indptr");
    const TensorMatch to = match(out, "out");
    in.cuda().dtype(Kernels::dtype()).shape({m, k});
    by.same_device(in).dtype(Kernels::dtype()).shape({groups, n, k});
    starts.same_device(in).dtype(kInt32);
    to.same_device(in)
        .dtype(Kernels::dtype_o())
        .shape({m, n})
        .elements_apart()
        .apart(TensorMemory(starts));
    GemmParams params = {};
    params.kind = TokenGroups::ranges;
    params.group_info = numbers_of(starts, groups + 1, params.info_is_int64);
    const int64_t expected = groups > 0 ? (m + groups - 1) / groups : 0;
    Kernels::run(
        {in, to, {rows_of(by), false}, by, n, groups, groups, expected, tactic, enable_pdl},
        params);
  }

  // The same with weights that groups choose, and of either order.
  static void segment_gemm(TensorView x, TensorView weights, TensorView seg_indptr,
                           OptionalTensor weight_indices, TensorView out, bool weight_column_major,
                           int64_t tactic, bool enable_pdl) {
    Dim m("rows"), n("d_out"), k("d_in"), count("weights");
    const TensorMatcher match("segment_gemm");
    const TensorMatch in = match(x, "x");
    const TensorMatch by = match(weights, "weights");
    const TensorMatch starts = match(seg_indptr, "seg_indptr");
    const TensorMatch to = match(out, "out");
    in.cuda().dtype(Kernels::dtype()).shape({m, k});
    by.same_device(in).dtype(Kernels::dtype());
    if (weight_column_major) {
      by.shape({count, n, k});
    } else {
      by.shape({count, k, n});
    }
    starts.same_device(in).rank(1, 1);
    to.same_device(in)
        .dtype(Kernels::dtype_o())
        .shape({m, n})
        .elements_apart()
        .apart(TensorMemory(starts));
    to.apart(TensorMemory("segment_gemm", "weight_indices", weight_indices));
    const int64_t groups = std::max<int64_t>(seg_indptr.size(0) - 1, 0);
    GemmParams params = {};
    params.kind = TokenGroups::ranges;
    params.group_info = numbers_of(starts, groups + 1, params.info_is_int64);
    params.weight_of_group =
        match.optional<void>(weight_indices, "weight_indices", [&](const TensorMatch& which) {
          bool is_int64 = false;
          numbers_of(which.same_device(in), groups, is_int64);
          PRECAST_CHECK(is_int64 == params.info_is_int64, ValueError)
              << "segment_gemm: weight_indices must have the dtype of seg_indptr";
        });
    const GemmWeight weight = weight_column_major ? GemmWeight{rows_of(by), false}
                                                  : weight_of(by, Kernels::kTakesRowMajor);
    const int64_t expected = groups > 0 ? (m + groups - 1) / groups : 0;
    Kernels::run({in, to, weight, by, n, groups, count, expected, tactic, enable_pdl}, params);
  }
};

}  // namespace precast
