// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of the norms.
#include "core/ffi_export.h"
#include "norm/norm_checks.h"
#include "precast/norm/layernorm.cuh"
#include "precast/norm/rmsnorm.cuh"

namespace precast {

// csrc/norm/norm.cu
extern const DType norm_dtype;
cudaError_t rmsnorm(const RmsNormParams& params, bool enable_pdl, cudaStream_t stream);
cudaError_t fused_add_rmsnorm(const RmsNormParams& params, bool enable_pdl, cudaStream_t stream);
cudaError_t layernorm(const LayerNormParams& params, bool enable_pdl, cudaStream_t stream);

namespace {

void rmsnorm_entry(const char* op, const TensorView& input, const TensorView& weight, double eps,
                   const TensorView& out, float weight_bias, bool enable_pdl) {
  const Arg in = PRECAST_ARG(op, input);
  const Arg to = PRECAST_ARG(op, out);
  const Arg by = PRECAST_ARG(op, weight);
  check_norm_input(in, norm_dtype, eps);
  check_norm_weight(by, in, norm_dtype);
  check_norm_peer(to, in, norm_dtype);
  const RowView view = view_as_rows({in, to}, false);
  if (view.rows.count == 0 || view.columns == 0) return;
  check_norm_output(to, in, {by});

  RmsNormParams params = {};
  set_rms_rows(params, in, &weight, view, eps, weight_bias);
  params.out = data_of(out);
  params.out_strides = view.strides[1];
  launch_on(in, [&](cudaStream_t stream) { return rmsnorm(params, enable_pdl, stream); });
}

void fused_add_entry(const char* op, const TensorView& input, const TensorView& residual,
                     const TensorView& weight, double eps, float weight_bias, bool enable_pdl) {
  const Arg in = PRECAST_ARG(op, input);
  const Arg added = PRECAST_ARG(op, residual);
  const Arg by = PRECAST_ARG(op, weight);
  check_norm_input(in, norm_dtype, eps);
  check_columns(in, true);
  check_norm_peer(added, in, norm_dtype);
  check_norm_weight(by, in, norm_dtype);
  const RowView view = view_as_rows({in, added}, false);
  if (view.rows.count == 0 || view.columns == 0) return;
  const TensorMemory input_memory(in), residual_memory(added);
  check_elements_apart(input_memory);
  check_elements_apart(residual_memory);
  check_written({input_memory, residual_memory}, {by});

  RmsNormParams params = {};
  set_rms_rows(params, in, &weight, view, eps, weight_bias);
  params.out = data_of(input);
  params.residual = data_of(residual);
  params.out_strides = view.strides[0];
  params.residual_strides = view.strides[1];
  launch_on(in, [&](cudaStream_t stream) { return fused_add_rmsnorm(params, enable_pdl, stream); });
}

void rmsnorm_export(TensorView input, TensorView weight, double eps, TensorView out,
                    bool enable_pdl) {
  rmsnorm_entry("rmsnorm", input, weight, eps, out, 0.0f, enable_pdl);
}

void gemma_rmsnorm_export(TensorView input, TensorView weight, double eps, TensorView out,
                          bool enable_pdl) {
  rmsnorm_entry("gemma_rmsnorm", input, weight, eps, out, 1.0f, enable_pdl);
}

void fused_add_rmsnorm_export(TensorView input, TensorView residual, TensorView weight, double eps,
                              bool enable_pdl) {
  fused_add_entry("fused_add_rmsnorm", input, residual, weight, eps, 0.0f, enable_pdl);
}

void gemma_fused_add_rmsnorm_export(TensorView input, TensorView residual, TensorView weight,
                                    double eps, bool enable_pdl) {
  fused_add_entry("gemma_fused_add_rmsnorm", input, residual, weight, eps, 1.0f, enable_pdl);
}

void layernorm_export(TensorView input, TensorView gemma, TensorView beta, double eps,
                      TensorView out, bool enable_pdl) {
  const char* op = "layernorm";
  const Arg in = PRECAST_ARG(op, input);
  const Arg to = PRECAST_ARG(op, out);
  const Arg by = PRECAST_ARG(op, gemma);
  const Arg plus = PRECAST_ARG(op, beta);
  check_layernorm(in, {by, plus}, norm_dtype, eps);
  check_norm_peer(to, in, norm_dtype);
  check_layernorm_contiguous(to);
  const RowView view = view_as_rows({in, to}, false);
  if (view.rows.count == 0 || view.columns == 0) return;
  check_norm_output(to, in, {by, plus});

  LayerNormParams params = {};
  params.input = data_of(input);
  params.gamma = static_cast<const float*>(data_of(gemma));
  params.beta = static_cast<const float*>(data_of(beta));
  params.out = data_of(out);
  params.rows = view.rows.count;
  params.hidden = static_cast<int>(view.columns);
  params.eps = static_cast<float>(eps);
  launch_on(in, [&](cudaStream_t stream) { return layernorm(params, enable_pdl, stream); });
}

}  // namespace

PRECAST_EXPORT(rmsnorm, rmsnorm_export)
PRECAST_EXPORT(gemma_rmsnorm, gemma_rmsnorm_export)
PRECAST_EXPORT(fused_add_rmsnorm, fused_add_rmsnorm_export)
PRECAST_EXPORT(gemma_fused_add_rmsnorm, gemma_fused_add_rmsnorm_export)
PRECAST_EXPORT(layernorm, layernorm_export)

}  // namespace precast
