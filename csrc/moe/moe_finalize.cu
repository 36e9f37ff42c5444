// SPDX-License-Identifier: Apache-2.0
// The kernel of one moe_finalize module: PRECAST_DTYPE is f16 or bf16.
#include "precast/moe/moe_finalize.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/moe/moe_finalize.cu: define the module's element type, -DPRECAST_DTYPE=bf16"
#endif

namespace precast {

extern const DType moe_finalize_dtype = TypeName<PRECAST_DTYPE>::value;

cudaError_t moe_finalize(const MoeFinalizeParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_moe_finalize<PRECAST_DTYPE>(params, enable_pdl, stream);
}

}  // namespace precast
