// SPDX-License-Identifier: Apache-2.0
// Warpgroups: four warps that start at a multiple of four, and issue wgmma together. What they need
// around the instructions of core/sm90/wgmma.cuh. All of it exists for sm_90a alone.
//
// Operands in shared memory consist of atoms: eight rows of 128, 64 or 32 bytes, swizzled over as
// many, as TMA writes them. A descriptor says where the first atom lies and how far the next ones
// are.
//
// Source   PTX ISA, "Asynchronous warpgroup-level matrix instructions".
#pragma once

#include "precast/core/host_device.cuh"
#include "precast/core/types.cuh"

namespace precast {

constexpr int kWarpgroupSize = 128;

// The swizzle of a descriptor, over 128, 64 or 32 bytes.
PRECAST_HOST_DEVICE constexpr uint64_t wgmma_swizzle(int bytes) {
  return bytes == 128 ? 1 : bytes == 64 ? 2 : 3;
}

// The descriptor of an operand. `step` is the distance in bytes from eight rows to the next eight;
// `panel_step` from the bytes of an atom's row to the next ones of a row, for an operand that is
// longer in that direction than an atom: B with kTransposedB. Along k, an instruction reads 32
// bytes of a row, so one step of k adds 32 bytes to the address, whatever the element type.
PRECAST_HOST_DEVICE constexpr uint64_t wgmma_descriptor(uint32_t address, uint32_t step,
                                                        uint32_t panel_step = 16,
                                                        int swizzle_bytes = 128) {
  return uint64_t(address & 0x3ffff) >> 4 | uint64_t(panel_step >> 4) << 16 |
         uint64_t(step >> 4) << 32 | wgmma_swizzle(swizzle_bytes) << 62;
}

#if defined(__CUDACC__)

// Before the first wgmma, and after registers of operands have been written.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Ends a group of wgmma.
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending groups of this warp are not complete.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving reads of an accumulator before the wait that ends its group.
template <int kCount>
__device__ __forceinline__ void keep_behind_wait(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Makes what this thread has written to shared memory visible to wgmma and TMA. A barrier follows.
__device__ __forceinline__ void fence_shared_for_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Whether this lane is the one that the warp chooses; always the same one. All 32 lanes call it.
// Why not a test of the lane's number: the compiler knows then that one lane takes a branch, and
// issues what takes uniform registers, as TMA does, without a loop over the lanes.
__device__ __forceinline__ bool elect_lane() {
  uint32_t is_chosen;
  asm volatile(
      "{\n"
      ".reg .pred chosen;\n"
      "elect.sync _|chosen, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, chosen;\n"
      "}"
      : "=r"(is_chosen));
  return is_chosen != 0;
}

// A barrier of `threads` threads, whole warps; `id` is 1 to 15.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives at such a barrier, without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Takes more registers from the SM's pool, or gives some back: then each thread of the warpgroup
// has kCount of them.
template <int kCount>
__device__ __forceinline__ void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

#endif  // __CUDACC__

}  // namespace precast
