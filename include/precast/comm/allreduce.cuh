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
//          one-shot receive buffer  [peers, rows, row_vecs], what each peer has sent
//          two-shot receive buffer  [peers, rows, part_vecs], the peers' inputs for the chunks that
//                   this rank reduces, then [rows, row_vecs], the sums of the peers. A row has
//                   chunks of 32 vectors; rank q reduces chunks q, q + world, ...
// Threads  a cluster of CTAs takes a row, kVecs 16-byte vectors a thread, then the row that is
//          `clusters` further. A warp has a chunk. A thread sends its vectors to who reduces them,
//          polls those of the peers (comm/sentinel.cuh), and adds. All loads and stores of a vector
//          are by one thread, so outputs may be the input.
// Order    Ranks must launch the same grids in the same order. CTAs take rows in ascending order,
//          and start in ascending order, so a grid larger than the GPU cannot deadlock. Grids take
//          at most half of a GPU, so that two of them may run at once, in any order.
// Traffic  over the links, in each direction: one-shot (world - 1) n bytes, two-shot
//          2 (world - 1) / world n. Both are n for two GPUs, and one-shot waits once.
// Measured 2026-11-26 on two H200 (NVLink, 390 GB/s by copies), us in a CUDA graph, with NCCL's,
// the
//          faster one of torch's symmetric memory's, and FlashInfer's
//          8 KiB  2.0 (6.8, 6.4, 2.5)   512 KiB  3.6 (10.1, 8.2, 4.2)   1 MiB  5.2 (13.9, 9.9, 6.0)
//          8 MiB  27.1 (47.7, 32.3, 30.9)   32 MiB  98.6 (136, 108, 130); threads that only store
//          to the peer take 25.8 and 95.3 for the last two, copies at the rate above 21.5 and 86
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

// How large CTAs are at most, and how many of these fit a multiprocessor. A grid takes half of
// them, so that two grids may run at once. A thread has 64 registers, or 128 where the vectors of
// many peers, the second phase or unaligned rows need them, or two vectors and a norm; with two
// vectors of eight ranks even more.
struct CtaLimits {
  int threads;
  int ctas;
};

constexpr CtaLimits allreduce_limits(int world, bool norm, int vecs, bool two_shot, bool aligned) {
  // Why no other number for unaligned rows: it decides in which order the squares of a row are
  // added, and ranks do not know of each other's alignment.
  const int threads = world == 2 && !two_shot ? 512 : 256;
  const bool needs_more =
      (vecs == 2 && (world == 8 || (norm && threads == 512))) || (!aligned && threads == 512);
  return {threads, needs_more ? 1 : 2};
}

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

// Where the vectors of a thread are, and what becomes of them on their way.
template <typename Epilogue, int kWorld, int kVecs, bool kTwoShot, bool kAligned>
class Exchange {
 public:
  using T = typename Epilogue::T;
  using Params = typename Epilogue::Params;
  static constexpr int kSize = Vec<T>::kSize;
  static constexpr int kPeers = kWorld - 1;
  using Vecs = Vec<T>[kVecs];

  __device__ __forceinline__ explicit Exchange(const Params& p) : p_(p) {
    const int row_threads = static_cast<int>(blockDim.x * cluster_size());
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      index_[i] = static_cast<int>(cluster_rank() * blockDim.x + threadIdx.x) + i * row_threads;
      columns[i] = index_[i] * kSize;
    }
    const int chunks = (p.row_vecs + kWarpSize - 1) / kWarpSize;
    part_vecs_ = (chunks + kWorld - 1) / kWorld * kWarpSize;
  }

  // Selects the receive buffers. Only load() may be called before.
  __device__ __forceinline__ void start(uint32_t epoch) {
    epoch_ = epoch;
    received_ = region(p_.rank);
  }

  // Loads this thread's vectors of a row.
  __device__ __forceinline__ void load(int64_t row, Vecs& own) const {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int64_t at = row * p_.columns + columns[i];
      const int64_t in_row = p_.columns - columns[i], in_all = p_.count - at;
      own[i] = load_if<kAligned>(static_cast<const T*>(p_.input) + at,
                                 in_row < in_all ? in_row : in_all);
    }
  }

  // Sends them to who reduces them.
  __device__ __forceinline__ void send(int64_t row, const Vecs& own) const {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      if (!exists(i)) continue;
      if constexpr (kTwoShot) {
        if (owner(i) != p_.rank) store_to(owner(i), part_slot(p_.rank, owner(i), row, i), own[i]);
      } else {
        for_each_peer([&](int peer) { store_to(peer, whole_slot(p_.rank, peer, row, i), own[i]); });
      }
    }
  }

  // Two-shot: reduces those vectors of a row that this rank owns, and sends the sums.
  __device__ __forceinline__ void reduce_part(int64_t row, Vecs& own) const {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      if (!exists(i) || owner(i) != p_.rank) continue;
      Vec<T> peers[kPeers];
      receive(received_ + part_slot(peer_rank(0, p_.rank), p_.rank, row, i),
              p_.rows * part_vecs_ * kSize, peers, p_.limit, WaitStage::scatter, p_.rank, 0,
              epoch_);
      own[i] = reduce_ranks<kWorld>(own[i], peers, p_.rank);
      for_each_peer([&](int peer) { store_to(peer, result_slot(row, i), own[i]); });
    }
  }

  // Makes the sums of this thread's vectors of a row from `own`.
  __device__ __forceinline__ void finish(int64_t row, Vecs& own) const {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      if (!exists(i)) continue;  // own[i] is zero
      if constexpr (kTwoShot) {
        if (owner(i) == p_.rank) continue;
        Vec<T> sum[1];
        receive(received_ + result_slot(row, i), 0, sum, p_.limit, WaitStage::results, p_.rank,
                peer_index(owner(i), p_.rank), epoch_);
        own[i] = sum[0];
      } else {
        Vec<T> peers[kPeers];
        receive(received_ + whole_slot(peer_rank(0, p_.rank), p_.rank, row, i),
                p_.rows * p_.row_vecs * kSize, peers, p_.limit, WaitStage::gather, p_.rank, 0,
                epoch_);
        own[i] = reduce_ranks<kWorld>(own[i], peers, p_.rank);
      }
    }
  }

  int columns[kVecs];  // where this thread's vectors start in a row

 private:
  __device__ __forceinline__ bool exists(int i) const { return columns[i] < p_.columns; }

  // The warps' chunks of a row belong to the ranks in turn.
  __device__ __forceinline__ int owner(int i) const { return index_[i] / kWarpSize % kWorld; }

  // Slots in the receive buffer of `at`, in elements.
  __device__ __forceinline__ int64_t whole_slot(int from, int at, int64_t row, int i) const {
    return ((peer_index(from, at) * p_.rows + row) * p_.row_vecs + index_[i]) * kSize;
  }
  __device__ __forceinline__ int64_t part_slot(int from, int at, int64_t row, int i) const {
    const int place = index_[i] / (kWarpSize * kWorld) * kWarpSize + index_[i] % kWarpSize;
    return ((peer_index(from, at) * p_.rows + row) * part_vecs_ + place) * kSize;
  }
  __device__ __forceinline__ int64_t result_slot(int64_t row, int i) const {
    return (p_.rows * (kPeers * part_vecs_) + row * p_.row_vecs + index_[i]) * kSize;
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

  const Params& p_;
  uint32_t epoch_;
  T* received_;       // this rank's receive buffer
  int index_[kVecs];  // of this thread's vectors in a row
  int part_vecs_;     // vectors of a row that one rank reduces, at most
};

template <typename Epilogue, int kWorld, int kVecs, bool kTwoShot, bool kAligned>
__global__ __launch_bounds__(
    allreduce_limits(kWorld, Epilogue::kRowsAreWhole, kVecs, kTwoShot, kAligned).threads,
    allreduce_limits(kWorld, Epilogue::kRowsAreWhole, kVecs, kTwoShot, kAligned)
        .ctas) void AllReduceKernel(const __grid_constant__ typename Epilogue::Params p) {
  using Vecs = Vec<typename Epilogue::T>[kVecs];
  Exchange<Epilogue, kWorld, kVecs, kTwoShot, kAligned> exchange(p);
  Epilogue epilogue;
  // Why ahead: what is sent for the next rows is under way while this row is waited for.
  const int64_t step = gridDim.x / cluster_size();
  int64_t row = cluster_id();
  Vecs now, next, last;  // of row, row + step and, two-shot, row + 2 step

  if (p.triggers_early) launch_dependent_grids();
  wait_on_dependent_grids();
  if (row < p.rows) exchange.load(row, now);  // why first: it takes as long as reading the epoch
  Round round(p);
  if (p.signature != 0u) round.check_signatures(p, kWorld);
  exchange.start(round.epoch());
  if (row < p.rows) exchange.send(row, now);
  round.take_ticket();
  const auto send_further = [&](int64_t further, Vecs& vecs) {
    if (further >= p.rows) return;
    exchange.load(further, vecs);
    exchange.send(further, vecs);
  };
  if constexpr (kTwoShot) {
    send_further(row + step, next);
    if (row < p.rows) exchange.reduce_part(row, now);
  }
  for (; row < p.rows; row += step) {
    if constexpr (kTwoShot) {
      send_further(row + 2 * step, last);
      if (row + step < p.rows) exchange.reduce_part(row + step, next);
    } else {
      send_further(row + step, next);
    }
    const auto early = epilogue.template load_early<kAligned>(p, row, exchange.columns);
    exchange.finish(row, now);
    epilogue.template finish_row<kAligned>(p, row, exchange.columns, now, early);
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      now[i] = next[i];
      if constexpr (kTwoShot) next[i] = last[i];
    }
  }
  round.finish();
}

#if !defined(__CUDACC_RTC__)

template <typename Epilogue, int kWorld, bool kAligned>
auto allreduce_kernel(bool two_shot, int vecs) -> void (*)(typename Epilogue::Params) {
  if (vecs == 1) {
    return two_shot ? AllReduceKernel<Epilogue, kWorld, 1, true, kAligned>
                    : AllReduceKernel<Epilogue, kWorld, 1, false, kAligned>;
  }
  return two_shot ? AllReduceKernel<Epilogue, kWorld, 2, true, kAligned>
                  : AllReduceKernel<Epilogue, kWorld, 2, false, kAligned>;
}

// Launches the kernel on `stream`. `p.rows`, `p.columns` and `p.row_vecs` are set, and a row fits
// the cluster.
template <typename Epilogue, int kWorld>
cudaError_t launch_allreduce_rows(const typename Epilogue::Params& p, bool two_shot,
                                  const AllReduceTuning& cut, bool enable_pdl,
                                  cudaStream_t stream) {
  const int64_t most = cut.ctas / cut.cluster > 0 ? cut.ctas / cut.cluster : 1;
  const auto kernel = p.aligned ? allreduce_kernel<Epilogue, kWorld, true>(two_shot, cut.vecs)
                                : allreduce_kernel<Epilogue, kWorld, false>(two_shot, cut.vecs);
  return launch_clusters(kernel, static_cast<uint32_t>(p.rows < most ? p.rows : most), cut.cluster,
                         dim3(cut.threads), enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
