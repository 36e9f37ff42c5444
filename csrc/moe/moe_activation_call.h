// SPDX-License-Identifier: Apache-2.0
// What both bindings of moe_activation do: that of the kernels in CUDA and that in CuTe DSL.
#pragma once

#include "core/ffi_export.h"
#include "core/number_checks.h"
#include "moe/expert_checks.h"
#include "precast/moe/moe_activation.cuh"

namespace precast {

// Whether a function is one of those that there are.
PRECAST_ONE_COPY bool is_function(int64_t number) {
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

// The arguments.
struct MoeActivationCall {
  const TensorView& input;
  const OptionalTensor& row_experts;
  const OptionalTensor& expert_offsets;
  int64_t activation_type;
  const OptionalTensor& bias;
  const OptionalTensor& swiglu_alpha;
  const OptionalTensor& swiglu_beta;
  const OptionalTensor& swiglu_limit;
  const OptionalTensor& scale;
  const OptionalTensor& quant_scale;
  bool gate_first;
  double eps;
  const TensorView& out;
  const OptionalTensor& out_scale;
};

// Checks the arguments and calls launch(params, output, stream), unless there is nothing to write.
template <typename Launch>
void moe_activation_call(DType dtype, const MoeActivationCall& call, const Launch& launch) {
  const char* op = "moe_activation";
  const TensorMatcher match(op);
  const TensorMatch in = match(call.input, "input");
  const TensorMatch to = match(call.out, "out");
  in.cuda().dtype(dtype);
  PRECAST_CHECK(is_function(call.activation_type), ValueError)
      << op << ": activation_type must be one of 0 to 6, 8 and 9, got " << call.activation_type;
  MoeActivationParams params = {};
  params.function = static_cast<ExpertFunction>(call.activation_type);
  const bool has_scales = call.out_scale.has_value();
  const int64_t parts = is_gated(params.function) ? 2 : 1;
  const int64_t multiple = has_scales ? kExpertGroup : kExpertColumns;
  check_expert_matrix(in, parts * multiple, false);
  const int64_t rows = call.input.size(0), inputs = call.input.size(1), columns = inputs / parts;
  check_at_least(op, "eps", call.eps, 1e-30);  // a smaller scale has no finite reciprocal
  Dim starts("experts + 1", 1), experts("experts");
  params.offsets =
      match.optional<const int32_t>(call.expert_offsets, "expert_offsets", [&](const auto& of) {
        of.same_device(in).dtype(kInt32).shape({starts}).contiguous();
        Extent(experts).bind(int64_t(starts) - 1);
      });
  params.row_experts = match.optional<const int32_t>(
      call.row_experts, "row_experts",
      [&](const auto& of) { of.same_device(in).dtype(kInt32).shape({rows}).contiguous(); });
  params.bias = match.optional<void>(call.bias, "bias", [&](const TensorMatch& with) {
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
  params.alpha = of_experts(call.swiglu_alpha, "swiglu_alpha");
  params.beta = of_experts(call.swiglu_beta, "swiglu_beta");
  params.limit = of_experts(call.swiglu_limit, "swiglu_limit");
  params.scale = of_experts(call.scale, "scale");
  const bool has_codes = call.quant_scale.has_value();
  params.quant_scale =
      match.optional<const float>(call.quant_scale, "quant_scale", [&](const TensorMatch& by) {
        const Arg& arg = by;
        by.same_device(in).dtype(DType::f32);
        params.quant_scale_is_each = arg.tensor.numel() != 1;
        if (params.quant_scale_is_each) by.shape({experts});
        by.contiguous();
      });
  PRECAST_CHECK(!has_codes || !has_scales, ValueError)
      << op << ": out_scale must not be given with quant_scale; pass one of them";
  const ExpertOutput output = has_scales  ? ExpertOutput::scaled_codes
                              : has_codes ? ExpertOutput::codes
                                          : ExpertOutput::numbers;
  const bool differs = params.bias != nullptr || params.alpha != nullptr ||
                       params.beta != nullptr || params.limit != nullptr ||
                       params.scale != nullptr || params.quant_scale_is_each;
  PRECAST_CHECK(!differs || call.row_experts.has_value(), ValueError)
      << op << ": row_experts must be given with numbers or biases of experts, got None";
  to.same_device(in).dtype(output == ExpertOutput::numbers ? dtype : DType::e4m3);
  check_expert_matrix(to, multiple, true);
  to.shape({rows, columns}).elements_apart();
  params.out_scale =
      match.optional<float>(call.out_scale, "out_scale", [&](const TensorMatch& scales) {
        const Arg& arg = scales;
        scales.same_device(in).dtype(DType::f32).shape({columns / kExpertGroup, rows});
        // Without rows, groups may have any strides.
        if (arg.tensor.numel() > 0) scales.unit_stride_output();
        scales.elements_apart();
        params.scale_stride = arg.tensor.stride(0);
      });
  check_written({TensorMemory(to), {op, "out_scale", call.out_scale}},
                {TensorMemory(in),
                 {op, "expert_offsets", call.expert_offsets},
                 {op, "row_experts", call.row_experts},
                 {op, "quant_scale", call.quant_scale},
                 {op, "bias", call.bias},
                 {op, "swiglu_alpha", call.swiglu_alpha},
                 {op, "swiglu_beta", call.swiglu_beta},
                 {op, "swiglu_limit", call.swiglu_limit},
                 {op, "scale", call.scale}});
  check_expert_items(in, rows, columns, kExpertColumns);
  // Without experts, no row belongs to one.
  if (rows == 0 || columns == 0 || int64_t(experts) == 0) return;

  params.input = data_of(call.input);
  params.out = data_of(call.out);
  params.input_stride = call.input.stride(0);
  params.out_stride = call.out.stride(0);
  params.columns = columns;
  params.gate = call.gate_first || parts == 1 ? 0 : columns;
  // Where nothing says how many there are, nothing is read of an expert.
  params.experts = int64_t(experts) > 0 ? static_cast<int>(experts) : 0;
  params.eps = static_cast<float>(call.eps);
  params.items = plan_items(static_cast<uint32_t>(rows), columns, kExpertColumns).items;
  launch_on(in, [&](cudaStream_t stream) { return launch(params, output, stream); });
}

}  // namespace precast
