// SPDX-License-Identifier: Apache-2.0
// The k largest elements of each row, exactly: values and indices, or indices transformed for
// sparse attention, into a ragged KV cache or through a page table.
//
//   out[r] = the k largest of window r, row[start : start + length]; of equal elements those with
//            the lowest (or highest) indices. NaN is larger than all numbers. -0.0 equals 0.0 and
//            is returned as 0.0.
//
// Layout   input            [rows, size]    f32, f16 or bf16; rows at any address and stride
//          values, indices  [rows, k]       the input's type and int64
//          out, raw         [rows, k]       int32: transformed and plain indices; -1 pads the row
//                                           with lengths of requests, values may come with out
//          table            [batch, pages]  int32; all other per-row parameters are int32, too
// Threads  a cluster of 1 to 8 CTAs a row. The first CTA gathers the candidates of all CTAs,
//          selects the k largest and sorts them if that is requested (topk/bucket_sort.cuh).
// Traffic  reads the window once; of a long window also a sample, which then comes from L2. Writes
//          the results once. If the sample is not representative, the window is read once more.
// Select   Elements at or above a threshold go to a list in shared memory. Few rows, which fit in
//          shared memory, compute the threshold from group maxima (topk/resident.cuh). Others are
//          streamed in tiles of 16 elements a thread (topk/streaming.cuh): the threshold comes from
//          the sample, or rises each time that the list is full. The k largest of the list are
//          found by one bucket pass; if a bucket holds too many, by radix selection on the ordered
//          keys, and on the indices of equal elements (topk/radix_select.cuh). A k above 8192 is
//          divided into parts that one CTA each can sort (topk/large_k.cuh).
//
// Measured 2026-11-21 on an H200, f32, normal rows of 128256, k 50, 256 and 2048: 1 row in 6.8, 7.2
// and 9.4 us, 16 in 10.4, 10.8 and 12.8, 64 in 14.5, 15.9 and 19.4, 256 in 34.9, 36.6 and 43.5. In
// bf16 with k 50 and 2048: 6.3 and 10.2, 8.0 and 12.2, 12.3 and 18.6, 23.9 and 36.2. Ascending rows
// take up to 1.75 times as long.
#pragma once

#include "precast/topk/resident.cuh"
#include "precast/topk/results.cuh"
#include "precast/topk/streaming.cuh"

namespace precast {

#if defined(__CUDACC__)

// Stores candidates as results.
template <typename T>
struct StoreResult {
  const ResultWriter<T>& results;

  __device__ __forceinline__ void operator()(uint32_t i, uint64_t x) const {
    results.put(static_cast<int>(i), x);
  }
};

// Writes a list of k candidates in the requested order. All threads call it.
template <typename T>
__device__ __forceinline__ void write_list(const ResultWriter<T>& results, TopKStorage& s,
                                           uint64_t* list, uint32_t size) {
  const TopKParams& p = results.p;
  constexpr int kKeyBits = KeyTraits<T>::kBits;
  if (p.order == TopKOrder::any) {
    for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) results.put(i, list[i]);
    return;
  }
  for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) {
    list[i] = to_sort_key<kKeyBits>(p, list[i]);
  }
  __syncthreads();
  bucket_sort(s, list, size, kKeyBits + kIndexBits, StoreOrdered<T>{results});
}

// Writes the k largest of a list of `size` candidates in the range of `bin_map`, using `sorted`,
// which has room for k + kMaxInBin. The histogram of `buffer` must be zero. All threads call it.
template <typename T>
__device__ __forceinline__ void write_largest(const ResultWriter<T>& results, TopKStorage& s,
                                              uint64_t* list, uint64_t* sorted, uint32_t size,
                                              const BinMap& bin_map, int buffer) {
  const TopKParams& p = results.p;
  const uint32_t k = p.k;
  const bool by_value = p.order == TopKOrder::by_value && !p.prefer_last;
  uint32_t* const bins = s.histogram[buffer];
  bool done = false;
  if (sorted != nullptr && (by_value || p.order == TopKOrder::any)) {
    const StoreResult<T> put = {results};
    if (bucket_select(s, bins, list, sorted, size, k, bin_map, by_value, put)) return;
  } else if (sorted != nullptr) {
    done = bucket_select(s, bins, list, sorted, size, k, bin_map, false, StoreToList{list});
  }
  if (!done) {
    constexpr int kKeyBits = KeyTraits<T>::kBits;
    buffer = 1;
    align_buffers(s, buffer);
    RadixThreshold threshold = initial_threshold<kKeyBits>(k);
    radix_select<kKeyBits, 1>(threshold, s, ForEachInList{list, size}, k, k, 1, buffer);
    compact(s, list, size, threshold.lower_bound);
  }
  __syncthreads();
  write_list(results, s, list, k);
}

// The streaming kernel's CTA. `shared` holds TopKStorage and the lists.
template <typename T>
__device__ __forceinline__ void top_k_row(const TopKParams& p, uint64_t* shared) {
  TopKStorage& s = *reinterpret_cast<TopKStorage*>(shared);
  uint64_t* const lists = shared + sizeof(TopKStorage) / sizeof(uint64_t);
  const int ctas = cluster_size();
  const uint32_t row = blockIdx.x / ctas;
  const int rank = cluster_rank();
#pragma unroll 1
  for (int i = threadIdx.x; i < kNumBins; i += blockDim.x) s.histogram[0][i] = 0;
  if (threadIdx.x < 3) s.append_counts[threadIdx.x] = 0;
  if (threadIdx.x == 0) s.num_forwarded = 0;
  if (p.lengths == nullptr && may_overlap_previous_grid()) {
    const Window<T> window(p, row, ctas);
    window.prefetch(p.prefer_last ? window.tiles() - 1 : 0);
  }
  wait_on_dependent_grids();
  launch_dependent_grids();
  const Window<T> window(p, row, ctas);
  const ResultWriter<T> results(p, row);
  if (p.mode != TopKMode::values && window.length <= p.k) {
    if (rank == 0) write_all_indices(results, window, 0, p.k);
    return;
  }
  __syncthreads();
  constexpr int kKeyBits = KeyTraits<T>::kBits;
  StreamedPart<T> part = {p, window, s, lists, 0, min_ordered_key<T>(), true, 0, 0};
  part.select(p.list_capacity, ctas);
  uint64_t* list = lists;
  uint32_t size = part.size;
  if (ctas > 1) {
    if (!part.keeps_sampled) {
      if (threadIdx.x == 0) s.base_offset = atomic_add_in_cta(&s.num_forwarded, 0, size);
      __syncthreads();
      part.base_offset = s.base_offset;
    }
    list += p.list_capacity;
    for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) {
      store_in_cta(list + part.base_offset + i, 0, lists[i]);
    }
    cluster_sync(ctas);
    if (rank != 0) return;
    size = part.keeps_sampled ? part.total : part.threshold.count;
  }
  const BinMap bin_map = bin_map_of_list(s, list, size, part.threshold_key, kKeyBits + kIndexBits);
  uint64_t* const sorted = ctas > 1 ? lists : lists + p.list_capacity;
  write_largest(results, s, list, p.max_bucket_sorted == 0 ? nullptr : sorted, size, bin_map,
                part.buffer);
}

// The resident kernel's CTA. `shared` holds TopKStorage, the list and the vectors of the row.
template <typename T>
__device__ __forceinline__ void top_k_resident_row(const TopKParams& p, uint64_t* shared) {
  TopKStorage& s = *reinterpret_cast<TopKStorage*>(shared);
  uint64_t* const list = shared + sizeof(TopKStorage) / sizeof(uint64_t);
  Vec<T>* const data = reinterpret_cast<Vec<T>*>(list + p.list_capacity);
  const int ctas = cluster_size();
  const uint32_t row = blockIdx.x / ctas;
#pragma unroll 1
  for (int i = threadIdx.x; i < kNumBins; i += blockDim.x) s.histogram[0][i] = 0;
  if (threadIdx.x == 0) s.num_kept = s.max_key = 0;
  if (p.lengths == nullptr && may_overlap_previous_grid()) {
    Window<T>(p, row, ctas).prefetch_all(ctas);
  }
  wait_on_dependent_grids();
  launch_dependent_grids();
  const Window<T> window(p, row, ctas);
  const ResultWriter<T> results(p, row);
  if (p.mode != TopKMode::values && window.length <= p.k) {
    if (cluster_rank() == 0) write_all_indices(results, window, 0, p.k);
    return;
  }
  if (ctas > 1) cluster_arrive_relaxed();
  ResidentPart<T> part(p, window, s, data, ctas);
  part.start_load();
  __syncthreads();
  part.finish_load();
  int buffer = 0;
  BinMap bin_map;
  uint32_t size = gather_candidates(part, list, ctas, bin_map, buffer);
  if (cluster_rank() != 0) return;
  // The vectors of the row are no longer needed.
  write_largest(results, s, list, reinterpret_cast<uint64_t*>(data), size, bin_map, buffer);
}

template <typename T>
__global__ void __launch_bounds__(kMaxThreads, 1) TopKKernel(TopKParams p) {
  extern __shared__ uint64_t shared[];
  top_k_row<T>(p, shared);
}

template <typename T>
__global__ void __launch_bounds__(kResidentThreads, 1) TopKResidentKernel(TopKParams p) {
  extern __shared__ uint64_t shared[];
  top_k_resident_row<T>(p, shared);
}

#endif  // __CUDACC__

}  // namespace precast
