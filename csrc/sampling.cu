// SPDX-License-Identifier: Apache-2.0
// The kernels of one sampling module: PRECAST_DTYPE is f32, f16 or bf16.
#include "precast/sampling.cuh"
#include "precast/sampling_chain.cuh"
#include "precast/sampling_plan.cuh"
#include "precast/sampling_rows.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/sampling.cu: define the module's element type, -DPRECAST_DTYPE=f32"
#endif

namespace precast {

extern const DType sampling_dtype = TypeName<PRECAST_DTYPE>::value;

cudaError_t sample_rows(const SampleParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_sampling(SampleKernel<PRECAST_DTYPE, true>, SampleKernel<PRECAST_DTYPE, false>,
                         params, enable_pdl, stream, true);
}

cudaError_t transform_rows(const RowOpParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_sampling(RowOpKernel<PRECAST_DTYPE, true>, RowOpKernel<PRECAST_DTYPE, false>,
                         params, enable_pdl, stream);
}

cudaError_t sample_chain(const ChainParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_sampling(ChainKernel<PRECAST_DTYPE, true>, ChainKernel<PRECAST_DTYPE, false>,
                         params, enable_pdl, stream, false, true);
}

}  // namespace precast
