// SPDX-License-Identifier: Apache-2.0
// The kernel that plans attention, and how many CTAs of the kernels that run plans an SM holds.
#include "precast/attention/plan_kernel.cuh"
#include "precast/attention/tile.cuh"
#include "precast/mla/tile.cuh"

namespace precast {

int attention_plan_ctas_per_sm(int block_m, int head_dim_qk, int head_dim_vo, int kv_bytes) {
  return attention_ctas_per_sm(kv_bytes, block_m, head_dim_qk, head_dim_vo);
}

int mla_plan_ctas_per_sm(int block_m, int head_dim_ckv, int head_dim_kpe, int kv_bytes) {
  return mla_ctas_per_sm(kv_bytes, block_m, head_dim_ckv, head_dim_kpe);
}

cudaError_t attention_plan(const PlanParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_attention_plan(params, enable_pdl, stream);
}

}  // namespace precast
