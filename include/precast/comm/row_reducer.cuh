// SPDX-License-Identifier: Apache-2.0
// Reductions over the CTAs of a row, which have up to kMaxWarps warps together.
#pragma once

#include "precast/core/quant.cuh"
#include "precast/core/sm90/cluster_memory.cuh"
#include "precast/core/sm90/mbarrier.cuh"

namespace precast {

#if defined(__CUDACC__)

// Sums and maxima over the CTAs of a row, one after the other. Two sets of shared memory in turn
// make that safe: a CTA is in its call n + 2 only when all warps have begun call n + 1.
//
// CTAs of a cluster exchange by stores that complete on an mbarrier. Why not by cluster barriers,
// as cluster_sum() does: their release waits until everything that was sent to the peers has
// arrived there, which took 1.4 us for 8 rows of 8192 (H200).
class RowReducer {
 public:
  __device__ __forceinline__ RowReducer() {
    if (cluster_size() == 1) return;
    if (threadIdx.x == 0) {
      mbarrier_init(&memory().barriers[0]);
      mbarrier_init(&memory().barriers[1]);
      fence_mbarrier_init();
    }
    cluster_arrive_relaxed();
  }

  __device__ __forceinline__ float sum(float x) {
    if (cluster_size() == 1) return block_sum(x, memory().sums[calls_++ & 1]);
    return warp_sum(__uint_as_float(exchange(__float_as_uint(warp_sum(x)))));
  }

  __device__ __forceinline__ uint32_t max(uint32_t x) {
    if (cluster_size() == 1) return block_max(x, memory().words[calls_++ & 1]);
    return warp_max(exchange(warp_max(x)));
  }

 private:
  struct Memory {
    float sums[2][kMaxWarps];
    uint32_t words[2][kMaxWarps];
    uint64_t barriers[2];
  };

  __device__ __forceinline__ static Memory& memory() {
    __shared__ Memory memory;
    return memory;
  }

  // Gives each warp the words of all warps of the cluster: lane l gets that of warp l, or 0.
  __device__ __forceinline__ uint32_t exchange(uint32_t word) {
    // Why here: before the wait for the kernel before it takes 0.2 us longer, and while the data of
    // the peers is under way as well (8 rows of 8192, two H200).
    if (calls_ == 0) cluster_wait();  // the mbarriers of all CTAs are initialised
    const uint32_t lane = threadIdx.x % kWarpSize, warps = blockDim.x / kWarpSize;
    const uint32_t all = warps * cluster_size();
    const uint32_t turn = calls_ & 1, parity = calls_ / 2 & 1;
    ++calls_;
    uint64_t* barrier = &memory().barriers[turn];
    uint32_t* words = memory().words[turn];
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(barrier, all * sizeof(uint32_t));
    if (lane < cluster_size()) {
      store_async(&words[cluster_rank() * warps + threadIdx.x / kWarpSize], barrier,
                  static_cast<int>(lane), word);
    }
    mbarrier_wait_parity(barrier, parity);
    return lane < all ? words[lane] : 0u;
  }

  uint32_t calls_ = 0;
};

#endif  // __CUDACC__

}  // namespace precast
