// SPDX-License-Identifier: Apache-2.0
// The kernel of one top-k module: PRECAST_DTYPE is f32, f16 or bf16.
#include "precast/topk/plan.cuh"
#include "precast/topk/topk.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/topk/topk.cu: define the module's element type, -DPRECAST_DTYPE=f32"
#endif

namespace precast {

extern const DType topk_dtype = TypeName<PRECAST_DTYPE>::value;

cudaError_t top_k_rows(const TopKParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_top_k<PRECAST_DTYPE>(params, enable_pdl, stream);
}

}  // namespace precast
