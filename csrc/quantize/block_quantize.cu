// SPDX-License-Identifier: Apache-2.0
// The kernels of one block_quantize module: PRECAST_DTYPE is f16 or bf16.
#include "precast/quantize/block_quantize.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/quantize/block_quantize.cu: define the module's element type, -DPRECAST_DTYPE=bf16"
#endif

namespace precast {

extern const DType block_quantize_dtype = TypeName<PRECAST_DTYPE>::value;

cudaError_t block_quantize(BlockRecipe recipe, const BlockQuantizeParams& params, bool enable_pdl,
                           cudaStream_t stream) {
  return launch_block_quantize<PRECAST_DTYPE>(recipe, params, enable_pdl, stream);
}

}  // namespace precast
