// SPDX-License-Identifier: Apache-2.0
// The weights of manifold-constrained hyper-connections, and the input of a layer.
//
//   m[t]     = sum_s dot[s, t] * rstd,  rstd = 1 / sqrt(sum_s squares[s, t] / k + rms_eps)
//   pre[j]   = sigmoid(m[j] * scale[0] + base[j]) + pre_eps                        j < 4
//   post[j]  = sigmoid(m[4 + j] * scale[1] + base[4 + j]) * post_factor
//   comb     = Sinkhorn of the 4 x 4 matrix m[8:] * scale[2] + base[8:]: softmax of its rows plus
//              eps, then columns divided by their sum + eps; and repeat - 1 times rows, columns
//   layer_input[t, h] = round(sum_j pre[j] * residual[t, j, h])
//
// Layout   dot       [splits, tokens, 24]  f32  contiguous, as all; squares [splits, tokens] or
//                                               absent: then those of the residual
//          residual  [tokens, 4, hidden]   T
//          post      [tokens, 4]           f32  comb [tokens, 4, 4], from the old stream to the new
// Threads  one CTA processes one token. Its threads load the first vectors of the streams; then the
//          first warp computes the weights, one entry a lane, while these loads are on their way.
// Traffic  reads dot, squares and residual once (of rows above 8192 columns the rest twice, if the
//          squares are those of the residual), writes the results once
// Source   Xie et al., mHC: Manifold-Constrained Hyper-Connections, arXiv:2512.24880; Sinkhorn and
//          Knopp 1967
// Measured not yet
#pragma once

#include "precast/core/block.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/math.cuh"
#include "precast/core/rows.cuh"
#include "precast/core/vec.cuh"
#include "precast/mhc/mhc_post.cuh"

namespace precast {

constexpr int kMixes = kStreams * (2 + kStreams);
constexpr int kMhcThreads = 512;
constexpr int kHeldVecs = 2;  // of each stream, in registers of a thread

struct MhcPreParams {
  const float* dot;      // [splits, tokens, 24]
  const float* squares;  // [splits, tokens], or null
  const void* residual;  // [tokens, 4, hidden]
  const float* scale;    // [3]
  const float* base;     // [24]
  float* post;           // [tokens, 4]
  float* comb;           // [tokens, 4, 4]
  void* layer_input;     // [tokens, hidden]
  uint32_t tokens;
  int64_t hidden;
  int splits;
  int repeat;
  float k;
  float rms_eps;
  float pre_eps;
  float sinkhorn_eps;
  float post_factor;
};

#if defined(__CUDACC__)

// Sums over the rows (lanes that differ in bits 0 and 1) and columns (bits 2 and 3) of a 4 x 4
// matrix, of which lane 4 * row + column has an entry. All lanes of the warp must call them.
__device__ __forceinline__ float matrix_row_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

__device__ __forceinline__ float matrix_column_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 4);
  return x + __shfl_xor_sync(0xffffffffu, x, 8);
}

// One entry of the doubly stochastic matrix; the order is that of the formula.
__device__ __forceinline__ float sinkhorn(float x, float eps, int repeat) {
  float row_max = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, 2));
  x = expf(x - row_max);
  x = __fdividef(x, matrix_row_sum(x)) + eps;
  x = __fdividef(x, matrix_column_sum(x) + eps);
  for (int i = 1; i < repeat; ++i) {
    x = __fdividef(x, matrix_row_sum(x) + eps);
    x = __fdividef(x, matrix_column_sum(x) + eps);
  }
  return x;
}

// The weights of a token, by one warp: stores post and comb, and writes pre to `pre`. `squares` is
// the sum where p.squares is null.
__device__ __forceinline__ void compute_mixes(const MhcPreParams& p, uint32_t token, float squares,
                                              float (&pre)[kStreams]) {
  constexpr int kMatrix = kStreams * kStreams;
  const int lane = threadIdx.x % kWarpSize;
  // Lanes 0 to 15 have the matrix, so that its rows and columns are bits; then pre and post.
  const int column = lane < kMatrix ? lane + 2 * kStreams : lane - kMatrix;
  const bool exists = lane < kMixes;
  float dot = 0.0f;
  if (p.squares != nullptr) squares = 0.0f;
  for (int split = 0; split < p.splits; ++split) {
    const int64_t row = int64_t(split) * p.tokens + token;
    if (p.squares != nullptr) squares += load_scalar(p.squares + row);
    if (exists) dot += load_scalar(p.dot + row * kMixes + column);
  }
  const float rstd = rsqrtf(squares / p.k + p.rms_eps);
  const int kind = lane < kMatrix ? 2 : lane < kMatrix + kStreams ? 0 : 1;
  float x = 0.0f;
  if (exists) {
    x = dot * rstd * load_scalar(p.scale + kind) + load_scalar(p.base + column);
  }
  const float entry = sinkhorn(x, p.sinkhorn_eps, p.repeat);
  const float gate = __fdividef(1.0f, 1.0f + expf(-x));
  if (lane < kMatrix) {
    p.comb[int64_t(token) * kMatrix + lane] = entry;
  } else if (kind == 0) {
    pre[column] = gate + p.pre_eps;
  } else if (exists) {
    p.post[int64_t(token) * kStreams + column - kStreams] = gate * p.post_factor;
  }
}

template <typename T>
__device__ __forceinline__ float sum_of_squares(Vec<T> vec) {
  float x[Vec<T>::kSize], sum = 0.0f;
  unpack(vec, x);
#pragma unroll
  for (int i = 0; i < Vec<T>::kSize; ++i) sum = fmaf(x[i], x[i], sum);
  return sum;
}

template <typename T, bool kAligned>
__device__ __forceinline__ void store_layer_input(T* target, const Vec<T> (&streams)[kStreams],
                                                  const float (&pre)[kStreams], int64_t left) {
  constexpr int kSize = Vec<T>::kSize;
  float x[kSize], y[kSize] = {};
#pragma unroll
  for (int stream = 0; stream < kStreams; ++stream) {
    unpack(streams[stream], x);
#pragma unroll
    for (int i = 0; i < kSize; ++i) y[i] = fmaf(pre[stream], x[i], y[i]);
  }
  store<kAligned>(target, pack<T>(y), left);
}

template <typename T, bool kAligned, bool kPrenorm>
__global__ __launch_bounds__(kMhcThreads,
                             1) void MhcPreKernel(const __grid_constant__ MhcPreParams p) {
  constexpr int kSize = Vec<T>::kSize;
  __shared__ float shared_pre[kStreams];
  __shared__ float scratch[kMaxWarps];
  const uint32_t token = blockIdx.x;
  const int64_t step = int64_t(blockDim.x) * kSize;
  const int64_t first = int64_t(threadIdx.x) * kSize;
  const T* residual = static_cast<const T*>(p.residual) + token * kStreams * p.hidden;
  T* layer_input = static_cast<T*>(p.layer_input) + token * p.hidden;

  launch_dependent_grids();
  if (may_overlap_previous_grid() && first < p.hidden) {
#pragma unroll
    for (int stream = 0; stream < kStreams; ++stream) {
      prefetch_to_l2(residual + stream * p.hidden + first);
    }
  }
  wait_on_dependent_grids();

  Vec<T> held[kHeldVecs][kStreams];
#pragma unroll
  for (int i = 0; i < kHeldVecs; ++i) {
    const int64_t at = first + i * step;
#pragma unroll
    for (int stream = 0; stream < kStreams; ++stream) {
      held[i][stream] = at < p.hidden
                            ? load<kAligned>(residual + stream * p.hidden + at, p.hidden - at)
                            : zero_vec<T>();
    }
  }

  float squares = 0.0f;
  if constexpr (kPrenorm) {
#pragma unroll
    for (int i = 0; i < kHeldVecs; ++i) {
#pragma unroll
      for (int stream = 0; stream < kStreams; ++stream) squares += sum_of_squares(held[i][stream]);
    }
    for (int64_t at = first + kHeldVecs * step; at < p.hidden; at += step) {
#pragma unroll
      for (int stream = 0; stream < kStreams; ++stream) {
        squares += sum_of_squares(load<kAligned>(residual + stream * p.hidden + at, p.hidden - at));
      }
    }
    squares = block_sum(squares, scratch);
  }
  if (threadIdx.x < kWarpSize) compute_mixes(p, token, squares, shared_pre);
  __syncthreads();
  float pre[kStreams];
#pragma unroll
  for (int stream = 0; stream < kStreams; ++stream) pre[stream] = shared_pre[stream];

#pragma unroll
  for (int i = 0; i < kHeldVecs; ++i) {
    const int64_t at = first + i * step;
    if (at < p.hidden) {
      store_layer_input<T, kAligned>(layer_input + at, held[i], pre, p.hidden - at);
    }
  }
  for (int64_t at = first + kHeldVecs * step; at < p.hidden; at += step) {
    Vec<T> streams[kStreams];
#pragma unroll
    for (int stream = 0; stream < kStreams; ++stream) {
      streams[stream] = load<kAligned>(residual + stream * p.hidden + at, p.hidden - at);
    }
    store_layer_input<T, kAligned>(layer_input + at, streams, pre, p.hidden - at);
  }
}

#if !defined(__CUDACC_RTC__)

// Launches the weights and the mix on `stream`, unless there are no tokens.
template <typename T>
cudaError_t launch_mhc_pre(const MhcPreParams& p, bool enable_pdl, cudaStream_t stream) {
  if (p.tokens == 0) return cudaSuccess;
  const RowStrides rows{0, p.hidden};
  const bool aligned = rows_are_vector_aligned<T>(p.residual, rows) &&
                       rows_are_vector_aligned<T>(p.layer_input, rows);
  const bool prenorm = p.squares == nullptr;
  const auto kernel =
      aligned ? (prenorm ? MhcPreKernel<T, true, true> : MhcPreKernel<T, true, false>)
              : (prenorm ? MhcPreKernel<T, false, true> : MhcPreKernel<T, false, false>);
  // The least power of two of threads that hold a row, as small CTAs leave room for others.
  int threads = 64;
  while (threads < kMhcThreads && int64_t(threads) * kHeldVecs * Vec<T>::kSize < p.hidden) {
    threads *= 2;
  }
  return launch(kernel, dim3(p.tokens), dim3(threads), enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
