// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of the GEMM of 16-bit matrices for Hopper whose weights have a gate for each
// column.
#include "core/ffi_export.h"
#include "gemm/gemm_sm90_call.h"
#include "precast/gemm/sm90/gated_params.cuh"
#include "precast/gemm/sm90/gemm16_choose.cuh"

namespace precast {

// csrc/gemm/gemm_gated_sm90.cu, csrc/gemm/gemm_gated_sm90_swapped.cu
extern const DType gemm_gated_sm90_dtype;
cudaError_t gemm_gated_sm90(const GatedGemmParams& params, bool row_major_b,
                            const GatedGemmChoice& choice, int sms, bool enable_pdl,
                            cudaStream_t stream);
cudaError_t gemm_gated_sm90_swapped(const GatedGemmParams& params, bool row_major_b,
                                    const GatedGemmChoice& choice, int sms, bool enable_pdl,
                                    cudaStream_t stream);

namespace {

// TMA takes eight rows of a half of the weight at once.
constexpr int64_t kEight = 8;

// Groups of consecutive rows, from one number of m_indptr to the next. Rows of a group's weight are
// those of the columns of the output, then their gates.
void grouped_mm_gated_entry(TensorView a, TensorView b, TensorView m_indptr,
                            int64_t activation_type, OptionalTensor bias,
                            OptionalTensor swiglu_alpha, OptionalTensor swiglu_beta,
                            OptionalTensor swiglu_limit, TensorView out, int64_t tactic,
                            bool enable_pdl) {
  const char* op = "grouped_mm_gated";
  Dim m("m"), n("n"), k("k"), groups("groups");
  const TensorMatcher match(op);
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
  GatedGemmParams params = {};
  params.function = static_cast<ExpertFunction>(activation_type);
  PRECAST_CHECK(
      activation_type == static_cast<int64_t>(params.function) && is_gated(params.function),
      ValueError)
      << op << ": activation_type must be 3, 4, 5 or 8, got " << activation_type;
  params.bias = match.optional<void>(bias, "bias", [&](const TensorMatch& with) {
    with.same_device(in).dtype(gemm_gated_sm90_dtype).shape({groups, 2 * columns}).contiguous();
  });
  const auto numbers = [&](const OptionalTensor& given, const char* name) {
    return match.optional<const float>(given, name, [&](const TensorMatch& each) {
      each.same_device(in).dtype(DType::f32).shape({groups}).contiguous();
    });
  };
  params.swiglu_alpha = numbers(swiglu_alpha, "swiglu_alpha");
  params.swiglu_beta = numbers(swiglu_beta, "swiglu_beta");
  params.swiglu_limit = numbers(swiglu_limit, "swiglu_limit");
  check_written({TensorMemory(to)}, {{op, "bias", bias},
                                     {op, "swiglu_alpha", swiglu_alpha},
                                     {op, "swiglu_beta", swiglu_beta},
                                     {op, "swiglu_limit", swiglu_limit}});
  params.kind = TokenGroups::ranges;
  params.group_info = numbers_of(starts, groups + 1, params.info_is_int64);
  const int64_t expected = groups > 0 ? (m + groups - 1) / groups : 0;
  run_gemm_sm90(
      {in, to, {rows_of(by), false}, by, columns, groups, groups, expected, tactic, enable_pdl},
      params,
      Sm90Tiles<GatedGemmChoice, GatedGemmParams>{gemm_gated_sm90, gemm_gated_sm90_swapped, 2});
}

}  // namespace

PRECAST_EXPORT(grouped_mm_gated, grouped_mm_gated_entry)

}  // namespace precast
