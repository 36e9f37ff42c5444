// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of scale.
#include "core/ffi_export.h"
#include "core/tensor_matcher.h"
#include "precast/elementwise/scale.cuh"

namespace precast {

// csrc/elementwise/scale.cu
extern const DType scale_dtype;
cudaError_t scale(const ScaleParams& params, bool enable_pdl, cudaStream_t stream);

namespace {

void scale_entry(TensorView input, double factor, TensorView out, bool enable_pdl) {
  const Arg in = PRECAST_ARG("scale", input);
  const Arg to = PRECAST_ARG("scale", out);
  TensorMatch(in).cuda().dtype(scale_dtype).unit_stride();
  TensorMatch(to).same_device(in).dtype(scale_dtype).shape_of(in).unit_stride_output();
  const RowView view = view_as_rows({in, to}, true);
  if (view.rows.count == 0 || view.columns == 0) return;
  check_items(in, view, view.columns);
  const TensorMemory memory(to);
  check_elements_apart(memory);
  check_same_or_apart(memory, in);

  ScaleParams params = {};
  params.input = data_of(input);
  params.out = data_of(out);
  params.input_strides = view.strides[0];
  params.out_strides = view.strides[1];
  params.rows = view.rows;
  params.columns = view.columns;
  params.factor = static_cast<float>(factor);
  launch_on(in, [&](cudaStream_t stream) { return scale(params, enable_pdl, stream); });
}

}  // namespace

PRECAST_EXPORT(scale, scale_entry)

}  // namespace precast
