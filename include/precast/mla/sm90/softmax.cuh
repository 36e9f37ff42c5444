// SPDX-License-Identifier: Apache-2.0
// Online softmax whose rows two warpgroups hold: the statistics go from one to the other with each
// KV block. Blocks are processed in one order, so each consumer adopts row_max of the block before,
// may raise it for its own block, and hands it on: both use the same row_max for each P.
#pragma once

#include "precast/attention/sm90/softmax.cuh"

namespace precast {

#if defined(__CUDACC__)

class SharedRowStatistics : public RowStatistics {
 public:
  // Takes row_max of the other consumer, which is at least as large. Returns whether acc_o of the
  // warp's rows must be rescaled.
  __device__ __forceinline__ bool adopt_max(const float (&new_max)[2]) {
    const bool grows = new_max[0] != row_max[0] || new_max[1] != row_max[1];
    if (!__any_sync(0xffffffffu, grows)) return false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factor_[half] = exp2_relative(row_max[half], new_max[half]);
      row_max[half] = new_max[half];
      row_sum[half] *= factor_[half];
    }
    return true;
  }

  // row_sum of the whole row, which all its lanes get.
  __device__ __forceinline__ float total(int half) const { return quad_sum(row_sum[half]); }

  // Adds a sum of the other consumer to those of this one, or replaces them by it. One lane of the
  // four of a row has it.
  template <bool kReplaces>
  __device__ __forceinline__ void take_sum(int half, float sum) {
    const float own = threadIdx.x % 4 == 0 ? sum : 0.0f;
    row_sum[half] = kReplaces ? own : row_sum[half] + own;
  }
};

#endif  // __CUDACC__

}  // namespace precast
