// SPDX-License-Identifier: Apache-2.0
// What both bindings of moe_finalize do: that of the kernel in CUDA and that in CuTe DSL.
#pragma once

#include "core/ffi_export.h"
#include "core/tensor_matcher.h"
#include "moe/row_checks.h"
#include "precast/moe/moe_finalize.cuh"

namespace precast {

// Checks the arguments and calls launch(params, stream), unless there is nothing to write.
template <typename Launch>
void moe_finalize_call(DType dtype, const TensorView& input, const TensorView& indices,
                       const TensorView& weights, const TensorView& out, const Launch& launch) {
  const char* op = "moe_finalize";
  const Arg in = PRECAST_ARG(op, input);
  const Arg places = PRECAST_ARG(op, indices);
  const Arg factors = PRECAST_ARG(op, weights);
  const Arg sums = PRECAST_ARG(op, out);
  TensorMatch(in).cuda().dtype(dtype).rank(2, 2).unit_stride();
  TensorMatch(places).same_device(in).dtype(kInt32).rank(2, 2).contiguous();
  const int64_t tokens = indices.size(0), topk = indices.size(1), columns = input.size(1);
  PRECAST_CHECK(topk >= 1 && topk <= kMaxMoeTopK, ValueError)
      << places.what() << " must have 1 to " << kMaxMoeTopK << " columns, got shape "
      << to_string(indices.shape());
  PRECAST_CHECK(columns % (kVecBytes / 2) == 0 && columns <= kMaxMoeColumns, ValueError)
      << in.what() << " must have a multiple of " << kVecBytes / 2 << " columns up to "
      << kMaxMoeColumns << ", got shape " << to_string(input.shape());
  TensorMatch(factors).same_device(in).dtype(DType::f32).shape({tokens, topk}).contiguous();
  TensorMatch(sums).same_device(in).dtype(dtype).shape({tokens, columns}).unit_stride_output();
  check_elements_apart(sums);
  check_written({sums}, {in, places, factors});
  if (tokens == 0 || columns == 0) return;
  check_rows_aligned(in, kVecBytes);
  check_rows_aligned(sums, kVecBytes);
  check_row_count(in, input.size(0));
  check_row_count(places, tokens);
  const ItemPlan plan = plan_items(static_cast<uint32_t>(tokens), columns, kVecBytes / 2);
  PRECAST_CHECK(plan.fits, ValueError)
      << sums.what() << " must have at most " << kMaxItems << " items of " << kVecBytes
      << " bytes, got shape " << to_string(out.shape()) << "; call on parts of it";
  MoeFinalizeParams params = {};
  params.rows = data_of(input);
  params.indices = static_cast<const int32_t*>(data_of(indices));
  params.weights = static_cast<const float*>(data_of(weights));
  params.out = data_of(out);
  params.row_stride = input.stride(0);
  params.out_stride = out.stride(0);
  params.count = static_cast<uint32_t>(input.size(0));
  params.topk = static_cast<int>(topk);
  params.items = plan.items;
  launch_on(in, [&](cudaStream_t stream) { return launch(params, stream); });
}

}  // namespace precast
