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

// The barriers of one CTA. All threads make one, call wait() for each barrier, and finish() once.
// blockDim.x >= world, blockIdx.x < kMaxBarrierCtas. `signals` are those of each rank, as this rank
// addresses them.
class PeerBarrier {
 public:
  __device__ __forceinline__ PeerBarrier(BarrierSignals* const (&signals)[kMaxWorld], int rank,
                                         int world, const WaitLimit& limit)
      : signals_(signals),
        rank_(rank),
        world_(world),
        limit_(limit),
        // Why once: the next barrier need not wait for this rank's own memory.
        count_(load_relaxed_system(&signals[rank]->count[blockIdx.x])) {}

  // kRelease: what this CTA wrote before is visible to the CTAs of the peers after. Without it the
  // barrier only says that all have arrived, and that their loads whose results they have used are
  // done: at the start of a kernel, before which stream order has made everything visible, and at
  // its end, if peers may overwrite what it has read.
  template <bool kRelease>
  __device__ __forceinline__ void wait() {
    ++count_;
    __syncthreads();
    const int peer = static_cast<int>(threadIdx.x);
    if (peer < world_) {
      uint32_t* theirs = &signals_[peer]->arrived[blockIdx.x][rank_];
      if constexpr (kRelease) {
        store_release_system(theirs, count_);
      } else {
        store_relaxed_system(theirs, count_);
      }
      const uint32_t* arrived = &signals_[rank_]->arrived[blockIdx.x][peer];
      BoundedWait wait(limit_);
      while (static_cast<int32_t>(
                 (kRelease ? load_acquire_system(arrived) : load_relaxed_system(arrived)) -
                 count_) < 0) {
        wait.missed(WaitStage::barrier, rank_, peer, count_);
      }
    }
    __syncthreads();
  }

  // Keeps the count for the next launch.
  __device__ __forceinline__ void finish() {
    if (threadIdx.x == 0) store_relaxed_system(&signals_[rank_]->count[blockIdx.x], count_);
  }

 private:
  BarrierSignals* const (&signals_)[kMaxWorld];
  const int rank_, world_;
  const WaitLimit& limit_;
  uint32_t count_;
};

#endif  // __CUDACC__

}  // namespace precast
