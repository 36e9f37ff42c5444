// SPDX-License-Identifier: Apache-2.0
// The kernels of one paged_dequantize module: PRECAST_DTYPE, the output's, is f16 or bf16.
#include "precast/quantize/paged_dequantize.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/quantize/paged_dequantize.cu: define the module's element type, -DPRECAST_DTYPE=bf16"
#endif

namespace precast {

extern const DType paged_dequantize_dtype = TypeName<PRECAST_DTYPE>::value;

cudaError_t paged_dequantize(const PagedDequantizeParams& params, bool enable_pdl,
                             cudaStream_t stream) {
  return launch_paged_dequantize<PRECAST_DTYPE>(params, enable_pdl, stream);
}

}  // namespace precast
