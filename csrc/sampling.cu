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
#if defined(PRECAST_TUNE)
  const bool lists = getenv("PT_NOLIST") == nullptr && (params.top_k_values != nullptr || (params.top_k > 0 && params.top_k < 96));
#else
  const bool lists = params.top_k_values != nullptr || (params.top_k > 0 && params.top_k < 96);
#endif
  if (params.top_k_values == nullptr && params.top_k == 0 && params.top_p.values == nullptr && params.top_p.value >= 1.0f && params.min_p.values == nullptr && params.min_p.value <= 0.0f && getenv("PT_NOPLAIN") == nullptr)
  return launch_sampling(PlainKernel<PRECAST_DTYPE, true>, PlainKernel<PRECAST_DTYPE, false>,
                         params, enable_pdl, stream, getenv("PT_PWALK") != nullptr);
  return launch_sampling(SampleKernel<PRECAST_DTYPE, true>, SampleKernel<PRECAST_DTYPE, false>,
                         params, enable_pdl, stream, lists);
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
