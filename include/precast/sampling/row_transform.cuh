// SPDX-License-Identifier: Apache-2.0
// Rows of the vocabulary that become rows: softmax, renormalisation after top-k or top-p, and the
// mask of logits outside the top-k.
//
//   softmax   y = exp((x - max(x)) / temperature) / sum                       f32
//   top_k     y = w >= k-th largest ? w / (sum of the kept) : 0
//   top_p     y = w >= t ? w / (sum of the kept) : 0, t as in sampling/sampling.cuh
//   mask      y = x >= k-th largest ? x : -inf
//
// Layout   source, out  [rows, vocab]  rows strided, elements contiguous
// Threads  as sampling/sampling.cuh.
// Traffic  reads and writes each row once, as long as it stays on chip.
// Measured 2026-11-21 on an H200 in a CUDA graph, f32, rows of 128256, which a softmax of normal
//          numbers of deviation 2.5 made; us for 64 and 256 rows:
//          softmax 25.1, 71.7; top_p of 0.9 40.4, 114; top_k of 500 38.7, 108;
//          mask of 50 31.5, 85.6. In some runs those of 256 rows take 1.5 times as long.
#pragma once

#include "precast/sampling/sampling.cuh"

namespace precast {

enum class RowOp : int { softmax, top_k, top_p, mask };

struct RowOpParams {
  RowSource source;
  void* out;
  int64_t out_stride;           // elements
  const int32_t* top_k_values;  // [rows], or null
  PerRow number;                // top_p, or temperature of softmax
  int32_t top_k;
  RowOp op;
  bool aligned;  // rows of out, as RowSource
};

#if defined(__CUDACC__)

__device__ __forceinline__ void store_four(f32* target, const float (&x)[4]) {
  store_vec(target, pack<f32>(x));
}

template <typename T>
__device__ __forceinline__ void store_four(T* target, const float (&x)[4]) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(target), "r"(pack_pair(T(), x[0], x[1])),
               "r"(pack_pair(T(), x[2], x[3]))
               : "memory");
}

// Stores value(y) of each element.
template <typename Out, typename Row, typename F>
__device__ __forceinline__ void store_row(Out* out, const RowOpParams& p, Row& row,
                                          const F& value) {
  const int vocab = p.source.vocab;
  each_half(row, Always(), [&](int i, int first, const float (&y)[kPerLane / 2]) {
    const int at = (row.first + i) * kSlab + place_in_slab(threadIdx.x % kWarpSize, 4 * first);
#pragma unroll
    for (int j = 0; j < kPerLane / 2; j += 4) {
      const float four[4] = {value(y[j]), value(y[j + 1]), value(y[j + 2]), value(y[j + 3])};
      const int to = at + j * kWarpSize;
      if (p.aligned) {
        if (to < vocab) store_four(out + to, four);
      } else {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if (to + c < vocab) out[to + c] = from_float<Out>(four[c]);
        }
      }
    }
  });
}

// Of a slab or a group: its mass where its largest element weighs 1, and that element.
struct MassAtMax {
  float factor;

  __device__ __forceinline__ float weight(float max, float other) const {
    return max == other ? 1.0f : fast_exp2((max - other) * factor);
  }

  __device__ __forceinline__ float2 over(const float2* slots, int count) const {
    const int lane = threadIdx.x % kWarpSize;
    float max = -__int_as_float(0x7f800000), mass = 0.0f;
    for (int i = lane; i < count; i += kWarpSize) max = fmaxf(max, slots[i].y);
    max = warp_max(max);
    for (int i = lane; i < count; i += kWarpSize) mass += slots[i].x * weight(slots[i].y, max);
    return {warp_sum(mass), max};
  }
};

// Why masses by the maximum of each slab: the row's own would take one exchange more. The weights
// that are written are by the row's own, so that equal logits have equal shares, and larger ones no
// smaller ones.
template <typename T, bool kOnChip>
__device__ __forceinline__ void softmax_row(Sampler<T, kOnChip>& sampler, const RowOpParams& p,
                                            f32* out, float temperature) {
  const float infinity = __int_as_float(0x7f800000);
  auto& row = sampler.row;
  const MassAtMax masses = {factor_of(temperature)};
  sampler.template exchange<MassAtMax>(
      [&] {
        float* at = row.copy;
#pragma unroll 1
        for (int i = row.warp(); i < row.count; i += row.warps(), at += row.step()) {
          float y[kPerLane], max = -infinity, mass = 0.0f;
          row.load(row.first + i, at, y);
#pragma unroll
          for (int j = 0; j < kPerLane; ++j) max = fmaxf(max, y[j]);
          max = warp_max(max);
          const float one = max == -infinity ? 0.0f : max;
#pragma unroll
          for (int j = 0; j < kPerLane; ++j) mass += fast_exp2((y[j] - one) * masses.factor);
          sampler.put(i, warp_sum(mass), max);
        }
      },
      masses);
  const float max = sampler.max();
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const float2 pair = sampler.pairs()[i];
    total += pair.x * masses.weight(pair.y, max);
  }
  const float inverse = __frcp_rn(total);  // infinite for a row of minus infinities: 0 times it
  row.weigh(max, masses.factor);
  store_row(out, p, row,
            [&](float x) { return (kOnChip ? weight_of_logit(x, row.weighing) : x) * inverse; });
}

template <typename T, bool kOnChip>
__device__ __forceinline__ void transform_row(Sampler<T, kOnChip>& sampler, const RowOpParams& p) {
  auto& s = sampler.s;
  auto& row = sampler.row;
  const int ctas = sampler.ctas, vocab = p.source.vocab;
  const uint32_t output = cluster_number();
  row.start(p.op == RowOp::softmax || p.op == RowOp::mask);
  sampler.begin(
      [&] { row.data = static_cast<const T*>(p.source.data) + output * p.source.stride; });
  const float parameter = p.number[output];
  if (p.op != RowOp::softmax) clear_bins(s.select);
  sampler.arrive();
  if (p.op == RowOp::softmax) {
    softmax_row(sampler, p, static_cast<f32*>(p.out) + output * p.out_stride, parameter);
    return;
  }
  const bool by_mass = p.op == RowOp::top_p;
  int k = vocab;
  if (by_mass) {
    sampler.exchange_masses_and_maxima();
  } else {
    sampler.exchange_maxima(true);
    k = p.top_k_values == nullptr ? p.top_k : p.top_k_values[output];
  }
  const float max = sampler.max(), infinity = __int_as_float(0x7f800000);
  float total = sampler.total(), least = -infinity;
  if (by_mass ? parameter < 1.0f : k > 0 && k < vocab) {
    least = select(row, s.select, ctas, by_mass ? needed_mass(parameter) : k, max, by_mass,
                   mass_scale(total), sampler.maxima, true);
  }
  float inverse = 1.0f, floor = least, cut = -infinity;
  if (p.op == RowOp::mask) {
    if (ctas > 1) cluster_arrive_relaxed();  // others may still read this CTA's memory
  } else {
    row.cut(least);
    if (!by_mass || parameter < 1.0f) {
      sampler.exchange_masses();
      total = sampler.total();
    }
    // A row with a NaN is NaN throughout: its total is, and nothing is below the floor.
    inverse = total == 0.0f ? 0.0f : __frcp_rn(total);
    floor = total == total ? row.weighing.floor : -infinity;
    cut = 0.0f;
  }
  store_row(static_cast<T*>(p.out) + output * p.out_stride, p, row,
            [=](float y) { return y < floor ? cut : y * inverse; });
  if (p.op == RowOp::mask && ctas > 1) cluster_wait();
}

template <typename T, bool kOnChip>
__global__ __launch_bounds__(kBoundThreads<kOnChip>,
                             1) void RowOpKernel(const __grid_constant__ RowOpParams p) {
  extern __shared__ __align__(128) float memory[];
  __shared__ RowShared shared;
  Sampler<T, kOnChip> sampler(shared, p.source, memory);
  transform_row(sampler, p);
}

#endif  // __CUDACC__

}  // namespace precast
