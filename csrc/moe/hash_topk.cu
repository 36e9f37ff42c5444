// SPDX-License-Identifier: Apache-2.0
// The kernel of the hash_topk module. It has no axes, because its tensors have one dtype each.
#include "precast/moe/hash_topk.cuh"

namespace precast {

cudaError_t hash_topk(const HashTopKParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_hash_topk(params, enable_pdl, stream);
}

}  // namespace precast
