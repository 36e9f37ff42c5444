// SPDX-License-Identifier: Apache-2.0
// The kernels of one fused_topk_deepseek module: PRECAST_DTYPE and PRECAST_DTYPE_BIAS are f32, f16
// or bf16.
#include "precast/moe/fused_topk_deepseek.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/moe/fused_topk_deepseek.cu: define the type of the scores, -DPRECAST_DTYPE=f32"
#endif
#if !defined(PRECAST_DTYPE_BIAS)
#error "csrc/moe/fused_topk_deepseek.cu: define the type of the bias, -DPRECAST_DTYPE_BIAS=f32"
#endif

namespace precast {

extern const DType routing_dtype = TypeName<PRECAST_DTYPE>::value;
extern const DType routing_dtype_bias = TypeName<PRECAST_DTYPE_BIAS>::value;

cudaError_t fused_topk_deepseek(const FusedTopKDeepSeekParams& params, bool enable_pdl,
                                cudaStream_t stream) {
  return launch_fused_topk_deepseek<PRECAST_DTYPE, PRECAST_DTYPE_BIAS>(params, enable_pdl, stream);
}

}  // namespace precast
