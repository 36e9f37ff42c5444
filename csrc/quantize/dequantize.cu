// SPDX-License-Identifier: Apache-2.0
// The kernels of one dequantize module: PRECAST_DTYPE_Q is e4m3, e5m2 or i8, PRECAST_DTYPE is f16,
// bf16 or f32.
#include "precast/quantize/dequantize.cuh"

#if !defined(PRECAST_DTYPE) || !defined(PRECAST_DTYPE_Q)
#error \
    "csrc/quantize/dequantize.cu: define the module's types, -DPRECAST_DTYPE_Q=e4m3 -DPRECAST_DTYPE=bf16"
#endif

namespace precast {

extern const DType dequantize_dtype_q = TypeName<PRECAST_DTYPE_Q>::value;
extern const DType dequantize_dtype = TypeName<PRECAST_DTYPE>::value;

cudaError_t dequantize(const DequantizeParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_dequantize<PRECAST_DTYPE_Q, PRECAST_DTYPE>(params, enable_pdl, stream);
}

}  // namespace precast
