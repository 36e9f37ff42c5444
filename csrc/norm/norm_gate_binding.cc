// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of the norms with an activation.
#include "core/ffi_export.h"
#include "norm/norm_checks.h"
#include "precast/norm/rmsnorm_gate.cuh"

namespace precast {

// csrc/norm/norm_gate.cu
extern const DType norm_gate_dtype;
extern const DType norm_gate_dtype_out;
cudaError_t fused_rmsnorm_silu(const RmsNormGateParams& params, bool enable_pdl,
                               cudaStream_t stream);
cudaError_t rmsnorm_sigmoid_gate(const RmsNormGateParams& params, bool enable_pdl,
                                 cudaStream_t stream);

namespace {

void fused_rmsnorm_silu_export(TensorView input, TensorView weight, double eps, TensorView out,
                               OptionalTensor block_scale, bool enable_pdl) {
  const char* op = "fused_rmsnorm_silu";
  const Arg in = PRECAST_ARG(op, input);
  const Arg to = PRECAST_ARG(op, out);
  const Arg by = PRECAST_ARG(op, weight);
  check_norm_input(in, norm_gate_dtype, eps);
  check_norm_weight(by, in, norm_gate_dtype);
  check_norm_peer(to, in, norm_gate_dtype_out);
  // It belongs to four-bit output, for which there is no module.
  PRECAST_CHECK(!block_scale.has_value(), ValueError)
      << op << ": block_scale must be None, as out is " << to_string(out.dtype())
      << ", which has no scales; it is for NVFP4 output, which is not implemented";
  const RowView view = view_as_rows({in, to}, false);
  if (view.rows.count == 0 || view.columns == 0) return;
  check_norm_output(to, in, {by});

  RmsNormGateParams params = {};
  set_rms_rows(params, in, &weight, view, eps, 0.0f);
  params.out = data_of(out);
  params.out_strides = view.strides[1];
  launch_on(in,
            [&](cudaStream_t stream) { return fused_rmsnorm_silu(params, enable_pdl, stream); });
}

void rmsnorm_sigmoid_gate_export(TensorView input, TensorView gate, double eps,
                                 OptionalTensor weight, OptionalTensor out, bool enable_pdl) {
  const char* op = "rmsnorm_sigmoid_gate";
  const TensorView out_view = out.has_value() ? out.value() : input;
  const Arg in = PRECAST_ARG(op, input);
  const Arg by = PRECAST_ARG(op, gate);
  const Arg to = {op, out.has_value() ? "out" : "input", out_view};
  check_norm_input(in, norm_gate_dtype, eps);
  check_norm_peer(by, in, norm_gate_dtype, false);
  TensorView weight_view = input;
  if (weight.has_value()) {
    weight_view = weight.value();
    check_norm_weight({op, "weight", weight_view}, in, norm_gate_dtype);
  }
  check_norm_peer(to, in, norm_gate_dtype_out);
  const RowView view = view_as_rows({in, by, to}, false);
  if (view.rows.count == 0 || view.columns == 0) return;
  check_norm_output(to, in, {by, {op, "weight", weight}});

  RmsNormGateParams params = {};
  set_rms_rows(params, in, weight.has_value() ? &weight_view : nullptr, view, eps, 0.0f);
  params.gate = data_of(gate);
  params.out = data_of(out_view);
  params.gate_strides = view.strides[1];
  params.out_strides = view.strides[2];
  launch_on(in,
            [&](cudaStream_t stream) { return rmsnorm_sigmoid_gate(params, enable_pdl, stream); });
}

}  // namespace

PRECAST_EXPORT(fused_rmsnorm_silu, fused_rmsnorm_silu_export)
PRECAST_EXPORT(rmsnorm_sigmoid_gate, rmsnorm_sigmoid_gate_export)

}  // namespace precast
