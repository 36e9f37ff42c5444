// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of the GEMM of 16-bit matrices for every GPU.
#include "core/ffi_export.h"
#include "gemm/gemm_call.h"

namespace precast {

// csrc/gemm/gemm.cu
extern const DType gemm_dtype;
extern const DType gemm_dtype_o;
cudaError_t gemm(const GemmParams& params, bool row_major_b, int tile, bool enable_pdl,
                 cudaStream_t stream);

namespace {

void mm_bf16_entry(TensorView a, TensorView b, OptionalTensor bias, TensorView out, int64_t tactic,
                   bool pdl) {
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
  to.same_device(in).dtype(gemm_dtype_o).shape({m, n}).elements_apart();
  to.apart(TensorMemory("mm_bf16", "bias", bias));
  params.kind = TokenGroups::equal;
  run_gemm({in, to, weight_of(by, true), by, n, 1, 1, m, tactic, pdl}, params, gemm);
}

void bmm_bf16_entry(TensorView A, TensorView B, TensorView out, int64_t tactic, bool enable_pdl) {
  Dim batch("b"), m("m"), n("n"), k("k");
  const TensorMatcher match("bmm_bf16");
  const TensorMatch in = match(A, "A");
  const TensorMatch by = match(B, "B");
  const TensorMatch to = match(out, "out");
  in.cuda().dtype(DType::bf16).shape({batch, m, k});
  by.same_device(in).dtype(DType::bf16).shape({batch, k, n});
  to.same_device(in).dtype(gemm_dtype_o).shape({batch, m, n}).elements_apart();
  GemmParams params = {};
  params.kind = TokenGroups::equal;
  run_gemm({in, to, weight_of(by, true), by, n, batch, batch, m, tactic, enable_pdl}, params, gemm);
}

// Groups of consecutive rows, from one number of m_indptr to the next.
void grouped_mm_bf16_entry(TensorView a, TensorView b, TensorView m_indptr, TensorView out,
                           int64_t tactic, bool enable_pdl) {
  Dim m("m"), n("n"), k("k"), groups("groups");
  const TensorMatcher match("grouped_mm_bf16");
  const TensorMatch in = match(a, "a");
  const TensorMatch by = match(b, "b");
  const TensorMatch starts = match(m_indptr, "m_indptr");
  const TensorMatch to = match(out, "out");
  in.cuda().dtype(gemm_dtype).shape({m, k});
  by.same_device(in).dtype(gemm_dtype).shape({groups, n, k});
  starts.same_device(in).dtype(kInt32);
  to.same_device(in).dtype(gemm_dtype_o).shape({m, n}).elements_apart().apart(TensorMemory(starts));
  GemmParams params = {};
  params.kind = TokenGroups::ranges;
  params.group_info = numbers_of(starts, groups + 1, params.info_is_int64);
  const int64_t expected = groups > 0 ? (m + groups - 1) / groups : 0;
  run_gemm({in, to, {rows_of(by), false}, by, n, groups, groups, expected, tactic, enable_pdl},
           params, gemm);
}

// The same with weights that groups choose, and of either order.
void segment_gemm_entry(TensorView x, TensorView weights, TensorView seg_indptr,
                        OptionalTensor weight_indices, TensorView out, bool weight_column_major,
                        int64_t tactic, bool enable_pdl) {
  Dim m("rows"), n("d_out"), k("d_in"), count("weights");
  const TensorMatcher match("segment_gemm");
  const TensorMatch in = match(x, "x");
  const TensorMatch by = match(weights, "weights");
  const TensorMatch starts = match(seg_indptr, "seg_indptr");
  const TensorMatch to = match(out, "out");
  in.cuda().dtype(gemm_dtype).shape({m, k});
  by.same_device(in).dtype(gemm_dtype);
  if (weight_column_major) {
    by.shape({count, n, k});
  } else {
    by.shape({count, k, n});
  }
  starts.same_device(in).rank(1, 1);
  to.same_device(in).dtype(gemm_dtype_o).shape({m, n}).elements_apart().apart(TensorMemory(starts));
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
  const GemmWeight weight =
      weight_column_major ? GemmWeight{rows_of(by), false} : weight_of(by, true);
  const int64_t expected = groups > 0 ? (m + groups - 1) / groups : 0;
  run_gemm({in, to, weight, by, n, groups, count, expected, tactic, enable_pdl}, params, gemm);
}

}  // namespace

PRECAST_EXPORT(mm_bf16, mm_bf16_entry)
PRECAST_EXPORT(bmm_bf16, bmm_bf16_entry)
PRECAST_EXPORT(grouped_mm_bf16, grouped_mm_bf16_entry)
PRECAST_EXPORT(segment_gemm, segment_gemm_entry)

}  // namespace precast
