// SPDX-License-Identifier: Apache-2.0
// The kernels of one block_dequantize module: PRECAST_DTYPE, the output's, is f32, f16 or bf16.
#include "precast/quantize/block_dequantize.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/quantize/block_dequantize.cu: define the module's element type, -DPRECAST_DTYPE=bf16"
#endif

namespace precast {

extern const DType block_dequantize_dtype = TypeName<PRECAST_DTYPE>::value;

cudaError_t block_dequantize(BlockFormat format, const BlockDequantizeParams& params,
                             bool enable_pdl, cudaStream_t stream) {
  return launch_block_dequantize<PRECAST_DTYPE>(format, params, enable_pdl, stream);
}

}  // namespace precast
