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
  // Construct it before the wait for the grid before. Why it waits for the other CTAs here, and not
  // in the first exchange: a grid that starts early has the time.
  __device__ __forceinline__ RowReducer() {
    if (cluster_size() == 1) return;
    const uint32_t warps = blockDim.x / kWarpSize;
    all_ = warps * cluster_size();
    // Why volatile: what the compiler can compute again where it is used, it does, and that is
    // between the data of the peers and the sum.
    asm volatile("mov.u32 %0, %1;" : "=r"(address_) : "r"(shared_address(&memory_of_cta())));
    asm volatile("mov.u32 %0, %1;"
                 : "=r"(own_)
                 : "r"(cluster_rank() * warps + threadIdx.x / kWarpSize));
    if (threadIdx.x == 0) {
      mbarrier_init(&memory()->barriers[0]);
      mbarrier_init(&memory()->barriers[1]);
      fence_mbarrier_init();
    }
    cluster_arrive_relaxed();
    cluster_wait();  // the mbarriers of all CTAs are initialised
  }

  // `meanwhile()` runs while the sums of the other CTAs are under way.
  template <typename Action>
  __device__ __forceinline__ float sum(float x, const Action& meanwhile) {
    if (cluster_size() == 1) {
      meanwhile();
      return block_sum(x, memory_of_cta().sums[calls_++ & 1]);
    }
    const uint4 w = exchange(__float_as_uint(warp_sum(x)), meanwhile);
    const float low = __uint_as_float(w.x) + __uint_as_float(w.y);
    const float high = __uint_as_float(w.z) + __uint_as_float(w.w);
    return warp_sum(low + high, kLanes);
  }

  __device__ __forceinline__ uint32_t max(uint32_t x) {
    if (cluster_size() == 1) return block_max(x, memory_of_cta().words[calls_++ & 1]);
    const uint4 w = exchange(warp_max(x), [] {});
    return warp_max(::max(::max(w.x, w.y), ::max(w.z, w.w)), kLanes);
  }

 private:
  static constexpr int kLanes = kMaxWarps / 4;  // that have the words of all warps

  struct Memory {
    alignas(16) uint32_t words[2][kMaxWarps];
    float sums[2][kMaxWarps];
    uint64_t barriers[2];
  };

  __device__ __forceinline__ static Memory& memory_of_cta() {
    __shared__ Memory memory;
    return memory;
  }
  __device__ __forceinline__ Memory* memory() const {
    return static_cast<Memory*>(__cvta_shared_to_generic(address_));
  }

  // Gives each warp the words of all warps of the cluster: lane l those of warps 4 (l % kLanes) and
  // the next three, 0 for warps that do not exist. Why four: a load of 16 bytes in place of two
  // shuffles.
  template <typename Action>
  __device__ __forceinline__ uint4 exchange(uint32_t word, const Action& meanwhile) {
    const uint32_t lane = threadIdx.x % kWarpSize;
    const uint32_t turn = calls_ & 1, parity = calls_ / 2 & 1;
    ++calls_;
    uint64_t* barrier = &memory()->barriers[turn];
    uint32_t* words = memory()->words[turn];
    if (lane < cluster_size()) {
      store_async(&words[own_], barrier, static_cast<int>(lane), word);
    }
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(barrier, all_ * sizeof(uint32_t));
    meanwhile();
    mbarrier_wait_parity(barrier, parity);
    const uint32_t first = lane % kLanes * 4;
    uint4 found = *reinterpret_cast<const uint4*>(&words[first]);
    if (first + 0 >= all_) found.x = 0u;
    if (first + 1 >= all_) found.y = 0u;
    if (first + 2 >= all_) found.z = 0u;
    if (first + 3 >= all_) found.w = 0u;
    return found;
  }

  uint32_t calls_ = 0;
  uint32_t address_ = 0;  // of the CTA's memory
  uint32_t own_ = 0;      // the index of this warp among those of the cluster
  uint32_t all_ = 0;      // warps of the cluster
};

#endif  // __CUDACC__

}  // namespace precast
