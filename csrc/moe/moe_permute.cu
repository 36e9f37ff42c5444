// SPDX-License-Identifier: Apache-2.0
// The kernels of the moe_permute module. It has no axes: rows are copied as bytes.
#include "precast/moe/moe_permute.cuh"

#include "precast/moe/moe_sort.cuh"

namespace precast {

cudaError_t moe_sort(const MoeSortParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_moe_sort(params, enable_pdl, stream);
}

cudaError_t moe_permute(const MoePermuteParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_moe_permute(params, enable_pdl, stream);
}

}  // namespace precast
