// SPDX-License-Identifier: Apache-2.0
// The kernels of one rope module: PRECAST_DTYPE is f16 or bf16.
#include "precast/rope/qk_rmsnorm_rope.cuh"
#include "precast/rope/rope.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/rope/rope.cu: define the module's element type, -DPRECAST_DTYPE=bf16"
#endif

namespace precast {

extern const DType rope_dtype = TypeName<PRECAST_DTYPE>::value;

cudaError_t rope(RopeAngles angles, const RopeParams& params, bool enable_pdl,
                 cudaStream_t stream) {
  using T = PRECAST_DTYPE;
  return angles == RopeAngles::cached
             ? launch_rope<T, T, RopeAngles::cached, RopeOutput::rows>(params, enable_pdl, stream)
             : launch_rope<T, T, RopeAngles::computed, RopeOutput::rows>(params, enable_pdl,
                                                                         stream);
}

cudaError_t qk_rmsnorm_rope(const QkRmsNormRopeParams& params, bool enable_pdl,
                            cudaStream_t stream) {
  return launch_qk_rmsnorm_rope<PRECAST_DTYPE>(params, enable_pdl, stream);
}

}  // namespace precast
