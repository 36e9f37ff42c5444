// SPDX-License-Identifier: Apache-2.0
// The kernels of one moe_activation module: PRECAST_DTYPE is f16 or bf16.
#include "precast/moe/moe_activation.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/moe/moe_activation.cu: define the module's element type, -DPRECAST_DTYPE=bf16"
#endif

namespace precast {

extern const DType moe_activation_dtype = TypeName<PRECAST_DTYPE>::value;

cudaError_t moe_activation(const MoeActivationParams& params, ExpertOutput output, bool enable_pdl,
                           cudaStream_t stream) {
  return launch_moe_activation<PRECAST_DTYPE>(params, output, enable_pdl, stream);
}

}  // namespace precast
