// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of the norm with fp8 output by groups of columns.
#include "core/ffi_export.h"
#include "norm/norm_checks.h"
#include "precast/norm/rmsnorm_block_quant.cuh"

namespace precast {

// csrc/norm/norm_block_quant.cu
extern const DType norm_block_quant_dtype;
cudaError_t fused_add_rmsnorm_fp8_block_quant(const RmsNormBlockQuantParams& params,
                                              bool enable_pdl, cudaStream_t stream);

namespace {

constexpr int64_t kScaleRowsMultiple = 4;  // 16 bytes of fp32, as TMA requires

void check_block_scale(const Arg& scales, const Arg& in, int64_t rows, int64_t groups,
                       bool column_major) {
  TensorMatch(scales).same_device(in).dtype(DType::f32);
  const TensorView& t = scales.tensor;
  const int64_t padded = (rows + kScaleRowsMultiple - 1) / kScaleRowsMultiple * kScaleRowsMultiple;
  const int64_t first = column_major ? groups : rows;
  const int64_t second = column_major ? padded : groups;
  PRECAST_CHECK(t.ndim() == 2 && t.size(0) == first && t.size(1) == second, ValueError)
      << scales.what() << " must have shape [" << first << ", " << second << "] with "
      << (column_major ? "column_major_scales (groups, rows rounded up to 4)"
                       : "column_major_scales=False (rows, groups)")
      << ", got " << to_string(t.shape());
  check_contiguous(scales);
}

void block_quant_export(TensorView out, TensorView block_scale, OptionalTensor normed_out,
                        TensorView input, TensorView residual, TensorView weight, double eps,
                        bool enable_pdl, bool column_major_scales, bool scale_ue8m0) {
  const char* op = "fused_add_rmsnorm_fp8_block_quant";
  const Arg to = PRECAST_ARG(op, out);
  const Arg in = PRECAST_ARG(op, input);
  const Arg added = PRECAST_ARG(op, residual);
  const Arg scales = PRECAST_ARG(op, block_scale);
  const Arg by = PRECAST_ARG(op, weight);
  const DType dtype = norm_block_quant_dtype;
  check_cuda(to);
  check_norm_input(in, dtype, eps);
  PRECAST_CHECK(input.size(-1) % kQuantGroup == 0, ValueError)
      << in.what() << "'s last dimension must be a multiple of " << kQuantGroup << ", got "
      << input.size(-1);
  check_norm_peer(added, in, dtype);
  check_norm_weight(by, in, dtype);
  check_norm_peer(to, in, DType::e4m3);
  // Without a normed output, the residual takes its place among the rows.
  const TensorView normed_view = normed_out.has_value() ? normed_out.value() : residual;
  const Arg normed = {op, "normed_out", normed_view};
  if (normed_out.has_value()) check_norm_peer(normed, in, dtype);
  const RowView view = view_as_rows({in, added, to, normed}, false);
  const int64_t groups = view.columns / kQuantGroup;
  check_block_scale(scales, in, view.rows.count, groups, column_major_scales);
  if (view.rows.count == 0 || view.columns == 0) return;
  const TensorMemory input_memory(in), residual_memory(added), out_memory(to);
  const TensorMemory scales_memory(scales);
  check_elements_apart(residual_memory);
  check_elements_apart(out_memory);
  check_written({residual_memory, out_memory, scales_memory}, {input_memory, by});
  if (normed_out.has_value()) {
    const TensorMemory normed_memory(normed);
    check_elements_apart(normed_memory);
    check_same_or_apart(normed_memory, input_memory);
    check_written({normed_memory}, {residual_memory, out_memory, by});
    check_memory_apart(scales_memory, normed_memory);
  }

  RmsNormBlockQuantParams params = {};
  set_rms_rows(params, in, &weight, view, eps, 0.0f);
  params.residual = data_of(residual);
  params.out = data_of(out);
  params.normed = normed_out.has_value() ? data_of(normed_view) : nullptr;
  params.scales = static_cast<float*>(data_of(block_scale));
  params.residual_strides = view.strides[1];
  params.out_strides = view.strides[2];
  params.normed_strides = view.strides[3];
  params.scale_row_stride = column_major_scales ? 1 : groups;
  params.scale_group_stride = column_major_scales ? block_scale.size(1) : 1;
  params.ue8m0 = scale_ue8m0;
  launch_on(in, [&](cudaStream_t stream) {
    return fused_add_rmsnorm_fp8_block_quant(params, enable_pdl, stream);
  });
}

}  // namespace

PRECAST_EXPORT(fused_add_rmsnorm_fp8_block_quant, block_quant_export)

}  // namespace precast
