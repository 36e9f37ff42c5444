// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of the quantisation in blocks.
#include <tvm/ffi/optional.h>

#include "core/ffi_export.h"
#include "precast/quantize/block_quantize.cuh"
#include "quantize/block_scale_checks.h"

namespace precast {

// csrc/quantize/block_quantize.cu
extern const DType block_quantize_dtype;
cudaError_t block_quantize(BlockRecipe recipe, const BlockQuantizeParams& params, bool enable_pdl,
                           cudaStream_t stream);

namespace {

// Checks that `out` has the shape of `in` with another last dimension.
void check_output(const Arg& out, const Arg& in, int64_t last) {
  PRECAST_CHECK(has_shape_but_last(out.tensor, in.tensor, last), ValueError)
      << out.what() << " must have " << in.name << "'s shape " << to_string(in.tensor.shape())
      << " with " << last << " columns, got " << to_string(out.tensor.shape());
  TensorMatch(out).contiguous().aligned();
}

struct Call {
  BlockRecipe recipe;
  int64_t layout;
  int64_t padded_columns;
  bool global_is_inverse;
  bool enable_pdl;
};

void entry(const Arg& in, const Arg* global, const Arg& to, const Arg& sf, const Call& call) {
  TensorMatch(in).cuda().dtype(block_quantize_dtype);
  const int64_t rows = count_rows(in);
  const int64_t columns = in.tensor.size(-1), block = block_size(call.recipe);
  PRECAST_CHECK(columns % block == 0, ValueError)
      << in.what() << "'s last dimension must be a multiple of " << block << ", got " << columns;
  const SfLayout layout = check_layout(in.op, call.layout);
  check_columns(in, false);
  const bool e4m3 = call.recipe == BlockRecipe::mxfp8;
  TensorMatch(to).same_device(in).dtype(packed_dtype(e4m3));
  check_output(to, in, e4m3 ? call.padded_columns : columns / 2);
  check_scales(sf, in, layout, rows, call.padded_columns / block);
  BlockQuantizeParams params = {};
  if (global != nullptr) {
    TensorMatch(*global).same_device(in).dtype(DType::f32);
    const int64_t count = global->tensor.numel();
    PRECAST_CHECK(count == 1 || count == rows, ValueError)
        << global->what() << " must have 1 element, or " << rows << ", one a row, got shape "
        << to_string(global->tensor.shape());
    check_contiguous(*global);
    params.global = static_cast<const float*>(data_of(global->tensor));
    params.global_stride = count == 1 ? 0 : 1;
  }
  const RowView view = view_as_rows({in}, false);
  if (view.rows.count == 0 || call.padded_columns == 0) return;
  PRECAST_CHECK(static_cast<uint64_t>(sf.tensor.numel()) <= kMaxItems / (block / 16), ValueError)
      << in.what() << " must have at most " << kMaxItems
      << " items of 16 elements, with the scales' padding, got shape "
      << to_string(in.tensor.shape()) << "; call on parts of it";
  check_written({to, sf}, {in});
  if (global != nullptr) check_written({to, sf}, {*global});

  params.input = data_of(in.tensor);
  params.out = data_of(to.tensor);
  params.out_sf = data_of(sf.tensor);
  params.input_strides = view.strides[0];
  params.rows = view.rows;
  params.columns = columns;
  params.padded_columns = call.padded_columns;
  params.global_is_inverse = call.global_is_inverse;
  params.layout = layout;
  launch_on(in, [&](cudaStream_t stream) {
    return block_quantize(call.recipe, params, call.enable_pdl, stream);
  });
}

void fp4_quantize_export(TensorView input, tvm::ffi::Optional<TensorView> global_scale,
                         TensorView out, TensorView out_sf, bool sf_use_ue8m0, int64_t sf_layout,
                         bool is_global_scale_inversed, bool enable_pdl) {
  const char* op = "fp4_quantize";
  const Arg in = PRECAST_ARG(op, input);
  check_cuda(in);
  PRECAST_CHECK(sf_use_ue8m0 || global_scale.has_value(), ValueError)
      << op << ": global_scale must be a tensor unless sf_use_ue8m0, got None";
  const bool nvfp4 = !sf_use_ue8m0;
  const TensorView number = nvfp4 ? *global_scale : input;
  const Arg global = {op, "global_scale", number};
  entry(in, nvfp4 ? &global : nullptr, PRECAST_ARG(op, out), PRECAST_ARG(op, out_sf),
        {nvfp4 ? BlockRecipe::nvfp4 : BlockRecipe::mxfp4, sf_layout,
         input.ndim() > 0 ? input.size(-1) : 0, is_global_scale_inversed, enable_pdl});
}

void nvfp4_quantize_export(TensorView a, TensorView a_global_sf, TensorView out, TensorView out_sf,
                           int64_t sf_layout, bool enable_pdl) {
  const char* op = "nvfp4_quantize";
  const Arg in = PRECAST_ARG(op, a);
  const Arg global = PRECAST_ARG(op, a_global_sf);
  entry(in, &global, PRECAST_ARG(op, out), PRECAST_ARG(op, out_sf),
        {BlockRecipe::nvfp4, sf_layout, a.ndim() > 0 ? a.size(-1) : 0, false, enable_pdl});
}

void nvfp4_kv_quantize_export(TensorView input, TensorView global_scale, TensorView fp4_output,
                              TensorView block_scales, bool enable_pdl) {
  const char* op = "nvfp4_kv_quantize";
  const Arg in = PRECAST_ARG(op, input);
  const Arg global = PRECAST_ARG(op, global_scale);
  check_cuda(in);
  check_one_number(global, in);
  entry(in, &global, PRECAST_ARG(op, fp4_output), PRECAST_ARG(op, block_scales),
        {BlockRecipe::nvfp4, static_cast<int64_t>(SfLayout::linear),
         input.ndim() > 0 ? input.size(-1) : 0, true, enable_pdl});
}

void mxfp4_quantize_export(TensorView a, TensorView out, TensorView out_sf, int64_t sf_layout,
                           bool enable_pdl) {
  const char* op = "mxfp4_quantize";
  const Arg in = PRECAST_ARG(op, a);
  entry(in, nullptr, PRECAST_ARG(op, out), PRECAST_ARG(op, out_sf),
        {BlockRecipe::mxfp4, sf_layout, a.ndim() > 0 ? a.size(-1) : 0, false, enable_pdl});
}

void mxfp8_quantize_export(TensorView input, TensorView out, TensorView out_sf, int64_t sf_layout,
                           int64_t alignment, bool enable_pdl) {
  const char* op = "mxfp8_quantize";
  const Arg in = PRECAST_ARG(op, input);
  check_cuda(in);
  PRECAST_CHECK(alignment > 0 && alignment % 32 == 0, ValueError)
      << op << ": alignment must be a positive multiple of 32, got " << alignment;
  const int64_t columns = input.ndim() > 0 ? input.size(-1) : 0;
  entry(in, nullptr, PRECAST_ARG(op, out), PRECAST_ARG(op, out_sf),
        {BlockRecipe::mxfp8, sf_layout, round_up_to(columns, alignment), false, enable_pdl});
}

}  // namespace

PRECAST_EXPORT(fp4_quantize, fp4_quantize_export)
PRECAST_EXPORT(nvfp4_quantize, nvfp4_quantize_export)
PRECAST_EXPORT(nvfp4_kv_quantize, nvfp4_kv_quantize_export)
PRECAST_EXPORT(mxfp4_quantize, mxfp4_quantize_export)
PRECAST_EXPORT(mxfp8_quantize, mxfp8_quantize_export)

}  // namespace precast
