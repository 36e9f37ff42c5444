// SPDX-License-Identifier: Apache-2.0
// The checks that the bindings of the quantisations share. `quantize_dtype` and `quantize_dtype_q`
// are constants of the module's .cu.
#pragma once

#include <algorithm>
#include <cmath>

#include "core/number_checks.h"
#include "core/tensor_matcher.h"
#include "precast/quantize/per_group.cuh"
#include "precast/quantize/per_token.cuh"

namespace precast {

extern const DType quantize_dtype;
extern const DType quantize_dtype_q;

constexpr int64_t kMaxColumns = int64_t(1) << 30;  // the kernels compute columns in 32 bits
constexpr double kLeastEps = 1e-30;                // a smaller scale has no finite reciprocal

PRECAST_ONE_COPY void check_eps(const char* op, double eps) {
  check_at_least(op, "eps", eps, kLeastEps);
}

// Checks the input, and codes of its shape (with half the last dimension if gated).
PRECAST_ONE_COPY void check_input_and_codes(const Arg& in, const Arg& out, bool gated) {
  const TensorView& i = in.tensor;
  const TensorView& o = out.tensor;
  check_cuda(in);
  check_dtype(in, quantize_dtype);
  PRECAST_CHECK(i.ndim() >= 1, ValueError) << in.what() << " must have a last dimension, got []";
  PRECAST_CHECK(!gated || i.size(-1) % 2 == 0, ValueError)
      << in.what() << "'s last dimension must be even, got " << i.size(-1);
  PRECAST_CHECK(i.size(-1) <= kMaxColumns, ValueError)
      << in.what() << "'s last dimension must be at most " << kMaxColumns << ", got " << i.size(-1);
  check_same_device(out, in);
  check_dtype(out, quantize_dtype_q);
  if (gated) {
    PRECAST_CHECK(has_shape_but_last(o, i, i.size(-1) / 2), OutputShapeError)
        << out.what() << " must have " << in.name << "'s shape with half the last dimension, got "
        << to_string(o.shape()) << " for " << in.name << " " << to_string(i.shape());
  } else {
    check_same_shape(out, in);
  }
  check_columns(in, false);
  check_columns(out, true);
  check_elements_apart(out);
  check_memory_apart(out, in);
}

// Checks scales with `count` numbers for each row of `in`.
PRECAST_ONE_COPY void check_row_scales(const Arg& scales, const Arg& in, const Arg& out,
                                       int64_t count) {
  check_same_device(scales, in);
  PRECAST_CHECK(has_shape_but_last(scales.tensor, in.tensor, count), ValueError)
      << scales.what() << " must have " << in.name << "'s shape with a last dimension of " << count
      << ", got " << to_string(scales.tensor.shape()) << " for " << in.name << " "
      << to_string(in.tensor.shape());
  TensorMatch(scales).elements_apart().apart(in).apart(out);
}

inline QuantTensors quant_tensors(const Arg& in, const Arg& out, const RowView& view, bool gated) {
  QuantTensors tensors = {};
  tensors.input = data_of(in.tensor);
  tensors.out = data_of(out.tensor);
  tensors.input_strides = view.strides[0];
  tensors.out_strides = view.strides[1];
  tensors.rows = view.rows;
  tensors.columns = gated ? view.columns / 2 : view.columns;
  return tensors;
}

// -- entry points that quantize and silu_and_mul_quant share
// ---------------------------------------

cudaError_t static_quant(const StaticQuantParams& params, bool enable_pdl, cudaStream_t stream);
cudaError_t token_quant(const TokenQuantParams& params, bool enable_pdl, cudaStream_t stream);
cudaError_t group_quant(const GroupQuantParams& params, bool enable_pdl, cudaStream_t stream);

inline void static_quant_entry(const Arg& in, const Arg& scale, const Arg& out, bool gated,
                               bool enable_pdl) {
  check_input_and_codes(in, out, gated);
  check_one_number(scale, in);
  check_memory_apart(out, scale);
  const RowView view = view_as_rows({in, out}, !gated);
  if (view.rows.count == 0 || view.columns == 0) return;
  check_items(in, view, gated ? view.columns / 2 : view.columns);
  StaticQuantParams params = {};
  params.tensors = quant_tensors(in, out, view, gated);
  params.scale = static_cast<const float*>(data_of(scale.tensor));
  launch_on(in, [&](cudaStream_t stream) { return static_quant(params, enable_pdl, stream); });
}

inline void token_quant_entry(const Arg& in, double eps, const Arg& out, const Arg& scales,
                              bool gated, bool enable_pdl) {
  check_input_and_codes(in, out, gated);
  check_eps(in.op, eps);
  check_dtype(scales, DType::f32);
  check_row_scales(scales, in, out, 1);
  const RowView view = view_as_rows({in, out, scales}, false);
  if (view.rows.count == 0) return;
  TokenQuantParams params = {};
  params.tensors = quant_tensors(in, out, view, gated);
  params.scales = static_cast<float*>(data_of(scales.tensor));
  params.scale_strides = view.strides[2];
  params.eps = static_cast<float>(eps);
  launch_on(in, [&](cudaStream_t stream) { return token_quant(params, enable_pdl, stream); });
}

inline void group_quant_entry(const Arg& in, int64_t group_size, double eps, bool scale_ue8m0,
                              const Arg& out, const Arg& scales, bool gated, bool enable_pdl) {
  check_input_and_codes(in, out, gated);
  check_eps(in.op, eps);
  PRECAST_CHECK(group_size == 16 || group_size == 32 || group_size == 64 || group_size == 128,
                ValueError)
      << in.op << ": group_size must be 16, 32, 64 or 128, got " << group_size;
  const int64_t columns = out.tensor.size(-1);
  PRECAST_CHECK(columns % group_size == 0, ValueError)
      << in.what() << "'s last dimension must be a multiple of " << (gated ? "2 x " : "")
      << "group_size " << group_size << ", got " << in.tensor.size(-1);
  const bool packed = same_dtype(scales.tensor.dtype(), kInt32);
  PRECAST_CHECK(!packed || scale_ue8m0, ValueError)
      << scales.what() << " must be float32 unless scale_ue8m0 is true, got int32";
  if (!packed) check_dtype(scales, DType::f32);
  const int64_t groups = columns / group_size;
  check_row_scales(scales, in, out, packed ? (groups + 3) / 4 : groups);
  const RowView view = view_as_rows({in, out, scales}, false);
  if (view.rows.count == 0 || columns == 0) return;
  check_items(in, view, columns);
  GroupQuantParams params = {};
  params.tensors = quant_tensors(in, out, view, gated);
  params.scales = data_of(scales.tensor);
  params.scale_strides = view.strides[2];
  params.group_stride = scales.tensor.stride(-1);
  params.format = packed        ? ScaleFormat::exponents
                  : scale_ue8m0 ? ScaleFormat::powers_of_two
                                : ScaleFormat::numbers;
  params.group_size = static_cast<int>(group_size);
  params.eps = static_cast<float>(eps);
  launch_on(in, [&](cudaStream_t stream) { return group_quant(params, enable_pdl, stream); });
}

}  // namespace precast
