// SPDX-License-Identifier: Apache-2.0
// The kernel of the moe_scale_columns module. It has no axes: rows are bf16.
#include "precast/moe/moe_scale_columns.cuh"

namespace precast {

cudaError_t moe_scale_columns(const MoeScaleColumnsParams& params, bool enable_pdl,
                              cudaStream_t stream) {
  return launch_moe_scale_columns(params, enable_pdl, stream);
}

}  // namespace precast
