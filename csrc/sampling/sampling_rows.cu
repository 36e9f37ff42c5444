// SPDX-License-Identifier: Apache-2.0
// The other kernels of one sampling module, in a file of their own so that two cores compile it:
// PRECAST_DTYPE is f32, f16 or bf16.
#include "precast/sampling/chain_speculative.cuh"
#include "precast/sampling/plan.cuh"
#include "precast/sampling/row_transform.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/sampling/sampling_rows.cu: define the module's element type, -DPRECAST_DTYPE=f32"
#endif

namespace precast {

cudaError_t transform_rows(const RowTransformParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_sampling<RowTransformKernel<PRECAST_DTYPE, true>,
                         RowTransformKernel<PRECAST_DTYPE, false>>(params, enable_pdl, stream);
}

cudaError_t sample_chain(const ChainParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_sampling<ChainSpeculativeKernel<PRECAST_DTYPE, true>,
                         ChainSpeculativeKernel<PRECAST_DTYPE, false>>(params, enable_pdl, stream);
}

}  // namespace precast
