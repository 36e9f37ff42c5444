// SPDX-License-Identifier: Apache-2.0
// The entry points of the products with weights of 4 bits, whatever kernels compute them.
#pragma once

#include "gemm/gemm_call.h"
#include "precast/gemm/int4_weight.cuh"
#include "precast/gemm/mxfp4_weight.cuh"

namespace precast {

// The exported functions. `Kernels` has
//
//   static DType dtype_o();  of the module's outputs
//   static void run(const GemmCall& call, const W4GemmParams& params);
//
// where run() checks sizes and memory, and launches the product.
template <typename Kernels>
struct W4GemmEntries {
  static void grouped_mm_mxfp4(TensorView a, TensorView b, TensorView b_scale, TensorView m_indptr,
                               TensorView out, int64_t tactic, bool enable_pdl) {
    grouped_mm<mxfp4>("grouped_mm_mxfp4", kUint8, 16, a, b, b_scale, m_indptr, out, tactic,
                      enable_pdl);
  }
  static void grouped_mm_int4(TensorView a, TensorView b, TensorView b_scale, TensorView m_indptr,
                              TensorView out, int64_t tactic, bool enable_pdl) {
    grouped_mm<int4_pair>("grouped_mm_int4", DType::bf16, 8, a, b, b_scale, m_indptr, out, tactic,
                          enable_pdl);
  }

 private:
  // Blocks of scales have so many rows, and so many scales in each.
  template <typename Weight, typename ScaleType>
  static void grouped_mm(const char* op, ScaleType scale_type, int64_t block_rows, TensorView a,
                         TensorView b, TensorView b_scale, TensorView m_indptr, TensorView out,
                         int64_t tactic, bool enable_pdl) {
    Dim m("m"), n("n"), k("k"), groups("groups");
    const TensorMatcher match(op);
    const TensorMatch in = match(a, "a");
    const TensorMatch by = match(b, "b");
    const TensorMatch of_b = match(b_scale, "b_scale");
    const TensorMatch starts = match(m_indptr, "m_indptr");
    const TensorMatch to = match(out, "out");
    in.cuda().dtype(DType::bf16).shape({m, k});
    PRECAST_CHECK(k > 0 && k % kW4Depth == 0, ValueError)
        << op << ": a must have a positive multiple of " << kW4Depth << " columns, got shape "
        << to_string(a.shape()) << "; pad with zeros";
    by.same_device(in).dtype(kUint8).shape({groups, n, k / 2}).contiguous();
    PRECAST_CHECK(n % kW4Columns == 0, ValueError)
        << op << ": b must have a multiple of " << kW4Columns << " rows, got shape "
        << to_string(b.shape()) << "; pad with zeros";
    of_b.same_device(in)
        .dtype(scale_type)
        .shape({groups, n / kW4Columns, k / kW4Depth, block_rows, block_rows})
        .contiguous();
    starts.same_device(in).dtype(kInt32);
    to.same_device(in).dtype(Kernels::dtype_o()).shape({m, n}).elements_apart();
    check_written({TensorMemory(to)}, {TensorMemory(starts), TensorMemory(of_b)});
    W4GemmParams params = {};
    params.kind = TokenGroups::ranges;
    params.group_info = numbers_of(starts, groups + 1, params.info_is_int64);
    params.b_scales = of_b.data<const unsigned char>();
    const int64_t expected = groups > 0 ? (m + groups - 1) / groups : 0;
    const GemmWeight weight = {{data_of(b), k / 2, n * (k / 2)}, false};
    if (b_scale.numel() > 0) check_vector_aligned(of_b);
    Kernels::run({in, to, weight, by, n, groups, groups, expected, tactic, enable_pdl}, params);
  }
};

}  // namespace precast
