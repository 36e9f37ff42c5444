// SPDX-License-Identifier: Apache-2.0
// Checks of tensors' memory: an output holds each element once, and shares no byte with another
// tensor unless it is that tensor. Tensors may have any strides and element sizes: slices of one
// packed buffer, caches in any order of dimensions.
#pragma once

#include <cstdint>

#include "core/tvm_ffi_utils.h"

namespace precast {

class TensorMemory {
 public:
  // Implicit: an Arg, which must outlive the object, stands for its memory. Only dimensions with
  // more than one element are kept, in ascending order of their strides.
  [[gnu::noinline]] TensorMemory(const Arg& tensor) : arg(tensor) {
    const TensorView& t = tensor.tensor;
    begin_ = reinterpret_cast<intptr_t>(data_of(t));
    item_ = (t.dtype().bits + 7) / 8;
    for (int i = 0; i < t.ndim(); ++i) {
      empty_ = empty_ || t.size(i) == 0;
      if (t.size(i) <= 1 || dims_ == kMaxDims) continue;
      const int64_t stride = t.stride(i) * item_;
      int at = dims_++;
      for (; at > 0 && strides_[at - 1] > stride; --at) {
        strides_[at] = strides_[at - 1];
        sizes_[at] = sizes_[at - 1];
      }
      strides_[at] = stride;
      sizes_[at] = t.size(i);
    }
  }

  bool holds_each_element_once() const {
    int64_t extent = item_;  // of the dimensions with smaller strides
    for (int i = 0; i < dims_; ++i) {
      if (strides_[i] < extent) return empty_;
      extent += (sizes_[i] - 1) * strides_[i];
    }
    return true;
  }

  // Whether both have the same elements in the same order. With as many tokens as heads, a
  // transposed view has the same strides for other elements.
  bool is(const TensorMemory& other) const {
    if (begin_ != other.begin_ || item_ != other.item_) return false;
    const TensorView &a = arg.tensor, &b = other.arg.tensor;
    if (a.ndim() != b.ndim()) return false;
    for (int i = 0; i < a.ndim(); ++i) {
      if (a.size(i) != b.size(i) || (a.size(i) > 1 && a.stride(i) != b.stride(i))) return false;
    }
    return true;
  }

  // Returns false unless disjointness can be proved. Slices of one packed tensor are disjoint if
  // each stays within its own part of every period of a common stride.
  [[gnu::noinline]] bool is_apart(const TensorMemory& other) const {
    const int64_t distance = other.begin_ - begin_;
    if (empty_ || other.empty_) return true;
    if (distance >= extent_within(kWhole) || -distance >= other.extent_within(kWhole)) return true;
    for (const TensorMemory* memory : {this, &other}) {
      for (int i = 0; i < memory->dims_; ++i) {
        const int64_t period = memory->strides_[i];
        if (period <= 0 || !repeats(period) || !other.repeats(period)) continue;
        const int64_t phase = (distance % period + period) % period;
        if (phase >= extent_within(period) && period - phase >= other.extent_within(period)) {
          return true;
        }
      }
    }
    return false;
  }

  const Arg& arg;

 private:
  static constexpr int kMaxDims = 8;
  static constexpr int64_t kWhole = INT64_MAX;

  // The bytes from the first element to the end of the last, over the dimensions whose strides are
  // below `period`.
  int64_t extent_within(int64_t period) const {
    int64_t bytes = item_;
    for (int i = 0; i < dims_ && strides_[i] < period; ++i) bytes += (sizes_[i] - 1) * strides_[i];
    return bytes;
  }

  // Whether the layout repeats every `period` bytes.
  bool repeats(int64_t period) const {
    for (int i = 0; i < dims_; ++i) {
      if (strides_[i] > period && strides_[i] % period != 0) return false;
    }
    return true;
  }

  int64_t strides_[kMaxDims] = {};  // bytes
  int64_t sizes_[kMaxDims] = {};
  int dims_ = 0;
  bool empty_ = false;
  int64_t item_;
  intptr_t begin_;
};

// Throws ValueError if an output holds an element twice.
PRECAST_ONE_COPY void check_elements_apart(const TensorMemory& out) {
  PRECAST_CHECK(out.holds_each_element_once(), ValueError)
      << out.arg.what() << " must not hold an element twice, got strides "
      << to_string(out.arg.tensor.strides()) << " for shape " << to_string(out.arg.tensor.shape());
}

// Throws ValueError if `out` shares memory with `other`.
PRECAST_ONE_COPY void check_memory_apart(const TensorMemory& out, const TensorMemory& other) {
  PRECAST_CHECK(out.is_apart(other), ValueError)
      << out.arg.what() << " must not overlap " << other.arg.name << "'s memory; call .clone()";
}

// Does the same for an output that may be the input itself.
PRECAST_ONE_COPY void check_same_or_apart(const TensorMemory& out, const TensorMemory& input) {
  PRECAST_CHECK(out.is(input) || out.is_apart(input), ValueError)
      << out.arg.what() << " must be " << input.arg.name
      << " itself or not overlap its memory; call .clone()";
}

}  // namespace precast
