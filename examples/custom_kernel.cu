// SPDX-License-Identifier: Apache-2.0
// A kernel of your own, with its entry point.
//
//   out[i] = max(input[i], 0)^2, computed in fp32; a NaN stays a NaN
//
// Layout   input, out  [...]  f32 or bf16, contiguous, of one shape
// Threads  one thread computes one element
// Source   definition
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

namespace {

using tvm::ffi::TensorView;

constexpr int kThreads = 256;

template <typename T>
__global__ void SquaredReluKernel(const T* input, T* out, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const float x = static_cast<float>(input[i]);
  const float y = x < 0.0f ? 0.0f : x;  // false for a NaN
  out[i] = static_cast<T>(y * y);
}

template <typename T>
void launch(const TensorView& input, const TensorView& out, int64_t count, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
  SquaredReluKernel<<<blocks, kThreads, 0, stream>>>(static_cast<const T*>(input.data_ptr()),
                                                     static_cast<T*>(out.data_ptr()), count);
}

void require(bool holds, const char* what) {
  if (!holds) TVM_FFI_THROW(ValueError) << "squared_relu: " << what;
}

bool same_shape(const TensorView& a, const TensorView& b) {
  if (a.ndim() != b.ndim()) return false;
  for (int i = 0; i < a.ndim(); ++i) {
    if (a.size(i) != b.size(i)) return false;
  }
  return true;
}

void squared_relu(TensorView input, TensorView out) {
  const DLDevice device = input.device();
  require(device.device_type == kDLCUDA, "input must be a CUDA tensor");
  require(out.device().device_type == kDLCUDA && out.device().device_id == device.device_id,
          "out must be on the device of input");
  const DLDataType dtype = input.dtype();
  const bool is_f32 = dtype == DLDataType{kDLFloat, 32, 1};
  require(is_f32 || dtype == DLDataType{kDLBfloat, 16, 1}, "input must be float32 or bfloat16");
  require(out.dtype() == dtype, "out must have the dtype of input");
  require(same_shape(input, out), "out must have the shape of input");
  require(input.IsContiguous() && out.IsContiguous(), "input and out must be contiguous");

  int64_t count = 1;
  for (int i = 0; i < input.ndim(); ++i) count *= input.size(i);
  if (count == 0) return;
  const auto stream =
      static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  is_f32 ? launch<float>(input, out, count, stream)
         : launch<__nv_bfloat16>(input, out, count, stream);
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) {
    TVM_FFI_THROW(RuntimeError) << "squared_relu: " << cudaGetErrorString(status);
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(squared_relu, squared_relu);
