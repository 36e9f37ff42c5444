// SPDX-License-Identifier: Apache-2.0
// The kernels of one norm_quant module: PRECAST_DTYPE is f16 or bf16, PRECAST_DTYPE_OUT e4m3 or
// e5m2.
#include "precast/norm/layernorm.cuh"
#include "precast/norm/rmsnorm_quant.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/norm/norm_quant.cu: define the module's element type, -DPRECAST_DTYPE=bf16"
#endif
#if !defined(PRECAST_DTYPE_OUT)
#error "csrc/norm/norm_quant.cu: define the type of the module's output, -DPRECAST_DTYPE_OUT=e4m3"
#endif

namespace precast {

extern const DType norm_quant_dtype = TypeName<PRECAST_DTYPE>::value;
extern const DType norm_quant_dtype_out = TypeName<PRECAST_DTYPE_OUT>::value;

cudaError_t rmsnorm_quant(const RmsNormQuantParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_rmsnorm_quant<PRECAST_DTYPE, PRECAST_DTYPE_OUT, false>(params, enable_pdl, stream);
}

cudaError_t fused_add_rmsnorm_quant(const RmsNormQuantParams& params, bool enable_pdl,
                                    cudaStream_t stream) {
  return launch_rmsnorm_quant<PRECAST_DTYPE, PRECAST_DTYPE_OUT, true>(params, enable_pdl, stream);
}

cudaError_t layernorm_quant(const LayerNormParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_layernorm<PRECAST_DTYPE, PRECAST_DTYPE_OUT>(params, enable_pdl, stream);
}

}  // namespace precast
