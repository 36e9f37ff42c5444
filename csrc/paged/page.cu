// SPDX-License-Identifier: Apache-2.0
// The kernels of the page module. It has no axes, because a copy needs no element type.
#include "precast/paged/batch_indices_positions.cuh"
#include "precast/paged/page.cuh"

namespace precast {

cudaError_t append_paged(const AppendPagedParams& params, bool from_slots, bool enable_pdl,
                         cudaStream_t stream) {
  return from_slots ? launch_append_paged<SlotKind::slots>(params, enable_pdl, stream)
                    : launch_append_paged<SlotKind::table>(params, enable_pdl, stream);
}

cudaError_t batch_indices_positions(const BatchIndicesPositionsParams& params, bool enable_pdl,
                                    cudaStream_t stream) {
  return launch_batch_indices_positions(params, enable_pdl, stream);
}

}  // namespace precast
