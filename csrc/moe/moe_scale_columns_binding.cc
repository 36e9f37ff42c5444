// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of columns multiplied by scales and rounded to e4m3.
#include "core/ffi_export.h"
#include "moe/expert_checks.h"
#include "precast/moe/moe_scale_columns.cuh"

namespace precast {

// csrc/moe/moe_scale_columns.cu
cudaError_t moe_scale_columns(const MoeScaleColumnsParams& params, bool enable_pdl,
                              cudaStream_t stream);

namespace {

void moe_scale_columns_entry(TensorView input, OptionalTensor scale, OptionalTensor expert_offsets,
                             TensorView out, bool enable_pdl) {
  const char* op = "moe_scale_columns";
  const TensorMatcher match(op);
  const TensorMatch in = match(input, "input");
  const TensorMatch to = match(out, "out");
  constexpr int kSize = kVecBytes / 2;
  in.cuda().dtype(DType::bf16);
  check_expert_matrix(in, kSize, false);
  const int64_t rows = input.size(0), columns = input.size(1);
  MoeScaleColumnsParams params = {};
  params.scale = match.optional<const void>(scale, "scale", [&](const TensorMatch& by) {
    by.same_device(in).dtype(DType::bf16).shape({columns}).contiguous();
    if (columns > 0) by.aligned();
  });
  int64_t last = 0;
  params.rows_end =
      match.optional<const int32_t>(expert_offsets, "expert_offsets", [&](const TensorMatch& of) {
        Dim starts("experts + 1", 1);
        of.same_device(in).dtype(kInt32).shape({starts}).contiguous();
        last = int64_t(starts) - 1;
      });
  if (params.rows_end != nullptr) params.rows_end += last;
  to.same_device(in).dtype(DType::bf16);
  check_expert_matrix(to, kSize, true);
  to.shape_of(in).elements_apart();
  check_same_or_apart(TensorMemory(to), TensorMemory(in));
  check_written({TensorMemory(to)}, {{op, "scale", scale}, {op, "expert_offsets", expert_offsets}});
  check_expert_items(in, rows, columns, kSize);
  if (rows == 0 || columns == 0) return;

  params.input = data_of(input);
  params.out = data_of(out);
  params.input_stride = input.stride(0);
  params.out_stride = out.stride(0);
  params.items = plan_items(static_cast<uint32_t>(rows), columns, kSize).items;
  launch_on(in, [&](cudaStream_t stream) { return moe_scale_columns(params, enable_pdl, stream); });
}

}  // namespace

PRECAST_EXPORT(moe_scale_columns, moe_scale_columns_entry)

}  // namespace precast
