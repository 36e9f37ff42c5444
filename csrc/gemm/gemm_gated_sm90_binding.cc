// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of the GEMM of 16-bit matrices for Hopper whose weights have a gate for each
// column.
#include "core/ffi_export.h"
#include "gemm/gemm_sm90_call.h"
#include "precast/gemm/sm90/gemm16_choose.cuh"

namespace precast {

// csrc/gemm/gemm_gated_sm90.cu, csrc/gemm/gemm_gated_sm90_swapped.cu
extern const DType gemm_gated_sm90_dtype;
cudaError_t gemm_gated_sm90(const GemmParams& params, bool row_major_b,
                            const GatedGemmChoice& choice, int sms, bool enable_pdl,
                            cudaStream_t stream);
cudaError_t gemm_gated_sm90_swapped(const GemmParams& params, bool row_major_b,
                                    const GatedGemmChoice& choice, int sms, bool enable_pdl,
                                    cudaStream_t stream);

namespace {

// TMA takes eight rows of a half of the weight at once.
constexpr int64_t kEight = 8;

// Groups of consecutive rows, from one number of m_indptr to the next. Rows of a group's weight are
// those of the columns of the output, then their gates.
void grouped_mm_swiglu_entry(TensorView a, TensorView b, TensorView m_indptr, TensorView out,
                             int64_t tactic, bool enable_pdl) {
  Dim m("m"), n("n"), k("k"), groups("groups");
  const TensorMatcher match("grouped_mm_swiglu");
  const TensorMatch in = match(a, "a");
  const TensorMatch by = match(b, "b");
  const TensorMatch starts = match(m_indptr, "m_indptr");
  const TensorMatch to = match(out, "out");
  in.cuda().dtype(gemm_gated_sm90_dtype).shape({m, k});
  starts.same_device(in).dtype(kInt32);
  to.same_device(in)
      .dtype(gemm_gated_sm90_dtype)
      .shape({m, n})
      .elements_apart()
      .apart(TensorMemory(starts));
  const int64_t columns = out.size(1);
  by.same_device(in).dtype(gemm_gated_sm90_dtype).shape({groups, 2 * columns, k});
  PRECAST_CHECK(columns % kEight == 0 && columns <= kMostRows / 2, ValueError)
      << static_cast<const Arg&>(to).what() << " must have a multiple of " << kEight
      << " columns up to " << kMostRows / 2 << ", got shape " << to_string(out.shape());
  GemmParams params = {};
  params.kind = TokenGroups::ranges;
  params.group_info = numbers_of(starts, groups + 1, params.info_is_int64);
  const int64_t expected = groups > 0 ? (m + groups - 1) / groups : 0;
  run_gemm_sm90<GatedGemmChoice>(
      {in, to, {rows_of(by), false}, by, columns, groups, groups, expected, tactic, enable_pdl},
      params, {gemm_gated_sm90, gemm_gated_sm90_swapped, 2});
}

}  // namespace

PRECAST_EXPORT(grouped_mm_swiglu, grouped_mm_swiglu_entry)

}  // namespace precast
