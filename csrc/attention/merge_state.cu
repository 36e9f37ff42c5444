// SPDX-License-Identifier: Apache-2.0
// The kernels of one merge_state module: PRECAST_DTYPE is f16, bf16 or f32.
#include "precast/attention/merge_state.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/attention/merge_state.cu: define the module's element type, -DPRECAST_DTYPE=bf16"
#endif

namespace precast {

extern const DType merge_state_dtype = TypeName<PRECAST_DTYPE>::value;

cudaError_t merge_state(const MergeStateParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_merge_state<PRECAST_DTYPE>(params, enable_pdl, stream);
}

cudaError_t merge_states(const MergeStatesParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_merge_states<PRECAST_DTYPE>(params, enable_pdl, stream);
}

}  // namespace precast
