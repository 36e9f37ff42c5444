// SPDX-License-Identifier: Apache-2.0
// Checks of the rows of experts, which the bindings of this folder share.
#pragma once

#include "core/tvm_ffi_utils.h"

namespace precast {

constexpr int64_t kMaxMoeColumns = int64_t(1) << 24;
constexpr int64_t kMaxMoeRows = 0x7fffffff;
constexpr int64_t kMaxMoeTopK = 64;

// Throws ValueError unless rows start at multiples of `bytes`.
PRECAST_ONE_COPY void check_rows_aligned(const Arg& arg, int64_t bytes) {
  const TensorView& t = arg.tensor;
  const int64_t item = t.dtype().bits / 8;
  PRECAST_CHECK(reinterpret_cast<uint64_t>(data_of(t)) % bytes == 0 &&
                    (t.size(0) <= 1 || t.stride(0) * item % bytes == 0),
                ValueError)
      << arg.what() << " must have an address and strides that are a multiple of " << bytes
      << " bytes, got strides " << to_string(t.strides()) << "; call .clone()";
}

PRECAST_ONE_COPY void check_row_count(const Arg& arg, int64_t rows) {
  PRECAST_CHECK(rows <= kMaxMoeRows, ValueError)
      << arg.what() << " must have at most " << kMaxMoeRows << " rows, got " << rows;
}

}  // namespace precast
