// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of the dequantisation of blocks.
#include <tvm/ffi/optional.h>

#include "core/ffi_export.h"
#include "precast/quantize/block_dequantize.cuh"
#include "quantize/block_scale_checks.h"

namespace precast {

// csrc/quantize/block_dequantize.cu
extern const DType block_dequantize_dtype;
cudaError_t block_dequantize(BlockFormat format, const BlockDequantizeParams& params,
                             bool enable_pdl, cudaStream_t stream);

namespace {

struct Call {
  BlockFormat format;
  int64_t block;
  int64_t layout;
  bool enable_pdl;
};

void entry(const Arg& in, const Arg& scales, const Arg* global, const Arg& to, const Call& call) {
  const bool e2m1 = call.format != BlockFormat::e4m3_ue8m0;
  TensorMatch(in).cuda().dtype(packed_dtype(!e2m1));
  const int64_t rows = count_rows(in);
  check_contiguous(in);
  const int64_t columns = in.tensor.size(-1) * (e2m1 ? 2 : 1);
  PRECAST_CHECK(columns % call.block == 0, ValueError)
      << in.what() << " must hold whole blocks of " << call.block << " numbers a row, got "
      << columns << " numbers";
  const SfLayout layout = check_layout(in.op, call.layout);
  check_scales(scales, in, layout, rows, columns / call.block);
  if (global != nullptr) check_one_number(*global, in);
  const TensorView& o = to.tensor;
  TensorMatch(to).same_device(in).dtype(block_dequantize_dtype);
  PRECAST_CHECK(has_shape_but_last(o, in.tensor, columns), ValueError)
      << to.what() << " must have " << in.name << "'s shape with " << columns << " columns, got "
      << to_string(o.shape());
  check_contiguous(to);
  if (rows == 0 || columns == 0) return;
  check_vector_aligned(in);
  check_vector_aligned(to);
  PRECAST_CHECK(rows <= 0x7fffffff && columns <= int64_t(0xffffffff), ValueError)
      << in.what() << " must have at most 2^31 - 1 rows and 2^32 - 1 numbers a row, got shape "
      << to_string(in.tensor.shape());
  const int item_size = kVecBytes / (o.dtype().bits / 8);
  PRECAST_CHECK(plan_items(static_cast<uint32_t>(rows), columns, item_size).fits, ValueError)
      << to.what() << " must have at most " << kMaxItems << " items of " << kVecBytes
      << " bytes, got shape " << to_string(o.shape()) << "; call on parts of it";
  check_written({to}, {in, scales});
  if (global != nullptr) check_memory_apart(to, *global);

  BlockDequantizeParams params = {};
  params.input = data_of(in.tensor);
  params.scales = data_of(scales.tensor);
  params.global = global == nullptr ? nullptr : static_cast<const float*>(data_of(global->tensor));
  params.out = data_of(o);
  params.rows = static_cast<uint32_t>(rows);
  params.columns = columns;
  params.block = static_cast<uint32_t>(call.block);
  params.layout = layout;
  launch_on(in, [&](cudaStream_t stream) {
    return block_dequantize(call.format, params, call.enable_pdl, stream);
  });
}

void e2m1_export(TensorView e2m1_tensor, TensorView ufp8_scale_tensor,
                 tvm::ffi::Optional<TensorView> global_scale_tensor, TensorView out,
                 int64_t sf_vec_size, int64_t ufp8_type, int64_t sf_layout, bool enable_pdl) {
  const char* op = "e2m1_and_ufp8sf_scale_to_float";
  const Arg in = PRECAST_ARG(op, e2m1_tensor);
  check_cuda(in);
  PRECAST_CHECK(sf_vec_size == 16 || sf_vec_size == 32, ValueError)
      << op << ": sf_vec_size must be 16 or 32, got " << sf_vec_size;
  PRECAST_CHECK(ufp8_type == 0 || ufp8_type == 1, ValueError)
      << op << ": ufp8_type must be 0 (ue8m0) or 1 (e4m3), got " << ufp8_type;
  const bool e4m3 = ufp8_type == 1;
  PRECAST_CHECK(!e4m3 || global_scale_tensor.has_value(), ValueError)
      << op << ": global_scale_tensor must be a tensor with ufp8_type=1, got None";
  const TensorView number = e4m3 ? *global_scale_tensor : e2m1_tensor;
  const Arg global = {op, "global_scale_tensor", number};
  entry(in, PRECAST_ARG(op, ufp8_scale_tensor), e4m3 ? &global : nullptr, PRECAST_ARG(op, out),
        {e4m3 ? BlockFormat::e2m1_e4m3 : BlockFormat::e2m1_ue8m0, sf_vec_size, sf_layout,
         enable_pdl});
}

void mxfp4_export(TensorView a_fp4, TensorView a_sf, TensorView out, int64_t sf_layout,
                  bool enable_pdl) {
  const char* op = "mxfp4_dequantize";
  entry(PRECAST_ARG(op, a_fp4), PRECAST_ARG(op, a_sf), nullptr, PRECAST_ARG(op, out),
        {BlockFormat::e2m1_ue8m0, 32, sf_layout, enable_pdl});
}

void mxfp8_export(TensorView input, TensorView scale_tensor, TensorView out, int64_t sf_layout,
                  bool enable_pdl) {
  const char* op = "mxfp8_dequantize";
  entry(PRECAST_ARG(op, input), PRECAST_ARG(op, scale_tensor), nullptr, PRECAST_ARG(op, out),
        {BlockFormat::e4m3_ue8m0, 32, sf_layout, enable_pdl});
}

void nvfp4_kv_export(TensorView fp4_data, TensorView block_scales, TensorView global_scale,
                     TensorView out, bool enable_pdl) {
  const char* op = "nvfp4_kv_dequantize";
  const Arg global = PRECAST_ARG(op, global_scale);
  entry(PRECAST_ARG(op, fp4_data), PRECAST_ARG(op, block_scales), &global, PRECAST_ARG(op, out),
        {BlockFormat::e2m1_e4m3, 16, static_cast<int64_t>(SfLayout::linear), enable_pdl});
}

}  // namespace

PRECAST_EXPORT(e2m1_and_ufp8sf_scale_to_float, e2m1_export)
PRECAST_EXPORT(mxfp4_dequantize, mxfp4_export)
PRECAST_EXPORT(mxfp8_dequantize, mxfp8_export)
PRECAST_EXPORT(nvfp4_kv_dequantize, nvfp4_kv_export)

}  // namespace precast
