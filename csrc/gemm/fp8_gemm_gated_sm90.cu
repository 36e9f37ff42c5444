// SPDX-License-Identifier: Apache-2.0
// The kernel of the module fp8_gemm_gated_sm90.
#include "precast/gemm/sm90/gated_blocks.cuh"

namespace precast {

cudaError_t fp8_gemm_gated_sm90(const Sm90GatedParams& params, const GatedBlocksChoice& choice,
                                int sms, bool enable_pdl, cudaStream_t stream) {
  return launch_gated_blocks(params, choice, sms, enable_pdl, stream);
}

}  // namespace precast
