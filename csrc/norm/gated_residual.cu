// SPDX-License-Identifier: Apache-2.0
// The kernels of one gated_residual module: PRECAST_DTYPE is f16 or bf16.
#include "precast/norm/gated_residual.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/norm/gated_residual.cu: define the module's element type, -DPRECAST_DTYPE=bf16"
#endif

namespace precast {

extern const DType gated_residual_dtype = TypeName<PRECAST_DTYPE>::value;

cudaError_t gated_residual(const GatedResidualParams& params, bool enable_pdl,
                           cudaStream_t stream) {
  return launch_gated_residual<PRECAST_DTYPE>(params, enable_pdl, stream);
}

}  // namespace precast
