// SPDX-License-Identifier: Apache-2.0
// The layer between tvm-ffi and a launcher: checks that name the operator, the argument, what was
// got and what is legal; the device guard; the stream; CUDA errors as exceptions.
//
// A binding validates, guards, takes the stream and launches, in this order.
#pragma once

#include <cuda_runtime_api.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <initializer_list>
#include <string>
#include <utility>

#include "precast/core/items.cuh"
#include "precast/core/rows.cuh"
#include "precast/core/types.cuh"

// Throws an error of this tvm-ffi kind unless the condition holds: PRECAST_CHECK(a == b,
// ValueError)
// << "what was got, what is legal".
#define PRECAST_CHECK(condition, kind) \
  if (condition) {                     \
  } else                               \
    TVM_FFI_THROW(kind)

// Why: a module then has one copy of each check instead of one for each call site; a call costs a
// nanosecond.
#define PRECAST_ONE_COPY [[gnu::noinline]] inline

// Names an argument in checks: PRECAST_ARG("scale", input).
#define PRECAST_ARG(op, tensor) \
  ::precast::Arg { op, #tensor, tensor }

namespace precast {

using tvm::ffi::TensorView;
using OptionalTensor = tvm::ffi::Optional<TensorView>;

struct Arg {
  const char* op;
  const char* name;
  const TensorView& tensor;

  // "scale: input", the start of every message.
  [[gnu::noinline]] std::string what() const { return std::string(op) + ": " + name; }
};

inline void* data_of(const TensorView& tensor) {
  return static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset();
}

PRECAST_ONE_COPY std::string to_string(const tvm::ffi::ShapeView& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

PRECAST_ONE_COPY const char* device_name(DLDevice device) {
  return device.device_type == kDLCUDA ? "cuda" : device.device_type == kDLCPU ? "cpu" : "another";
}

PRECAST_ONE_COPY std::string to_string(DLDevice device) {
  const std::string name = device_name(device);
  return device.device_type == kDLCPU ? name : name + ":" + std::to_string(device.device_id);
}

PRECAST_ONE_COPY std::string to_string(DLDataType dtype) {
  const std::string bits = std::to_string(dtype.bits);
  if (dtype.lanes != 1) return "a vector type";
  if (dtype.code == kDLBfloat) return "bfloat" + bits;
  if (dtype.code == kDLFloat) return "float" + bits;
  if (dtype.code == kDLInt) return "int" + bits;
  if (dtype.code == kDLUInt) return "uint" + bits;
  if (dtype.code == kDLBool) return "bool";
  if (dtype.code == kDLFloat8_e4m3fn) return "float8_e4m3fn";
  if (dtype.code == kDLFloat8_e5m2) return "float8_e5m2";
  return "dtype code " + std::to_string(dtype.code);
}

PRECAST_ONE_COPY DLDataType to_dl(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return {kDLFloat, 32, 1};
    case DType::f16:
      return {kDLFloat, 16, 1};
    case DType::e4m3:
      return {kDLFloat8_e4m3fn, 8, 1};
    case DType::e5m2:
      return {kDLFloat8_e5m2, 8, 1};
    case DType::i8:
      return {kDLInt, 8, 1};
    case DType::bf16:
      break;
  }
  return {kDLBfloat, 16, 1};
}

inline bool same_dtype(DLDataType a, DLDataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

inline bool has_dtype(const Arg& arg, DType dtype) {
  return same_dtype(arg.tensor.dtype(), to_dl(dtype));
}

PRECAST_ONE_COPY void check_cuda(const Arg& arg) {
  PRECAST_CHECK(arg.tensor.device().device_type == kDLCUDA, ValueError)
      << arg.what() << " must be a CUDA tensor, got " << device_name(arg.tensor.device());
}

PRECAST_ONE_COPY void check_same_device(const Arg& arg, const Arg& other) {
  const DLDevice a = arg.tensor.device();
  const DLDevice b = other.tensor.device();
  PRECAST_CHECK(a.device_type == b.device_type && a.device_id == b.device_id, ValueError)
      << arg.what() << " must be on " << to_string(b) << " as " << other.name << ", got "
      << to_string(a);
}

PRECAST_ONE_COPY void check_dtype(const Arg& arg, DLDataType dtype) {
  PRECAST_CHECK(same_dtype(arg.tensor.dtype(), dtype), ValueError)
      << arg.what() << " must be " << to_string(dtype) << ", got " << to_string(arg.tensor.dtype());
}

inline void check_dtype(const Arg& arg, DType dtype) { check_dtype(arg, to_dl(dtype)); }

PRECAST_ONE_COPY void check_rank(const Arg& arg, int least, int most) {
  PRECAST_CHECK(arg.tensor.ndim() >= least && arg.tensor.ndim() <= most, ValueError)
      << arg.what() << " must have " << (least < most ? std::to_string(least) + " to " : "") << most
      << (most > 1 ? " dimensions" : " dimension") << ", got shape "
      << to_string(arg.tensor.shape());
}

// One fp32 number, in a tensor of any rank.
PRECAST_ONE_COPY void check_one_number(const Arg& arg, const Arg& other) {
  check_same_device(arg, other);
  check_dtype(arg, DType::f32);
  PRECAST_CHECK(arg.tensor.numel() == 1, ValueError)
      << arg.what() << " must hold one number, got shape " << to_string(arg.tensor.shape());
}

PRECAST_ONE_COPY bool has_shape(const TensorView& tensor, const tvm::ffi::ShapeView& shape) {
  if (static_cast<size_t>(tensor.ndim()) != shape.size()) return false;
  for (int i = 0; i < tensor.ndim(); ++i) {
    if (tensor.size(i) != shape[i]) return false;
  }
  return true;
}

// Whether a tensor has the shape of `other` with the last dimension `last`.
PRECAST_ONE_COPY bool has_shape_but_last(const TensorView& tensor, const TensorView& other,
                                         int64_t last) {
  bool fits = tensor.ndim() == other.ndim() && tensor.size(-1) == last;
  for (int i = 0; fits && i + 1 < tensor.ndim(); ++i) fits = tensor.size(i) == other.size(i);
  return fits;
}

PRECAST_ONE_COPY void check_same_shape(const Arg& arg, const Arg& other) {
  PRECAST_CHECK(has_shape(arg.tensor, other.tensor.shape()), ValueError)
      << arg.what() << " must have " << other.name << "'s shape " << to_string(other.tensor.shape())
      << ", got " << to_string(arg.tensor.shape());
}

PRECAST_ONE_COPY bool is_contiguous(const TensorView& tensor) {
  // For an empty tensor, tvm-ffi 0.1.9 takes torch's strides for gaps.
  return tensor.numel() == 0 || tensor.IsContiguous();
}

PRECAST_ONE_COPY void check_contiguous(const Arg& arg) {
  PRECAST_CHECK(is_contiguous(arg.tensor), ValueError)
      << arg.what() << " must be contiguous, got strides " << to_string(arg.tensor.strides())
      << " for shape " << to_string(arg.tensor.shape()) << "; call .contiguous()";
}

// A contiguous 1-D tensor of `size` elements, such as a weight.
PRECAST_ONE_COPY void check_vector(const Arg& arg, int64_t size) {
  PRECAST_CHECK(arg.tensor.ndim() == 1 && arg.tensor.size(0) == size, ValueError)
      << arg.what() << " must have shape [" << size << "], got " << to_string(arg.tensor.shape());
  check_contiguous(arg);
}

PRECAST_ONE_COPY void check_vector_aligned(const Arg& arg) {
  PRECAST_CHECK(reinterpret_cast<uint64_t>(data_of(arg.tensor)) % kVecBytes == 0, ValueError)
      << arg.what() << " must start at a multiple of " << kVecBytes << " bytes; call .clone()";
}

// The last dimension must have unit stride; an output must not hold an element twice.
PRECAST_ONE_COPY void check_columns(const Arg& arg, bool is_output) {
  const TensorView& t = arg.tensor;
  const bool unit = t.ndim() == 0 || t.size(-1) <= 1 || t.stride(-1) == 1;
  PRECAST_CHECK(unit, ValueError) << arg.what() << " must have stride 1 in its last dimension, got "
                                  << "strides " << to_string(t.strides()) << "; call .contiguous()";
  for (int i = 0; is_output && i < t.ndim(); ++i) {
    PRECAST_CHECK(t.size(i) <= 1 || t.stride(i) != 0, ValueError)
        << arg.what() << " must not be expanded, got stride 0 in dimension " << i;
  }
}

// Tensors of equal leading shape, viewed as rows of their last dimension.
constexpr int kMaxRowTensors = 4;

struct RowView {
  Rows rows;
  int64_t columns = 1;  // of the first tensor
  RowStrides strides[kMaxRowTensors];
};

// Merges the dimensions that can be merged in every tensor. With `join_columns` rows may merge into
// columns, too, so that contiguous tensors become one row. Throws ValueError if more than two row
// dimensions remain.
PRECAST_ONE_COPY RowView view_as_rows(std::initializer_list<Arg> args, bool join_columns) {
  const Arg& first = *args.begin();
  RowView view;
  int64_t sizes[2] = {1, 1};  // inner, outer
  int64_t strides[2][kMaxRowTensors] = {};
  int levels = 0;
  bool in_columns = join_columns;  // dimensions can still merge into the columns
  view.columns = first.tensor.ndim() > 0 ? first.tensor.size(-1) : 1;
  for (int dim = first.tensor.ndim() - 2; dim >= 0; --dim) {
    const int64_t size = first.tensor.size(dim);
    if (size == 1) continue;
    bool merges = levels > 0 || in_columns;
    int which = 0;
    for (const Arg& arg : args) {
      const int64_t run =
          levels > 0 ? sizes[levels - 1] * strides[levels - 1][which] : view.columns;
      merges = merges && arg.tensor.stride(dim) == run;
      ++which;
    }
    if (merges && levels == 0) {
      view.columns *= size;
      continue;
    }
    in_columns = false;
    if (merges) {
      sizes[levels - 1] *= size;
      continue;
    }
    PRECAST_CHECK(levels < 2, ValueError)
        << first.what() << " and the output must merge into rows with at most two strides, got "
        << "shape " << to_string(first.tensor.shape()) << " and strides "
        << to_string(first.tensor.strides()) << "; call .contiguous()";
    which = 0;
    for (const Arg& arg : args) strides[levels][which++] = arg.tensor.stride(dim);
    sizes[levels++] = size;
  }
  for (int which = 0; which < kMaxRowTensors; ++which) {
    view.strides[which] = RowStrides{strides[1][which], strides[0][which]};
  }
  constexpr int64_t kMaxRows = 0x7fffffff;
  const bool empty = sizes[0] == 0 || sizes[1] == 0;
  PRECAST_CHECK(empty || sizes[0] <= kMaxRows / sizes[1], ValueError)
      << first.what() << " must have at most " << kMaxRows << " rows, got shape "
      << to_string(first.tensor.shape());
  view.rows.count = empty ? 0 : static_cast<uint32_t>(sizes[0] * sizes[1]);
  view.rows.inner = FastDivmod(empty ? 1 : static_cast<uint32_t>(sizes[0]));
  return view;
}

// Throws ValueError if element-wise kernels cannot number the items of rows of `columns` elements.
PRECAST_ONE_COPY void check_items(const Arg& arg, const RowView& view, int64_t columns) {
  const int item_size = kVecBytes / ((arg.tensor.dtype().bits + 7) / 8);
  PRECAST_CHECK(plan_items(view.rows.count, columns, item_size).fits, ValueError)
      << arg.what() << " must have at most " << kMaxItems << " items of " << kVecBytes
      << " bytes, got shape " << to_string(arg.tensor.shape()) << "; call on parts of it";
}

// Throws RuntimeError for a CUDA error of `op`, and clears it: the next CUDA call of the code that
// catches the exception must not report it again.
PRECAST_ONE_COPY void check_cuda_status(const char* op, cudaError_t status) {
  if (status != cudaSuccess) cudaGetLastError();
  PRECAST_CHECK(status == cudaSuccess, RuntimeError)
      << op << ": " << cudaGetErrorName(status) << ": " << cudaGetErrorString(status);
}

// Makes the tensor's device the current one for a scope.
class DeviceGuard {
 public:
  [[gnu::noinline]] DeviceGuard(const char* op, DLDevice device) {
    check_cuda_status(op, cudaGetDevice(&previous_));
    changed_ = previous_ != device.device_id;
    if (changed_) check_cuda_status(op, cudaSetDevice(device.device_id));
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

// Runs launcher(stream) on the tensor's device and on its current stream, which the framework has
// set.
template <typename Launcher>
void launch_on(const Arg& arg, const Launcher& launcher) {
  const DLDevice device = arg.tensor.device();
  const DeviceGuard guard(arg.op, device);
  const auto stream =
      static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  check_cuda_status(arg.op, launcher(stream));
}

}  // namespace precast
