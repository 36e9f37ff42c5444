// SPDX-License-Identifier: Apache-2.0
// The kernels of one sampling module that sample tokens: PRECAST_DTYPE is f32, f16 or bf16.
#include "precast/sampling/plan.cuh"
#include "precast/sampling/sampling.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/sampling/sampling.cu: define the module's element type, -DPRECAST_DTYPE=f32"
#endif

namespace precast {

extern const DType sampling_dtype = TypeName<PRECAST_DTYPE>::value;

cudaError_t sample_rows(const SampleParams& params, bool enable_pdl, cudaStream_t stream) {
  if (has_top_k(params)) {
    return launch_sampling<TopKTopPSampleKernel<PRECAST_DTYPE, true, true>,
                           TopKTopPSampleKernel<PRECAST_DTYPE, false, true>>(
        params, enable_pdl, stream, reads_row_once(params));
  }
  if (has_top_p(params)) {
    return launch_sampling<TopKTopPSampleKernel<PRECAST_DTYPE, true, false>,
                           TopKTopPSampleKernel<PRECAST_DTYPE, false, false>>(params, enable_pdl,
                                                                              stream);
  }
  return launch_sampling<MinPSampleKernel<PRECAST_DTYPE, true>,
                         MinPSampleKernel<PRECAST_DTYPE, false>>(params, enable_pdl, stream,
                                                                 reads_row_once(params));
}

}  // namespace precast
