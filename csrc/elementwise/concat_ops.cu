// SPDX-License-Identifier: Apache-2.0
// The kernels of the concat_ops module. It has no axes, because a copy needs no element type.
#include "precast/elementwise/concat_ops.cuh"

namespace precast {

cudaError_t concat_mla_k(const ConcatMlaKParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_concat_mla_k(params, enable_pdl, stream);
}

}  // namespace precast
