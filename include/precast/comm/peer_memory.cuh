// SPDX-License-Identifier: Apache-2.0
// Accesses to memory that GPUs of one host share, and waits that may be bounded.
//
// Every address here may belong to another GPU, or be written by one. All accesses have system
// scope, because GPU scope orders nothing that crosses NVLink or PCIe.
#pragma once

#include "precast/core/types.cuh"
#include "precast/core/vec.cuh"

namespace precast {

constexpr int kMaxWorld = 8;  // GPUs that take part

// Where a kernel waits; part of WaitReport.
enum class WaitStage : int {
  none = 0,
  barrier = 1,   // PeerBarrier
  gather = 2,    // one-shot: the inputs of all peers
  scatter = 3,   // two-shot: the rows that this rank reduces
  results = 4,   // two-shot: the rows that peers have reduced
  signature = 5  // the debug check of shapes
};

// What a wait that ran out of time writes, in pinned host memory, so that the process can read it
// although the kernel has trapped. `stage` is written last.
struct WaitReport {
  int32_t stage;  // WaitStage, 0 while nothing has happened
  int32_t rank;   // the rank that waited
  int32_t peer;   // the rank whose data did not come
  int32_t cta;
  uint32_t epoch;     // of the workspace
  uint32_t expected;  // the signature of this rank, for WaitStage::signature
  uint32_t got;       // the signature of the peer
  int32_t mismatch;   // 1 if signatures differ, 0 if time ran out
};

// How long waits may take. With nanoseconds == 0 they never end, and cost nothing but the polls.
struct WaitLimit {
  uint64_t nanoseconds;
  WaitReport* report;  // needed if nanoseconds != 0
};

#if defined(__CUDACC__)

// -- flags ----------------------------------------------------------------------------------------

// A thread that reads `x` with load_acquire_system() then sees the writes of this thread, and those
// that this thread has observed (through a CTA barrier, too).
__device__ __forceinline__ void store_release_system(uint32_t* target, uint32_t x) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(target), "r"(x) : "memory");
}

__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t* source) {
  uint32_t x;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(source) : "memory");
  return x;
}

// The same without ordering of other accesses.
__device__ __forceinline__ void store_relaxed_system(uint32_t* target, uint32_t x) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(target), "r"(x) : "memory");
}

__device__ __forceinline__ uint32_t load_relaxed_system(const uint32_t* source) {
  uint32_t x;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(source) : "memory");
  return x;
}

// -- data -----------------------------------------------------------------------------------------

// Stores and loads 16 aligned bytes as four words, each of which is written and read as a whole.
// They bypass L1, and order nothing.
template <typename T>
__device__ __forceinline__ void store_vec_system(T* target, Vec<T> vec) {
  PRECAST_STORE_VEC("st.relaxed.sys.global.v4.u32", target, vec);
}

template <typename T>
__device__ __forceinline__ Vec<T> load_vec_system(const T* source) {
  Vec<T> vec;
  PRECAST_LOAD_VEC("ld.relaxed.sys.global.v4.u32", vec, source);
  return vec;
}

// -- waits ----------------------------------------------------------------------------------------

__device__ __forceinline__ uint64_t nanoseconds_now() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Writes the report and stops the kernel with an error. Why a trap: to go on would compute with
// data that is not there, and to return would let the next kernel do so.
[[noreturn]] __device__ __noinline__ void fail_wait(WaitReport* report, WaitStage stage, int rank,
                                                    int peer, uint32_t epoch, bool mismatch,
                                                    uint32_t expected, uint32_t got) {
  volatile WaitReport* out = report;
  out->rank = rank;
  out->peer = peer;
  out->cta = static_cast<int32_t>(blockIdx.x);
  out->epoch = epoch;
  out->expected = expected;
  out->got = got;
  out->mismatch = mismatch ? 1 : 0;
  __threadfence_system();
  out->stage = static_cast<int32_t>(stage);
  __threadfence_system();
  asm volatile("trap;");
  __builtin_unreachable();
}

// Bounds the polls of one wait. Call missed() after each poll that found nothing.
class BoundedWait {
 public:
  __device__ __forceinline__ explicit BoundedWait(const WaitLimit& limit) : limit_(limit) {}

  __device__ __forceinline__ void missed(WaitStage stage, int rank, int peer, uint32_t epoch) {
    if (limit_.nanoseconds == 0) return;
    // Why not each time: reading the timer takes longer than a poll.
    if (++polls_ % 256 != 0) return;
    const uint64_t now = nanoseconds_now();
    if (start_ == 0) start_ = now;
    if (now - start_ > limit_.nanoseconds) {
      fail_wait(limit_.report, stage, rank, peer, epoch, false, 0u, 0u);
    }
  }

 private:
  const WaitLimit& limit_;
  uint64_t start_ = 0;
  uint32_t polls_ = 0;
};

#endif  // __CUDACC__

}  // namespace precast
