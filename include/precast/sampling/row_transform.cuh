// SPDX-License-Identifier: Apache-2.0
// Transforms of whole rows over the vocabulary: softmax, renormalisation after top-k or top-p, and
// the mask of logits outside of the top-k.
//
//   softmax   y = exp((x - max(x)) / temperature) / sum                       f32
//   top_k     y = w >= k-th largest ? w / (sum of the kept w) : 0
//   top_p     y = w >= t ? w / (sum of the kept w) : 0, t as in sampling/sampling.cuh
//   mask      y = x >= k-th largest ? x : -inf
//
// Layout   source, out  [rows, vocab]  rows strided, elements contiguous
// Threads  as in sampling/sampling.cuh
// Traffic  reads and writes each row once if it stays on chip
// Measured 2026-11-21 on an H200 in a CUDA graph, f32, rows of 128256, the softmax of normal
// numbers
//          with standard deviation 2.5; us for 64 and 256 rows:
//          softmax 25.1, 71.7; top_p of 0.9 40.4, 114; top_k of 500 38.7, 108;
//          mask of 50 31.5, 85.6. In some runs 256 rows take 1.5 times as long.
#pragma once

#include "precast/sampling/sampling.cuh"

namespace precast {

enum class RowTransform : int { softmax, top_k, top_p, mask };

struct RowTransformParams {
  RowSource source;
  void* out;
  int64_t out_stride;           // elements between rows
  const int32_t* top_k_values;  // [rows], or null
  PerRowScalar parameter;       // top_p, or temperature of softmax
  int32_t top_k;
  RowTransform op;
  bool aligned;  // as RowSource::aligned, for rows of out
};

#if defined(__CUDACC__)

__device__ __forceinline__ void store_vec4(f32* target, const float (&x)[4]) {
  store_vec(target, pack<f32>(x));
}

template <typename T>
__device__ __forceinline__ void store_vec4(T* target, const float (&x)[4]) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(target), "r"(pack_pair(T(), x[0], x[1])),
               "r"(pack_pair(T(), x[2], x[3]))
               : "memory");
}

// Stores transform_item(y) for each element y.
template <typename Out, typename Row, typename F>
__device__ __forceinline__ void store_row(Out* out, const RowTransformParams& p, Row& row,
                                          const F& transform_item) {
  const int vocab = p.source.vocab_size;
  for_each_half_tile(row, AllTiles(), [&](int i, int first, const float (&y)[kItemsPerLane / 2]) {
    const int first_column =
        (row.first_tile + i) * kTileSize + index_in_tile(threadIdx.x % kWarpSize, 4 * first);
#pragma unroll
    for (int j = 0; j < kItemsPerLane / 2; j += 4) {
      const float values[4] = {transform_item(y[j]), transform_item(y[j + 1]),
                               transform_item(y[j + 2]), transform_item(y[j + 3])};
      const int column = first_column + j * kWarpSize;
      if (p.aligned) {
        if (column < vocab) store_vec4(out + column, values);
      } else {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if (column + c < vocab) out[column + c] = from_float<Out>(values[c]);
        }
      }
    }
  });
}

// The statistics of a tile or chunk are its sum of exponentials, relative to its own maximum, and
// that maximum. Combining them rescales the sums to the new maximum, as in online softmax.
struct OnlineSoftmaxReduction {
  float scale_log2;

  __device__ __forceinline__ float rescale(float max, float new_max) const {
    return max == new_max ? 1.0f : fast_exp2((max - new_max) * scale_log2);
  }

  __device__ __forceinline__ float2 reduce(const float2* stats, int count) const {
    const int lane = threadIdx.x % kWarpSize;
    float max = -__int_as_float(0x7f800000), mass = 0.0f;
    for (int i = lane; i < count; i += kWarpSize) max = fmaxf(max, stats[i].y);
    max = warp_max(max);
    for (int i = lane; i < count; i += kWarpSize) mass += stats[i].x * rescale(stats[i].y, max);
    return {warp_sum(mass), max};
  }
};

// Why each tile has its own maximum: using the row maximum would take one more all-gather. The
// weights that are written use the row maximum, so equal logits get equal results, and larger
// logits never get smaller results.
template <typename T, bool kOnChip>
__device__ __forceinline__ void softmax_row(Sampler<T, kOnChip>& sampler,
                                            const RowTransformParams& p, f32* out,
                                            float temperature) {
  const float infinity = __int_as_float(0x7f800000);
  auto& row = sampler.row;
  const OnlineSoftmaxReduction reduction = {softmax_scale_log2(temperature)};
  sampler.template all_gather<OnlineSoftmaxReduction>(
      [&] {
        float* smem = row.lane_smem;
#pragma unroll 1
        for (int i = row.warp_id(); i < row.cta_tiles;
             i += row.num_warps(), smem += row.tile_stride()) {
          float y[kItemsPerLane], max = -infinity, mass = 0.0f;
          row.load(row.first_tile + i, smem, y);
#pragma unroll
          for (int j = 0; j < kItemsPerLane; ++j) max = fmaxf(max, y[j]);
          max = warp_max(max);
          const float tile_shift = max == -infinity ? 0.0f : max;
#pragma unroll
          for (int j = 0; j < kItemsPerLane; ++j) {
            mass += fast_exp2((y[j] - tile_shift) * reduction.scale_log2);
          }
          sampler.set_tile_stats(i, warp_sum(mass), max);
        }
      },
      reduction);
  const float max = sampler.row_max();
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kNumChunks; ++i) {
    const float2 pair = sampler.chunk_stats()[i];
    total += pair.x * reduction.rescale(pair.y, max);
  }
  // infinite for a row of minus infinities, which becomes NaN
  const float inverse = __frcp_rn(total);
  row.apply_softmax(max, reduction.scale_log2);
  store_row(out, p, row,
            [&](float x) { return (kOnChip ? exp_weight(x, row.weights) : x) * inverse; });
}

template <typename T, bool kOnChip>
__device__ __forceinline__ void transform_row(Sampler<T, kOnChip>& sampler,
                                              const RowTransformParams& p) {
  auto& s = sampler.s;
  auto& row = sampler.row;
  const int ctas = sampler.ctas, vocab = p.source.vocab_size;
  const uint32_t output = cluster_id();
  row.reset(p.op == RowTransform::softmax || p.op == RowTransform::mask);
  sampler.begin(
      [&] { row.data = static_cast<const T*>(p.source.data) + output * p.source.stride; });
  const float parameter = p.parameter[output];
  if (p.op != RowTransform::softmax) clear_bins(s.select);
  sampler.wait_for_row();
  if (p.op == RowTransform::softmax) {
    softmax_row(sampler, p, static_cast<f32*>(p.out) + output * p.out_stride, parameter);
    return;
  }
  const bool by_mass = p.op == RowTransform::top_p;
  int k = vocab;
  if (by_mass) {
    sampler.all_gather_mass_and_max();
  } else {
    sampler.all_gather_max_ignoring_nan(true);
    k = p.top_k_values == nullptr ? p.top_k : p.top_k_values[output];
  }
  const float max = sampler.row_max(), infinity = __int_as_float(0x7f800000);
  float total = sampler.total_mass(), selected = -infinity;
  if (by_mass ? parameter < 1.0f : k > 0 && k < vocab) {
    selected = radix_select(row, s.select, ctas, by_mass ? fixed_point_target(parameter) : k, max,
                            by_mass, fixed_point_scale(total), sampler.tile_maxima, true);
  }
  float inverse = 1.0f, threshold = selected, dropped_value = -infinity;
  if (p.op == RowTransform::mask) {
    if (ctas > 1) cluster_arrive_relaxed();  // other CTAs may still read this CTA's shared memory
  } else {
    row.raise_threshold(selected);
    if (!by_mass || parameter < 1.0f) {
      sampler.all_gather_mass();
      total = sampler.total_mass();
    }
    // A row with a NaN becomes NaN throughout: its total is NaN, and no element is below the
    // threshold.
    inverse = total == 0.0f ? 0.0f : __frcp_rn(total);
    threshold = total == total ? row.weights.threshold : -infinity;
    dropped_value = 0.0f;
  }
  store_row(static_cast<T*>(p.out) + output * p.out_stride, p, row,
            [=](float y) { return y < threshold ? dropped_value : y * inverse; });
  if (p.op == RowTransform::mask && ctas > 1) cluster_wait();
}

template <typename T, bool kOnChip>
__global__ __launch_bounds__(kTransformMaxThreads<kOnChip>, 1) void RowTransformKernel(
    const __grid_constant__ RowTransformParams p) {
  extern __shared__ __align__(128) float memory[];
  __shared__ SamplerStorage shared;
  Sampler<T, kOnChip> sampler(shared, p.source, memory);
  transform_row(sampler, p);
}

#endif  // __CUDACC__

}  // namespace precast
