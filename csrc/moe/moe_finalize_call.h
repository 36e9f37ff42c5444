// SPDX-License-Identifier: Apache-2.0
// What both bindings of moe_finalize do: that of the kernel in CUDA and that in CuTe DSL.
#pragma once

#include <limits>

#include "core/ffi_export.h"
#include "moe/expert_checks.h"
#include "precast/moe/moe_finalize.cuh"

namespace precast {

// Checks the arguments and calls launch(params, stream), unless there is nothing to write.
template <typename Launch>
void moe_finalize_call(DType dtype, DType dtype_o, const TensorView& input,
                       const TensorView& permuted_rows, const OptionalTensor& weights,
                       const OptionalTensor& row_experts, const OptionalTensor& scale,
                       const TensorView& out, const OptionalTensor& bias, int64_t ranks,
                       const Launch& launch) {
  const char* op = "moe_finalize";
  const TensorMatcher match(op);
  const TensorMatch in = match(input, "input");
  const TensorMatch rows = match(permuted_rows, "permuted_rows");
  const TensorMatch to = match(out, "out");
  in.cuda().dtype(dtype);
  check_expert_matrix(in, kVecBytes / 2, false);
  const int64_t count = input.size(0), columns = input.size(1);
  rows.same_device(in).dtype(kInt32).rank(2, 2);
  const int64_t tokens = permuted_rows.size(0);
  to.same_device(in).dtype(dtype_o);
  check_expert_matrix(to, kVecBytes / 2, true);
  to.shape({tokens, columns}).elements_apart();
  MoeFinalizeParams params = {};
  params.slots = slots_of(rows, in, tokens, count);
  params.weights = match.optional<const float>(weights, "weights", [&](const TensorMatch& by) {
    by.same_device(in).dtype(DType::f32).shape({tokens, permuted_rows.size(1)}).contiguous();
  });
  params.row_experts = match.optional<const int32_t>(
      row_experts, "row_experts",
      [&](const TensorMatch& of) { of.same_device(in).dtype(kInt32).shape({count}).contiguous(); });
  Dim experts("experts");
  params.scale = match.optional<const float>(scale, "scale", [&](const TensorMatch& by) {
    by.same_device(in).dtype(DType::f32).shape({experts}).contiguous();
  });
  params.bias = match.optional<void>(bias, "bias", [&](const TensorMatch& with) {
    const Arg& arg = with;
    with.same_device(in).dtype(dtype_o).shape({experts, columns}).contiguous();
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
  PRECAST_CHECK(!differs || int64_t(experts) > 0 || count == 0, ValueError)
      << op << ": input must have no rows without experts, got shape " << to_string(input.shape());
  PRECAST_CHECK(ranks >= 1 && ranks <= std::numeric_limits<int>::max(), ValueError)
      << op << ": ranks must be from 1 to 2147483647, got " << ranks;
  if (tokens == 0 || columns == 0) return;

  params.input = data_of(input);
  params.out = data_of(out);
  params.input_stride = input.stride(0);
  params.out_stride = out.stride(0);
  params.experts = static_cast<int>(experts);
  params.columns = columns;
  params.ranks = static_cast<int>(ranks);
  params.items = plan_items(static_cast<uint32_t>(tokens), columns, kVecBytes / 2).items;
  launch_on(in, [&](cudaStream_t stream) { return launch(params, stream); });
}

}  // namespace precast
