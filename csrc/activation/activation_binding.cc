// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of the gated activations.
#include "core/ffi_export.h"
#include "core/memory_checks.h"
#include "core/tvm_ffi_utils.h"
#include "precast/activation/activation.cuh"

namespace precast {

// csrc/activation/activation.cu
extern const DType activation_dtype;
cudaError_t act_and_mul(Activation activation, const ActAndMulParams& params, bool enable_pdl,
                        cudaStream_t stream);

namespace {

void check_pointer(const Arg& arg) {
  PRECAST_CHECK(reinterpret_cast<uint64_t>(data_of(arg.tensor)) % kVecBytes == 0, ValueError)
      << "The pointers must be multiple of 16 bytes. " << arg.what()
      << " starts at an address that is not; call .clone()";
}

// Checks that `out` has the shape of `input` with half its last dimension.
void check_output_shape(const Arg& out, const Arg& input) {
  const TensorView &o = out.tensor, &i = input.tensor;
  PRECAST_CHECK(i.size(-1) % 2 == 0 && has_shape_but_last(o, i, i.size(-1) / 2), OutputShapeError)
      << out.what() << " must have input's shape with half the last dimension, got "
      << to_string(o.shape()) << " for input " << to_string(i.shape());
}

void entry(const char* op, Activation activation, const TensorView& input, const TensorView& out,
           bool enable_pdl) {
  const Arg in = PRECAST_ARG(op, input);
  const Arg to = PRECAST_ARG(op, out);
  check_cuda(in);
  check_dtype(in, activation_dtype);
  PRECAST_CHECK(input.ndim() >= 1, ValueError)
      << in.what() << " must have a last dimension, got []";
  PRECAST_CHECK(input.size(-1) * (input.dtype().bits / 8) % kVecBytes == 0, ValueError)
      << "The pointers must be multiple of 16 bytes. " << in.what()
      << "'s last dimension must be a multiple of " << kVecBytes / (input.dtype().bits / 8)
      << " elements, got " << input.size(-1);
  check_same_device(to, in);
  check_dtype(to, activation_dtype);
  check_output_shape(to, in);
  check_columns(in, false);
  check_columns(to, true);
  const RowView view = view_as_rows({in, to}, false);
  if (view.rows.count == 0 || view.columns == 0) return;
  check_pointer(in);
  check_pointer(to);
  check_items(to, view, view.columns / 2);
  const TensorMemory memory(to);
  check_elements_apart(memory);
  check_memory_apart(memory, in);

  ActAndMulParams params = {};
  params.input = data_of(input);
  params.out = data_of(out);
  params.input_strides = view.strides[0];
  params.out_strides = view.strides[1];
  params.rows = view.rows;
  params.columns = view.columns / 2;
  launch_on(
      in, [&](cudaStream_t stream) { return act_and_mul(activation, params, enable_pdl, stream); });
}

void silu_and_mul(TensorView input, TensorView out, bool enable_pdl) {
  entry("silu_and_mul", Activation::silu, input, out, enable_pdl);
}

void gelu_and_mul(TensorView input, TensorView out, bool enable_pdl) {
  entry("gelu_and_mul", Activation::gelu, input, out, enable_pdl);
}

void gelu_tanh_and_mul(TensorView input, TensorView out, bool enable_pdl) {
  entry("gelu_tanh_and_mul", Activation::gelu_tanh, input, out, enable_pdl);
}

}  // namespace

PRECAST_EXPORT(silu_and_mul, silu_and_mul)
PRECAST_EXPORT(gelu_and_mul, gelu_and_mul)
PRECAST_EXPORT(gelu_tanh_and_mul, gelu_tanh_and_mul)

}  // namespace precast
