// SPDX-License-Identifier: Apache-2.0
// A barrier between the CTAs with one index of all GPUs.
//
// Each rank has a BarrierSignals in memory that all peers can write, filled with zeros before its
// first use. A CTA counts its barriers; it tells each peer its count and waits until each peer's
// count is as high. Counts only grow, and live in memory, so that a captured launch may be replayed
// and nothing is ever reset. They wrap after 2^32 barriers; comparisons are made for that.
//
// All ranks must run the same sequence of barriers with the same CTA indices.
#pragma once

#include "precast/comm/peer_memory.cuh"

namespace precast {

constexpr int kMaxBarrierCtas = 160;

struct BarrierSignals {
  uint32_t arrived[kMaxBarrierCtas][kMaxWorld];  // written by the peers
  uint32_t count[kMaxBarrierCtas];               // this rank's own
};

#if defined(__CUDACC__)

// kRelease: what this CTA wrote before is visible to the CTAs of the peers after. Without it the
// barrier only says that all have arrived, such as at the start of a kernel, before which stream
// order has made everything visible.
//
// All threads must call it; blockDim.x >= world, blockIdx.x < kMaxBarrierCtas. `signals` are those
// of each rank, as this rank addresses them.
template <bool kRelease>
__device__ __forceinline__ void peer_barrier(BarrierSignals* const (&signals)[kMaxWorld], int rank,
                                             int world, const WaitLimit& limit) {
  BarrierSignals* own = signals[rank];
  __syncthreads();
  const uint32_t count = own->count[blockIdx.x] + 1u;
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < world) {
    uint32_t* theirs = &signals[peer]->arrived[blockIdx.x][rank];
    if constexpr (kRelease) {
      store_release_system(theirs, count);
    } else {
      store_relaxed_system(theirs, count);
    }
    const uint32_t* arrived = &own->arrived[blockIdx.x][peer];
    BoundedWait wait(limit);
    while (static_cast<int32_t>(
               (kRelease ? load_acquire_system(arrived) : load_relaxed_system(arrived)) - count) <
           0) {
      wait.missed(WaitStage::barrier, rank, peer, count);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) own->count[blockIdx.x] = count;
}

#endif  // __CUDACC__

}  // namespace precast
