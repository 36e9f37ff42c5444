// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of the weighted sums of experts' rows.
#include "core/ffi_export.h"
#include "moe/expert_checks.h"
#include "precast/moe/moe_unpermute.cuh"

namespace precast {

// csrc/moe/moe_unpermute.cu
extern const DType moe_unpermute_dtype;
extern const DType moe_unpermute_dtype_o;
cudaError_t moe_unpermute(const MoeUnpermuteParams& params, bool enable_pdl, cudaStream_t stream);

namespace {

void moe_unpermute_entry(TensorView x, TensorView permuted_rows, OptionalTensor weights,
                         OptionalTensor row_experts, OptionalTensor scale, TensorView out,
                         OptionalTensor bias, bool enable_pdl) {
  const char* op = "moe_unpermute";
  const TensorMatcher match(op);
  const TensorMatch in = match(x, "x");
  const TensorMatch rows = match(permuted_rows, "permuted_rows");
  const TensorMatch to = match(out, "out");
  in.cuda().dtype(moe_unpermute_dtype);
  check_expert_matrix(in, kVecBytes / 2, false);
  const int64_t x_rows = x.size(0), columns = x.size(1);
  to.same_device(in).dtype(moe_unpermute_dtype_o);
  check_expert_matrix(to, kVecBytes / 2, true);
  const int64_t tokens = out.size(0);
  to.shape({tokens, columns}).elements_apart();
  MoeUnpermuteParams params = {};
  params.slots = slots_of(rows, in, tokens, x_rows);
  params.weight = match.optional<const float>(weights, "weights", [&](const TensorMatch& by) {
    by.same_device(in).dtype(DType::f32).shape_of(rows).contiguous();
  });
  params.row_experts =
      match.optional<const int32_t>(row_experts, "row_experts", [&](const TensorMatch& of) {
        of.same_device(in).dtype(kInt32).shape({x_rows}).contiguous();
      });
  Dim experts("experts");
  params.scale = match.optional<const float>(scale, "scale", [&](const TensorMatch& by) {
    by.same_device(in).dtype(DType::f32).shape({experts}).contiguous();
  });
  params.bias = match.optional<void>(bias, "bias", [&](const TensorMatch& with) {
    const Arg& arg = with;
    with.same_device(in).dtype(moe_unpermute_dtype_o).shape({experts, columns}).contiguous();
    if (arg.tensor.numel() > 0) with.aligned();
  });
  const bool differs = scale.has_value() || bias.has_value();
  PRECAST_CHECK(!differs || row_experts.has_value(), ValueError)
      << op << ": row_experts must be given with scale or bias, got None";
  check_written({TensorMemory(to)}, {TensorMemory(in),
                                     TensorMemory(rows),
                                     {op, "weights", weights},
                                     {op, "row_experts", row_experts},
                                     {op, "scale", scale},
                                     {op, "bias", bias}});
  check_expert_items(to, tokens, columns, kVecBytes / 2);
  PRECAST_CHECK(!differs || int64_t(experts) > 0 || x_rows == 0, ValueError)
      << op << ": x must have no rows without experts, got shape " << to_string(x.shape());
  if (tokens == 0 || columns == 0) return;

  params.x = data_of(x);
  params.out = data_of(out);
  params.x_stride = x.stride(0);
  params.out_stride = out.stride(0);
  params.tokens = static_cast<uint32_t>(tokens);
  params.experts = static_cast<int>(experts);
  params.columns = columns;
  launch_on(in, [&](cudaStream_t stream) { return moe_unpermute(params, enable_pdl, stream); });
}

}  // namespace

PRECAST_EXPORT(moe_unpermute, moe_unpermute_entry)

}  // namespace precast
