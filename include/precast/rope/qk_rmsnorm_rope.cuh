// SPDX-License-Identifier: Apache-2.0
// RMSNorm of each head of queries and keys, then RoPE, in place on a packed projection.
//
//   n[t, h, c] = qkv[t, h, c] / sqrt(mean_c(qkv[t, h, c]^2) + eps) * (weight[c] + weight_bias)
//   qkv[t, h, :] = round(rope(n[t, h, :]))
//
// with the rotation of rope/rope.cuh and the weight of the queries or of the keys; weight_bias is
// 0, or 1 for Gemma's form. All arithmetic is fp32, rounded once.
//
// Layout   qkv     [tokens, q_heads + k_heads (+ more), head_dim]  T; any token stride
//          q_weight, k_weight  [head_dim]  T, contiguous
// Threads  A head belongs to `lanes` lanes (a power of two), which hold two vectors of 8 elements
//          each as in rope/rope.cuh: those that turn, then those behind rotary_dim. The mean is a
//          sum over these lanes. A thread takes the same place of kHeads heads, all of queries or
//          all of keys, with one rotation and one pair of weights.
// Traffic  reads and writes queries and keys once, and the cache's row of each token.
// Source   Zhang and Sennrich, arXiv:1910.07467; Su et al., arXiv:2104.09864; used in this order by
//          Qwen3 (arXiv:2505.09388) and Gemma 3 (arXiv:2503.19786).
// Measured 2026-11-21 on an H200, bf16, 16384 tokens, heads of 128 that turn whole, with shares of
//          the elementwise ceiling of the same run (4387 GB/s):
//          32 + 8 heads   4171 GB/s  0.95        32 + 16 heads  4143 GB/s  0.94
#pragma once

#include "precast/core/launch.cuh"
#include "precast/core/rows.cuh"
#include "precast/core/vec.cuh"
#include "precast/core/warp.cuh"
#include "precast/rope/rotation.cuh"

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
  int q_groups;       // of kHeads heads each, or fewer in the last
  FastDivmod groups;  // of queries, then of keys
  int lanes_log2;
  uint32_t tokens_ahead;  // how far ahead rows of the cache are asked for; 0: not at all
  bool evict_last;
};

#if defined(__CUDACC__)

// Keeps the compiler from holding the vector's elements as fp32 from here to their next use: twice
// the registers, while to unpack them again is an instruction each.
template <typename T>
__device__ __forceinline__ void forget_unpacked(Vec<T>& vec) {
  asm volatile("" : "+r"(vec.bits.x), "+r"(vec.bits.y), "+r"(vec.bits.z), "+r"(vec.bits.w));
}

constexpr int log2_of(int x) { return x > 1 ? 1 + log2_of(x / 2) : 0; }

// Heads a thread takes where there are many and all of a head turns, and where part of it does.
constexpr int kManyQkHeads = 4;
constexpr int kManyPartialQkHeads = 2;

// Threads of a CTA: small ones, so that a slow warp keeps little of a multiprocessor. On H200, with
// 16384 tokens and four heads a thread, 32 were 2 % faster than 64, and 3 % than 128; with two
// heads 64 were 4 % faster than 128.
constexpr int qk_threads(int heads) { return heads == kManyQkHeads ? 32 : 64; }

// Of as many warps a multiprocessor as leave a thread the registers that it needs: 128 with four
// heads, 72 with two. With fewer, what was spilled cost up to a third.
constexpr int qk_min_ctas(int heads) { return heads == 4 ? 16 : heads == 2 ? 14 : 1; }

// The first CTAs, which may prefetch while the grid before still runs. With the 320 CTAs of 64
// tokens all of them would cost 9 % on H200.
constexpr uint32_t kQkCtasThatPrefetch = 256;

// kLanes: of a head of 16 kLanes columns, all of which turn; 0: any sizes.
template <typename T, bool kInterleave, bool kAligned, int kHeads, int kLanes>
__global__ __launch_bounds__(qk_threads(kHeads), qk_min_ctas(kHeads)) void QkRmsNormRopeKernel(
    const __grid_constant__ QkRmsNormRopeParams p) {
  constexpr int kThreads = qk_threads(kHeads);
  constexpr bool kWhole = kLanes > 0;
  const int rotary_dim = kWhole ? 16 * kLanes : p.source.rotary_dim;
  const int head_dim = kWhole ? 16 * kLanes : p.head_dim;
  const int64_t head_stride = kWhole ? 16 * kLanes : p.head_stride;
  const int lanes = kWhole ? kLanes : 1 << p.lanes_log2;
  const int lanes_log2 = kWhole ? log2_of(kLanes) : p.lanes_log2;
  const int turning = (rotary_dim + 15) / 16;  // lanes whose vectors turn
  const int lane = threadIdx.x & (lanes - 1);
  const uint32_t row = (blockIdx.x * (kThreads >> lanes_log2)) +  //
                       (threadIdx.x >> lanes_log2);
  const uint32_t token = p.groups.divide(row);
  const int group = static_cast<int>(row - token * p.groups.value);
  const bool is_query = group < p.q_groups;
  const int head = is_query ? group * kHeads : p.q_heads + (group - p.q_groups) * kHeads;
  const int left = is_query ? p.q_heads - head : p.q_heads + p.k_heads - head;
  const int heads = token < p.tokens ? min(left, kHeads) : 0;

  // Columns of the lane's two vectors, and how many there are from each on.
  const bool turns = kWhole || lane < turning;
  const int size = turns ? rotary_dim : head_dim - rotary_dim;
  const int column = (turns ? lane : lane - turning) * 8;
  const int second = turns && !kInterleave ? rotary_dim / 2 : (size + 15) / 16 * 8;
  const int a = turns ? column : rotary_dim + column;
  const int b = a + second;
  const int a_left = min(second, size) - column;
  const int b_left = size - second - column;
  const bool has_a = heads > 0 && (kWhole || a_left > 0);
  const bool has_b = has_a && (kWhole || b_left > 0);
  T* data = static_cast<T*>(p.qkv) + token * p.token_stride + head * head_stride;
  const T* weight = static_cast<const T*>(is_query ? p.q_weight : p.k_weight);
  const IndexTensor& positions = p.source.positions.ids;

  if (may_overlap_previous_grid() && blockIdx.x < kQkCtasThatPrefetch) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (has_a && h < heads) prefetch_to_l2(data + h * head_stride + a);
      if (has_b && h < heads) prefetch_to_l2(data + h * head_stride + b);
    }
    if (has_a) prefetch_to_l2(weight + a);
    if (has_b) prefetch_to_l2(weight + b);
    if (has_a && group == 0) prefetch_to_l2(address_of(positions, token));
    if (has_a && turns && group == 0) {
      Rotation::prefetch(p.source, guess_low_word(positions, token), lane);
    }
  }
  wait_for_previous_grid();

  // Why ahead of the heads: the row of the cache, two reads deep, is what is there last. Behind
  // them was 1 % slower on H200 with 16384 tokens.
  RawIndex id;
  int32_t position_ahead = -1;
  if (has_a && turns) {
    id = RawIndex(positions, token);
    if (p.tokens_ahead > 0 && group == 0 && token + p.tokens_ahead < p.tokens) {
      position_ahead = load_low_word(positions, token + p.tokens_ahead);
    }
  }
  const int32_t position = id.saturated(positions);
  const bool turns_it = p.source.cache.has(position);
  Rotation rotation;
  if (turns_it) {
    const RopePairs pairs = {kInterleave ? a / 2 : a, b / 2};
    rotation.load<kInterleave, kAligned>(p.source, position, pairs);
  }
  const L2Policy policy = read_policy(p.evict_last);
  Vec<T> a_vec[kHeads], b_vec[kHeads];  // [kHeads, 8]
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const T* row_data = data + h * head_stride;
    a_vec[h] = has_a && h < heads ? load<kAligned>(row_data + a, a_left, policy) : zero_vec<T>();
    b_vec[h] = has_b && h < heads ? load<kAligned>(row_data + b, b_left, policy) : zero_vec<T>();
  }
  const Vec<T> a_weight = has_a ? load<kAligned>(weight + a, a_left) : zero_vec<T>();
  const Vec<T> b_weight = has_b ? load<kAligned>(weight + b, b_left) : zero_vec<T>();
  // Why here: for 64 tokens, behind the loads was 14 % faster on H200 than ahead of them.
  allow_next_grid();

  float sum[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    float x[8], y[8];
    unpack(a_vec[h], x);
    unpack(b_vec[h], y);
    sum[h] = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[h] += x[i] * x[i] + y[i] * y[i];
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) sum[h] = warp_sum(sum[h], lanes);

  // Why: word by word, so that the weights of all columns are never unpacked at once.
  float rstd[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    rstd[h] = rsqrtf(sum[h] / head_dim + p.eps);
    forget_unpacked(a_vec[h]);
    forget_unpacked(b_vec[h]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 w_a = unpack_pair(T(), word_of(a_weight, i));
    const float2 w_b = unpack_pair(T(), word_of(b_weight, i));
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float2 x = unpack_pair(T(), word_of(a_vec[h], i));
      float2 y = unpack_pair(T(), word_of(b_vec[h], i));
      x.x *= rstd[h] * (w_a.x + p.weight_bias);
      x.y *= rstd[h] * (w_a.y + p.weight_bias);
      y.x *= rstd[h] * (w_b.x + p.weight_bias);
      y.y *= rstd[h] * (w_b.y + p.weight_bias);
      if (turns_it) rotation.apply<kInterleave>(i, x, y);
      word_of(a_vec[h], i) = pack_pair(T(), x.x, x.y);
      word_of(b_vec[h], i) = pack_pair(T(), y.x, y.y);
    }
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    T* row_data = data + h * head_stride;
    if (has_a && h < heads) store<kAligned>(row_data + a, a_vec[h], a_left);
    if (has_b && h < heads) store<kAligned>(row_data + b, b_vec[h], b_left);
  }
  Rotation::prefetch(p.source, position_ahead, lane);
}

#if !defined(__CUDACC_RTC__)

// Where there are more heads than these, a thread takes several.
constexpr int64_t kManyQkRows = 1 << 16;

template <typename T, bool kInterleave>
cudaError_t launch_qk_rmsnorm_rope_as(QkRmsNormRopeParams p, bool aligned, bool enable_pdl,
                                      cudaStream_t stream) {
  const int64_t rows = int64_t(p.tokens) * (p.q_heads + p.k_heads);
  const int64_t bytes = rows * p.head_dim * 4;
  const bool many = aligned && rows >= kManyQkRows;
  const bool whole = p.source.rotary_dim == p.head_dim && p.head_stride == p.head_dim;
  auto kernel = aligned ? QkRmsNormRopeKernel<T, kInterleave, true, 1, 0>
                        : QkRmsNormRopeKernel<T, kInterleave, false, 1, 0>;
  int heads = 1;  // a thread
  if (many) {
    kernel = QkRmsNormRopeKernel<T, kInterleave, true, kManyPartialQkHeads, 0>;
    heads = kManyPartialQkHeads;
    if (whole && (p.head_dim == 128 || p.head_dim == 256)) {
      kernel = p.head_dim == 128 ? QkRmsNormRopeKernel<T, kInterleave, true, kManyQkHeads, 8>
                                 : QkRmsNormRopeKernel<T, kInterleave, true, kManyQkHeads, 16>;
      heads = kManyQkHeads;
    }
  }
  p.evict_last = reads_evict_last(bytes, true);
  p.tokens_ahead = many ? tokens_ahead(bytes, p.tokens) : 0;
  p.q_groups = (p.q_heads + heads - 1) / heads;
  p.groups = FastDivmod(static_cast<uint32_t>(p.q_groups + (p.k_heads + heads - 1) / heads));
  const uint64_t groups = uint64_t(p.tokens) * p.groups.value;
  const int threads = qk_threads(heads);
  const uint32_t ctas = static_cast<uint32_t>((groups - 1) / (threads >> p.lanes_log2) + 1);
  return launch(kernel, dim3(ctas), dim3(threads), enable_pdl, stream, p);
}

// Lanes that a head needs, 32 at most: each has 16 columns of those that turn, or of the others.
inline int qk_lanes(int64_t head_dim, int64_t rotary_dim) {
  return static_cast<int>((rotary_dim + 15) / 16 + (head_dim - rotary_dim + 15) / 16);
}

// Launches it on `stream`; nothing without tokens or heads. head_dim is a multiple of 8, rotary_dim
// even and not above it. cudaErrorInvalidValue if there are more than 2^31 heads.
template <typename T>
cudaError_t launch_qk_rmsnorm_rope(QkRmsNormRopeParams p, bool enable_pdl, cudaStream_t stream) {
  const uint64_t rows = uint64_t(p.tokens) * (p.q_heads + p.k_heads);
  if (rows == 0) return cudaSuccess;
  if (rows > 0x7fffffffu) return cudaErrorInvalidValue;
  p.lanes_log2 = 0;
  while ((1 << p.lanes_log2) < qk_lanes(p.head_dim, p.source.rotary_dim)) ++p.lanes_log2;
  if (p.lanes_log2 > 5) return cudaErrorInvalidValue;
  const uint64_t bits =
      reinterpret_cast<uint64_t>(p.qkv) | reinterpret_cast<uint64_t>(p.q_weight) |
      reinterpret_cast<uint64_t>(p.k_weight) | reinterpret_cast<uint64_t>(p.source.cache.rows) |
      (p.token_stride | p.head_stride) * sizeof(T) | p.source.cache.stride * sizeof(float);
  const bool aligned = bits % kVecBytes == 0 && p.source.rotary_dim % 16 == 0;
  return p.interleave ? launch_qk_rmsnorm_rope_as<T, true>(p, aligned, enable_pdl, stream)
                      : launch_qk_rmsnorm_rope_as<T, false>(p, aligned, enable_pdl, stream);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
