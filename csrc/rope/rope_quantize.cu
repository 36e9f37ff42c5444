// SPDX-License-Identifier: Apache-2.0
// The kernels of one rope_quantize module: PRECAST_DTYPE is f16 or bf16, PRECAST_DTYPE_OUT e4m3 or
// e5m2.
#include "precast/rope/rope.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/rope/rope_quantize.cu: define the module's element type, -DPRECAST_DTYPE=bf16"
#endif
#if !defined(PRECAST_DTYPE_OUT)
#error \
    "csrc/rope/rope_quantize.cu: define the type of the module's output, -DPRECAST_DTYPE_OUT=e4m3"
#endif

namespace precast {

extern const DType rope_quantize_dtype = TypeName<PRECAST_DTYPE>::value;
extern const DType rope_quantize_dtype_out = TypeName<PRECAST_DTYPE_OUT>::value;

cudaError_t rope_quantize(const RopeParams& params, bool enable_pdl, cudaStream_t stream) {
  using T = PRECAST_DTYPE;
  using Out = PRECAST_DTYPE_OUT;
  constexpr RopeAngles kAngles = RopeAngles::cached;
  if (params.slots.tokens.data == nullptr) {  // no page table
    return launch_rope<T, Out, kAngles, RopeOutput::rows>(params, enable_pdl, stream);
  }
  return has_index32_only(params.slots)
             ? launch_rope<T, Out, kAngles, RopeOutput::pages32>(params, enable_pdl, stream)
             : launch_rope<T, Out, kAngles, RopeOutput::pages>(params, enable_pdl, stream);
}

}  // namespace precast
