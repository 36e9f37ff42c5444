// SPDX-License-Identifier: Apache-2.0
// The kernel of the tinygemm module. It has no axes, because its operands have one dtype.
#include "precast/gemm/tinygemm.cuh"

namespace precast {

cudaError_t tinygemm(const TinyGemmParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_tinygemm(params, enable_pdl, stream);
}

}  // namespace precast
