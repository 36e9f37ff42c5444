// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of the gated norms.
#include "core/ffi_export.h"
#include "norm/norm_checks.h"
#include "precast/norm/gated_residual.cuh"

namespace precast {

// csrc/norm/gated_residual.cu
extern const DType gated_residual_dtype;
cudaError_t gated_residual(const GatedResidualParams& params, bool enable_pdl, cudaStream_t stream);

namespace {

// Checks what both functions take, and sets its parameters. `weight` and `alpha` may be missing.
GatedResidualParams params_of(const Arg& in, const TensorView& residual, const char* weight_name,
                              const OptionalTensor& weight, const OptionalTensor& alpha,
                              const TensorView& beta, const Arg& out) {
  const char* op = in.op;
  TensorMatch(in).cuda().dtype(gated_residual_dtype).rank(2, 2).unit_stride();
  const int64_t rows = in.tensor.size(0), hidden = in.tensor.size(1);
  PRECAST_CHECK(rows <= 0x7fffffff && hidden <= kMaxHidden, ValueError)
      << in.what() << " must have at most 2^31 - 1 rows and " << kMaxHidden << " columns, got "
      << to_string(in.tensor.shape());
  const TensorMatcher match(op);
  const Arg from = match(residual, "residual");
  TensorMatch(from).same_device(in).dtype(DType::f32).shape_of(in).unit_stride();
  GatedResidualParams params = {};
  params.weight = match.optional<void>(weight, weight_name, [&](const TensorMatch& vector) {
    vector.same_device(in).dtype(gated_residual_dtype).shape({hidden}).contiguous();
  });
  params.alpha = match.optional<const float>(alpha, "alpha", [&](const TensorMatch& vector) {
    vector.same_device(in).dtype(DType::f32).shape({hidden}).contiguous();
  });
  const TensorMatch by = match(beta, "beta");
  by.same_device(in).dtype(DType::f32).shape({hidden}).contiguous();
  TensorMatch(out).same_device(in).dtype(DType::f32).shape_of(from).unit_stride_output();
  params.branch = data_of(in.tensor);
  params.residual = static_cast<const float*>(data_of(residual));
  params.beta = by.data<const float>();
  params.out = static_cast<float*>(data_of(out.tensor));
  params.branch_stride = in.tensor.stride(0);
  params.residual_stride = residual.stride(0);
  params.out_stride = out.tensor.stride(0);
  params.rows = static_cast<uint32_t>(rows);
  params.hidden = static_cast<int>(hidden);
  return params;
}

float not_nan(const char* op, const char* name, double value) {
  check_not_nan(op, name, value);
  return static_cast<float>(value);
}

float at_least_zero(const char* op, const char* name, double value) {
  check_at_least(op, name, value, 0.0);
  return static_cast<float>(value);
}

void gated_residual_rmsnorm_entry(TensorView branch, TensorView residual, OptionalTensor weight,
                                  TensorView alpha, TensorView beta, double eps, double gain_center,
                                  TensorView out, bool enable_pdl) {
  const char* op = "gated_residual_rmsnorm";
  const Arg in = PRECAST_ARG(op, branch);
  const Arg from = PRECAST_ARG(op, residual);
  const Arg to = PRECAST_ARG(op, out);
  check_cuda(in);
  const float checked_eps = at_least_zero(op, "eps", eps);
  const float bias = not_nan(op, "gain_center", gain_center);
  GatedResidualParams params = params_of(in, residual, "weight", weight, alpha, beta, to);
  params.eps = checked_eps;
  params.weight_bias = bias;
  check_norm_output(to, from,
                    {in, {op, "weight", weight}, PRECAST_ARG(op, alpha), PRECAST_ARG(op, beta)});
  if (params.rows == 0 || params.hidden == 0) return;
  launch_on(in, [&](cudaStream_t stream) { return gated_residual(params, enable_pdl, stream); });
}

void gated_residual_next_rmsnorm_entry(TensorView branch, TensorView residual,
                                       TensorView next_weight, OptionalTensor alpha,
                                       double alpha_value, TensorView beta, double post_eps,
                                       double next_eps, double next_gain_center,
                                       TensorView residual_out, TensorView ffn_input,
                                       OptionalTensor post_weight, double post_gain_center,
                                       bool enable_pdl) {
  const char* op = "gated_residual_next_rmsnorm";
  const Arg in = PRECAST_ARG(op, branch);
  const Arg from = PRECAST_ARG(op, residual);
  const Arg by = PRECAST_ARG(op, next_weight);
  const Arg to = PRECAST_ARG(op, residual_out);
  const Arg next = PRECAST_ARG(op, ffn_input);
  check_cuda(in);
  const float value = not_nan(op, "alpha", alpha_value);
  const float eps = at_least_zero(op, "post_eps", post_eps);
  const float second_eps = at_least_zero(op, "next_eps", next_eps);
  const float next_bias = not_nan(op, "next_gain_center", next_gain_center);
  const float bias = not_nan(op, "post_gain_center", post_gain_center);
  GatedResidualParams params = params_of(in, residual, "post_weight", post_weight, alpha, beta, to);
  check_norm_weight(by, in, gated_residual_dtype);
  TensorMatch(next).same_device(in).dtype(gated_residual_dtype).shape_of(in).unit_stride_output();
  params.alpha_value = value;
  params.eps = eps;
  params.weight_bias = bias;
  params.next_weight = data_of(next_weight);
  params.next = data_of(ffn_input);
  params.next_stride = ffn_input.stride(0);
  params.next_eps = second_eps;
  params.next_weight_bias = next_bias;
  const TensorMemory vectors[] = {{op, "next_weight", next_weight},
                                  {op, "alpha", alpha},
                                  {op, "beta", beta},
                                  {op, "post_weight", post_weight}};
  check_norm_output(to, from, {in, vectors[0], vectors[1], vectors[2], vectors[3]});
  check_norm_output(next, in, {from, to, vectors[0], vectors[1], vectors[2], vectors[3]});
  if (params.rows == 0 || params.hidden == 0) return;
  launch_on(in, [&](cudaStream_t stream) { return gated_residual(params, enable_pdl, stream); });
}

}  // namespace

PRECAST_EXPORT(gated_residual_rmsnorm, gated_residual_rmsnorm_entry)
PRECAST_EXPORT(gated_residual_next_rmsnorm, gated_residual_next_rmsnorm_entry)

}  // namespace precast
