// SPDX-License-Identifier: Apache-2.0
// Where tensors lie in memory: an output holds each element once, and shares no byte with another
// tensor unless it is that tensor.
#pragma once

#include "tvm_ffi_utils.h"

namespace precast {

// One argument of a RowView as memory: runs of `columns` elements at two strides, the nearer first.
// Either order of the row dimensions is legal: heads inside tokens, tokens inside heads.
struct RowMemory {
  const Arg& arg;
  int64_t columns;
  int64_t near_stride, near_count;
  int64_t far_stride, far_count;
  intptr_t begin, end;  // bytes

  // `which` counts in the order of view_as_rows().
  RowMemory(const Arg& tensor, const RowView& view, int which, int64_t columns)
      : arg(tensor),
        columns(columns),
        near_stride(view.strides[which].inner),
        near_count(view.rows.inner.value),
        far_stride(view.strides[which].outer),
        far_count(view.rows.count / near_count) {
    if (far_count > 1 && near_count > 1 && far_stride < near_stride) {
      std::swap(near_stride, far_stride);
      std::swap(near_count, far_count);
    }
    begin = reinterpret_cast<intptr_t>(data_of(arg.tensor));
    end = begin + ((far_count - 1) * far_stride + near_extent()) * item_size();
  }

  int64_t near_extent() const { return (near_count - 1) * near_stride + columns; }
  int64_t item_size() const { return (arg.tensor.dtype().bits + 7) / 8; }
};

// True if runs of `a` and of `b` elements, each repeated every `stride` elements and starting
// `distance` apart, never meet.
inline bool runs_are_apart(int64_t distance, int64_t a, int64_t b, int64_t stride) {
  if (stride <= 0) return false;
  const int64_t phase = (distance % stride + stride) % stride;
  return phase >= a && stride - phase >= b;
}

// Slices of one packed tensor are told apart by their common strides. False where nothing proves
// that the two are apart.
inline bool memory_is_apart(const RowMemory& a, const RowMemory& b) {
  if (a.end <= b.begin || b.end <= a.begin) return true;
  const int64_t bytes = b.begin - a.begin;
  if (a.item_size() != b.item_size()) return false;
  if (a.near_stride != b.near_stride || a.far_stride != b.far_stride || bytes % a.item_size() != 0)
    return false;
  const int64_t distance = bytes / a.item_size();
  if (runs_are_apart(distance, a.near_extent(), b.near_extent(), a.far_stride)) return true;
  return a.near_stride > 0 && a.far_stride % a.near_stride == 0 &&
         runs_are_apart(distance, a.columns, b.columns, a.near_stride);
}

// Throws ValueError if rows of an output overlap each other.
PRECAST_ONE_COPY void check_rows_apart(const RowMemory& out) {
  const bool apart = (out.near_count == 1 || out.near_stride >= out.columns) &&
                     (out.far_count == 1 || out.far_stride >= out.near_extent());
  PRECAST_CHECK(apart, ValueError)
      << out.arg.what() << " must not hold an element twice, got strides "
      << to_string(out.arg.tensor.strides()) << " for shape " << to_string(out.arg.tensor.shape());
}

// Throws ValueError if `out` shares memory with `other`.
PRECAST_ONE_COPY void check_memory_apart(const RowMemory& out, const RowMemory& other) {
  PRECAST_CHECK(memory_is_apart(out, other), ValueError)
      << out.arg.what() << " must not overlap " << other.arg.name << "'s memory; call .clone()";
}

// The same, for an output that may be the input itself.
PRECAST_ONE_COPY void check_same_or_apart(const RowMemory& out, const RowMemory& input) {
  const bool same = out.item_size() == input.item_size() && out.begin == input.begin &&
                    out.columns == input.columns && out.near_stride == input.near_stride &&
                    out.far_stride == input.far_stride;
  PRECAST_CHECK(same || memory_is_apart(out, input), ValueError)
      << out.arg.what() << " must be " << input.arg.name
      << " itself or not overlap its memory; call .clone()";
}

}  // namespace precast
