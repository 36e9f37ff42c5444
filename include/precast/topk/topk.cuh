// SPDX-License-Identifier: Apache-2.0
// The k largest of each row, exactly: values and positions, or positions as sparse attention wants
// them, in a ragged cache or through a page table.
//
//   out[r] = the k of window r, row[start : start + length], that are largest; of equal ones those
//            with the lowest (or highest) positions. NaN is larger than all, -0.0 equals 0.0
//            and comes out as that.
//
// Layout   input            [rows, size]    f32, f16 or bf16; rows at any address and pitch
//          values, indices  [rows, k]       the input's type and int64
//          out, raw         [rows, k]       int32: transformed positions, positions; -1 behind them
//          table            [batch, pages]  int32, and one int32 a row for all that differs by row
// Threads  a cluster of 1 to 8 CTAs a row. The first one gathers what all found, takes the k
//          largest of that and, where it is asked for, orders them (topk/bucket_sort.cuh).
// Traffic  reads the window once, and of a long one a sample, which then comes from L2; writes the
//          results once. A window whose sample misleads is read once more.
// Select   What reaches a floor goes to a list in shared memory. Few rows, which shared memory
//          holds as a whole, tell a floor themselves (topk/resident.cuh). Others are read in tiles
//          of 16 elements a thread (topk/streaming.cuh): the floor comes from the sample, or rises
//          each time that the list is full and cut. The k largest of a list are found by counting
//          it in bins, and where those do not tell them apart by radix selection on the ordered
//          keys, and on positions where equal ones remain (topk/radix_select.cuh).
//
// Measured 2026-11-21 on an H200, f32, normal rows of 128256, k 50, 256 and 2048: 1 row in 6.8, 7.2
// and 9.4 us, 16 in 10.4, 10.8 and 12.8, 64 in 14.5, 15.9 and 19.4, 256 in 34.9, 36.6 and 43.5. In
// bf16 with k 50 and 2048: 6.3 and 10.2, 8.0 and 12.2, 12.3 and 18.6, 23.9 and 36.2. Ascending rows
// take up to 1.75 times as long.
#pragma once

#include "precast/topk/resident.cuh"
#include "precast/topk/streaming.cuh"

namespace precast {

#if defined(__CUDACC__)

// Where the results of a row go.
template <typename T>
struct Results {
  const TopKParams& p;
  int64_t first;
  const int32_t* pages;
  int32_t offset;

  __device__ __forceinline__ Results(const TopKParams& params, uint32_t row) : p(params) {
    first = int64_t(row) * p.k;
    pages = nullptr;
    offset = 0;
    if (p.mode == TopKMode::ragged) offset = p.offsets[row];
    if (p.mode == TopKMode::paged) {
      const int64_t batch = p.row_to_batch == nullptr ? row : p.row_to_batch[row];
      pages = p.table + batch * p.table_stride;
      if (p.page_starts != nullptr) pages += p.page_starts[row];
    }
  }

  __device__ __forceinline__ void put(int i, uint64_t x) const {
    const int rank = static_cast<int>(x & (kMaxPlaces - 1));
    const int place = p.last_first ? rank : kMaxPlaces - 1 - rank;
    if (p.mode != TopKMode::values) {
      put_place(i, place);
      return;
    }
    const uint32_t bits = bits_of<T>(static_cast<uint32_t>(x >> kPlaceBits));
    if constexpr (sizeof(T) == 4) {
      static_cast<uint32_t*>(p.values)[first + i] = bits;
    } else {
      static_cast<unsigned short*>(p.values)[first + i] = static_cast<unsigned short>(bits);
    }
    p.indices[first + i] = place;
  }

  // A position in the window; negative: there is none.
  __device__ __forceinline__ void put_place(int i, int place) const {
    int32_t result = -1;
    if (place >= 0) {
      result = place + offset;
      if (pages != nullptr) {
        const int32_t page = pages[place >> p.page_bits];
        result = (page << p.page_bits) + (place & ((1 << p.page_bits) - 1));
      }
    }
    p.out[first + i] = result;
    if (p.raw != nullptr) p.raw[first + i] = place;
  }
};

// Candidates so ranked that the order wanted is a descending one, and back.
template <int kKeyBits>
__device__ __forceinline__ uint64_t to_order(const TopKParams& p, uint64_t x) {
  if (p.last_first) x ^= kMaxPlaces - 1;  // the lowest place is the best now
  if (p.order == TopKOrder::by_value) return x;
  return (x & (kMaxPlaces - 1)) << kKeyBits | x >> kPlaceBits;
}

template <int kKeyBits>
__device__ __forceinline__ uint64_t from_order(const TopKParams& p, uint64_t x) {
  if (p.order == TopKOrder::by_place) {
    x = (x & ((uint64_t(1) << kKeyBits) - 1)) << kPlaceBits | x >> kKeyBits;
  }
  return p.last_first ? x ^ (kMaxPlaces - 1) : x;
}

// Puts candidates where the order wants them.
template <typename T>
struct PutInOrder {
  const Results<T>& results;

  __device__ __forceinline__ void operator()(uint32_t i, uint64_t x) const {
    results.put(static_cast<int>(i), from_order<Keys<T>::kBits>(results.p, x));
  }
};

// Puts candidates that come in the order wanted.
template <typename T>
struct PutResult {
  const Results<T>& results;

  __device__ __forceinline__ void operator()(uint32_t i, uint64_t x) const {
    results.put(static_cast<int>(i), x);
  }
};

// All threads: writes positions where the window has no more than k elements.
template <typename T>
__device__ __forceinline__ void write_all_places(const Results<T>& results, int length) {
  for (int i = threadIdx.x; i < results.p.k; i += blockDim.x) {
    results.put_place(i, i < length ? i : -1);
  }
}

// All threads: writes a list of k candidates in the order that is asked for.
template <typename T>
__device__ __forceinline__ void write_list(const Results<T>& results, ListShared& s, uint64_t* list,
                                           uint32_t size) {
  const TopKParams& p = results.p;
  constexpr int kKeyBits = Keys<T>::kBits;
  if (p.order == TopKOrder::any) {
    for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) results.put(i, list[i]);
    return;
  }
  for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) {
    list[i] = to_order<kKeyBits>(p, list[i]);
  }
  __syncthreads();
  in_order(s, list, size, kKeyBits + kPlaceBits, PutInOrder<T>{results});
}

// All threads: writes the k largest of a list of `size` candidates in the range of `bin`, by way of
// `sorted`, with room for k + kMostInBin. The histogram of `turn` is all zero.
template <typename T>
__device__ __forceinline__ void write_largest(const Results<T>& results, ListShared& s,
                                              uint64_t* list, uint64_t* sorted, uint32_t size,
                                              const Binning& bin, int turn) {
  const TopKParams& p = results.p;
  const uint32_t k = p.k;
  const bool by_value = p.order == TopKOrder::by_value && !p.last_first;
  uint32_t* const bins = s.histogram[turn];
  bool done = false;
  if (sorted != nullptr && (by_value || p.order == TopKOrder::any)) {
    const PutResult<T> put = {results};
    if (largest_in_order(s, bins, list, sorted, size, k, bin, by_value, put)) return;
  } else if (sorted != nullptr) {
    done = largest_in_order(s, bins, list, sorted, size, k, bin, false, PutOnList{list});
  }
  if (!done) {
    constexpr int kKeyBits = Keys<T>::kBits;
    turn = 1;
    share_turn(s, turn);
    Cut cut = uncut<kKeyBits>(k);
    go_on<kKeyBits, 1>(cut, s, EachOfList{list, size}, k, k, 1, turn);
    compact(s, list, size, cut.edge);
  }
  __syncthreads();
  write_list(results, s, list, k);
}

// The work of one CTA, in `shared` memory: ListShared and the lists.
template <typename T>
__device__ __forceinline__ void top_k_row(const TopKParams& p, uint64_t* shared) {
  ListShared& s = *reinterpret_cast<ListShared*>(shared);
  uint64_t* const lists = shared + sizeof(ListShared) / sizeof(uint64_t);
  const int ctas = cluster_size();
  const uint32_t row = blockIdx.x / ctas;
  const int rank = cluster_rank();
#pragma unroll 1
  for (int i = threadIdx.x; i < kBins; i += blockDim.x) s.histogram[0][i] = 0;
  if (threadIdx.x < 3) s.added[threadIdx.x] = 0;
  if (threadIdx.x == 0) s.forwarded = 0;
  if (p.lengths == nullptr && may_overlap_previous_grid()) {
    const Window<T> window(p, row, ctas);
    window.prefetch(p.last_first ? window.tiles() - 1 : 0);
  }
  wait_for_previous_grid();
  allow_next_grid();
  const Window<T> window(p, row, ctas);
  const Results<T> results(p, row);
  if (p.mode != TopKMode::values && window.length <= p.k) {
    if (rank == 0) write_all_places(results, window.length);
    return;
  }
  __syncthreads();
  constexpr int kKeyBits = Keys<T>::kBits;
  Part<T> part = {p, window, s, lists, 0, lowest_key<T>(), true, 0, 0};
  part.read(p.room, ctas);
  uint64_t* list = lists;
  uint32_t size = part.size;
  if (ctas > 1) {
    if (!part.as_found) {
      if (threadIdx.x == 0) s.base = add_in_cta(&s.forwarded, 0, size);
      __syncthreads();
      part.base = s.base;
    }
    list += p.room;
    for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) {
      store_in_cta(list + part.base + i, 0, lists[i]);
    }
    cluster_barrier(ctas);
    if (rank != 0) return;
    size = part.as_found ? part.total : part.cut.count;
  }
  const Binning bin = binning_from(s, list, size, part.floor, kKeyBits + kPlaceBits);
  uint64_t* const sorted = ctas > 1 ? lists : lists + p.room;
  write_largest(results, s, list, p.most == 0 ? nullptr : sorted, size, bin, part.turn);
}

// The same where shared memory holds the row: behind the list lie its vectors.
template <typename T>
__device__ __forceinline__ void top_k_whole_row(const TopKParams& p, uint64_t* shared) {
  ListShared& s = *reinterpret_cast<ListShared*>(shared);
  uint64_t* const list = shared + sizeof(ListShared) / sizeof(uint64_t);
  Vec<T>* const data = reinterpret_cast<Vec<T>*>(list + p.room);
  const int ctas = cluster_size();
  const uint32_t row = blockIdx.x / ctas;
#pragma unroll 1
  for (int i = threadIdx.x; i < kBins; i += blockDim.x) s.histogram[0][i] = 0;
  if (threadIdx.x == 0) s.kept = s.highest = 0;
  if (p.lengths == nullptr && may_overlap_previous_grid()) {
    Window<T>(p, row, ctas).prefetch_all(ctas);
  }
  wait_for_previous_grid();
  allow_next_grid();
  const Window<T> window(p, row, ctas);
  const Results<T> results(p, row);
  if (p.mode != TopKMode::values && window.length <= p.k) {
    if (cluster_rank() == 0) write_all_places(results, window.length);
    return;
  }
  if (ctas > 1) cluster_arrive_relaxed();
  WholePart<T> part(p, window, s, data, ctas);
  part.start();
  __syncthreads();
  part.finish();
  int turn = 0;
  Binning bin;
  uint32_t size = gather_whole(part, list, ctas, bin, turn);
  if (cluster_rank() != 0) return;
  // The row's place is free now.
  write_largest(results, s, list, reinterpret_cast<uint64_t*>(data), size, bin, turn);
}

template <typename T>
__global__ void __launch_bounds__(kMaxThreads, 1) TopKKernel(TopKParams p) {
  extern __shared__ uint64_t shared[];
  top_k_row<T>(p, shared);
}

template <typename T>
__global__ void __launch_bounds__(kWholeThreads, 1) TopKWholeKernel(TopKParams p) {
  extern __shared__ uint64_t shared[];
  top_k_whole_row<T>(p, shared);
}

#endif  // __CUDACC__

}  // namespace precast
