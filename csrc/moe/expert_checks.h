// SPDX-License-Identifier: Apache-2.0
// What the bindings check that work on the rows of experts.
#pragma once

#include "core/tensor_matcher.h"
#include "precast/moe/expert_rows.cuh"

namespace precast {

constexpr int64_t kMostExpertRows = 0x7fffffff;

// Checks a matrix whose rows start at multiples of 16 bytes, of `multiple` columns.
PRECAST_ONE_COPY void check_expert_matrix(const TensorMatch& match, int64_t multiple,
                                          bool is_output) {
  const Arg& arg = match;
  const TensorView& t = arg.tensor;
  match.rank(2, 2);
  PRECAST_CHECK(t.size(0) <= kMostExpertRows, ValueError)
      << arg.what() << " must have at most " << kMostExpertRows << " rows, got shape "
      << to_string(t.shape());
  PRECAST_CHECK(t.size(1) % multiple == 0, ValueError)
      << arg.what() << " must have a multiple of " << multiple << " columns, got shape "
      << to_string(t.shape());
  check_columns(arg, is_output);
  const int64_t bytes = t.stride(0) * ((t.dtype().bits + 7) / 8);
  PRECAST_CHECK(t.size(0) <= 1 || t.numel() == 0 || bytes % kVecBytes == 0, ValueError)
      << arg.what() << " must have rows that start at multiples of " << kVecBytes
      << " bytes, got strides " << to_string(t.strides()) << "; pad the rows";
  if (t.numel() > 0) match.aligned();
}

// The rows that slots have: int32 [tokens, slots].
PRECAST_ONE_COPY TokenSlots slots_of(const TensorMatch& match, const Arg& in, int64_t tokens,
                                     int64_t legal) {
  const Arg& arg = match;
  match.same_device(in).dtype(kInt32).rank(2, 2);
  match.shape({tokens, arg.tensor.size(1)}).contiguous();
  PRECAST_CHECK(arg.tensor.size(1) <= kMostExpertRows, ValueError)
      << arg.what() << " must have at most " << kMostExpertRows << " columns, got shape "
      << to_string(arg.tensor.shape());
  return {static_cast<const int32_t*>(data_of(arg.tensor)), static_cast<int>(arg.tensor.size(1)),
          static_cast<uint32_t>(legal)};
}

// Scales [rows, groups] at any strides.
PRECAST_ONE_COPY void check_group_scales(const TensorMatch& match, const Arg& in, int64_t rows,
                                         int64_t columns) {
  match.same_device(in).dtype(DType::f32).shape({rows, columns / kExpertGroup}).elements_apart();
}

// Throws ValueError if kernels cannot number `rows` rows of items of 16 bytes.
PRECAST_ONE_COPY void check_expert_items(const Arg& arg, int64_t rows, int64_t columns,
                                         int item_size) {
  PRECAST_CHECK(rows == 0 || plan_items(static_cast<uint32_t>(rows), columns, item_size).fits,
                ValueError)
      << arg.what() << " must have at most " << kMaxItems << " items of " << item_size
      << " elements, got shape " << to_string(arg.tensor.shape()) << "; call on parts of it";
}

}  // namespace precast
