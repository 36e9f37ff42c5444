// SPDX-License-Identifier: Apache-2.0
// All-reduce between the GPUs of one host, and the kernel of all ops that fuse something with it.
//
//   s[r, c] = round(sum_k input_k[r, c])      over the ranks k = 0, 1, ... in this order, in fp32
//
// Every rank has the same bits. An epilogue defines what becomes of a row of s: the plain one
// stores it; comm/allreduce_norm.cuh has the others.
//
// Layout   input    [rows, columns]  T, contiguous. Without a norm the rows are as long as the
//                   launch likes; the last may be shorter.
//          buffers  each rank's workspace: WorkspaceControl, then two receive buffers of
//                   `region_bytes`, which rounds take in turn, filled with kSentinel
//          one-shot receive buffer  [peers, rows, columns], what each peer has sent
//          two-shot receive buffer  [peers, groups, columns], the inputs of the peers for this
//                   rank's rows, then [peers, groups, columns], the peers' rows after reduction.
//                   A group is `world` rows; rank q reduces its row q.
//          In receive buffers rows are padded to whole vectors.
// Threads  a cluster of CTAs takes a row (two-shot: a group), kVecs 16-byte vectors a thread, then
//          the next one that is `clusters` further. A thread sends its vectors to all peers, polls
//          those of the peers (comm/sentinel.cuh), and adds. All loads and stores of a vector are
//          by one thread, so outputs may be the input.
// Order    Ranks must launch the same grids in the same order. CTAs take rows in ascending order,
//          and start in ascending order, so a grid larger than the GPU cannot deadlock. Grids take
//          at most half of a GPU, so that two of them may run at once, in any order.
// Traffic  over the links, in each direction: one-shot (world - 1) n bytes, two-shot
//          2 (world - 1) / world n. Both are n for two GPUs, and one-shot waits once.
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

  const void* input;  // [rows, columns]
  void* output;       // [rows, columns], s, of the plain epilogue
  int64_t count;      // elements
  int64_t rows;
  int columns;
  int row_vecs;  // vectors of a row, rounded up
};

// How a launch is cut; 0 leaves a choice to the launcher. Benchmarks set them.
struct AllReduceTuning {
  int threads;
  int vecs;     // of a thread, 1 or 2
  int cluster;  // CTAs of a row
  int ctas;     // at most
};

// Threads of a CTA at most. Two such CTAs, of two grids, share a multiprocessor; so a thread has 64
// registers, or 128 where the vectors of
// many peers, the second phase or unaligned rows need them.
constexpr int allreduce_max_threads(int world, bool two_shot, bool aligned) {
  return world == 2 && !two_shot && aligned ? 512 : 256;
}

#if defined(__CUDACC__)

// One thread's share of the round: the epoch, and its publication for the next round.
class Round {
 public:
  __device__ __forceinline__ explicit Round(const AllReduceParams& p)
      : control_(reinterpret_cast<WorkspaceControl*>(p.buffers[p.rank])) {
    // Why one thread: the last CTA may change the epoch when all have their tickets, and a thread
    // has read it for certain only when it uses the value.
    __shared__ uint32_t epoch;
    if (threadIdx.x == 0) epoch = load_relaxed_system(&control_->epoch);
    __syncthreads();
    epoch_ = epoch;
    // Why now: the ticket is back long before the data of the peers is.
    if (threadIdx.x == 0) ticket_ = atomicAdd(&control_->arrived, 1u);
  }

  __device__ __forceinline__ uint32_t epoch() const { return epoch_; }

  // Where this round's receive buffer of a rank starts.
  template <typename T>
  __device__ __forceinline__ T* region(const AllReduceParams& p, int rank) const {
    return reinterpret_cast<T*>(p.buffers[rank] + kControlBytes + (epoch_ & 1u) * p.region_bytes);
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

// Loads a vector of which `left` elements exist; none if that is not positive. If kAligned, all of
// them exist, or none.
template <bool kAligned, typename T>
__device__ __forceinline__ Vec<T> load_if(const T* source, int64_t left) {
  return left > 0 ? load<kAligned>(source, left) : zero_vec<T>();
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

// Stores s.
template <typename T_>
struct StoreEpilogue {
  using T = T_;
  using Params = AllReduceParams;
  static constexpr bool kRowsAreWhole = false;  // columns of a row need not belong together

  template <int kVecs>
  struct Early {};

  template <bool kAligned, int kVecs>
  __device__ __forceinline__ static Early<kVecs> load_early(const Params&, int64_t /*row*/,
                                                            const int (&)[kVecs]) {
    return {};
  }

  template <bool kAligned, int kVecs>
  __device__ __forceinline__ void finish_row(const Params& p, int64_t row,
                                             const int (&columns)[kVecs],
                                             const Vec<T> (&sums)[kVecs], const Early<kVecs>&) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int64_t at = row * p.columns + columns[i];
      const int64_t left = columns[i] < p.columns ? p.count - at : 0;
      if (left > 0) store<kAligned>(static_cast<T*>(p.output) + at, sums[i], left);
    }
  }
};

template <typename Epilogue, int kWorld, int kVecs, bool kTwoShot, bool kAligned>
__global__ __launch_bounds__(allreduce_max_threads(kWorld, kTwoShot, kAligned),
                             2) void AllReduceKernel(typename Epilogue::Params p) {
  using T = typename Epilogue::T;
  constexpr int kSize = Vec<T>::kSize;
  constexpr int kPeers = kWorld - 1;
  constexpr int kUnroll = kWorld <= 4 ? kPeers : 1;  // why: the addresses of seven peers spill
  const T* input = static_cast<const T*>(p.input);   // [rows, columns]
  const int row_threads = static_cast<int>(blockDim.x * cluster_size());
  int columns[kVecs];  // of this thread's vectors
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    columns[i] =
        static_cast<int>(cluster_rank() * blockDim.x + threadIdx.x + i * row_threads) * kSize;
  }
  const int64_t clusters = gridDim.x / cluster_size();
  const int64_t padded = int64_t(p.row_vecs) * kSize;  // elements of a row of a receive buffer

  if (p.triggers_early) launch_dependent_grids();
  wait_on_dependent_grids();
  Round round(p);
  if (p.signature != 0u) round.check_signatures(p, kWorld);
  T* received = round.template region<T>(p, p.rank);
  Epilogue epilogue;

  const auto load_input = [&](int64_t row, int column) {
    const int64_t at = row * p.columns + column;
    const int64_t in_row = p.columns - column, in_all = p.count - at;
    return load_if<kAligned>(input + at, in_row < in_all ? in_row : in_all);
  };
  const auto send = [&](int peer, int64_t at, Vec<T> vec) {
    store_vec_system(round.template region<T>(p, peer) + at, without_sentinel(vec));
  };

  if constexpr (!kTwoShot) {
    const int64_t peer_stride = p.rows * padded;
    for (int64_t row = cluster_id(); row < p.rows; row += clusters) {
      Vec<T> own[kVecs];
#pragma unroll
      for (int i = 0; i < kVecs; ++i) own[i] = load_input(row, columns[i]);
#pragma unroll(kUnroll)
      for (int distance = 1; distance < kWorld; ++distance) {
        const int peer = (p.rank + distance) % kWorld;
        const int64_t to = peer_index(p.rank, peer) * peer_stride + row * padded;
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
          if (columns[i] < p.columns) send(peer, to + columns[i], own[i]);
        }
      }
      const auto early = epilogue.template load_early<kAligned>(p, row, columns);
      Vec<T> sums[kVecs];
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        sums[i] = zero_vec<T>();
        if (columns[i] >= p.columns) continue;
        Vec<T> peers[kPeers];
        receive(received + row * padded + columns[i], peer_stride, peers, p.limit,
                WaitStage::gather, p.rank, 0, round.epoch());
        sums[i] = reduce_ranks<kWorld>(own[i], peers, p.rank);
      }
      epilogue.template finish_row<kAligned>(p, row, columns, sums, early);
    }
  } else {
    const int64_t groups = (p.rows + kWorld - 1) / kWorld;
    const int64_t peer_stride = groups * padded;
    const int64_t results = kPeers * peer_stride;  // where the second half of the buffer starts
    for (int64_t group = cluster_id(); group < groups; group += clusters) {
      const int64_t first = group * kWorld, own_row = first + p.rank, base = group * padded;
#pragma unroll(kUnroll)
      for (int distance = 1; distance < kWorld; ++distance) {
        const int peer = (p.rank + distance) % kWorld;
        if (first + peer >= p.rows) continue;
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
          if (columns[i] >= p.columns) continue;
          send(peer, peer_index(p.rank, peer) * peer_stride + base + columns[i],
               load_input(first + peer, columns[i]));
        }
      }
      Vec<T> own[kVecs];  // first the input, then the sum
      if (own_row < p.rows) {
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
          own[i] = load_input(own_row, columns[i]);
          if (columns[i] >= p.columns) continue;
          Vec<T> peers[kPeers];
          receive(received + base + columns[i], peer_stride, peers, p.limit, WaitStage::scatter,
                  p.rank, 0, round.epoch());
          own[i] = reduce_ranks<kWorld>(own[i], peers, p.rank);
#pragma unroll(kUnroll)
          for (int distance = 1; distance < kWorld; ++distance) {
            const int peer = (p.rank + distance) % kWorld;
            send(peer, results + peer_index(p.rank, peer) * peer_stride + base + columns[i],
                 own[i]);
          }
        }
      }
      for (int owner = 0; owner < kWorld && first + owner < p.rows; ++owner) {
        const auto early = epilogue.template load_early<kAligned>(p, first + owner, columns);
        Vec<T> sums[kVecs];
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
          sums[i] = own[i];
          if (owner == p.rank || columns[i] >= p.columns) continue;
          const int index = peer_index(owner, p.rank);
          Vec<T> result[1];
          receive(received + results + index * peer_stride + base + columns[i], 0, result, p.limit,
                  WaitStage::results, p.rank, index, round.epoch());
          sums[i] = result[0];
        }
        epilogue.template finish_row<kAligned>(p, first + owner, columns, sums, early);
      }
    }
  }
  round.finish();
}

#if !defined(__CUDACC_RTC__)

// The bytes of a receive buffer that a launch needs.
inline int64_t allreduce_region_bytes(int world, bool two_shot, int64_t rows, int64_t row_vecs) {
  if (!two_shot) return (world - 1) * rows * row_vecs * kVecBytes;
  return 2 * (world - 1) * ((rows + world - 1) / world) * row_vecs * kVecBytes;
}

// Launches the kernel on `stream`. `p.rows`, `p.columns` and `p.row_vecs` are set, and a row fits
// the cluster. Unaligned rows need two vectors a thread.
template <typename Epilogue, int kWorld>
cudaError_t launch_allreduce_rows(const typename Epilogue::Params& p, bool two_shot,
                                  const AllReduceTuning& cut, bool enable_pdl,
                                  cudaStream_t stream) {
  const auto run = [&](void (*kernel)(typename Epilogue::Params)) {
    const int64_t items = two_shot ? (p.rows + kWorld - 1) / kWorld : p.rows;
    const int64_t most = cut.ctas / cut.cluster > 0 ? cut.ctas / cut.cluster : 1;
    return launch_clusters(kernel, static_cast<uint32_t>(items < most ? items : most), cut.cluster,
                           dim3(cut.threads), enable_pdl, stream, p);
  };
  if (!p.aligned) {
    return two_shot ? run(AllReduceKernel<Epilogue, kWorld, 2, true, false>)
                    : run(AllReduceKernel<Epilogue, kWorld, 2, false, false>);
  }
  if (cut.vecs == 1) {
    return two_shot ? run(AllReduceKernel<Epilogue, kWorld, 1, true, true>)
                    : run(AllReduceKernel<Epilogue, kWorld, 1, false, true>);
  }
  return two_shot ? run(AllReduceKernel<Epilogue, kWorld, 2, true, true>)
                  : run(AllReduceKernel<Epilogue, kWorld, 2, false, true>);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
