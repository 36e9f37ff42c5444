// SPDX-License-Identifier: Apache-2.0
// The kernels of one scale module: PRECAST_DTYPE is f16, bf16 or f32.
#include "precast/elementwise/scale.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/elementwise/scale.cu: define the module's element type, -DPRECAST_DTYPE=bf16"
#endif

namespace precast {

extern const DType scale_dtype = TypeName<PRECAST_DTYPE>::value;

cudaError_t scale(const ScaleParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_scale<PRECAST_DTYPE>(params, enable_pdl, stream);
}

}  // namespace precast
