// SPDX-License-Identifier: Apache-2.0
// The kernels of one gemm_gated_sm90 module for few tokens, which are the columns of its tiles. Why
// a file of its own: the two compile at the same time.
#include "precast/gemm/sm90/gated.cuh"

#if !defined(PRECAST_DTYPE)
#error "csrc/gemm/gemm_gated_sm90_swapped.cu: define PRECAST_DTYPE, such as bf16"
#endif

namespace precast {

cudaError_t gemm_gated_sm90_swapped(const GatedGemmParams& params, bool row_major_b,
                                    const GatedGemmChoice& choice, int sms, bool enable_pdl,
                                    cudaStream_t stream) {
  using Types = GatedGemmTypes<PRECAST_DTYPE>;
  return launch_plain_gemm<Types, true>(params, row_major_b, choice, sms, enable_pdl, stream);
}

}  // namespace precast
