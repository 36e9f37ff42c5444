// SPDX-License-Identifier: Apache-2.0
// The kernels of one silu_and_mul_quant module: PRECAST_DTYPE is f16 or bf16, PRECAST_DTYPE_Q is
// e4m3, e5m2 or i8.
#include "precast/quantize/per_group.cuh"
#include "precast/quantize/per_token.cuh"

#if !defined(PRECAST_DTYPE) || !defined(PRECAST_DTYPE_Q)
#error \
    "csrc/quantize/silu_and_mul_quant.cu: define the module's types, -DPRECAST_DTYPE=bf16 -DPRECAST_DTYPE_Q=e4m3"
#endif

namespace precast {

using T = PRECAST_DTYPE;
using Q = PRECAST_DTYPE_Q;

extern const DType quantize_dtype = TypeName<T>::value;
extern const DType quantize_dtype_q = TypeName<Q>::value;

cudaError_t static_quant(const StaticQuantParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_static_quant<T, Q, true>(params, enable_pdl, stream);
}

cudaError_t token_quant(const TokenQuantParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_token_quant<T, Q, true>(params, enable_pdl, stream);
}

cudaError_t group_quant(const GroupQuantParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_group_quant<T, Q, true>(params, enable_pdl, stream);
}

}  // namespace precast
