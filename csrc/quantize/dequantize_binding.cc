// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of dequantisation.
#include "core/ffi_export.h"
#include "core/tensor_matcher.h"
#include "precast/quantize/dequantize.cuh"

namespace precast {

// csrc/quantize/dequantize.cu
extern const DType dequantize_dtype_q;
extern const DType dequantize_dtype;
cudaError_t dequantize(const DequantizeParams& params, bool enable_pdl, cudaStream_t stream);

namespace {

// Returns the strides of the batch and of the rows in a tensor of matrices.
RowStrides matrix_strides(const TensorView& t) {
  return RowStrides{t.ndim() == 3 && t.size(0) > 1 ? t.stride(0) : 0,
                    t.size(-2) > 1 ? t.stride(-2) : 0};
}

void check_scale_shape(const Arg& scale, const Arg& in, int64_t tile_rows, int64_t tile_columns,
                       bool packed) {
  const TensorView& x = in.tensor;
  const TensorView& s = scale.tensor;
  const auto tiles = [](int64_t size, int64_t tile) { return (size + tile - 1) / tile; };
  const int64_t row_tiles = tiles(x.size(-2), tile_rows);
  const int64_t column_tiles = tiles(tiles(x.size(-1), tile_columns), packed ? 4 : 1);
  const bool fits = s.ndim() == x.ndim() && s.size(-2) == row_tiles && s.size(-1) == column_tiles &&
                    (x.ndim() == 2 || s.size(0) == x.size(0));
  PRECAST_CHECK(fits, ValueError) << scale.what() << " must hold [" << row_tiles << ", "
                                  << column_tiles << "] "
                                  << (packed ? "words of exponents" : "scales")
                                  << " a matrix for tiles of " << tile_rows << " x " << tile_columns
                                  << ", got shape " << to_string(s.shape()) << " for x "
                                  << to_string(x.shape());
}

void dequantize_fp8(TensorView x, TensorView x_scale, int64_t tile_rows, int64_t tile_columns,
                    TensorView out, bool enable_pdl) {
  const char* op = "dequantize_fp8";
  const Arg in = PRECAST_ARG(op, x);
  const Arg scale = PRECAST_ARG(op, x_scale);
  const Arg to = PRECAST_ARG(op, out);
  TensorMatch(in).cuda().dtype(dequantize_dtype_q).rank(2, 3).unit_stride();
  TensorMatch(to).same_device(in).dtype(dequantize_dtype).shape_of(in).unit_stride_output();
  constexpr int64_t kMaxSize = int64_t(1) << 30;
  PRECAST_CHECK(x.size(-1) <= kMaxSize, ValueError)
      << in.what() << "'s last dimension must be at most " << kMaxSize << ", got " << x.size(-1);
  PRECAST_CHECK(
      tile_rows >= 1 && tile_rows <= kMaxSize && tile_columns >= 1 && tile_columns <= kMaxSize,
      ValueError)
      << op << ": tiles must have 1 to " << kMaxSize << " rows and columns, got " << tile_rows
      << " x " << tile_columns;
  check_same_device(scale, in);
  const bool packed = same_dtype(x_scale.dtype(), kInt32);
  if (!packed) check_dtype(scale, DType::f32);
  check_scale_shape(scale, in, tile_rows, tile_columns, packed);
  if (x.numel() == 0) return;
  const RowView view = view_as_rows({in, to}, false);  // This limits the number of rows.
  check_items(to, view, view.columns);
  check_elements_apart(to);
  check_written({to}, {in, scale});

  DequantizeParams params = {};
  params.input = data_of(x);
  params.scales = data_of(x_scale);
  params.out = data_of(out);
  params.input_strides = matrix_strides(x);
  params.out_strides = matrix_strides(out);
  params.rows.count = view.rows.count;
  params.rows.inner = FastDivmod(static_cast<uint32_t>(x.size(-2)));
  params.columns = x.size(-1);
  params.format = packed ? ScaleFormat::exponents : ScaleFormat::numbers;
  params.scale_strides = matrix_strides(x_scale);
  params.column_tile_stride = x_scale.size(-1) > 1 ? x_scale.stride(-1) : 0;
  params.tile_rows = FastDivmod(static_cast<uint32_t>(tile_rows));
  params.tile_columns = FastDivmod(static_cast<uint32_t>(tile_columns));
  launch_on(in, [&](cudaStream_t stream) { return dequantize(params, enable_pdl, stream); });
}

}  // namespace

PRECAST_EXPORT(dequantize_fp8, dequantize_fp8)

}  // namespace precast
