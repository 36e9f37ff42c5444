// SPDX-License-Identifier: Apache-2.0
// Product of few rows with a weight, whose reading takes most of the time.
//
//   out[m, n] = round(sum_k input[m, k] * weight[n, k] + bias[n])
//
// Layout   input   [rows, depth]     bf16  contiguous, as all
//          weight  [columns, depth]  bf16  columns a multiple of 16, depth of 8
//          bias    [columns]         bf16  or absent
//          out     [rows, columns]   bf16 or fp32
// Threads  A cluster computes 16 columns of up to 8 kRowTiles rows. Its CTAs split the depth into
//          contiguous parts, and the warps of a CTA take steps of 64 of its part in turn: one lane
//          loads 16 bytes of two rows of the weight, and of one row of the input for each tile of
//          8, which are the fragments of mma.m16n8k16 with the weight as its first operand. The
//          order of the depth in a product is not that of memory, but the same in both operands,
//          so nothing passes through shared memory. Some steps are in flight in registers.
//          Partial sums are added over the warps in shared memory, then over the CTAs in
//          distributed shared memory, always in the same order. How the depth is split depends
//          on columns and depth alone, so that a row's result does not depend on the other rows.
// Traffic  reads the weight once for each kRowTiles * 8 rows, the input once for each 16 columns,
//          and writes out once
// Source   NVIDIA, TensorRT-LLM, tinygemm2, for the shape of the tiles; PTX ISA, "Matrix Fragments
//          for mma.m16n8k16"
// Measured 2026-11-23 on an H200 in a CUDA graph, us for 1, 16 and 64 rows, in brackets those of
//          FlashInfer's, which is faster where columns are few:
//            2880 x 128      2.8   3.3   7.6    (2.2   2.5   2.8)
//            7168 x 256      3.9   4.6  12.5    (4.2   4.4   5.9)
//            5120 x 5120    20.0  23.3  56.3   (16.1  28.3  97.3)
#pragma once

#include "precast/core/launch.cuh"
#include "precast/core/mma.cuh"
#include "precast/core/prefetch.cuh"
#include "precast/core/rows.cuh"
#include "precast/core/sm90/cluster_memory.cuh"
#include "precast/core/vec.cuh"

namespace precast {

constexpr int kTinyColumns = 16;                     // of a cluster
constexpr int kTinyRows = 8;                         // of a tile
constexpr int kTinyStep = 64;                        // of the depth, a warp and step
constexpr int kMaxTinyCtas = 8;                      // of a cluster: the largest that is portable
constexpr int64_t kMaxTinyTiles = int64_t(1) << 27;  // of 8 rows and 16 columns
constexpr int64_t kMaxTinyDepth = int64_t(1) << 24;

struct TinyGemmParams {
  const void* input;   // [rows, depth]
  const void* weight;  // [columns, depth]
  const void* bias;    // [columns] or null
  void* out;           // [rows, columns]
  uint32_t rows;
  uint32_t columns;
  int depth;
  bool out_is_f32;
  // The following is set by the launcher.
  FastDivmod column_tiles;
  bool prefetches;
};

#if defined(__CUDACC__)

// What a lane holds of one step: of each half of the step 8 elements of its rows.
template <int kRowTiles>
struct TinyOperands {
  Vec<bf16> weight[2][2];         // [half, row g or g + 8 of the columns]
  Vec<bf16> input[2][kRowTiles];  // [half, tile]

  // `k` is the lane's first element of the step.
  __device__ __forceinline__ void load(const bf16* first, const bf16* second,
                                       const bf16* const (&rows)[kRowTiles], int k, int end) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = k + half * (kTinyStep / 2);
      const bool exists = at < end;
      weight[half][0] = exists ? load_vec(first + at) : zero_vec<bf16>();
      weight[half][1] = exists ? load_vec(second + at) : zero_vec<bf16>();
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        input[half][tile] =
            exists && rows[tile] != nullptr ? load_vec(rows[tile] + at) : zero_vec<bf16>();
      }
    }
  }

  __device__ __forceinline__ void multiply(float (&sums)[kRowTiles][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 a = weight[half][0].bits, b = weight[half][1].bits;
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        const uint4 x = input[half][tile].bits;
        mma_m16n8k16<bf16>(sums[tile], {a.x, b.x, a.y, b.y}, x.x, x.y);
        mma_m16n8k16<bf16>(sums[tile], {a.z, b.z, a.w, b.w}, x.z, x.w);
      }
    }
  }
};

// Steps that a warp has in flight, as many as its registers hold.
constexpr int tiny_stages(int row_tiles) { return row_tiles > 1 ? 2 : 3; }

// Partial sums of a tile in shared memory, [16 columns, 8 rows]. Why not 8: the reads, in which
// neighbouring threads have neighbouring columns, are then without bank conflicts.
constexpr int kTinyColumnStride = 10;

// CTAs of a multiprocessor that leave a thread the registers of its stages, without spills.
constexpr int tiny_min_ctas(int row_tiles, int warps) { return row_tiles > 1 || warps > 8 ? 1 : 2; }

template <int kRowTiles, int kWarps>
__global__ __launch_bounds__(kWarps* kWarpSize, tiny_min_ctas(kRowTiles, kWarps)) void  //
    TinyGemmKernel(const __grid_constant__ TinyGemmParams p) {
  constexpr int kThreads = kWarps * kWarpSize;
  constexpr int kStages = tiny_stages(kRowTiles);
  constexpr int kResults = kRowTiles * kTinyRows * kTinyColumns;
  __shared__ float warp_sums[kWarps][kRowTiles][kTinyColumns * kTinyColumnStride];
  __shared__ uint32_t cta_sums[kResults];  // [CTAs, results of a CTA]

  const int ctas = static_cast<int>(cluster_size()), rank = static_cast<int>(cluster_rank());
  const uint32_t cluster = cluster_id();
  const uint32_t row_tile = p.column_tiles.divide(cluster);
  const uint32_t column = (cluster - row_tile * p.column_tiles.value) * kTinyColumns;
  const uint32_t row = row_tile * (kRowTiles * kTinyRows);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int group = lane / 4, quad = lane % 4;

  // The part of the depth that belongs to this CTA, in whole steps.
  const int ctas_log2 = 31 - __clz(ctas);  // cluster sizes are powers of two
  const int steps = (p.depth + kTinyStep - 1) / kTinyStep;
  const int begin = (steps * rank >> ctas_log2) * kTinyStep;
  const int end = min((steps * (rank + 1) >> ctas_log2) * kTinyStep, p.depth);
  const bf16* weight =  // [16, depth]
      static_cast<const bf16*>(p.weight) + int64_t(column) * p.depth;
  const bf16* input = static_cast<const bf16*>(p.input);
  const bf16* bias = static_cast<const bf16*>(p.bias);

  if (ctas > 1) cluster_arrive_relaxed();
  launch_dependent_grids();
  if (p.prefetches && may_overlap_previous_grid() && threadIdx.x < kTinyColumns && begin < end) {
    prefetch_bytes_to_l2(weight + int64_t(threadIdx.x) * p.depth + begin,
                         (end - begin) * int(sizeof(bf16)));
  }
  wait_on_dependent_grids();

  const bf16* first = weight + int64_t(group) * p.depth;
  const bf16* second = first + int64_t(8) * p.depth;
  const bf16* rows[kRowTiles];
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
    const uint32_t r = row + tile * kTinyRows + group;
    rows[tile] = r < p.rows ? input + int64_t(r) * p.depth : nullptr;
  }

  constexpr int kStride = kWarps * kTinyStep;
  TinyOperands<kRowTiles> stages[kStages];
  float sums[kRowTiles][4] = {};  // columns g and g + 8, rows 2 q and 2 q + 1 of each tile
  int k = begin + warp * kTinyStep;
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    stages[stage].load(first, second, rows, k + stage * kStride + quad * 8, end);
  }
#pragma unroll 1
  while (k < end) {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      stages[stage].multiply(sums);
      stages[stage].load(first, second, rows, k + (stage + kStages) * kStride + quad * 8, end);
    }
    k += kStages * kStride;
  }

#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
    float* target = &warp_sums[warp][tile][group * kTinyColumnStride + quad * 2];
    *reinterpret_cast<float2*>(target) = make_float2(sums[tile][0], sums[tile][1]);
    *reinterpret_cast<float2*>(target + 8 * kTinyColumnStride) =
        make_float2(sums[tile][2], sums[tile][3]);
  }
  __syncthreads();

  const auto store = [&](int result, float sum) {
    const uint32_t r = row + result / kTinyColumns;
    const uint32_t c = column + result % kTinyColumns;
    if (r >= p.rows) return;
    if (bias != nullptr) sum += to_float(bias[c]);
    const int64_t at = int64_t(r) * p.columns + c;
    if (p.out_is_f32) {
      static_cast<float*>(p.out)[at] = sum;
    } else {
      static_cast<bf16*>(p.out)[at] = from_float<bf16>(sum);
    }
  };
  const int share = kResults >> ctas_log2;  // results that each CTA adds over the CTAs
  if (ctas > 1) cluster_wait();             // the other CTAs have started
#pragma unroll
  for (int result = threadIdx.x; result < kResults; result += kThreads) {
    const int tile = result / (kTinyRows * kTinyColumns);
    const int tile_row = result / kTinyColumns % kTinyRows, c = result % kTinyColumns;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) sum += warp_sums[i][tile][c * kTinyColumnStride + tile_row];
    if (ctas == 1) {
      store(result, sum);
    } else {
      const int owner = result * ctas / kResults;
      store_in_cta(&cta_sums[rank * share + result - owner * share], owner, __float_as_uint(sum));
    }
  }
  if (ctas == 1) return;
  cluster_arrive();
  cluster_wait();
  for (int i = threadIdx.x; i < share; i += kThreads) {
    float sum = 0.0f;
    for (int cta = 0; cta < ctas; ++cta) sum += __uint_as_float(cta_sums[cta * share + i]);
    store(rank * share + i, sum);
  }
}

#if !defined(__CUDACC_RTC__)

// Without clusters, CTAs are larger, as there are few.
constexpr int kTinyClusterSize = kMaxClusterSize < kMaxTinyCtas ? kMaxClusterSize : kMaxTinyCtas;
constexpr int kTinyWarps = kTinyClusterSize > 1 ? 8 : 16;

// About two CTAs for each multiprocessor of the largest GPUs. Why not the number of this one: a
// result then depends on the architecture, but not on the GPU.
constexpr uint32_t kTinyCtas = 256;

// Returns the CTAs that split the depth: at most so many that each warp has a step.
inline int tiny_cluster_size(uint32_t column_tiles, int depth) {
  const int steps = (depth + kTinyStep - 1) / kTinyStep;
  int ctas = 1;
  while (ctas < kTinyClusterSize && 2 * ctas * column_tiles <= kTinyCtas &&
         steps > ctas * kTinyWarps) {
    ctas *= 2;
  }
  return ctas;
}

template <int kRowTiles>
cudaError_t launch_tinygemm_tiles(TinyGemmParams p, bool enable_pdl, cudaStream_t stream) {
  const uint32_t row_tiles = (p.rows - 1) / (kRowTiles * kTinyRows) + 1;
  const uint32_t column_tiles = p.columns / kTinyColumns;
  p.column_tiles = FastDivmod(column_tiles);
  p.prefetches = enable_pdl;
  const auto kernel = TinyGemmKernel<kRowTiles, kTinyWarps>;
  int ctas = tiny_cluster_size(column_tiles, p.depth);
  cudaError_t status;
  // A part of a GPU may have no room for a cluster.
  do {
    status = launch_clusters(kernel, dim3(row_tiles * column_tiles * ctas),
                             dim3(kTinyWarps * kWarpSize), ctas, 0, enable_pdl, stream, p);
    ctas /= 2;
  } while (ctas > 0 && is_cluster_too_large(status));
  return status;
}

// Launches the product on `stream`, unless the output is empty. The columns must be a multiple of
// 16 and the depth of 8, and input and weight aligned to 16 bytes. Returns cudaErrorInvalidValue if
// the output has more than kMaxTinyTiles tiles.
inline cudaError_t launch_tinygemm(const TinyGemmParams& p, bool enable_pdl, cudaStream_t stream) {
  if (p.rows == 0 || p.columns == 0) return cudaSuccess;
  const int64_t tiles = ((int64_t(p.rows) - 1) / kTinyRows + 1) * (p.columns / kTinyColumns);
  if (tiles > kMaxTinyTiles) return cudaErrorInvalidValue;
  if (p.rows <= kTinyRows) return launch_tinygemm_tiles<1>(p, enable_pdl, stream);
  // Larger tiles of rows take registers that CTAs of 16 warps do not have.
  if (kTinyWarps > 8 || p.rows <= 2 * kTinyRows) {
    return launch_tinygemm_tiles<2>(p, enable_pdl, stream);
  }
  return launch_tinygemm_tiles<kTinyWarps <= 8 ? 4 : 2>(p, enable_pdl, stream);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
