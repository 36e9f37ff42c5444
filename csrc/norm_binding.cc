// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of the norms.
#include "memory_checks.h"
#include "precast/layernorm.cuh"
#include "precast/rmsnorm.cuh"
#include "tvm_ffi_utils.h"

namespace precast {

// csrc/norm.cu
extern const DType norm_dtype;
cudaError_t rmsnorm(const RmsNormParams& params, bool enable_pdl, cudaStream_t stream);
cudaError_t fused_add_rmsnorm(const RmsNormParams& params, bool enable_pdl, cudaStream_t stream);
cudaError_t layernorm(const LayerNormParams& params, bool enable_pdl, cudaStream_t stream);

namespace {

constexpr int64_t kMaxHidden = int64_t(1) << 30;  // column arithmetic in the kernels is 32-bit

void check_input(const Arg& in) {
  check_cuda(in);
  check_dtype(in, norm_dtype);
  check_rank(in, 2, 3);
  PRECAST_CHECK(in.tensor.size(-1) <= kMaxHidden, ValueError)
      << in.what() << "'s last dimension must be at most " << kMaxHidden << ", got "
      << in.tensor.size(-1);
  check_columns(in, false);
}

// A tensor that goes row by row with `in`, and is written.
void check_peer(const Arg& arg, const Arg& in) {
  check_same_device(arg, in);
  check_dtype(arg, norm_dtype);
  check_same_shape(arg, in);
  check_columns(arg, true);
}

void check_weight(const Arg& weight, const Arg& in) {
  check_same_device(weight, in);
  check_dtype(weight, norm_dtype);
  check_vector(weight, in.tensor.size(-1));
}

void check_output(const Arg& out, const Arg& in, const RowView& view) {
  const RowMemory memory(out, view, 1, view.columns);
  check_rows_apart(memory);
  check_same_or_apart(memory, RowMemory(in, view, 0, view.columns));
}

void rmsnorm_entry(const char* op, const TensorView& input, const TensorView& weight, double eps,
                   const TensorView& out, float weight_bias, bool enable_pdl) {
  const Arg in = PRECAST_ARG(op, input);
  const Arg to = PRECAST_ARG(op, out);
  check_input(in);
  check_weight(PRECAST_ARG(op, weight), in);
  check_peer(to, in);
  const RowView view = view_as_rows({in, to}, false);
  if (view.rows.count == 0 || view.columns == 0) return;
  check_output(to, in, view);

  RmsNormParams params = {};
  params.input = data_of(input);
  params.weight = data_of(weight);
  params.out = data_of(out);
  params.input_strides = view.strides[0];
  params.out_strides = view.strides[1];
  params.rows = view.rows;
  params.hidden = static_cast<int>(view.columns);
  params.eps = static_cast<float>(eps);
  params.weight_bias = weight_bias;
  launch_on(in, [&](cudaStream_t stream) { return rmsnorm(params, enable_pdl, stream); });
}

void fused_add_entry(const char* op, const TensorView& input, const TensorView& residual,
                     const TensorView& weight, double eps, float weight_bias, bool enable_pdl) {
  const Arg in = PRECAST_ARG(op, input);
  const Arg added = PRECAST_ARG(op, residual);
  check_input(in);
  check_columns(in, true);
  check_peer(added, in);
  check_weight(PRECAST_ARG(op, weight), in);
  const RowView view = view_as_rows({in, added}, false);
  if (view.rows.count == 0 || view.columns == 0) return;
  const RowMemory input_memory(in, view, 0, view.columns);
  const RowMemory residual_memory(added, view, 1, view.columns);
  check_rows_apart(input_memory);
  check_rows_apart(residual_memory);
  check_memory_apart(residual_memory, input_memory);

  RmsNormParams params = {};
  params.input = params.out = data_of(input);
  params.residual = data_of(residual);
  params.weight = data_of(weight);
  params.input_strides = params.out_strides = view.strides[0];
  params.residual_strides = view.strides[1];
  params.rows = view.rows;
  params.hidden = static_cast<int>(view.columns);
  params.eps = static_cast<float>(eps);
  params.weight_bias = weight_bias;
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
  check_cuda(in);
  PRECAST_CHECK(has_dtype(in, norm_dtype), DtypeRuntimeError)
      << op << ": input must be bfloat16 (or float16, with the module of that type), got "
      << to_string(input.dtype());
  PRECAST_CHECK(input.IsContiguous(), DtypeRuntimeError)
      << op << ": input must be contiguous, got strides " << to_string(input.strides())
      << "; call .contiguous()";
  check_input(in);
  for (const Arg& arg : {PRECAST_ARG(op, gemma), PRECAST_ARG(op, beta)}) {
    check_same_device(arg, in);
    PRECAST_CHECK(has_dtype(arg, DType::f32), DtypeRuntimeError)
        << arg.what() << " must be float32, got " << to_string(arg.tensor.dtype());
    check_vector(arg, input.size(-1));
  }
  check_peer(to, in);
  check_contiguous(to);
  const RowView view = view_as_rows({in, to}, false);
  if (view.rows.count == 0 || view.columns == 0) return;
  check_output(to, in, view);

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

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rmsnorm, rmsnorm_export);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gemma_rmsnorm, gemma_rmsnorm_export);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fused_add_rmsnorm, fused_add_rmsnorm_export);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gemma_fused_add_rmsnorm, gemma_fused_add_rmsnorm_export);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layernorm, layernorm_export);

}  // namespace precast
