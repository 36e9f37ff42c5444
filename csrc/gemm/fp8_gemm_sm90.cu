// SPDX-License-Identifier: Apache-2.0
// The kernels of one fp8_gemm_sm90 module whose tiles' rows are tokens. Its macro is the axis of
// aot_configs/fp8_gemm_sm90.toml.
#include "precast/gemm/sm90/gemm.cuh"

#if !defined(PRECAST_DTYPE_O)
#error "csrc/gemm/fp8_gemm_sm90.cu: define PRECAST_DTYPE_O, such as bf16"
#endif

namespace precast {

extern const DType fp8_gemm_sm90_dtype_o = TypeName<PRECAST_DTYPE_O>::value;

cudaError_t fp8_gemm_sm90(const Fp8GemmParams& params, const Fp8GemmChoice& choice, int sms,
                          bool enable_pdl, cudaStream_t stream) {
  return launch_fp8_gemm<PRECAST_DTYPE_O, false>(params, choice, sms, enable_pdl, stream);
}

}  // namespace precast
