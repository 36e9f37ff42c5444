// SPDX-License-Identifier: Apache-2.0
// The kernels of one fused sampling module: PRECAST_DTYPE is f32, f16 or bf16.
#include "precast/sampling/fused.cuh"
#include "precast/sampling/plan.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/sampling/sampling_fused.cu: define the module's element type, -DPRECAST_DTYPE=f32"
#endif

namespace precast {

extern const DType sampling_fused_dtype = TypeName<PRECAST_DTYPE>::value;

cudaError_t sample_fused(const FusedParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_sampling<FusedSampleKernel<PRECAST_DTYPE, true>,
                         FusedSampleKernel<PRECAST_DTYPE, false>>(params, enable_pdl, stream,
                                                                  reads_row_once(params));
}

}  // namespace precast
