// SPDX-License-Identifier: Apache-2.0
// Checks of a call's tensors against named sizes, in one expression a tensor:
//
//   Dim rows("rows"), columns("columns");
//   TensorMatcher match("top_k");
//   const Arg in = match(input, "input").cuda().dtype(kDtype).shape({rows, columns}).unit_stride();
//   match(values, "values").same_device(in).dtype(kDtype).shape({rows, k}).contiguous().apart(in);
//
// The first tensor with a size binds it; every other tensor must have the same. A check that fails
// throws ValueError, which names the op, the argument, what was got and what is legal.
#pragma once

#include "core/memory_checks.h"
#include "core/tvm_ffi_utils.h"

namespace precast {

constexpr DLDataType kInt32 = {kDLInt, 32, 1};
constexpr DLDataType kInt64 = {kDLInt, 64, 1};
constexpr DLDataType kUint64 = {kDLUInt, 64, 1};
constexpr DLDataType kUint8 = {kDLUInt, 8, 1};
constexpr DLDataType kBool = {kDLBool, 8, 1};

// A size that several tensors share. It is unknown until a tensor binds it.
class Dim {
 public:
  explicit Dim(const char* name, int64_t least = 0) : name_(name), least_(least) {}
  operator int64_t() const { return size_; }

 private:
  friend class Extent;
  const char* name_;  // in errors, until it is bound
  int64_t least_;
  int64_t size_ = -1;
};

// One dimension of an expected shape: a number, or a Dim that is bound or to be bound.
class Extent {
 public:
  Extent(int64_t size) : size_(size) {}  // implicit, because shapes are written as lists
  Extent(int size) : size_(size) {}      // implicit
  Extent(Dim& dim) : dim_(&dim), size_(dim.size_) {}  // implicit

  bool accepts(int64_t size) const { return is_unknown() ? size >= dim_->least_ : size == size_; }
  void bind(int64_t size) const {
    if (dim_ != nullptr) dim_->size_ = size;
  }
  std::string text() const { return is_unknown() ? dim_->name_ : std::to_string(size_); }

 private:
  bool is_unknown() const { return dim_ != nullptr && size_ < 0; }

  Dim* dim_ = nullptr;
  int64_t size_;
};

PRECAST_ONE_COPY void check_shape(const Arg& arg, std::initializer_list<Extent> shape) {
  const TensorView& t = arg.tensor;
  bool fits = static_cast<size_t>(t.ndim()) == shape.size();
  std::string text;
  for (size_t i = 0; fits && i < shape.size(); ++i) fits = shape.begin()[i].accepts(t.size(i));
  if (!fits) {
    for (const Extent& extent : shape) text += (text.empty() ? "" : ", ") + extent.text();
  }
  PRECAST_CHECK(fits, ValueError) << arg.what() << " must have shape [" << text << "], got "
                                  << to_string(t.shape());
  for (size_t i = 0; i < shape.size(); ++i) shape.begin()[i].bind(t.size(i));
}

// Checks indices or tokens; returns whether they are int64 rather than int32.
PRECAST_ONE_COPY bool check_index_dtype(const Arg& arg) {
  const DLDataType dtype = arg.tensor.dtype();
  PRECAST_CHECK(same_dtype(dtype, kInt32) || same_dtype(dtype, kInt64), ValueError)
      << arg.what() << " must be int32 or int64, got " << to_string(dtype);
  return dtype.bits == 64;
}

// The checks of one tensor. Each returns the object, so that they form one expression.
class TensorMatch {
 public:
  explicit TensorMatch(const Arg& arg) : arg_(arg) {}
  operator const Arg&() const { return arg_; }

  const TensorMatch& cuda() const { return check_cuda(arg_), *this; }
  const TensorMatch& same_device(const Arg& other) const {
    return check_same_device(arg_, other), *this;
  }
  const TensorMatch& dtype(DType dtype) const { return check_dtype(arg_, dtype), *this; }
  const TensorMatch& dtype(DLDataType dtype) const { return check_dtype(arg_, dtype), *this; }
  const TensorMatch& index_dtype(bool& is_int64) const {
    return is_int64 = check_index_dtype(arg_), *this;
  }
  const TensorMatch& shape(std::initializer_list<Extent> shape) const {
    return check_shape(arg_, shape), *this;
  }
  const TensorMatch& shape_of(const Arg& other) const {
    return check_same_shape(arg_, other), *this;
  }
  const TensorMatch& rank(int least, int most) const {
    return check_rank(arg_, least, most), *this;
  }
  const TensorMatch& contiguous() const { return check_contiguous(arg_), *this; }
  const TensorMatch& unit_stride() const { return check_columns(arg_, false), *this; }
  const TensorMatch& unit_stride_output() const { return check_columns(arg_, true), *this; }
  const TensorMatch& aligned() const { return check_vector_aligned(arg_), *this; }
  // Checks that it shares no memory with `other`.
  const TensorMatch& apart(const TensorMemory& other) const {
    return check_memory_apart(arg_, other), *this;
  }
  const TensorMatch& elements_apart() const { return check_elements_apart(arg_), *this; }

  template <typename T>
  T* data() const {
    return static_cast<T*>(data_of(arg_.tensor));
  }

 private:
  Arg arg_;
};

class TensorMatcher {
 public:
  explicit TensorMatcher(const char* op) : op_(op) {}

  TensorMatch operator()(const TensorView& tensor, const char* name) const {
    return TensorMatch(Arg{op_, name, tensor});
  }

  // Returns the data of an optional tensor after check(match), or null.
  template <typename T, typename Check>
  T* optional(const OptionalTensor& tensor, const char* name, const Check& check) const {
    if (!tensor.has_value()) return nullptr;
    const TensorView view = tensor.value();
    const TensorMatch match = (*this)(view, name);
    check(match);
    return match.data<T>();
  }

 private:
  const char* op_;
};

}  // namespace precast
