// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of the block-scaled e4m3 GEMM for Hopper whose weights have a gate for each
// column.
#include "core/ffi_export.h"
#include "core/number_checks.h"
#include "gemm/fp8_gemm_call.h"
#include "gemm/sm90_choice.h"
#include "precast/gemm/sm90/gated_blocks_choose.cuh"
#include "precast/gemm/sm90/gated_params.cuh"

namespace precast {

// csrc/gemm/fp8_gemm_gated_sm90.cu
cudaError_t fp8_gemm_gated_sm90(const Sm90GatedParams& params, const GatedBlocksChoice& choice,
                                int sms, bool enable_pdl, cudaStream_t stream);

namespace {

constexpr const char* kGatedChoices = "0, 1 or 2, the tile and how two CTAs share an operand";

bool has_gated_choice(int64_t choice) {
  return choice < GatedBlocksChoice::kChoices &&
         is_legal(GatedBlocksChoice::of(static_cast<int>(choice)), TokenGroups::ranges);
}

// Groups of consecutive rows, from one number of m_indptr to the next. Rows of a group's weight are
// those of the columns of the output, then their gates.
void grouped_mm_fp8_swiglu_entry(TensorView a, TensorView b, TensorView a_scale, TensorView b_scale,
                                 TensorView m_indptr, TensorView out, TensorView out_scale,
                                 double eps, int64_t choice, bool enable_pdl) {
  const char* op = "grouped_mm_fp8_swiglu";
  Dim m("m"), n("n"), k("k"), groups("groups");
  const TensorMatcher match(op);
  const TensorMatch in = match(a, "a");
  const TensorMatch by = match(b, "b");
  const TensorMatch of_a = match(a_scale, "a_scale");
  const TensorMatch of_b = match(b_scale, "b_scale");
  const TensorMatch starts = match(m_indptr, "m_indptr");
  const TensorMatch to = match(out, "out");
  const TensorMatch scales = match(out_scale, "out_scale");
  in.cuda().dtype(DType::e4m3).shape({m, k});
  to.same_device(in).dtype(DType::e4m3).shape({m, n});
  const int64_t columns = out.size(1);
  PRECAST_CHECK(columns % kFp8Block == 0 && columns <= kMostRows / 2, ValueError)
      << static_cast<const Arg&>(to).what() << " must have a multiple of " << kFp8Block
      << " columns up to " << kMostRows / 2 << ", got shape " << to_string(out.shape());
  by.same_device(in).dtype(DType::e4m3).shape({groups, 2 * columns, k});
  const int64_t tokens = m, depth = k;
  PRECAST_CHECK(depth > 0 && depth % 16 == 0 && depth <= kMostDepth, ValueError)
      << static_cast<const Arg&>(in).what() << " must have a positive multiple of 16 columns, got "
      << "shape " << to_string(a.shape());
  PRECAST_CHECK(tokens <= kMostRows, ValueError)
      << static_cast<const Arg&>(in).what() << " must have at most " << kMostRows
      << " rows, got shape " << to_string(a.shape());
  of_a.same_device(in).dtype(DType::f32);
  of_b.same_device(in).dtype(DType::f32);
  starts.same_device(in).dtype(kInt32).shape({groups + 1}).contiguous();
  scales.same_device(in).dtype(DType::f32).shape({columns / kFp8Block, m}).unit_stride_output();
  check_at_least(op, "eps", eps, 1e-30);  // a smaller scale has no finite reciprocal
  PRECAST_CHECK(choice < 0 || has_gated_choice(choice), ValueError)
      << op << ": choice must be -1 or " << kGatedChoices << ", got " << choice;
  Sm90GatedParams params = {};
  Fp8GemmParams& p = params.p;
  p.kind = TokenGroups::ranges;
  p.groups = static_cast<int>(groups);
  p.tokens = static_cast<int>(tokens);
  p.columns = static_cast<int>(columns);
  p.depth = static_cast<int>(depth);
  p.a = matrix_of(in);
  p.b = matrix_of(by);
  p.a_scale = scales_of(of_a, false, groups, tokens, depth, 0, true, false);
  p.b_scale = scales_of(of_b, true, groups, 2 * columns, depth, kFp8BlockLog2, true, false);
  to.unit_stride_output().elements_apart();
  check_rows_aligned(to);
  scales.elements_apart();
  check_written({TensorMemory(to), TensorMemory(scales)},
                {TensorMemory(in), TensorMemory(by), TensorMemory(of_a), TensorMemory(of_b),
                 TensorMemory(starts)});
  if (groups == 0 || tokens == 0 || columns == 0) return;
  in.aligned();
  by.aligned();
  to.aligned();
  p.out = data_of(out);
  p.out_row_stride = out.stride(0);
  p.group_info = static_cast<const int32_t*>(data_of(m_indptr));
  params.out_scale = static_cast<float*>(data_of(out_scale));
  params.out_scale_stride = out_scale.stride(0);
  params.eps = static_cast<float>(eps);
  launch_on(in, [&](cudaStream_t stream) {
    const int sms = multiprocessors(op, a.device().device_id);
    const int expected = static_cast<int>((tokens + groups - 1) / groups);
    const GatedBlocksChoice chosen =
        choice >= 0 ? GatedBlocksChoice::of(static_cast<int>(choice))
                    : known_choice<GatedBlocksChoice>(
                          {p.kind, p.groups, expected, 2 * p.columns, p.depth, sms});
    return fp8_gemm_gated_sm90(params, chosen, sms, enable_pdl, stream);
  });
}

}  // namespace

PRECAST_EXPORT(grouped_mm_fp8_swiglu, grouped_mm_fp8_swiglu_entry)

}  // namespace precast
