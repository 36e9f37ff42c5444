// SPDX-License-Identifier: Apache-2.0
// The checks that the bindings of the norms share.
#pragma once

#include "core/number_checks.h"
#include "core/tensor_matcher.h"
#include "precast/norm/rmsnorm_rows.cuh"

namespace precast {

constexpr int64_t kMaxHidden = int64_t(1) << 30;  // the kernels compute columns in 32 bits

// Checks the rows, or heads of rows, to be normalised.
PRECAST_ONE_COPY void check_norm_input(const Arg& in, DType dtype, double eps) {
  check_at_least(in.op, "eps", eps, 0.0);
  TensorMatch(in).cuda().dtype(dtype).rank(2, 3);
  PRECAST_CHECK(in.tensor.size(-1) <= kMaxHidden, ValueError)
      << in.what() << "'s last dimension must be at most " << kMaxHidden << ", got "
      << in.tensor.size(-1);
  check_columns(in, false);
}

// Checks a tensor with the shape of `in`, which may be an output.
PRECAST_ONE_COPY void check_norm_peer(const Arg& arg, const Arg& in, DType dtype,
                                      bool is_output = true) {
  TensorMatch(arg).same_device(in).dtype(dtype).shape_of(in);
  check_columns(arg, is_output);
}

PRECAST_ONE_COPY void check_norm_weight(const Arg& weight, const Arg& in, DType dtype) {
  TensorMatch(weight).same_device(in).dtype(dtype).shape({in.tensor.size(-1)}).contiguous();
}

// An input or output of LayerNorm.
PRECAST_ONE_COPY void check_layernorm_contiguous(const Arg& arg) {
  PRECAST_CHECK(is_contiguous(arg.tensor), DtypeRuntimeError)
      << arg.what() << " must be contiguous, got strides " << to_string(arg.tensor.strides())
      << "; call .contiguous()";
}

// Checks LayerNorm's input and parameters. It throws the exceptions that its callers expect.
PRECAST_ONE_COPY void check_layernorm(const Arg& in, std::initializer_list<Arg> parameters,
                                      DType dtype, double eps) {
  check_cuda(in);
  PRECAST_CHECK(has_dtype(in, dtype), DtypeRuntimeError)
      << in.op << ": input must be bfloat16 (or float16, with the module of that type), got "
      << to_string(in.tensor.dtype());
  check_layernorm_contiguous(in);
  check_norm_input(in, dtype, eps);
  for (const Arg& arg : parameters) {
    check_same_device(arg, in);
    PRECAST_CHECK(has_dtype(arg, DType::f32), DtypeRuntimeError)
        << arg.what() << " must be float32, got " << to_string(arg.tensor.dtype());
    check_vector(arg, in.tensor.size(-1));
  }
}

// Checks an output that may be the input, but no other tensor that is read.
PRECAST_ONE_COPY void check_norm_output(const Arg& out, const Arg& in,
                                        std::initializer_list<TensorMemory> others) {
  const TensorMemory memory(out);
  check_elements_apart(memory);
  check_same_or_apart(memory, in);
  check_written({memory}, others);
}

// Sets the parameters that all RMS norms have.
inline void set_rms_rows(RmsNormRowsParams& params, const Arg& in, const TensorView* weight,
                         const RowView& view, double eps, float weight_bias) {
  params.input = data_of(in.tensor);
  params.weight = weight == nullptr ? nullptr : data_of(*weight);
  params.input_strides = view.strides[0];
  params.rows = view.rows;
  params.hidden = static_cast<int>(view.columns);
  params.eps = static_cast<float>(eps);
  params.weight_bias = weight_bias;
}

}  // namespace precast
