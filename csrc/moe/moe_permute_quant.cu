// SPDX-License-Identifier: Apache-2.0
// The kernel of one moe_permute_quant module: PRECAST_DTYPE is f16 or bf16.
#include "precast/moe/moe_permute_quant.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/moe/moe_permute_quant.cu: define the type of the tokens, -DPRECAST_DTYPE=bf16"
#endif

namespace precast {

extern const DType moe_permute_quant_dtype = TypeName<PRECAST_DTYPE>::value;

cudaError_t moe_permute_quant(const MoePermuteQuantParams& params, bool enable_pdl,
                              cudaStream_t stream) {
  return launch_moe_permute_quant<PRECAST_DTYPE>(params, enable_pdl, stream);
}

}  // namespace precast
