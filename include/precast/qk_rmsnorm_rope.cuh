// SPDX-License-Identifier: Apache-2.0
// RMSNorm of each head of queries and keys, then RoPE, in place on a packed projection.
//
//   n[t, h, c] = qkv[t, h, c] / sqrt(mean_c(qkv[t, h, c]^2) + eps) * (weight[c] + weight_bias)
//   qkv[t, h, :] = round(rope(n[t, h, :]))
//
// with the rotation of rope.cuh and the weight of the queries or of the keys; weight_bias is 0, or
// 1 for Gemma's form. All arithmetic is fp32, rounded once.
//
// Layout   qkv     [tokens, q_heads + k_heads (+ more), head_dim]  T; any token stride
//          q_weight, k_weight  [head_dim]  T, contiguous
// Threads  A head belongs to `lanes` lanes (a power of two), which hold two vectors of 8 elements
//          each as in rope.cuh: those that turn, then those behind rotary_dim. The mean is a sum
//          over these lanes.
// Traffic  reads and writes queries and keys once, and the cache's row of each token.
// Source   Zhang and Sennrich, arXiv:1910.07467; Su et al., arXiv:2104.09864; used in this order by
//          Qwen3 (arXiv:2505.09388) and Gemma 3 (arXiv:2503.19786).
#pragma once

#include "precast/core/items.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/vec.cuh"
#include "precast/core/warp.cuh"
#include "precast/rotation.cuh"

namespace precast {

struct QkRmsNormRopeParams {
  void* qkv;             // [tokens, q_heads + k_heads, head_dim]
  const void* q_weight;  // [head_dim]
  const void* k_weight;  // [head_dim]
  int64_t token_stride;
  int64_t head_stride;
  uint32_t tokens;
  int q_heads;
  int k_heads;
  int head_dim;
  float eps;
  float weight_bias;
  bool interleave;
  RopeSource source;
  // The launcher sets the rest.
  Divisor heads;  // q_heads + k_heads
  int lanes_log2;
  bool evict_last;
};

#if defined(__CUDACC__)

template <typename T, bool kInterleave, bool kAligned>
__global__ __launch_bounds__(kItemThreads) void QkRmsNormRopeKernel(
    const __grid_constant__ QkRmsNormRopeParams p) {
  const int rotary_dim = p.source.rotary_dim;
  const int tail = p.head_dim - rotary_dim;
  const int turning = rotary_dim / 16;  // lanes whose vectors turn
  const int lane = threadIdx.x & ((1 << p.lanes_log2) - 1);
  const uint32_t row = (blockIdx.x * (kItemThreads >> p.lanes_log2)) +  //
                       (threadIdx.x >> p.lanes_log2);
  const uint32_t token = p.heads.divide(row);
  const int head = static_cast<int>(row - token * p.heads.value);
  const bool row_exists = token < p.tokens;

  // Columns of the lane's two vectors.
  const bool turns = lane < turning;
  const int second = turns ? rotary_dim / 2 : (tail + 15) / 16 * 8;
  const int a = turns ? lane * 8 : rotary_dim + (lane - turning) * 8;
  const int b = a + second;
  const bool has_a = row_exists && (turns || (lane - turning) * 8 < second);
  const bool has_b = has_a && b < p.head_dim;
  T* row_data = static_cast<T*>(p.qkv) + token * p.token_stride + head * p.head_stride;
  const T* weight = static_cast<const T*>(head < p.q_heads ? p.q_weight : p.k_weight);

  allow_next_grid();
  if (may_overlap_previous_grid()) {
    if (has_a) {
      prefetch_to_l2(row_data + a);
      prefetch_to_l2(weight + a);
    }
    if (has_b) {
      prefetch_to_l2(row_data + b);
      prefetch_to_l2(weight + b);
    }
  }
  wait_for_previous_grid();

  int32_t position = -1;
  if (has_a && turns) position = p.source.positions.ids[token];
  const L2Policy policy = read_policy(p.evict_last);
  const Vec<T> a_vec = has_a ? load<kAligned>(row_data + a, 8, policy) : zero_vec<T>();
  const Vec<T> b_vec = has_b ? load<kAligned>(row_data + b, 8, policy) : zero_vec<T>();
  const Vec<T> a_weight = has_a ? load<kAligned>(weight + a, 8) : zero_vec<T>();
  const Vec<T> b_weight = has_b ? load<kAligned>(weight + b, 8) : zero_vec<T>();
  const bool turns_it = p.source.cache.has(position);
  Rotation rotation;
  if (turns_it) {
    const RopePairs pairs = {kInterleave ? a / 2 : a, b / 2};
    rotation.load<kInterleave, kAligned>(p.source, position, pairs);
  }

  float x[8], y[8], w[8];
  unpack(a_vec, x);
  unpack(b_vec, y);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += x[i] * x[i] + y[i] * y[i];
  sum = warp_sum(sum, 1 << p.lanes_log2);
  const float rstd = rsqrtf(sum / p.head_dim + p.eps);
  unpack(a_weight, w);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] *= rstd * (w[i] + p.weight_bias);
  unpack(b_weight, w);
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] *= rstd * (w[i] + p.weight_bias);
  if (turns_it) rotation.apply<kInterleave>(x, y);
  if (has_a) store<kAligned>(row_data + a, pack<T>(x), 8);
  if (has_b) store<kAligned>(row_data + b, pack<T>(y), 8);
}

#if !defined(__CUDACC_RTC__)

// Launches it on `stream`; nothing without tokens or heads. head_dim is a multiple of 8, rotary_dim
// one of 16 and not above it, head_dim at most 512. cudaErrorInvalidValue if there are more than
// 2^31 heads.
template <typename T>
cudaError_t launch_qk_rmsnorm_rope(QkRmsNormRopeParams p, bool enable_pdl, cudaStream_t stream) {
  const uint64_t rows = uint64_t(p.tokens) * (p.q_heads + p.k_heads);
  if (rows == 0) return cudaSuccess;
  if (rows > 0x7fffffffu) return cudaErrorInvalidValue;
  const int units = p.source.rotary_dim / 16 + (p.head_dim - p.source.rotary_dim + 15) / 16;
  p.lanes_log2 = 0;
  while ((1 << p.lanes_log2) < units) ++p.lanes_log2;
  if (p.lanes_log2 > 5) return cudaErrorInvalidValue;
  p.heads = Divisor(static_cast<uint32_t>(p.q_heads + p.k_heads));
  p.evict_last = reads_evict_last(int64_t(rows) * p.head_dim * 4, true);
  const uint64_t bits =
      reinterpret_cast<uint64_t>(p.qkv) | reinterpret_cast<uint64_t>(p.q_weight) |
      reinterpret_cast<uint64_t>(p.k_weight) | reinterpret_cast<uint64_t>(p.source.cache.rows) |
      (p.token_stride | p.head_stride) * sizeof(T) | p.source.cache.stride * sizeof(float);
  const bool aligned = bits % kVecBytes == 0;
  const auto kernel = p.interleave ? aligned ? QkRmsNormRopeKernel<T, true, true>
                                             : QkRmsNormRopeKernel<T, true, false>
                      : aligned    ? QkRmsNormRopeKernel<T, false, true>
                                   : QkRmsNormRopeKernel<T, false, false>;
  const uint32_t rows_per_cta = kItemThreads >> p.lanes_log2;
  const uint32_t ctas = static_cast<uint32_t>((rows - 1) / rows_per_cta + 1);
  return launch(kernel, dim3(ctas), dim3(kItemThreads), enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
