// SPDX-License-Identifier: Apache-2.0
// The kernels of one mhc module: PRECAST_DTYPE is f16 or bf16.
#include "precast/mhc/mhc_post.cuh"
#include "precast/mhc/mhc_pre.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/mhc/mhc.cu: define the module's element type, -DPRECAST_DTYPE=bf16"
#endif

namespace precast {

extern const DType mhc_dtype = TypeName<PRECAST_DTYPE>::value;

cudaError_t mhc_post(const MhcPostParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_mhc_post<PRECAST_DTYPE>(params, enable_pdl, stream);
}

cudaError_t mhc_pre(const MhcPreParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_mhc_pre<PRECAST_DTYPE>(params, enable_pdl, stream);
}

}  // namespace precast
