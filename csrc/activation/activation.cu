// SPDX-License-Identifier: Apache-2.0
// The kernels of one activation module: PRECAST_DTYPE is f16 or bf16.
#include "precast/activation/activation.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/activation/activation.cu: define the module's element type, -DPRECAST_DTYPE=bf16"
#endif

namespace precast {

extern const DType activation_dtype = TypeName<PRECAST_DTYPE>::value;

cudaError_t act_and_mul(Activation activation, const ActAndMulParams& params, bool enable_pdl,
                        cudaStream_t stream) {
  using T = PRECAST_DTYPE;
  switch (activation) {
    case Activation::silu:
      return launch_act_and_mul<T, Activation::silu>(params, enable_pdl, stream);
    case Activation::gelu:
      return launch_act_and_mul<T, Activation::gelu>(params, enable_pdl, stream);
    case Activation::gelu_tanh:
      return launch_act_and_mul<T, Activation::gelu_tanh>(params, enable_pdl, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace precast
