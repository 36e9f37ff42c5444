// SPDX-License-Identifier: Apache-2.0
// The kernels of one fp8_gemm_sm90 module for few tokens, which are the columns of its tiles. Why a
// file of its own: the two compile at the same time.
#include "precast/gemm/sm90/gemm.cuh"

#if !defined(PRECAST_DTYPE_O)
#error "csrc/gemm/fp8_gemm_sm90_swapped.cu: define PRECAST_DTYPE_O, such as bf16"
#endif

namespace precast {

cudaError_t fp8_gemm_sm90_swapped(const Fp8GemmParams& params, const Fp8GemmChoice& choice, int sms,
                                  bool enable_pdl, cudaStream_t stream) {
  return launch_fp8_gemm<PRECAST_DTYPE_O, true>(params, choice, sms, enable_pdl, stream);
}

}  // namespace precast
