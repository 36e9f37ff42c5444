// SPDX-License-Identifier: Apache-2.0
// What the bindings of block-scaled formats check alike.
#pragma once

#include "core/memory_checks.h"
#include "core/tvm_ffi_utils.h"
#include "precast/quantize/scale_layout.cuh"

namespace precast {

PRECAST_ONE_COPY void check_bytes(const Arg& arg) {
  PRECAST_CHECK(same_dtype(arg.tensor.dtype(), DLDataType{kDLUInt, 8, 1}), ValueError)
      << arg.what() << " must be uint8, got " << to_string(arg.tensor.dtype());
}

PRECAST_ONE_COPY void check_vector_aligned(const Arg& arg) {
  PRECAST_CHECK(reinterpret_cast<uint64_t>(data_of(arg.tensor)) % kVecBytes == 0, ValueError)
      << arg.what() << " must start at a multiple of " << kVecBytes << " bytes; call .clone()";
}

PRECAST_ONE_COPY SfLayout check_layout(const char* op, int64_t layout) {
  PRECAST_CHECK(layout >= 0 && layout <= 2, ValueError)
      << op << ": the scale layout must be 0 (128x4), 1 (8x4) or 2 (linear), got " << layout;
  return static_cast<SfLayout>(layout);
}

// Scales of any shape that hold, in order, those of [rows, columns] blocks.
PRECAST_ONE_COPY void check_scales(const Arg& scales, const Arg& data, SfLayout layout,
                                   int64_t rows, int64_t columns) {
  check_same_device(scales, data);
  check_contiguous(scales);
  const int64_t count = scale_bytes(layout, rows, columns);
  PRECAST_CHECK(scales.tensor.numel() == count, ValueError)
      << scales.what() << " must have " << count << " elements, for " << rows << " x " << columns
      << " blocks padded to " << padded_scale_rows(layout, rows) << " x "
      << padded_scale_columns(layout, columns) << ", got shape "
      << to_string(scales.tensor.shape());
}

}  // namespace precast
