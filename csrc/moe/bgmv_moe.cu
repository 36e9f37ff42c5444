// SPDX-License-Identifier: Apache-2.0
// The kernels of one bgmv_moe module: PRECAST_DTYPE is f16 or bf16.
#include "precast/moe/bgmv_moe_expand.cuh"
#include "precast/moe/bgmv_moe_shrink.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/moe/bgmv_moe.cu: define the module's element type, -DPRECAST_DTYPE=bf16"
#endif

namespace precast {

extern const DType bgmv_moe_dtype = TypeName<PRECAST_DTYPE>::value;

cudaError_t bgmv_moe_shrink(const BgmvMoeShrinkParams& params, bool enable_pdl,
                            cudaStream_t stream) {
  return launch_bgmv_moe_shrink<PRECAST_DTYPE>(params, enable_pdl, stream);
}

cudaError_t bgmv_moe_expand(const BgmvMoeExpandParams& params, bool enable_pdl,
                            cudaStream_t stream) {
  return launch_bgmv_moe_expand<PRECAST_DTYPE>(params, enable_pdl, stream);
}

}  // namespace precast
