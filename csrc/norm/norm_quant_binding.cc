// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of the norms with fp8 output by a given scale.
#include "core/ffi_export.h"
#include "norm/norm_checks.h"
#include "precast/norm/layernorm.cuh"
#include "precast/norm/rmsnorm_quant.cuh"

namespace precast {

// csrc/norm/norm_quant.cu
extern const DType norm_quant_dtype;
extern const DType norm_quant_dtype_out;
cudaError_t rmsnorm_quant(const RmsNormQuantParams& params, bool enable_pdl, cudaStream_t stream);
cudaError_t fused_add_rmsnorm_quant(const RmsNormQuantParams& params, bool enable_pdl,
                                    cudaStream_t stream);
cudaError_t layernorm_quant(const LayerNormParams& params, bool enable_pdl, cudaStream_t stream);

namespace {

// The output has another type than the inputs, so it must not be one of them.
void check_quantized_output(const Arg& to, std::initializer_list<TensorMemory> inputs) {
  const TensorMemory memory(to);
  check_elements_apart(memory);
  check_written({memory}, inputs);
}

void rmsnorm_quant_export(TensorView out, TensorView input, TensorView weight, TensorView scale,
                          double eps, bool enable_pdl) {
  const char* op = "rmsnorm_quant";
  const Arg to = PRECAST_ARG(op, out);
  const Arg in = PRECAST_ARG(op, input);
  const Arg by = PRECAST_ARG(op, weight);
  const Arg number = PRECAST_ARG(op, scale);
  check_cuda(to);
  check_norm_input(in, norm_quant_dtype, eps);
  check_norm_weight(by, in, norm_quant_dtype);
  check_norm_peer(to, in, norm_quant_dtype_out);
  check_one_number(number, in);
  const RowView view = view_as_rows({in, to}, false);
  if (view.rows.count == 0 || view.columns == 0) return;
  check_quantized_output(to, {in, by, number});

  RmsNormQuantParams params = {};
  set_rms_rows(params, in, &weight, view, eps, 0.0f);
  params.out = data_of(out);
  params.scale = static_cast<const float*>(data_of(scale));
  params.out_strides = view.strides[1];
  launch_on(in, [&](cudaStream_t stream) { return rmsnorm_quant(params, enable_pdl, stream); });
}

void fused_add_rmsnorm_quant_export(TensorView out, TensorView input, TensorView residual,
                                    TensorView weight, TensorView scale, double eps,
                                    bool enable_pdl) {
  const char* op = "fused_add_rmsnorm_quant";
  const Arg to = PRECAST_ARG(op, out);
  const Arg in = PRECAST_ARG(op, input);
  const Arg added = PRECAST_ARG(op, residual);
  const Arg by = PRECAST_ARG(op, weight);
  const Arg number = PRECAST_ARG(op, scale);
  check_cuda(to);
  check_norm_input(in, norm_quant_dtype, eps);
  check_norm_peer(added, in, norm_quant_dtype);
  check_norm_weight(by, in, norm_quant_dtype);
  check_norm_peer(to, in, norm_quant_dtype_out);
  check_one_number(number, in);
  const RowView view = view_as_rows({in, added, to}, false);
  if (view.rows.count == 0 || view.columns == 0) return;
  const TensorMemory residual_memory(added);
  check_elements_apart(residual_memory);
  check_written({residual_memory}, {in, by, number});
  check_quantized_output(to, {in, residual_memory, by, number});

  RmsNormQuantParams params = {};
  set_rms_rows(params, in, &weight, view, eps, 0.0f);
  params.residual = data_of(residual);
  params.out = data_of(out);
  params.scale = static_cast<const float*>(data_of(scale));
  params.residual_strides = view.strides[1];
  params.out_strides = view.strides[2];
  launch_on(
      in, [&](cudaStream_t stream) { return fused_add_rmsnorm_quant(params, enable_pdl, stream); });
}

void layernorm_quant_export(TensorView out, TensorView input, TensorView gemma, TensorView beta,
                            TensorView scale, double eps, bool enable_pdl) {
  const char* op = "layernorm_quant";
  const Arg to = PRECAST_ARG(op, out);
  const Arg in = PRECAST_ARG(op, input);
  const Arg by = PRECAST_ARG(op, gemma);
  const Arg plus = PRECAST_ARG(op, beta);
  const Arg number = PRECAST_ARG(op, scale);
  check_cuda(to);
  check_layernorm(in, {by, plus}, norm_quant_dtype, eps);
  check_norm_peer(to, in, norm_quant_dtype_out);
  check_layernorm_contiguous(to);
  check_one_number(number, in);
  const RowView view = view_as_rows({in, to}, false);
  if (view.rows.count == 0 || view.columns == 0) return;
  check_quantized_output(to, {in, by, plus, number});

  LayerNormParams params = {};
  params.input = data_of(input);
  params.gamma = static_cast<const float*>(data_of(gemma));
  params.beta = static_cast<const float*>(data_of(beta));
  params.out = data_of(out);
  params.rows = view.rows.count;
  params.hidden = static_cast<int>(view.columns);
  params.eps = static_cast<float>(eps);
  params.scale = static_cast<const float*>(data_of(scale));
  launch_on(in, [&](cudaStream_t stream) { return layernorm_quant(params, enable_pdl, stream); });
}

}  // namespace

PRECAST_EXPORT(rmsnorm_quant, rmsnorm_quant_export)
PRECAST_EXPORT(fused_add_rmsnorm_quant, fused_add_rmsnorm_quant_export)
PRECAST_EXPORT(layernorm_quant, layernorm_quant_export)

}  // namespace precast
