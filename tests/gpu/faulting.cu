// SPDX-License-Identifier: Apache-2.0
// A kernel of a user's own that copies, or fails in the way that it is told to.
#include <cuda_runtime_api.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

namespace {

enum Fault : int { kNone = 0, kIllegalAddress = 1, kTrap = 2 };

__global__ void FaultingKernel(const float* x, float* out, int64_t count, int fault) {
  if (fault == kTrap) __trap();
  // An address that no allocation has; volatile, so that the load is made.
  const volatile float* from = fault == kIllegalAddress ? reinterpret_cast<const float*>(8) : x;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) out[i] = from[i];
}

void faulting(tvm::ffi::TensorView x, tvm::ffi::TensorView out, int64_t count, int64_t fault) {
  const DLDevice device = x.device();
  const auto stream =
      static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  FaultingKernel<<<1, 256, 0, stream>>>(static_cast<const float*>(x.data_ptr()),
                                        static_cast<float*>(out.data_ptr()), count,
                                        static_cast<int>(fault));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(faulting, faulting);
