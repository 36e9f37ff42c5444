// SPDX-License-Identifier: Apache-2.0
// Queries, keys, values and outputs of attention as kernels take them.
#pragma once

#include "core/tensor_matcher.h"
#include "precast/attention/params.cuh"

namespace precast {

constexpr int64_t kCopyBytes = 16;  // what kernels load and store at once

PRECAST_ONE_COPY int64_t bytes_of(const TensorView& tensor) {
  return (tensor.dtype().bits + 7) / 8;
}

// Rows that kernels can load 16 bytes at a time.
PRECAST_ONE_COPY void check_rows(const Arg& arg) {
  const TensorView& t = arg.tensor;
  bool aligned = reinterpret_cast<uint64_t>(data_of(t)) % kCopyBytes == 0;
  for (int i = 0; i < t.ndim() - 1; ++i) {
    aligned = aligned && (t.size(i) <= 1 || t.stride(i) * bytes_of(t) % kCopyBytes == 0);
  }
  PRECAST_CHECK(aligned, ValueError)
      << arg.what() << " must have an address and strides that are a multiple of " << kCopyBytes
      << " bytes, got strides " << to_string(t.strides()) << "; call .clone()";
}

// Queries [tokens, heads, dim] that TMA can read.
PRECAST_ONE_COPY void check_steps(const Arg& arg) {
  const TensorView& t = arg.tensor;
  const bool steps = (t.size(0) <= 1 || t.stride(0) != 0) && (t.size(1) <= 1 || t.stride(1) != 0);
  PRECAST_CHECK(steps || t.size(0) == 0, ValueError)
      << arg.what() << " must have no stride of 0, which TMA cannot read, got strides "
      << to_string(t.strides()) << "; call .contiguous(), or plan with backend='fa2'";
}

// Queries and outputs [tokens, heads, dim]: kernels count steps of 16 bytes to a row in 32 bits.
PRECAST_ONE_COPY void check_span(const Arg& arg) {
  const TensorView& t = arg.tensor;
  if (t.numel() == 0) return;
  int64_t elements = t.size(2);
  for (int i = 0; i < 2; ++i) elements += (t.size(i) - 1) * t.stride(i);
  PRECAST_CHECK(elements * bytes_of(t) <= int64_t(1) << 36, ValueError)
      << arg.what() << " must lie within 2^36 bytes, got shape " << to_string(t.shape())
      << " and strides " << to_string(t.strides()) << "; call on parts of it";
}

// Bytes from one index of a dimension to the next; 0 where there is but one.
PRECAST_ONE_COPY int64_t step_of(const TensorView& tensor, int dim) {
  return tensor.size(dim) <= 1 ? 0 : tensor.stride(dim) * bytes_of(tensor);
}

// Keys or values with their dimensions: -1 for one that the tensor does not have.
PRECAST_ONE_COPY AttentionCache cache_of(const Arg& arg, int page, int entry, int head, int half,
                                         int half_dim) {
  const TensorView& t = arg.tensor;
  const auto step = [&](int dim) { return dim < 0 ? int64_t(0) : step_of(t, dim); };
  constexpr int64_t kMost = int64_t(1) << 36;
  PRECAST_CHECK(step(page) >= 0 && step(page) < kMost && step(entry) >= 0 && step(entry) < kMost,
                ValueError)
      << arg.what() << " must have strides from 0 to 2^36 bytes, got " << to_string(t.strides());
  const char* data = static_cast<const char*>(data_of(t));
  if (half > 0) data += t.stride(half_dim) * bytes_of(t);
  return AttentionCache(data, step(page), step(entry), step(head));
}

}  // namespace precast
