// SPDX-License-Identifier: Apache-2.0
// The kernels of one rope_quantize module: PRECAST_DTYPE is f16 or bf16.
#include "precast/rope.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/rope_quantize.cu: define the module's element type, -DPRECAST_DTYPE=bf16"
#endif

namespace precast {

extern const DType rope_quantize_dtype = TypeName<PRECAST_DTYPE>::value;

cudaError_t rope_quantize(DType out, const RopeParams& params, bool enable_pdl,
                          cudaStream_t stream) {
  using T = PRECAST_DTYPE;
  if (out == DType::e4m3) {
    return launch_rope<T, e4m3, RopeAngles::cached, true>(params, enable_pdl, stream);
  }
  if (out == DType::e5m2) {
    return launch_rope<T, e5m2, RopeAngles::cached, true>(params, enable_pdl, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace precast
