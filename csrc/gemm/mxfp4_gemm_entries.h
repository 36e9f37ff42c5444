// SPDX-License-Identifier: Apache-2.0
// The entry point of the products with weights of MXFP4, whatever kernels compute them.
#pragma once

#include "gemm/gemm_call.h"
#include "precast/gemm/mxfp4_weight.cuh"

namespace precast {

// The exported function. `Kernels` has
//
//   static DType dtype_o();  of the module's outputs
//   static void run(const GemmCall& call, const Mxfp4GemmParams& params);
//
// where run() checks sizes and memory, and launches the product.
template <typename Kernels>
struct Mxfp4GemmEntries {
  static void grouped_mm_mxfp4(TensorView a, TensorView b, TensorView b_scale, TensorView m_indptr,
                               TensorView out, int64_t tactic, bool enable_pdl) {
    Dim m("m"), n("n"), k("k"), groups("groups");
    const TensorMatcher match("grouped_mm_mxfp4");
    const TensorMatch in = match(a, "a");
    const TensorMatch by = match(b, "b");
    const TensorMatch of_b = match(b_scale, "b_scale");
    const TensorMatch starts = match(m_indptr, "m_indptr");
    const TensorMatch to = match(out, "out");
    in.cuda().dtype(DType::bf16).shape({m, k});
    PRECAST_CHECK(k > 0 && k % kMxfp4Depth == 0, ValueError)
        << "grouped_mm_mxfp4: a must have a positive multiple of " << kMxfp4Depth
        << " columns, got shape " << to_string(a.shape()) << "; pad with zeros";
    by.same_device(in).dtype(kUint8).shape({groups, n, k / 2}).contiguous();
    PRECAST_CHECK(n % kMxfp4Columns == 0, ValueError)
        << "grouped_mm_mxfp4: b must have a multiple of " << kMxfp4Columns << " rows, got shape "
        << to_string(b.shape()) << "; pad with zeros";
    of_b.same_device(in)
        .dtype(kUint8)
        .shape({groups, n / kMxfp4Columns, k / kMxfp4Depth, 16, 16})
        .contiguous();
    starts.same_device(in).dtype(kInt32);
    to.same_device(in).dtype(Kernels::dtype_o()).shape({m, n}).elements_apart();
    check_written({TensorMemory(to)}, {TensorMemory(starts), TensorMemory(of_b)});
    Mxfp4GemmParams params = {};
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
