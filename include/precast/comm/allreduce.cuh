// SPDX-License-Identifier: Apache-2.0
// All-reduce between the GPUs of one host, and the kernels of all ops that fuse something with it.
//
//   s[r, c] = round(sum_k input_k[r, c])      over the ranks k = 0, 1, ... in this order, in fp32
//
// Every rank has the same bits. An epilogue defines what becomes of a row of s: the plain one
// stores it; comm/allreduce_norm.cuh has the others.
//
// Layout   input    [rows, columns]  T, contiguous. Without a norm the rows are as long as the
//                   launch likes; the last may be shorter.
//          buffers  comm/allreduce_exchange.cuh, as order and traffic
// Threads  a cluster of CTAs takes a row, kVecs 16-byte vectors a thread, then the row that is
//          `clusters` further. A warp has a chunk of 32 vectors. A thread sends its vectors to the
//          ranks that reduce them, polls those of the peers (comm/sentinel.cuh), and adds.
//          AllReduceKernel holds aligned rows in registers, and works ahead of the row that it
//          waits for. AllReduceAnyKernel takes rows of any alignment, and any number of vectors a
//          thread: long rows, where there are no clusters. Both add in the same order.
// Measured 2026-11-26 on two H200 (NVLink, 390 GB/s by copies), us in a CUDA graph, with NCCL's,
//          the faster one of torch's symmetric memory's, and FlashInfer's
//          8 KiB  2.0 (6.8, 6.4, 2.5)   512 KiB  3.6 (10.1, 8.2, 4.2)   1 MiB  5.2 (13.9, 9.9, 6.0)
//          8 MiB  27.1 (47.7, 32.3, 30.9)   32 MiB  98.6 (136, 108, 130); threads that only store
//          to the peer take 25.8 and 95.3 for the last two, copies at the rate above 21.5 and 86
// Source   definition; comm/allreduce_exchange.cuh
#pragma once

#include "precast/comm/allreduce_cut.cuh"
#include "precast/comm/allreduce_exchange.cuh"
#include "precast/core/sm90/cluster_memory.cuh"

namespace precast {

#if defined(__CUDACC__)

// Stores s.
template <typename T_>
struct StoreEpilogue {
  using T = T_;
  using Params = AllReduceParams;
  static constexpr bool kRowsAreWhole = false;  // columns of a row need not belong together

  template <int kVecs>
  struct Early {};

  // Loads what does not depend on the peers.
  template <int kVecs>
  __device__ __forceinline__ static Early<kVecs> load_early(const Params&, int64_t /*row*/,
                                                            const int (&)[kVecs]) {
    return {};
  }

  // Finishes an aligned row from the sums of the thread's vectors.
  template <int kVecs>
  __device__ __forceinline__ static void finish_row(const Params& p, int64_t row,
                                                    const int (&indices)[kVecs],
                                                    const Vec<T> (&sums)[kVecs],
                                                    const Early<kVecs>&) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) store_sum(p, row, indices[i], sums[i], true);
  }

  // Bytes of shared memory that finish_any_row() needs of a CTA.
  static constexpr size_t shared_bytes(const AllReduceTuning&) { return 0; }

  // Finishes any row; sum_of(index) is called once for each of the thread's vectors.
  template <typename SumOf>
  __device__ __forceinline__ static void finish_any_row(const Params& p, int64_t row, int first,
                                                        int step, const SumOf& sum_of) {
#pragma unroll 1
    for (int index = first; index < p.row_vecs; index += step) {
      store_sum(p, row, index, sum_of(index), p.aligned);
    }
  }

 private:
  __device__ __forceinline__ static void store_sum(const Params& p, int64_t row, int index,
                                                   Vec<T> sum, bool aligned) {
    const int column = index * Vec<T>::kSize;
    const int64_t at = row * p.columns + column;
    store_if(static_cast<T*>(p.output) + at, sum, column < p.columns ? p.count - at : 0, aligned);
  }
};

// The vectors of a thread in a row: first_vec(), and every row_threads() further.
__device__ __forceinline__ int first_vec() {
  return static_cast<int>(cluster_rank() * blockDim.x + threadIdx.x);
}
__device__ __forceinline__ int row_threads() {
  return static_cast<int>(blockDim.x * cluster_size());
}

template <typename Epilogue, int kWorld, int kVecs, bool kTwoShot>
__global__ __launch_bounds__(allreduce_threads(kWorld),
                             allreduce_ctas(kWorld, Epilogue::kRowsAreWhole, kVecs))  //
    void AllReduceKernel(const __grid_constant__ typename Epilogue::Params p) {
  using T = typename Epilogue::T;
  using Vecs = Vec<T>[kVecs];
  Exchange<T, kWorld> exchange(p);
  Epilogue epilogue;
  int indices[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) indices[i] = first_vec() + i * row_threads();
  // Why not by row_vecs, which says the same: the compiler makes other code of it, with which a
  // fused norm takes 0.5 us longer (8 rows of 8192, two H200).
  const auto exists = [&](int i) { return indices[i] * Vec<T>::kSize < p.columns; };
  const auto load = [&](int64_t row, Vecs& vecs) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) vecs[i] = exchange.load(row, indices[i], true);
  };
  const auto send = [&](int64_t row, const Vecs& vecs) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      if (exists(i)) exchange.template send<kTwoShot>(row, indices[i], vecs[i]);
    }
  };
  const auto reduce_part = [&](int64_t row, Vecs& vecs) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      if (!exists(i) || !exchange.reduces(indices[i])) continue;
      vecs[i] = exchange.reduce_part(row, indices[i], vecs[i]);
    }
  };
  // Why ahead: what is sent for the next rows is under way while this row is waited for.
  const int64_t step = gridDim.x / cluster_size();
  int64_t row = cluster_id();
  Vecs now, next, last;  // of row, row + step and, two-shot, row + 2 step

  if (p.triggers_early) launch_dependent_grids();
  wait_on_dependent_grids();
  if (row < p.rows) load(row, now);  // why first: it takes as long as reading the epoch
  Round round(p);
  if (p.signature != 0u) round.check_signatures(p, kWorld);
  exchange.start(round.epoch());
  if (row < p.rows) send(row, now);
  round.take_ticket();
  const auto send_further = [&](int64_t further, Vecs& vecs) {
    if (further >= p.rows) return;
    load(further, vecs);
    send(further, vecs);
  };
  if constexpr (kTwoShot) {
    send_further(row + step, next);
    if (row < p.rows) reduce_part(row, now);
  }
  for (; row < p.rows; row += step) {
    if constexpr (kTwoShot) {
      send_further(row + 2 * step, last);
      if (row + step < p.rows) reduce_part(row + step, next);
    } else {
      send_further(row + step, next);
    }
    const auto early = epilogue.load_early(p, row, indices);
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      if (!exists(i)) continue;  // now[i] is zero
      if constexpr (!kTwoShot) {
        now[i] = exchange.gather(row, indices[i], now[i]);
      } else if (!exchange.reduces(indices[i])) {
        now[i] = exchange.take_result(row, indices[i]);
      }
    }
    epilogue.finish_row(p, row, indices, now, early);
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      now[i] = next[i];
      if constexpr (kTwoShot) next[i] = last[i];
    }
  }
  round.finish();
}

// Loads its input twice, which the thread itself overwrites at the earliest when it finishes a row.
template <typename Epilogue, int kWorld>
__global__ __launch_bounds__(allreduce_threads(kWorld), kAllReduceAnyCtas)  //
    void AllReduceAnyKernel(const __grid_constant__ typename Epilogue::Params p) {
  Exchange<typename Epilogue::T, kWorld> exchange(p);
  Epilogue epilogue;
  const int first = first_vec(), threads = row_threads();
  const int64_t step = gridDim.x / cluster_size();
  int64_t row = cluster_id();
  const bool two_shot = kWorld > 2 && p.two_shot;
  const auto send = [&](int64_t to) {
    if (to >= p.rows) return;
#pragma unroll 1
    for (int index = first; index < p.row_vecs; index += threads) {
      const auto own = exchange.load(to, index, p.aligned);
      if (two_shot) {
        exchange.template send<true>(to, index, own);
      } else {
        exchange.template send<false>(to, index, own);
      }
    }
  };

  if (p.triggers_early) launch_dependent_grids();
  wait_on_dependent_grids();
  Round round(p);
  if (p.signature != 0u) round.check_signatures(p, kWorld);
  exchange.start(round.epoch());
  send(row);
  round.take_ticket();
  for (; row < p.rows; row += step) {
    send(row + step);
    if (two_shot) {
#pragma unroll 1
      for (int index = first; index < p.row_vecs; index += threads) {
        if (!exchange.reduces(index)) continue;
        const auto own = exchange.load(row, index, p.aligned);
        exchange.keep_result(row, index, exchange.reduce_part(row, index, own));
      }
    }
    epilogue.finish_any_row(p, row, first, threads, [&](int index) {
      if (two_shot) return exchange.take_result(row, index);
      return exchange.gather(row, index, exchange.load(row, index, p.aligned));
    });
  }
  round.finish();
}

#if !defined(__CUDACC_RTC__)

template <typename Epilogue, int kWorld, int kVecs>
auto allreduce_kernel(bool two_shot) -> void (*)(typename Epilogue::Params) {
  if constexpr (kWorld > 2) {
    if (two_shot) return AllReduceKernel<Epilogue, kWorld, kVecs, true>;
  }
  return AllReduceKernel<Epilogue, kWorld, kVecs, false>;
}

// Launches a kernel on `stream`. `p.rows`, `p.columns`, `p.row_vecs` and `p.two_shot` are set, and
// a row fits the cluster.
template <typename Epilogue, int kWorld>
cudaError_t launch_allreduce_rows(const typename Epilogue::Params& p, const AllReduceTuning& cut,
                                  bool enable_pdl, cudaStream_t stream) {
  const int64_t most = cut.ctas / cut.cluster > 0 ? cut.ctas / cut.cluster : 1;
  const dim3 grid(static_cast<uint32_t>(p.rows < most ? p.rows : most) * cut.cluster);
  const auto run = [&](void (*kernel)(typename Epilogue::Params), size_t shared) {
    return launch_clusters(kernel, grid, dim3(cut.threads), cut.cluster, shared, enable_pdl, stream,
                           p);
  };
  if (needs_any_kernel(p.aligned, cut.vecs)) {
    return run(AllReduceAnyKernel<Epilogue, kWorld>, Epilogue::shared_bytes(cut));
  }
  return run(cut.vecs == 1 ? allreduce_kernel<Epilogue, kWorld, 1>(p.two_shot)
                           : allreduce_kernel<Epilogue, kWorld, 2>(p.two_shot),
             0);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
