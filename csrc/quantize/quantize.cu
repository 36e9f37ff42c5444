// SPDX-License-Identifier: Apache-2.0
// The kernels of one quantize module: PRECAST_DTYPE is f16, bf16 or f32, PRECAST_DTYPE_Q is e4m3,
// e5m2 or i8.
#include "precast/quantize/per_block.cuh"
#include "precast/quantize/per_group.cuh"
#include "precast/quantize/per_tensor.cuh"
#include "precast/quantize/per_token.cuh"

#if !defined(PRECAST_DTYPE) || !defined(PRECAST_DTYPE_Q)
#error \
    "csrc/quantize/quantize.cu: define the module's types, -DPRECAST_DTYPE=bf16 -DPRECAST_DTYPE_Q=e4m3"
#endif

namespace precast {

using T = PRECAST_DTYPE;
using Q = PRECAST_DTYPE_Q;

extern const DType quantize_dtype = TypeName<T>::value;
extern const DType quantize_dtype_q = TypeName<Q>::value;

cudaError_t static_quant(const StaticQuantParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_static_quant<T, Q, false>(params, enable_pdl, stream);
}

cudaError_t tensor_quant(const TensorQuantParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_tensor_quant<T, Q>(params, enable_pdl, stream);
}

cudaError_t token_quant(const TokenQuantParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_token_quant<T, Q, false>(params, enable_pdl, stream);
}

cudaError_t group_quant(const GroupQuantParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_group_quant<T, Q, false>(params, enable_pdl, stream);
}

cudaError_t block_quant(const BlockQuantParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_block_quant<T, Q>(params, enable_pdl, stream);
}

}  // namespace precast
