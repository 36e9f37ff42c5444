// SPDX-License-Identifier: Apache-2.0
// Checks that the bindings of GEMMs share.
#pragma once

#include "core/tensor_matcher.h"
#include "precast/gemm/fp8_params.cuh"

namespace precast {

constexpr int64_t kMostInt = 0x7fffffff;
// A block of the depth, and a tile of rows, may end behind the last one.
constexpr int64_t kMostDepth = kMostInt - kFp8Block;
constexpr int64_t kMostRows = kMostInt - 512;

// Checks that rows start at multiples of 16 bytes, as TMA, cp.async and wide stores need it.
PRECAST_ONE_COPY void check_rows_aligned(const Arg& arg) {
  const TensorView& t = arg.tensor;
  const int64_t bytes = (t.dtype().bits + 7) / 8;
  bool aligned = true;
  for (int i = 0; i + 1 < t.ndim(); ++i) {
    const int64_t stride = t.stride(i) * bytes;
    aligned = aligned && (t.size(i) <= 1 || (stride > 0 && stride % kVecBytes == 0));
  }
  PRECAST_CHECK(aligned || t.numel() == 0, ValueError)
      << arg.what() << " must have rows that start at different multiples of " << kVecBytes
      << " bytes, got strides " << to_string(t.strides()) << "; pad the rows";
}

// An operand whose rows are contiguous.
PRECAST_ONE_COPY GemmMatrix matrix_of(const TensorMatch& match) {
  const Arg& arg = match;
  match.unit_stride();
  check_rows_aligned(arg);
  const TensorView& t = arg.tensor;
  const bool has_groups = t.ndim() == 3;
  const int64_t bytes = (t.dtype().bits + 7) / 8;
  return {data_of(t), t.stride(t.ndim() - 2) * bytes, has_groups ? t.stride(0) * bytes : 0};
}

}  // namespace precast
