// SPDX-License-Identifier: Apache-2.0
// The kernel of one moe_finalize module: PRECAST_DTYPE and PRECAST_DTYPE_O are f16 or bf16.
#include "precast/moe/moe_finalize.cuh"

#if !defined(PRECAST_DTYPE) || !defined(PRECAST_DTYPE_O)
#error "csrc/moe/moe_finalize.cu: define PRECAST_DTYPE and PRECAST_DTYPE_O, such as bf16"
#endif

namespace precast {

extern const DType moe_finalize_dtype = TypeName<PRECAST_DTYPE>::value;
extern const DType moe_finalize_dtype_o = TypeName<PRECAST_DTYPE_O>::value;

cudaError_t moe_finalize(const MoeFinalizeParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_moe_finalize<PRECAST_DTYPE, PRECAST_DTYPE_O>(params, enable_pdl, stream);
}

}  // namespace precast
