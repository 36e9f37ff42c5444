// SPDX-License-Identifier: Apache-2.0
// The kernels of one scaled_gemm_sm90 module whose tiles' rows are tokens. Its macro is the axis of
// aot_configs/scaled_gemm_sm90.toml.
#include "precast/gemm/sm90/scaled.cuh"

#if !defined(PRECAST_DTYPE_O)
#error "csrc/gemm/scaled_gemm_sm90.cu: define PRECAST_DTYPE_O, such as bf16"
#endif

namespace precast {

extern const DType scaled_gemm_sm90_dtype_o = TypeName<PRECAST_DTYPE_O>::value;

cudaError_t scaled_gemm_sm90(const GemmParams& params, bool row_major_b,
                             const ScaledGemmChoice& choice, int sms, bool enable_pdl,
                             cudaStream_t stream) {
  using Types = ScaledGemmTypes<PRECAST_DTYPE_O>;
  return launch_plain_gemm<Types, false>(params, row_major_b, choice, sms, enable_pdl, stream);
}

}  // namespace precast
