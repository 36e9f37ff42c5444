// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of the function between the two products of an expert.
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

// What all functions take.
struct ExpertActivationCall {
  const TensorView& x;
  const TensorView& expert_offsets;
  const TensorView& row_experts;
  int64_t activation_type;
  const OptionalTensor& bias;
  const OptionalTensor& swiglu_alpha;
  const OptionalTensor& swiglu_beta;
  const OptionalTensor& swiglu_limit;
  const OptionalTensor& scale;
  const TensorView& out;
};

// Checks a call and launches it. `quant_scale` and `out_scale` are null unless the output is codes
// of that kind.
void run(const char* op, const ExpertActivationCall& call, const TensorView* quant_scale,
         const TensorView* out_scale, bool enable_pdl) {
  const TensorMatcher match(op);
  const TensorMatch in = match(call.x, "x");
  const TensorMatch offsets = match(call.expert_offsets, "expert_offsets");
  const TensorMatch experts_of = match(call.row_experts, "row_experts");
  const TensorMatch to = match(call.out, "out");
  in.cuda().dtype(expert_activation_dtype);
  PRECAST_CHECK(is_function(call.activation_type), ValueError)
      << op << ": activation_type must be one of 0 to 6, 8 and 9, got " << call.activation_type;
  ExpertActivationParams params = {};
  params.function = static_cast<ExpertFunction>(call.activation_type);
  const int64_t parts = is_gated(params.function) ? 2 : 1;
  const int64_t multiple = out_scale != nullptr ? kExpertGroup : kExpertColumns;
  check_expert_matrix(in, parts * multiple, false);
  const int64_t rows = call.x.size(0), inputs = call.x.size(1), columns = inputs / parts;
  offsets.same_device(in).dtype(kInt32).rank(1, 1).contiguous();
  const int64_t experts = call.expert_offsets.size(0) - 1;
  PRECAST_CHECK(experts >= 0 && experts <= kMostExpertRows, ValueError)
      << op << ": expert_offsets must have at least one element, got shape [0]";
  experts_of.same_device(in).dtype(kInt32).shape({rows}).contiguous();
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
  ExpertOutput output = ExpertOutput::numbers;
  const TensorMemory codes_by = quant_scale != nullptr
                                    ? TensorMemory(op, "quant_scale", *quant_scale)
                                    : TensorMemory(op, "quant_scale", nullptr, 0);
  const TensorMemory scales_to = out_scale != nullptr ? TensorMemory(op, "out_scale", *out_scale)
                                                      : TensorMemory(op, "out_scale", nullptr, 0);
  if (quant_scale != nullptr) {
    output = ExpertOutput::codes;
    const TensorMatch by = match(*quant_scale, "quant_scale");
    by.same_device(in).dtype(DType::f32);
    params.quant_scale_is_each = quant_scale->numel() != 1;
    if (params.quant_scale_is_each) by.shape({experts});
    by.contiguous();
    params.quant_scale = by.data<const float>();
  }
  to.same_device(in).dtype(output == ExpertOutput::numbers && out_scale == nullptr
                               ? expert_activation_dtype
                               : DType::e4m3);
  check_expert_matrix(to, multiple, true);
  to.shape({rows, columns}).elements_apart();
  if (out_scale != nullptr) {
    output = ExpertOutput::scaled_codes;
    const TensorMatch scales = match(*out_scale, "out_scale");
    check_group_scales(scales, in, rows, columns);
    params.out_scale = scales.data<float>();
    params.scale_row_stride = out_scale->stride(0);
    params.scale_group_stride = out_scale->stride(1);
  }
  check_written({TensorMemory(to), scales_to}, {TensorMemory(in),
                                                TensorMemory(offsets),
                                                TensorMemory(experts_of),
                                                codes_by,
                                                {op, "bias", call.bias},
                                                {op, "swiglu_alpha", call.swiglu_alpha},
                                                {op, "swiglu_beta", call.swiglu_beta},
                                                {op, "swiglu_limit", call.swiglu_limit},
                                                {op, "scale", call.scale}});
  check_expert_items(in, rows, columns, kExpertColumns);
  if (rows == 0 || columns == 0 || experts == 0) return;

  params.x = data_of(call.x);
  params.offsets = offsets.data<const int32_t>();
  params.row_experts = experts_of.data<const int32_t>();
  params.out = data_of(call.out);
  params.x_stride = call.x.stride(0);
  params.out_stride = call.out.stride(0);
  params.rows = static_cast<uint32_t>(rows);
  params.experts = static_cast<int>(experts);
  params.columns = columns;
  launch_on(in, [&](cudaStream_t stream) {
    return expert_activation(params, output, enable_pdl, stream);
  });
}

void expert_activation_entry(TensorView x, TensorView expert_offsets, TensorView row_experts,
                             int64_t activation_type, OptionalTensor bias,
                             OptionalTensor swiglu_alpha, OptionalTensor swiglu_beta,
                             OptionalTensor swiglu_limit, OptionalTensor scale, TensorView out,
                             bool enable_pdl) {
  run("expert_activation",
      {x, expert_offsets, row_experts, activation_type, bias, swiglu_alpha, swiglu_beta,
       swiglu_limit, scale, out},
      nullptr, nullptr, enable_pdl);
}

void expert_activation_quant_entry(TensorView x, TensorView expert_offsets, TensorView row_experts,
                                   TensorView quant_scale, int64_t activation_type,
                                   OptionalTensor bias, OptionalTensor swiglu_alpha,
                                   OptionalTensor swiglu_beta, OptionalTensor swiglu_limit,
                                   OptionalTensor scale, TensorView out, bool enable_pdl) {
  run("expert_activation_quant",
      {x, expert_offsets, row_experts, activation_type, bias, swiglu_alpha, swiglu_beta,
       swiglu_limit, scale, out},
      &quant_scale, nullptr, enable_pdl);
}

void expert_activation_block_quant_entry(TensorView x, TensorView expert_offsets,
                                         TensorView row_experts, int64_t activation_type,
                                         OptionalTensor bias, OptionalTensor swiglu_alpha,
                                         OptionalTensor swiglu_beta, OptionalTensor swiglu_limit,
                                         OptionalTensor scale, TensorView out, TensorView out_scale,
                                         bool enable_pdl) {
  run("expert_activation_block_quant",
      {x, expert_offsets, row_experts, activation_type, bias, swiglu_alpha, swiglu_beta,
       swiglu_limit, scale, out},
      nullptr, &out_scale, enable_pdl);
}

}  // namespace

PRECAST_EXPORT(expert_activation, expert_activation_entry)
PRECAST_EXPORT(expert_activation_quant, expert_activation_quant_entry)
PRECAST_EXPORT(expert_activation_block_quant, expert_activation_block_quant_entry)

}  // namespace precast
