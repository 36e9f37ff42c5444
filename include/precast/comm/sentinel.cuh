// SPDX-License-Identifier: Apache-2.0
// Messages that say by themselves when they have arrived.
//
// A receive buffer is filled with kSentinel. The sender stores its data there, and the receiver
// polls each word until it is another value; then it puts the sentinel back. No flag, no fence and
// no barrier is needed, so a message takes one crossing of the link.
//
// The sentinel is a word of ones, which is a NaN in fp32, and two NaNs in f16 and bf16. A sender
// that has such a word sends another NaN instead; so no number is changed, not even a negative
// zero.
//
// Two rounds alternate between two buffers. A sender may write buffer e % 2 in round e + 2 only
// after it has finished round e + 1, for which it needed the data of this receiver, which sends in
// round e + 1 after its kernel of round e has ended: after it has put all sentinels back.
// Source   polling for data in place of a flag: L. Lamport, On Interprocess Communication, 1986;
//          its use for all-reduce: TensorRT-LLM (NVIDIA, Apache-2.0)
#pragma once

#include "precast/comm/peer_memory.cuh"

namespace precast {

constexpr uint32_t kSentinel = 0xffffffffu;

#if defined(__CUDACC__)

__device__ __forceinline__ uint32_t without_sentinel(uint32_t word) {
  return word == kSentinel ? 0x7fff7fffu : word;  // NaNs of f16 and bf16, and of fp32
}

template <typename T>
__device__ __forceinline__ Vec<T> without_sentinel(Vec<T> vec) {
  const uint4 b = vec.bits;
  return Vec<T>{make_uint4(without_sentinel(b.x), without_sentinel(b.y), without_sentinel(b.z),
                           without_sentinel(b.w))};
}

template <typename T>
__device__ __forceinline__ bool has_arrived(Vec<T> vec) {
  const uint4 b = vec.bits;
  return b.x != kSentinel && b.y != kSentinel && b.z != kSentinel && b.w != kSentinel;
}

// Puts the sentinel back. Only the receiver may write it, after has_arrived().
template <typename T>
__device__ __forceinline__ void store_sentinel(T* slot) {
  store_vec(slot, Vec<T>{make_uint4(kSentinel, kSentinel, kSentinel, kSentinel)});
}

// Ranks without `self` are numbered 0 to world - 2.
__device__ __forceinline__ int peer_index(int peer, int self) { return peer - (peer > self); }
__device__ __forceinline__ int peer_rank(int index, int self) { return index + (index >= self); }

// Receives one vector from each of kPeers peers, whose slots are `peer_stride` elements apart, and
// puts the sentinels back. `first_peer` is the index of the first.
template <int kPeers, typename T>
__device__ __forceinline__ void receive(T* slot, int64_t peer_stride, Vec<T> (&vecs)[kPeers],
                                        const WaitLimit& limit, WaitStage stage, int rank,
                                        int first_peer, uint32_t epoch) {
  BoundedWait wait(limit);
  while (true) {
    // Why all at once: the loads are in flight together, so that many peers take as long as one.
#pragma unroll
    for (int i = 0; i < kPeers; ++i) vecs[i] = load_vec_system(slot + i * peer_stride);
    int missing = -1;
#pragma unroll
    for (int i = kPeers - 1; i >= 0; --i) {
      if (!has_arrived(vecs[i])) missing = i;
    }
    if (missing < 0) break;
    wait.missed(stage, rank, peer_rank(first_peer + missing, rank), epoch);
  }
#pragma unroll
  for (int i = 0; i < kPeers; ++i) store_sentinel(slot + i * peer_stride);
}

#endif  // __CUDACC__

}  // namespace precast
