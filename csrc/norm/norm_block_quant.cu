// SPDX-License-Identifier: Apache-2.0
// The kernels of one norm_block_quant module: PRECAST_DTYPE is f16 or bf16.
#include "precast/norm/rmsnorm_block_quant.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/norm/norm_block_quant.cu: define the module's element type, -DPRECAST_DTYPE=bf16"
#endif

namespace precast {

extern const DType norm_block_quant_dtype = TypeName<PRECAST_DTYPE>::value;

cudaError_t fused_add_rmsnorm_fp8_block_quant(const RmsNormBlockQuantParams& params,
                                              bool enable_pdl, cudaStream_t stream) {
  return launch_rmsnorm_block_quant<PRECAST_DTYPE>(params, enable_pdl, stream);
}

}  // namespace precast
