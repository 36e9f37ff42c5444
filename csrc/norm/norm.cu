// SPDX-License-Identifier: Apache-2.0
// The kernels of one norm module: PRECAST_DTYPE is f16 or bf16.
#include "precast/norm/layernorm.cuh"
#include "precast/norm/rmsnorm.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/norm/norm.cu: define the module's element type, -DPRECAST_DTYPE=bf16"
#endif

namespace precast {

extern const DType norm_dtype = TypeName<PRECAST_DTYPE>::value;

cudaError_t rmsnorm(const RmsNormParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_rmsnorm<PRECAST_DTYPE, false>(params, enable_pdl, stream);
}

cudaError_t fused_add_rmsnorm(const RmsNormParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_rmsnorm<PRECAST_DTYPE, true>(params, enable_pdl, stream);
}

cudaError_t layernorm(const LayerNormParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_layernorm<PRECAST_DTYPE, PRECAST_DTYPE>(params, enable_pdl, stream);
}

}  // namespace precast
