// SPDX-License-Identifier: Apache-2.0
// How the vectors of a row go from rank to rank, for all kernels of the all-reduce.
//
// Layout   buffers  each rank's workspace: WorkspaceControl, then two receive buffers of
//                   `region_bytes`, which rounds take in turn, filled with kSentinel
//          one-shot receive buffer  [peers, rows, row_vecs], what each peer has sent
//          two-shot receive buffer  [peers, rows, part_vecs], the peers' inputs for the chunks that
//                   this rank reduces, then [rows, row_vecs], the sums of the peers. A row has
//                   chunks of 32 vectors; rank q reduces chunks q, q + world, ...
// Threads  all loads and stores of a vector are by one thread, so outputs may be the input
// Order    Ranks must launch grids for the same rows in the same order. CTAs take rows in ascending
//          order, and start in ascending order, so a grid larger than the GPU cannot deadlock.
//          Grids take at most half of a GPU, so that two of them may run at once, in any order.
// Traffic  over the links, in each direction: one-shot (world - 1) n bytes, two-shot
//          2 (world - 1) / world n. Both are n for two GPUs, and one-shot waits once, so two GPUs
//          have no two-shot.
// Source   polling for data: comm/sentinel.cuh; two phases: Thakur, Rabenseifner and Gropp,
//          Optimization of Collective Communication Operations in MPICH, 2005
#pragma once

#include "precast/comm/sentinel.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/sm90/cluster.cuh"

namespace precast {

// The start of a rank's workspace. Zeros before its first use.
struct WorkspaceControl {
  uint32_t epoch;    // rounds that have started; its parity selects the receive buffer
  uint32_t arrived;  // CTAs of this round that have read the epoch
  uint32_t unused[14];
  uint32_t signatures[2][kMaxWorld];  // debug: what each peer launches; written by the peers
};

constexpr int kControlBytes = 1024;
static_assert(sizeof(WorkspaceControl) <= kControlBytes);

struct AllReduceParams {
  char* buffers[kMaxWorld];  // the workspace of each rank, as this rank addresses it
  int64_t region_bytes;
  int rank;
  uint32_t signature;  // debug: of the launch's arguments, compared between ranks; 0 for no check
  WaitLimit limit;
  bool triggers_early;  // lets a dependent grid start before this one ends
  bool aligned;         // rows of all tensors start at multiples of 16 bytes and are whole vectors
  bool two_shot;        // set by the launcher

  const void* input;  // [rows, columns]
  void* output;       // [rows, columns], s, of the plain epilogue
  int64_t count;      // elements
  int64_t rows;
  int columns;
  int row_vecs;  // vectors of a row, rounded up
};

#if defined(__CUDACC__)

// One thread's view of a round: its epoch, and the publication of the next one.
class Round {
 public:
  __device__ __forceinline__ explicit Round(const AllReduceParams& p)
      : control_(reinterpret_cast<WorkspaceControl*>(p.buffers[p.rank])),
        epoch_(load_relaxed_system(&control_->epoch)) {}

  __device__ __forceinline__ uint32_t epoch() const { return epoch_; }

  // Says that this CTA knows the epoch, so that the last CTA may change it. Call it after all
  // threads have used the epoch, in an address; for only then they have read it for certain.
  __device__ __forceinline__ void take_ticket() {
    __syncthreads();
    // Why here: the ticket is back before the data of the peers is.
    if (threadIdx.x == 0) ticket_ = atomicAdd(&control_->arrived, 1u);
  }

  __device__ __forceinline__ void finish() {
    if (threadIdx.x == 0 && ticket_ == gridDim.x - 1) {
      control_->arrived = 0u;
      control_->epoch = epoch_ + 1u;
    }
  }

  // Debug: compares what the ranks launch, before the data is trusted.
  __device__ __forceinline__ void check_signatures(const AllReduceParams& p, int world) const {
    const int peer = static_cast<int>(threadIdx.x);
    if (blockIdx.x != 0 || peer >= world || peer == p.rank) return;
    WorkspaceControl* theirs = reinterpret_cast<WorkspaceControl*>(p.buffers[peer]);
    store_relaxed_system(&theirs->signatures[epoch_ & 1u][p.rank], p.signature);
    uint32_t* slot = &control_->signatures[epoch_ & 1u][peer];
    BoundedWait wait(p.limit);
    uint32_t got;
    while ((got = load_relaxed_system(slot)) == 0u) {
      wait.missed(WaitStage::signature, p.rank, peer, epoch_);
    }
    if (got != p.signature) {
      fail_wait(p.limit.report, WaitStage::signature, p.rank, peer, epoch_, true, p.signature, got);
    }
    store_relaxed_system(slot, 0u);
  }

 private:
  WorkspaceControl* control_;
  uint32_t epoch_;
  uint32_t ticket_ = 0xffffffffu;
};

// Loads a vector of which `left` elements exist; none if that is not positive. If `aligned`, all of
// them exist, or none.
template <typename T>
__device__ __forceinline__ Vec<T> load_if(const T* source, int64_t left, bool aligned) {
  if (left <= 0) return zero_vec<T>();
  return aligned ? load_vec(source) : load_elements(source, left);
}

// Stores one in the same way.
template <typename T>
__device__ __forceinline__ void store_if(T* target, Vec<T> vec, int64_t left, bool aligned) {
  if (left <= 0) return;
  if (aligned) {
    store_vec(target, vec);
  } else {
    store_elements(target, vec, left);
  }
}

// Adds in the order of ranks, in fp32. `peers` are the others' vectors.
template <int kWorld, typename T>
__device__ __forceinline__ Vec<T> reduce_ranks(Vec<T> own, const Vec<T> (&peers)[kWorld - 1],
                                               int rank) {
  constexpr int kSize = Vec<T>::kSize;
  float sum[kSize];
#pragma unroll
  for (int k = 0; k < kWorld; ++k) {
    const uint4 before = peers[k < kWorld - 1 ? k : 0].bits, after = peers[k > 0 ? k - 1 : 0].bits;
    const Vec<T> vec = {k == rank ? own.bits : k < rank ? before : after};
    float x[kSize];
    unpack(vec, x);
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum[i] = k == 0 ? x[i] : sum[i] + x[i];
  }
  return pack<T>(sum);
}

// The way of a vector through a round. `index` is where it is in its row; all methods but load()
// are for vectors that exist, `index < p.row_vecs`.
template <typename T, int kWorld>
class Exchange {
 public:
  static constexpr int kSize = Vec<T>::kSize;
  static constexpr int kPeers = kWorld - 1;

  __device__ __forceinline__ explicit Exchange(const AllReduceParams& p) : p_(p) {
    const int chunks = (p.row_vecs + kWarpSize - 1) / kWarpSize;
    part_vecs_ = (chunks + kWorld - 1) / kWorld * kWarpSize;
  }

  // Selects the receive buffers. Only load() may be called before.
  __device__ __forceinline__ void start(uint32_t epoch) {
    epoch_ = epoch;
    received_ = region(p_.rank);
  }

  // Loads this rank's input, zeros behind its end.
  __device__ __forceinline__ Vec<T> load(int64_t row, int index, bool aligned) const {
    const int column = index * kSize;
    const int64_t at = row * p_.columns + column;
    const int64_t in_row = p_.columns - column, in_all = p_.count - at;
    return load_if(static_cast<const T*>(p_.input) + at, in_row < in_all ? in_row : in_all,
                   aligned);
  }

  // Sends this rank's input to the rank that reduces it, one-shot to all.
  template <bool kTwoShot>
  __device__ __forceinline__ void send(int64_t row, int index, Vec<T> own) const {
    if constexpr (kTwoShot) {
      const int to = owner(index);
      if (to != p_.rank) store_to(to, part_slot(p_.rank, to, row, index), own);
    } else {
      for_each_peer([&](int peer) { store_to(peer, whole_slot(p_.rank, peer, row, index), own); });
    }
  }

  // One-shot: the sum.
  __device__ __forceinline__ Vec<T> gather(int64_t row, int index, Vec<T> own) const {
    return sum(whole_slot(peer_rank(0, p_.rank), p_.rank, row, index),
               p_.rows * p_.row_vecs * kSize, own, WaitStage::gather);
  }

  // Two-shot, if this rank reduces the vector: the sum, which it has sent to its peers.
  __device__ __forceinline__ Vec<T> reduce_part(int64_t row, int index, Vec<T> own) const {
    own = sum(part_slot(peer_rank(0, p_.rank), p_.rank, row, index), p_.rows * part_vecs_ * kSize,
              own, WaitStage::scatter);
    for_each_peer([&](int peer) { store_to(peer, result_slot(row, index), own); });
    return own;
  }

  // Two-shot, if another rank reduces the vector: the sum.
  __device__ __forceinline__ Vec<T> take_result(int64_t row, int index) const {
    Vec<T> result[1];
    receive(received_ + result_slot(row, index), 0, result, p_.limit, WaitStage::results, p_.rank,
            peer_index(owner(index), p_.rank), epoch_);
    return result[0];
  }

  // Two-shot: keeps a sum of reduce_part() where take_result() of the same thread finds it.
  __device__ __forceinline__ void keep_result(int64_t row, int index, Vec<T> own) const {
    store_to(p_.rank, result_slot(row, index), own);
  }

  // Whether this rank reduces the vector. The chunks of a row belong to the ranks in turn.
  __device__ __forceinline__ bool reduces(int index) const { return owner(index) == p_.rank; }

 private:
  __device__ __forceinline__ static int owner(int index) { return index / kWarpSize % kWorld; }

  // Receives the vectors of all peers from the slots of this rank, and adds.
  __device__ __forceinline__ Vec<T> sum(int64_t first_slot, int64_t peer_stride, Vec<T> own,
                                        WaitStage stage) const {
    Vec<T> peers[kPeers];
    receive(received_ + first_slot, peer_stride, peers, p_.limit, stage, p_.rank, 0, epoch_);
    return reduce_ranks<kWorld>(own, peers, p_.rank);
  }

  // Slots in the receive buffer of `at`, in elements.
  __device__ __forceinline__ int64_t whole_slot(int from, int at, int64_t row, int index) const {
    return ((peer_index(from, at) * p_.rows + row) * p_.row_vecs + index) * kSize;
  }
  __device__ __forceinline__ int64_t part_slot(int from, int at, int64_t row, int index) const {
    const int place = index / (kWarpSize * kWorld) * kWarpSize + index % kWarpSize;
    return ((peer_index(from, at) * p_.rows + row) * part_vecs_ + place) * kSize;
  }
  __device__ __forceinline__ int64_t result_slot(int64_t row, int index) const {
    return (p_.rows * (kPeers * part_vecs_) + row * p_.row_vecs + index) * kSize;
  }

  template <typename Action>
  __device__ __forceinline__ void for_each_peer(const Action& action) const {
    constexpr int kUnroll = kWorld <= 4 ? kPeers : 1;  // why: the addresses of seven peers spill
#pragma unroll(kUnroll)
    for (int distance = 1; distance < kWorld; ++distance) action((p_.rank + distance) % kWorld);
  }

  __device__ __forceinline__ void store_to(int peer, int64_t slot, Vec<T> vec) const {
    store_vec_system(region(peer) + slot, without_sentinel(vec));
  }

  // Where this round's receive buffer of a rank starts.
  __device__ __forceinline__ T* region(int rank) const {
    return reinterpret_cast<T*>(p_.buffers[rank] + kControlBytes + (epoch_ & 1u) * p_.region_bytes);
  }

  const AllReduceParams& p_;
  uint32_t epoch_;
  T* received_;    // this rank's receive buffer
  int part_vecs_;  // vectors of a row that one rank reduces, at most
};

#endif  // __CUDACC__

}  // namespace precast
