// SPDX-License-Identifier: Apache-2.0
// The kernel that plans attention, and how many CTAs of the attention kernels an SM holds.
#include "precast/attention_plan_kernel.cuh"
#include "precast/attention_tile.cuh"

namespace precast {

namespace {

template <typename KV, int kDimQ, int kDimV>
int ctas_of(int tile_rows) {
  switch (tile_rows) {
    case kNarrowRows:
      return AttentionTile<f16, KV, kDimQ, kDimV, kNarrowRows, false>::kCtasPerSm;
    case kMiddleRows:
      return AttentionTile<f16, KV, kDimQ, kDimV, kMiddleRows, false>::kCtasPerSm;
    case kWideRows:
      if constexpr (has_wide_tile(kDimV)) return AttentionTile<f16, KV, kDimQ, kDimV, kWideRows, false>::kCtasPerSm;
  }
  return 0;
}

template <typename KV>
int ctas_of(int tile_rows, int head_dim_qk, int head_dim_vo) {
  if (head_dim_qk == 192 && head_dim_vo == 128) return ctas_of<KV, 192, 128>(tile_rows);
  if (head_dim_qk != head_dim_vo) return 0;
  switch (head_dim_qk) {
    case 64:
      return ctas_of<KV, 64, 64>(tile_rows);
    case 80:
      return ctas_of<KV, 80, 80>(tile_rows);
    case 96:
      return ctas_of<KV, 96, 96>(tile_rows);
    case 128:
      return ctas_of<KV, 128, 128>(tile_rows);
    case 256:
      return ctas_of<KV, 256, 256>(tile_rows);
    case 512:
      return ctas_of<KV, 512, 512>(tile_rows);
  }
  return 0;
}

}  // namespace

int attention_ctas_per_sm(int tile_rows, int head_dim_qk, int head_dim_vo, int kv_bytes) {
  return kv_bytes == 1 ? ctas_of<i8>(tile_rows, head_dim_qk, head_dim_vo)
                       : ctas_of<f16>(tile_rows, head_dim_qk, head_dim_vo);
}

cudaError_t attention_plan(const PlanParams& params, bool enable_pdl, cudaStream_t stream) {
  return launch_attention_plan(params, enable_pdl, stream);
}

}  // namespace precast
