// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of the 8-bit quantisations.
#include "core/ffi_export.h"
#include "precast/quantize/per_block.cuh"
#include "precast/quantize/per_tensor.cuh"
#include "quantize/quant_checks.h"

namespace precast {

// csrc/quantize/quantize.cu
cudaError_t tensor_quant(const TensorQuantParams& params, bool enable_pdl, cudaStream_t stream);
cudaError_t block_quant(const BlockQuantParams& params, bool enable_pdl, cudaStream_t stream);

namespace {

void static_quant_fp8(TensorView x, TensorView scale, TensorView out, bool enable_pdl) {
  const char* op = "static_quant_fp8";
  static_quant_entry(PRECAST_ARG(op, x), PRECAST_ARG(op, scale), PRECAST_ARG(op, out), false,
                     enable_pdl);
}

void per_tensor_quant_fp8(TensorView x, double eps, TensorView out, TensorView out_scale,
                          TensorView workspace, bool enable_pdl) {
  const char* op = "per_tensor_quant_fp8";
  const Arg in = PRECAST_ARG(op, x);
  const Arg to = PRECAST_ARG(op, out);
  const Arg scale = PRECAST_ARG(op, out_scale);
  const Arg scratch = PRECAST_ARG(op, workspace);
  check_input_and_codes(in, to, false);
  check_eps(op, eps);
  check_one_number(scale, in);
  TensorMatch(scratch).same_device(in).dtype(DType::f32).contiguous();
  PRECAST_CHECK(workspace.numel() >= kTensorCtas, ValueError)
      << scratch.what() << " must have at least " << kTensorCtas << " elements, got shape "
      << to_string(workspace.shape());
  TensorMatch(scale).apart(in).apart(to);
  TensorMatch(scratch).apart(in).apart(to).apart(scale);
  const RowView view = view_as_rows({in, to}, true);
  if (view.rows.count > 0 && view.columns > 0) check_items(in, view, view.columns);

  TensorQuantParams params = {};
  params.tensors = quant_tensors(in, to, view, false);
  params.scale = static_cast<float*>(data_of(out_scale));
  params.amaxes = static_cast<uint32_t*>(data_of(workspace));
  params.eps = static_cast<float>(eps);
  launch_on(in, [&](cudaStream_t stream) { return tensor_quant(params, enable_pdl, stream); });
}

void per_token_quant_fp8(TensorView x, double eps, TensorView out, TensorView out_scale,
                         bool enable_pdl) {
  const char* op = "per_token_quant_fp8";
  token_quant_entry(PRECAST_ARG(op, x), eps, PRECAST_ARG(op, out), PRECAST_ARG(op, out_scale),
                    false, enable_pdl);
}

void per_token_group_quant_8bit(TensorView x, int64_t group_size, double eps, bool scale_ue8m0,
                                TensorView out, TensorView out_scale, bool enable_pdl) {
  const char* op = "per_token_group_quant_8bit";
  group_quant_entry(PRECAST_ARG(op, x), group_size, eps, scale_ue8m0, PRECAST_ARG(op, out),
                    PRECAST_ARG(op, out_scale), false, enable_pdl);
}

void per_block_cast_to_fp8(TensorView x, bool use_ue8m0, double eps, TensorView out,
                           TensorView out_scale, bool enable_pdl) {
  const char* op = "per_block_cast_to_fp8";
  const Arg in = PRECAST_ARG(op, x);
  const Arg to = PRECAST_ARG(op, out);
  const Arg scales = PRECAST_ARG(op, out_scale);
  check_cuda(in);
  check_rank(in, 2, 3);
  check_input_and_codes(in, to, false);
  check_eps(op, eps);
  TensorMatch(scales).same_device(in).dtype(DType::f32);
  const auto blocks_of = [](int64_t size) { return (size + kQuantBlock - 1) / kQuantBlock; };
  const int64_t rows = x.size(-2), columns = x.size(-1);
  const int64_t batch = x.ndim() == 3 ? x.size(0) : 1;
  const int64_t row_blocks = blocks_of(rows), column_blocks = blocks_of(columns);
  const TensorView& s = out_scale;
  const bool fits = s.ndim() == x.ndim() && s.size(-2) == row_blocks &&
                    s.size(-1) == column_blocks && (x.ndim() == 2 || s.size(0) == batch);
  PRECAST_CHECK(fits, ValueError) << scales.what() << " must hold a scale for each block of "
                                  << kQuantBlock << " x " << kQuantBlock << ", got shape "
                                  << to_string(s.shape()) << " for x " << to_string(x.shape());
  TensorMatch(scales).contiguous().apart(in).apart(to);
  if (x.numel() == 0) return;
  constexpr int64_t kMaxBlocks = 0x7fffffff;
  PRECAST_CHECK(rows * batch <= kMaxBlocks && batch * row_blocks <= kMaxBlocks / column_blocks,
                ValueError)
      << in.what() << " must have at most " << kMaxBlocks << " rows and blocks, got shape "
      << to_string(x.shape());

  BlockQuantParams params = {};
  params.tensors.input = data_of(x);
  params.tensors.out = data_of(out);
  params.tensors.input_strides = RowStrides{batch > 1 ? x.stride(0) : 0, x.stride(-2)};
  params.tensors.out_strides = RowStrides{batch > 1 ? out.stride(0) : 0, out.stride(-2)};
  params.tensors.rows.count = static_cast<uint32_t>(batch * rows);
  params.tensors.rows.inner = FastDivmod(static_cast<uint32_t>(rows));
  params.tensors.columns = columns;
  params.scales = static_cast<float*>(data_of(out_scale));
  params.format = use_ue8m0 ? ScaleFormat::powers_of_two : ScaleFormat::numbers;
  params.eps = static_cast<float>(eps);
  launch_on(in, [&](cudaStream_t stream) { return block_quant(params, enable_pdl, stream); });
}

}  // namespace

PRECAST_EXPORT(static_quant_fp8, static_quant_fp8)
PRECAST_EXPORT(per_tensor_quant_fp8, per_tensor_quant_fp8)
PRECAST_EXPORT(per_token_quant_fp8, per_token_quant_fp8)
PRECAST_EXPORT(per_token_group_quant_8bit, per_token_group_quant_8bit)
PRECAST_EXPORT(per_block_cast_to_fp8, per_block_cast_to_fp8)

}  // namespace precast
