// SPDX-License-Identifier: Apache-2.0
// Circular buffers in shared memory with an mbarrier for each stage that is full, and one for each
// that is empty.
#pragma once

#include "precast/core/sm90/mbarrier.cuh"

namespace precast {

#if defined(__CUDACC__)

// A stage of a circular buffer, and the parity of its phase. Producers start a phase behind.
template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t parity = 0;

  // The state after `count` phases. Why: a count takes one register, and several buffers may share
  // it.
  static __device__ __forceinline__ PipelineState after(uint32_t count) {
    return {static_cast<int>(count % kStages), count / kStages % 2};
  }

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <int kStages>
struct PipelineBarriers {
  using State = PipelineState<kStages>;
  uint64_t full[kStages], empty[kStages];

  __device__ __forceinline__ void init(uint32_t producers, uint32_t consumers) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&full[i], producers);
      mbarrier_init(&empty[i], consumers);
    }
  }
  // The same by all lanes of a warp.
  __device__ __forceinline__ void init_by_warp(uint32_t producers, uint32_t consumers) {
    for (int i = threadIdx.x % 32; i < kStages; i += 32) {
      mbarrier_init(&full[i], producers);
      mbarrier_init(&empty[i], consumers);
    }
  }
  __device__ __forceinline__ void wait_full(const State& s, const char* name) {
    mbarrier_wait_parity(&full[s.stage], s.parity, name);
  }
  __device__ __forceinline__ void wait_empty(const State& s, const char* name) {
    mbarrier_wait_parity(&empty[s.stage], s.parity ^ 1, name);
  }
};

#endif  // __CUDACC__

}  // namespace precast
