// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of the function between the two products of an expert.
#include "core/ffi_export.h"
#include "moe/expert_checks.h"
#include "precast/moe/expert_activation.cuh"

namespace precast {

// csrc/moe/expert_activation.cu
extern const DType expert_activation_dtype;
cudaError_t expert_activation(const ExpertActivationParams& params, ExpertOutput output,
                              bool enable_pdl, cudaStream_t stream);

namespace {

// Whether a function is one of those that there are.
bool is_function(int64_t number) {
  switch (static_cast<ExpertFunction>(number)) {
    case ExpertFunction::gelu:
    case ExpertFunction::relu:
    case ExpertFunction::silu:
    case ExpertFunction::swiglu:
    case ExpertFunction::geglu:
    case ExpertFunction::swiglu_bias:
    case ExpertFunction::relu2:
    case ExpertFunction::geglu_tanh:
    case ExpertFunction::identity:
      return true;
  }
  return false;
}

void expert_activation_entry(TensorView x, TensorView expert_offsets, TensorView row_experts,
                             int64_t activation_type, OptionalTensor bias,
                             OptionalTensor swiglu_alpha, OptionalTensor swiglu_beta,
                             OptionalTensor swiglu_limit, OptionalTensor scale,
                             OptionalTensor quant_scale, TensorView out, OptionalTensor out_scale,
                             bool enable_pdl) {
  const char* op = "expert_activation";
  const TensorMatcher match(op);
  const TensorMatch in = match(x, "x");
  const TensorMatch offsets = match(expert_offsets, "expert_offsets");
  const TensorMatch experts_of = match(row_experts, "row_experts");
  const TensorMatch to = match(out, "out");
  in.cuda().dtype(expert_activation_dtype);
  PRECAST_CHECK(is_function(activation_type), ValueError)
      << op << ": activation_type must be one of 0 to 6, 8 and 9, got " << activation_type;
  ExpertActivationParams params = {};
  params.function = static_cast<ExpertFunction>(activation_type);
  const int64_t parts = is_gated(params.function) ? 2 : 1;
  const bool is_scaled = out_scale.has_value();
  const int64_t multiple = is_scaled ? kExpertGroup : kExpertColumns;
  check_expert_matrix(in, parts * multiple, false);
  const int64_t rows = x.size(0), inputs = x.size(1), columns = inputs / parts;
  offsets.same_device(in).dtype(kInt32).rank(1, 1).contiguous();
  const int64_t experts = expert_offsets.size(0) - 1;
  PRECAST_CHECK(experts >= 0 && experts <= kMostExpertRows, ValueError)
      << op << ": expert_offsets must have at least one element, got shape [0]";
  experts_of.same_device(in).dtype(kInt32).shape({rows}).contiguous();
  params.bias = match.optional<void>(bias, "bias", [&](const TensorMatch& with) {
    const Arg& arg = with;
    with.same_device(in);
    PRECAST_CHECK(has_dtype(arg, DType::bf16) || has_dtype(arg, DType::f16), ValueError)
        << arg.what() << " must be bfloat16 or float16, got " << to_string(arg.tensor.dtype());
    params.bias_type = has_dtype(arg, DType::f16) ? DType::f16 : DType::bf16;
    with.shape({experts, inputs}).contiguous();
    if (arg.tensor.numel() > 0) with.aligned();
  });
  const auto of_experts = [&](const OptionalTensor& tensor, const char* name) {
    return match.optional<const float>(tensor, name, [&](const TensorMatch& numbers) {
      numbers.same_device(in).dtype(DType::f32).shape({experts}).contiguous();
    });
  };
  params.alpha = of_experts(swiglu_alpha, "swiglu_alpha");
  params.beta = of_experts(swiglu_beta, "swiglu_beta");
  params.limit = of_experts(swiglu_limit, "swiglu_limit");
  params.scale = of_experts(scale, "scale");
  params.quant_scale =
      match.optional<const float>(quant_scale, "quant_scale", [&](const TensorMatch& by) {
        const TensorView& t = static_cast<const Arg&>(by).tensor;
        by.same_device(in).dtype(DType::f32).rank(0, 1);
        params.quant_scale_is_each = t.ndim() == 1 && t.size(0) != 1;
        if (params.quant_scale_is_each) by.shape({experts});
        by.contiguous();
      });
  const bool is_codes = quant_scale.has_value();
  PRECAST_CHECK(!(is_codes && is_scaled), ValueError)
      << op << ": quant_scale must be None with out_scale, which the call computes";
  to.same_device(in).dtype(is_codes || is_scaled ? DType::e4m3 : expert_activation_dtype);
  check_expert_matrix(to, multiple, true);
  to.shape({rows, columns}).elements_apart();
  params.out_scale = match.optional<float>(out_scale, "out_scale", [&](const TensorMatch& scales) {
    const TensorView& t = static_cast<const Arg&>(scales).tensor;
    check_group_scales(scales, in, rows, columns);
    params.scale_row_stride = t.stride(0);
    params.scale_group_stride = t.stride(1);
  });
  check_written({TensorMemory(to), {op, "out_scale", out_scale}},
                {TensorMemory(in),
                 TensorMemory(offsets),
                 TensorMemory(experts_of),
                 {op, "bias", bias},
                 {op, "swiglu_alpha", swiglu_alpha},
                 {op, "swiglu_beta", swiglu_beta},
                 {op, "swiglu_limit", swiglu_limit},
                 {op, "scale", scale},
                 {op, "quant_scale", quant_scale}});
  check_expert_items(in, rows, columns, kExpertColumns);
  if (rows == 0 || columns == 0 || experts == 0) return;

  params.x = data_of(x);
  params.offsets = offsets.data<const int32_t>();
  params.row_experts = experts_of.data<const int32_t>();
  params.out = data_of(out);
  params.x_stride = x.stride(0);
  params.out_stride = out.stride(0);
  params.rows = static_cast<uint32_t>(rows);
  params.experts = static_cast<int>(experts);
  params.columns = columns;
  const ExpertOutput output = is_scaled  ? ExpertOutput::scaled_codes
                              : is_codes ? ExpertOutput::codes
                                         : ExpertOutput::numbers;
  launch_on(in, [&](cudaStream_t stream) {
    return expert_activation(params, output, enable_pdl, stream);
  });
}

}  // namespace

PRECAST_EXPORT(expert_activation, expert_activation_entry)

}  // namespace precast
