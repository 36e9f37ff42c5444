// SPDX-License-Identifier: Apache-2.0
// The kernels of the fused_qk_rmsnorm_rope module. It has no axes: the outputs' dtype changes a few
// instructions alone.
#include "precast/rope/fused_qk_rmsnorm_rope.cuh"

namespace precast {

cudaError_t fused_qk_rmsnorm_rope(const QkRmsNormRope3dParams& params, bool enable_pdl,
                                  cudaStream_t stream) {
  return launch_fused_qk_rmsnorm_rope(params, enable_pdl, stream);
}

}  // namespace precast
