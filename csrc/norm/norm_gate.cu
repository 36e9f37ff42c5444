// SPDX-License-Identifier: Apache-2.0
// The kernels of one norm_gate module: PRECAST_DTYPE is f16 or bf16, PRECAST_DTYPE_OUT f16, bf16 or
// e4m3.
#include "precast/core/fp8.cuh"
#include "precast/norm/rmsnorm_gate.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/norm/norm_gate.cu: define the module's element type, -DPRECAST_DTYPE=bf16"
#endif
#if !defined(PRECAST_DTYPE_OUT)
#error "csrc/norm/norm_gate.cu: define the type of the module's output, -DPRECAST_DTYPE_OUT=bf16"
#endif

namespace precast {

extern const DType norm_gate_dtype = TypeName<PRECAST_DTYPE>::value;
extern const DType norm_gate_dtype_out = TypeName<PRECAST_DTYPE_OUT>::value;

cudaError_t fused_rmsnorm_silu(const RmsNormGateParams& params, bool enable_pdl,
                               cudaStream_t stream) {
  return launch_rmsnorm_gate<PRECAST_DTYPE, PRECAST_DTYPE_OUT, false>(params, enable_pdl, stream);
}

cudaError_t rmsnorm_sigmoid_gate(const RmsNormGateParams& params, bool enable_pdl,
                                 cudaStream_t stream) {
  return launch_rmsnorm_gate<PRECAST_DTYPE, PRECAST_DTYPE_OUT, true>(params, enable_pdl, stream);
}

}  // namespace precast
