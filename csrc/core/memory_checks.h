// SPDX-License-Identifier: Apache-2.0
// Checks of tensors' memory: an output holds each element once, and shares no byte with another
// tensor unless it is that tensor. Tensors may have any strides and element sizes: slices of one
// packed buffer, caches in any order of dimensions.
//
// A binding says once what it writes and what it reads:
//
//   check_written({out, scales}, {input, {op, "mask", mask}});
#pragma once

#include <cstdint>
#include <initializer_list>

#include "core/tvm_ffi_utils.h"

namespace precast {

// Dimensions with more than one element, in ascending order of their strides.
class MemoryLayout {
 public:
  [[gnu::noinline]] explicit MemoryLayout(const TensorView& t) : item_((t.dtype().bits + 7) / 8) {
    for (int i = 0; i < t.ndim(); ++i) {
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
  // `bytes` in a row.
  explicit MemoryLayout(int64_t bytes) : item_(bytes) {}

  bool holds_each_element_once() const {
    int64_t extent = item_;  // of the dimensions with smaller strides
    for (int i = 0; i < dims_; ++i) {
      if (strides_[i] < extent) return false;
      extent += (sizes_[i] - 1) * strides_[i];
    }
    return true;
  }

  // Returns true only if it can prove that no byte belongs to both; `other` starts `distance` bytes
  // behind. Slices of one packed tensor are disjoint if each stays within its own part of every
  // period of a common stride.
  bool is_apart(const MemoryLayout& other, int64_t distance) const {
    for (const MemoryLayout* layout : {this, &other}) {
      for (int i = 0; i < layout->dims_; ++i) {
        const int64_t period = layout->strides_[i];
        if (period <= 0 || !repeats(period) || !other.repeats(period)) continue;
        const int64_t phase = (distance % period + period) % period;
        if (phase >= extent_within(period) && period - phase >= other.extent_within(period)) {
          return true;
        }
      }
    }
    return false;
  }

 private:
  static constexpr int kMaxDims = 8;

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
      if (strides_[i] < 0 || (strides_[i] > period && strides_[i] % period != 0)) return false;
    }
    return true;
  }

  int64_t strides_[kMaxDims] = {};  // bytes
  int64_t sizes_[kMaxDims] = {};
  int dims_ = 0;
  int64_t item_;
};

// An argument's memory: the addresses from its first byte to its last. Why: comparing them takes a
// nanosecond, and almost always tells two tensors apart; layouts are made only where it does not.
class TensorMemory {
 public:
  // Implicit: an Arg, whose tensor must outlive the object, stands for its memory.
  TensorMemory(const Arg& arg) : TensorMemory(arg.op, arg.name, &arg.tensor) {}
  TensorMemory(const char* op, const char* name, const TensorView& tensor)
      : TensorMemory(op, name, &tensor) {}
  // An optional argument; without a tensor it overlaps nothing.
  TensorMemory(const char* op, const char* name, const OptionalTensor& tensor)
      : TensorMemory(op, name, tensor.has_value() ? &*tensor : nullptr) {}
  // Memory of which only address and size are known.
  TensorMemory(const char* op, const char* name, const void* data, int64_t bytes)
      : op_(op), name_(name) {
    if (data != nullptr && bytes > 0) {
      data_ = low_ = reinterpret_cast<intptr_t>(data);
      high_ = low_ + bytes;
    }
  }

  // "scale: input", the start of every message.
  std::string what() const { return std::string(op_) + ": " + name_; }
  const char* name() const { return name_; }
  const TensorView& tensor() const { return *tensor_; }

  bool holds_each_element_once() const {
    return low_ == high_ || MemoryLayout(*tensor_).holds_each_element_once();
  }

  // Whether both have the same elements in the same order. With as many tokens as heads, a
  // transposed view has the same strides for other elements.
  bool is(const TensorMemory& other) const {
    if (data_ != other.data_) return false;
    const TensorView &a = *tensor_, &b = *other.tensor_;
    if (a.ndim() != b.ndim() || a.dtype().bits != b.dtype().bits) return false;
    for (int i = 0; i < a.ndim(); ++i) {
      if (a.size(i) != b.size(i) || (a.size(i) > 1 && a.stride(i) != b.stride(i))) return false;
    }
    return true;
  }

  // Returns true only if it can prove that no byte belongs to both.
  bool is_apart(const TensorMemory& other) const {
    return high_ <= other.low_ || other.high_ <= low_ || is_interleaved(other);
  }

 private:
  [[gnu::noinline]] TensorMemory(const char* op, const char* name, const TensorView* tensor)
      : op_(op), name_(name), tensor_(tensor) {
    if (tensor == nullptr) return;
    int64_t below = 0, above = 0;  // elements from the first in memory to the last
    for (int i = 0; i < tensor->ndim(); ++i) {
      const int64_t size = tensor->size(i);
      if (size == 0) return;
      const int64_t extent = (size - 1) * tensor->stride(i);
      (extent < 0 ? below : above) += extent;
    }
    const int64_t item = (tensor->dtype().bits + 7) / 8;
    data_ = reinterpret_cast<intptr_t>(data_of(*tensor));
    low_ = data_ + below * item;
    high_ = data_ + (above + 1) * item;
  }

  MemoryLayout layout() const {
    return tensor_ != nullptr ? MemoryLayout(*tensor_) : MemoryLayout(high_ - low_);
  }

  [[gnu::noinline]] bool is_interleaved(const TensorMemory& other) const {
    return layout().is_apart(other.layout(), other.data_ - data_);
  }

  const char* op_;
  const char* name_;
  const TensorView* tensor_ = nullptr;
  // Without elements all are null, and no other range contains that.
  intptr_t data_ = 0, low_ = 0, high_ = 0;
};

// Throws ValueError if an output holds an element twice.
PRECAST_ONE_COPY void check_elements_apart(const TensorMemory& out) {
  PRECAST_CHECK(out.holds_each_element_once(), ValueError)
      << out.what() << " must not hold an element twice, got strides "
      << to_string(out.tensor().strides()) << " for shape " << to_string(out.tensor().shape());
}

// Throws ValueError if `out` shares memory with `other`.
PRECAST_ONE_COPY void check_memory_apart(const TensorMemory& out, const TensorMemory& other) {
  PRECAST_CHECK(out.is_apart(other), ValueError)
      << out.what() << " must not overlap " << other.name() << "'s memory; call .clone()";
}

// Throws ValueError if a tensor that is written shares memory with another one of the call.
PRECAST_ONE_COPY void check_written(std::initializer_list<TensorMemory> written,
                                    std::initializer_list<TensorMemory> read) {
  for (const TensorMemory& out : written) {
    for (const TensorMemory* other = written.begin(); other != &out; ++other) {
      check_memory_apart(out, *other);
    }
  }
  for (const TensorMemory& out : written) {
    for (const TensorMemory& other : read) check_memory_apart(out, other);
  }
}

// Throws ValueError if `out` shares memory with `input` and is not the input itself.
PRECAST_ONE_COPY void check_same_or_apart(const TensorMemory& out, const TensorMemory& input) {
  PRECAST_CHECK(out.is(input) || out.is_apart(input), ValueError)
      << out.what() << " must be " << input.name()
      << " itself or not overlap its memory; call .clone()";
}

}  // namespace precast
