// SPDX-License-Identifier: Apache-2.0
// The order of the rows of a mixture of experts: those of an expert follow each other.
//
//   e(p)           = selected[p] - first_expert for pair p = token * slots + slot
//   offsets[e]     = |{p : 0 <= e(p) < e}|,  e <= experts
//   rows[p]        = offsets[e(p)] + |{q < p : e(q) = e(p)}|,  -1 unless 0 <= e(p) < experts
//   row_experts[rows[p]] = e(p)
//
// Layout   selected, rows  [pairs]            int32, contiguous
//          offsets         [experts + 1]      int32
//          row_experts     [pairs]            int32, of which offsets[experts] are written
//          counts          [chunks, experts]  int32, scratch of calls with more than one chunk
// Threads  A CTA sorts a chunk of 4096 pairs: a warp counts its part of them for each expert, the
//          counts of the warps before it are added, and it ranks its pairs. With more chunks, a
//          first kernel counts each of them, and CTAs add up the counts of all.
// Traffic  reads the pairs once, or twice; every CTA reads all counts from L2
// Source   counting sort; it is stable, so that the order depends on the experts alone
#pragma once

#include "precast/core/launch.cuh"
#include "precast/core/warp.cuh"
#include "precast/moe/expert_rows.cuh"

namespace precast {

constexpr int kSortThreads = 512;
constexpr int kSortWarps = kSortThreads / kWarpSize;
constexpr int kSortSteps = 8;                                // pairs of a lane
constexpr int kSortChunk = kSortThreads * kSortSteps;        // pairs of a CTA
constexpr int kMaxSortExperts = 1024;                        // of a rank: their counts fit in 48 KB
constexpr int kSortRounds = kMaxSortExperts / kSortThreads;  // experts of a thread

struct MoeSortParams {
  const int32_t* selected;  // [pairs]
  int32_t* rows;            // [pairs]
  int32_t* offsets;         // [experts + 1]
  int32_t* row_experts;     // [pairs]
  int32_t* counts;          // [chunks, experts], or null for one chunk
  uint32_t pairs;           // below 2^31
  uint32_t chunks;          // at least 1; set by the launcher
  int experts;
  int first_expert;
};

inline int64_t moe_sort_chunks(int64_t pairs) {
  return pairs <= kSortChunk ? 1 : (pairs + kSortChunk - 1) / kSortChunk;
}

#if defined(__CUDACC__)

// The expert of a pair, or -1 if another rank has it. Why unsigned: any number may be no expert.
__device__ __forceinline__ int local_expert(const MoeSortParams& p, uint32_t pair) {
  const uint32_t expert =
      static_cast<uint32_t>(load_number(p.selected + pair)) - static_cast<uint32_t>(p.first_expert);
  return expert < static_cast<uint32_t>(p.experts) ? static_cast<int>(expert) : -1;
}

__global__ __launch_bounds__(kSortThreads) void MoeCountKernel(
    const __grid_constant__ MoeSortParams p) {
  __shared__ int counts[kMaxSortExperts];
  for (int e = threadIdx.x; e < p.experts; e += kSortThreads) counts[e] = 0;
  launch_dependent_grids();
  wait_on_dependent_grids();
  __syncthreads();
  const uint32_t first = blockIdx.x * kSortChunk + threadIdx.x;
#pragma unroll
  for (int step = 0; step < kSortSteps; ++step) {
    const uint32_t pair = first + step * kSortThreads;
    const int expert = pair < p.pairs ? local_expert(p, pair) : -1;
    if (expert >= 0) atomicAdd(&counts[expert], 1);
  }
  __syncthreads();
  int32_t* out = p.counts + int64_t(blockIdx.x) * p.experts;  // [experts]
  for (int e = threadIdx.x; e < p.experts; e += kSortThreads) out[e] = counts[e];
}

// Adds up `x` of the threads before this one, and of all of them. All threads call it, after a
// barrier behind the last use of `sums`.
__device__ __forceinline__ int sum_before(int x, int (&sums)[kSortWarps], int& all) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  int until = x;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, until, distance);
    if (lane >= distance) until += other;
  }
  if (lane == kWarpSize - 1) sums[warp] = until;
  __syncthreads();
  const int of_warp = lane < kSortWarps ? sums[lane] : 0;
  all = __reduce_add_sync(0xffffffffu, of_warp);
  return until - x + __reduce_add_sync(0xffffffffu, lane < warp ? of_warp : 0);
}

__global__ __launch_bounds__(kSortThreads) void MoePlaceKernel(
    const __grid_constant__ MoeSortParams p) {
  // Of each warp and expert, the pairs of the warps before it in this CTA, and of its steps so far.
  __shared__ unsigned short before[kSortWarps][kMaxSortExperts];
  __shared__ int begin[kMaxSortExperts];  // the row of the first pair of this CTA
  __shared__ int sums[kSortWarps];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  for (int e = lane; e < p.experts; e += kWarpSize) before[warp][e] = 0;

  launch_dependent_grids();
  wait_on_dependent_grids();

  const uint32_t first = blockIdx.x * kSortChunk;
  const uint32_t count = min(p.pairs - first, static_cast<uint32_t>(kSortChunk));
  // Few pairs are spread over all warps.
  const int steps = static_cast<int>((count + kSortThreads - 1) / kSortThreads);
  const uint32_t of_warp = warp * steps * kWarpSize + lane;
  int experts[kSortSteps];
  uint32_t peers[kSortSteps];  // the lanes whose pair has the same expert
  __syncwarp();
#pragma unroll
  for (int step = 0; step < kSortSteps; ++step) {
    const uint32_t at = of_warp + step * kWarpSize;
    experts[step] = step < steps && at < count ? local_expert(p, first + at) : -1;
  }
#pragma unroll
  for (int step = 0; step < kSortSteps; ++step) {
    if (step >= steps) continue;
    peers[step] = __match_any_sync(0xffffffffu, experts[step]);
    if (experts[step] >= 0 && lane == __ffs(peers[step]) - 1) {
      before[warp][experts[step]] += static_cast<unsigned short>(__popc(peers[step]));
    }
    __syncwarp();
  }
  __syncthreads();

  int earlier = 0;  // rows of the rounds before
#pragma unroll
  for (int round = 0; round < kSortRounds; ++round) {
    if (round * kSortThreads >= p.experts) break;
    const int e = round * kSortThreads + threadIdx.x;
    int all = 0, of_earlier_chunks = 0;
    if (e < p.experts) {
#pragma unroll
      for (int w = 0; w < kSortWarps; ++w) {
        const int of_this = before[w][e];
        before[w][e] = static_cast<unsigned short>(all);
        all += of_this;
      }
      if (p.chunks > 1) {
        all = 0;
        for (uint32_t chunk = 0; chunk < p.chunks; ++chunk) {
          const int of_this = load_number(p.counts + int64_t(chunk) * p.experts + e);
          all += of_this;
          if (chunk < blockIdx.x) of_earlier_chunks += of_this;
        }
      }
    }
    int of_round;
    const int offset = earlier + sum_before(all, sums, of_round);
    if (e < p.experts) {
      begin[e] = offset + of_earlier_chunks;
      if (blockIdx.x == 0) p.offsets[e] = offset;
    }
    earlier += of_round;
    __syncthreads();
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) p.offsets[p.experts] = earlier;

#pragma unroll
  for (int step = 0; step < kSortSteps; ++step) {
    if (step >= steps) continue;
    const int expert = experts[step];
    int row = -1;
    if (expert >= 0) {
      row = begin[expert] + before[warp][expert] + __popc(peers[step] & ((1u << lane) - 1));
    }
    __syncwarp();
    if (expert >= 0 && lane == __ffs(peers[step]) - 1) {
      before[warp][expert] += static_cast<unsigned short>(__popc(peers[step]));
    }
    __syncwarp();
    const uint32_t at = of_warp + step * kWarpSize;
    if (at < count) p.rows[first + at] = row;
    if (row >= 0) p.row_experts[row] = expert;
  }
}

#if !defined(__CUDACC_RTC__)

// Launches the sort on `stream`, also without pairs: then all offsets are 0. Returns
// cudaErrorInvalidValue for more than kMaxSortExperts.
inline cudaError_t launch_moe_sort(MoeSortParams p, bool enable_pdl, cudaStream_t stream) {
  if (p.experts > kMaxSortExperts) return cudaErrorInvalidValue;
  p.chunks = static_cast<uint32_t>(moe_sort_chunks(p.pairs));
  if (p.chunks > 1) {
    const cudaError_t error =
        launch(MoeCountKernel, dim3(p.chunks), dim3(kSortThreads), enable_pdl, stream, p);
    if (error != cudaSuccess) return error;
  }
  return launch(MoePlaceKernel, dim3(p.chunks), dim3(kSortThreads), enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
