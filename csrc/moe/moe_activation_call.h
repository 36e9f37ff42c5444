// SPDX-License-Identifier: Apache-2.0
// What both bindings of moe_activation do: that of the kernel in CUDA and that in CuTe DSL.
#pragma once

#include "core/ffi_export.h"
#include "core/number_checks.h"
#include "core/tensor_matcher.h"
#include "moe/row_checks.h"
#include "precast/moe/moe_activation.cuh"

namespace precast {

// Checks the arguments and calls launch(params, stream), unless there is no row.
template <typename Launch>
void moe_activation_call(DType dtype, const TensorView& input, const OptionalTensor& m_indices,
                         double eps, const TensorView& out, const TensorView& out_scale,
                         const Launch& launch) {
  const char* op = "moe_activation";
  const Arg in = PRECAST_ARG(op, input);
  const Arg codes = PRECAST_ARG(op, out);
  const Arg scales = PRECAST_ARG(op, out_scale);
  TensorMatch(in).cuda().dtype(dtype).rank(2, 2).unit_stride();
  const int64_t rows = input.size(0), columns = input.size(1) / 2;
  PRECAST_CHECK(input.size(1) % (2 * kMoeGroup) == 0 && columns <= kMaxMoeColumns, ValueError)
      << in.what() << " must have a multiple of " << 2 * kMoeGroup << " columns up to "
      << 2 * kMaxMoeColumns << ", got shape " << to_string(input.shape());
  check_at_least(op, "eps", eps, 1e-30);  // a smaller scale has no finite reciprocal
  MoeActivationParams params = {};
  const TensorView indices = m_indices.has_value() ? m_indices.value() : input;
  const Arg experts = {op, "m_indices", indices};
  if (m_indices.has_value()) {
    TensorMatch(experts).same_device(in).dtype(kInt32).shape({rows}).contiguous();
    params.m_indices = static_cast<const int32_t*>(data_of(indices));
  }
  TensorMatch(codes).same_device(in).dtype(DType::e4m3).shape({rows, columns});
  TensorMatch(codes).unit_stride_output();
  TensorMatch(scales).same_device(in).dtype(DType::f32).shape({columns / kMoeGroup, rows});
  TensorMatch(scales).unit_stride_output();
  check_elements_apart(codes);
  check_elements_apart(scales);
  check_written({codes, scales}, {in, experts});
  if (rows == 0 || columns == 0) return;
  check_rows_aligned(in, kVecBytes);
  check_rows_aligned(codes, kVecBytes / 2);
  check_row_count(in, rows);
  const ItemPlan plan = plan_items(static_cast<uint32_t>(rows), columns, kVecBytes / 2);
  PRECAST_CHECK(plan.fits, ValueError)
      << in.what() << " must have at most " << kMaxItems << " items of " << kVecBytes
      << " bytes in each half, got shape " << to_string(input.shape()) << "; call on parts of it";
  params.input = data_of(input);
  params.out = data_of(out);
  params.scales = static_cast<float*>(data_of(out_scale));
  params.input_stride = input.stride(0);
  params.out_stride = out.stride(0);
  params.scale_stride = out_scale.stride(0);
  params.columns = columns;
  params.items = plan.items;
  params.eps = static_cast<float>(eps);
  launch_on(in, [&](cudaStream_t stream) { return launch(params, stream); });
}

}  // namespace precast
