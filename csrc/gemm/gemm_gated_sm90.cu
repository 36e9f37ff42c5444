// SPDX-License-Identifier: Apache-2.0
// The kernels of one gemm_gated_sm90 module whose tiles' rows are tokens. Its macro is the axis of
// aot_configs/gemm_gated_sm90.toml.
#include "precast/gemm/sm90/gated.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/gemm/gemm_gated_sm90.cu: define PRECAST_DTYPE, such as bf16"
#endif

namespace precast {

extern const DType gemm_gated_sm90_dtype = TypeName<PRECAST_DTYPE>::value;

cudaError_t gemm_gated_sm90(const GatedGemmParams& params, bool row_major_b,
                            const GatedGemmChoice& choice, int sms, bool enable_pdl,
                            cudaStream_t stream) {
  using Types = GatedGemmTypes<PRECAST_DTYPE>;
  return launch_plain_gemm<Types, false>(params, row_major_b, choice, sms, enable_pdl, stream);
}

}  // namespace precast
