// SPDX-License-Identifier: Apache-2.0
// The checks that the bindings of block-scaled formats share.
#pragma once

#include "core/tensor_matcher.h"
#include "precast/quantize/scale_layout.cuh"

namespace precast {

PRECAST_ONE_COPY SfLayout check_layout(const char* op, int64_t layout) {
  PRECAST_CHECK(layout >= 0 && layout <= 2, ValueError)
      << op << ": the scale layout must be 0 (128x4), 1 (8x4) or 2 (linear), got " << layout;
  return static_cast<SfLayout>(layout);
}

// Checks bytes of any shape that hold, in order, the scales of [rows, columns] blocks.
PRECAST_ONE_COPY void check_scales(const Arg& scales, const Arg& data, SfLayout layout,
                                   int64_t rows, int64_t columns) {
  TensorMatch(scales).dtype(kUint8).same_device(data).contiguous();
  const int64_t count = scale_bytes(layout, rows, columns);
  PRECAST_CHECK(scales.tensor.numel() == count, ValueError)
      << scales.what() << " must have " << count << " elements, for " << rows << " x " << columns
      << " blocks padded to " << padded_scale_rows(layout, rows) << " x "
      << padded_scale_columns(layout, columns) << ", got shape "
      << to_string(scales.tensor.shape());
}

// Returns the number of rows of a tensor of at least 2 dimensions: the product of all but the last.
PRECAST_ONE_COPY int64_t count_rows(const Arg& in) {
  const TensorView& t = in.tensor;
  PRECAST_CHECK(t.ndim() >= 2, ValueError)
      << in.what() << " must have at least 2 dimensions, got shape " << to_string(t.shape());
  int64_t rows = 1;
  for (int i = 0; i + 1 < t.ndim(); ++i) rows *= t.size(i);
  return rows;
}

// The dtype of packed e2m1 numbers, or of e4m3 numbers.
inline DLDataType packed_dtype(bool e4m3) { return e4m3 ? to_dl(DType::e4m3) : kUint8; }

}  // namespace precast
