// SPDX-License-Identifier: Apache-2.0
// The residual streams behind a layer, in manifold-constrained hyper-connections.
//
//   out[t, n, h] = round(x[t, h] * post[t, n] + sum_o residual[t, o, h] * comb[t, o, n])
//
// Layout   x              [tokens, hidden]     T    contiguous, as all
//          residual, out  [tokens, 4, hidden]  T    out may be residual
//          post           [tokens, 4]          f32
//          comb           [tokens, 4, 4]       f32  from the old stream to the new one
// Threads  one thread processes 16 bytes of x, and the same columns of the four streams
// Traffic  reads x, residual and the weights once, writes out once
// Source   Xie et al., mHC: Manifold-Constrained Hyper-Connections, arXiv:2512.24880
// Measured not yet
#pragma once

#include "precast/core/items.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/vec.cuh"

namespace precast {

constexpr int kStreams = 4;

struct MhcPostParams {
  const void* x;         // [tokens, hidden]
  const void* residual;  // [tokens, 4, hidden]
  const float* post;     // [tokens, 4]
  const float* comb;     // [tokens, 4, 4]
  void* out;             // [tokens, 4, hidden]
  uint32_t tokens;
  int64_t hidden;
  Items items;  // set by the launcher
};

#if defined(__CUDACC__)

template <typename T, bool kAligned>
__global__ __launch_bounds__(kItemThreads, kAligned ? 4 : 2) void MhcPostKernel(
    const __grid_constant__ MhcPostParams p) {
  constexpr int kSize = Vec<T>::kSize;
  const uint32_t item = blockIdx.x * kItemThreads + threadIdx.x;
  if (item >= p.items.count) return;
  const ItemPosition at(p.items, item, kSize);
  const int64_t left = p.hidden - at.column;
  const T* x = static_cast<const T*>(p.x) + at.row * p.hidden + at.column;
  const int64_t offset = int64_t(at.row) * kStreams * p.hidden + at.column;
  const T* residual = static_cast<const T*>(p.residual) + offset;  // [kSize] of each stream
  T* out = static_cast<T*>(p.out) + offset;                        // [kSize] of each stream

  launch_dependent_grids();
  if (may_overlap_previous_grid()) {
    prefetch_to_l2(x);
#pragma unroll
    for (int old = 0; old < kStreams; ++old) prefetch_to_l2(residual + old * p.hidden);
  }
  wait_on_dependent_grids();

  const Vec<T> x_vec = load<kAligned>(x, left);
  Vec<T> residual_vecs[kStreams];
#pragma unroll
  for (int old = 0; old < kStreams; ++old) {
    residual_vecs[old] = load<kAligned>(residual + old * p.hidden, left);
  }
  float post[kStreams], comb[kStreams][kStreams];
  unpack(load_vec(p.post + int64_t(at.row) * kStreams), post);
#pragma unroll
  for (int old = 0; old < kStreams; ++old) {
    unpack(load_vec(p.comb + (int64_t(at.row) * kStreams + old) * kStreams), comb[old]);
  }

  float values[kSize], y[kStreams][kSize];
  unpack(x_vec, values);
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
#pragma unroll
    for (int stream = 0; stream < kStreams; ++stream) y[stream][i] = values[i] * post[stream];
  }
#pragma unroll
  for (int old = 0; old < kStreams; ++old) {
    unpack(residual_vecs[old], values);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
#pragma unroll
      for (int stream = 0; stream < kStreams; ++stream) {
        y[stream][i] = fmaf(values[i], comb[old][stream], y[stream][i]);
      }
    }
  }
#pragma unroll
  for (int stream = 0; stream < kStreams; ++stream) {
    store<kAligned>(out + stream * p.hidden, pack<T>(y[stream]), left);
  }
}

#if !defined(__CUDACC_RTC__)

// Launches the mix on `stream`, unless the tensors are empty. The weights must be 16-byte aligned.
// Returns cudaErrorInvalidValue if x has more than 2^32 items of 16 bytes.
template <typename T>
cudaError_t launch_mhc_post(MhcPostParams p, bool enable_pdl, cudaStream_t stream) {
  if (p.tokens == 0 || p.hidden == 0) return cudaSuccess;
  const ItemPlan plan = plan_items(p.tokens, p.hidden, Vec<T>::kSize);
  if (!plan.fits) return cudaErrorInvalidValue;
  p.items = plan.items;
  const RowStrides rows{0, p.hidden};
  const bool aligned = rows_are_vector_aligned<T>(p.x, rows) &&
                       rows_are_vector_aligned<T>(p.residual, rows) &&
                       rows_are_vector_aligned<T>(p.out, rows);
  const auto kernel = aligned ? MhcPostKernel<T, true> : MhcPostKernel<T, false>;
  return launch(kernel, dim3(plan.ctas), dim3(kItemThreads), enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
