// SPDX-License-Identifier: Apache-2.0
// The kernels of one expert_activation module: PRECAST_DTYPE is f16 or bf16.
#include "precast/moe/expert_activation.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/moe/expert_activation.cu: define the type of the products, -DPRECAST_DTYPE=bf16"
#endif

namespace precast {

extern const DType expert_activation_dtype = TypeName<PRECAST_DTYPE>::value;

cudaError_t expert_activation(const ExpertActivationParams& params, ExpertOutput output,
                              bool enable_pdl, cudaStream_t stream) {
  return launch_expert_activation<PRECAST_DTYPE>(params, output, enable_pdl, stream);
}

}  // namespace precast
