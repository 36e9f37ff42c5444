// SPDX-License-Identifier: Apache-2.0
// RMSNorm of each head of queries and keys, followed by RoPE, in place on a packed projection.
//
//   n[t, h, c] = qkv[t, h, c] / sqrt(mean_c(qkv[t, h, c]^2) + eps) * (weight[c] + weight_bias)
//   qkv[t, h, :] = round(rope(n[t, h, :]))
//
// with the rotation of rope/rope.cuh and the weight of the queries or of the keys. weight_bias is
// 0, or 1 for Gemma's form. All arithmetic is fp32, rounded once.
//
// Layout   qkv     [tokens, q_heads + k_heads (+ more), head_dim]  T; any token stride
//          q_weight, k_weight  [head_dim]  T, contiguous
// Threads  A head belongs to `lanes` lanes (a power of two). Each holds two vectors of 8 elements,
//          as in rope/rope.cuh: first the lanes whose columns are rotated, then those of the
//          columns behind rotary_dim. The mean is a sum over these lanes. A thread takes the same
//          columns of kHeads heads, all of queries or all of keys, with one rotation and one pair
//          of weights.
// Traffic  reads and writes queries and keys once, and reads the cache's row of each token
// Source   Zhang and Sennrich, arXiv:1910.07467; Su et al., arXiv:2104.09864; used in this order by
//          Qwen3 (arXiv:2505.09388) and Gemma 3 (arXiv:2503.19786)
// Measured 2026-11-21 on an H200, bf16, 16384 tokens, heads of 128 that are rotated whole, with
//          shares of the elementwise ceiling of the same run (4387 GB/s):
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
  RopeAngleSource source;
  // The following is set by the launcher.
  int q_groups;       // groups of kHeads heads; the last may have fewer
  FastDivmod groups;  // of queries, then of keys
  int lanes_log2;
  // how many tokens ahead rows of the cache are prefetched; 0 for no prefetch
  uint32_t prefetch_distance;
  bool evict_last;
};

#if defined(__CUDACC__)

// Keeps the compiler from holding the vector's elements as fp32 until their next use. That would
// take twice the registers, while unpacking them again takes one instruction each.
template <typename T>
__device__ __forceinline__ void force_repack(Vec<T>& vec) {
  asm volatile("" : "+r"(vec.bits.x), "+r"(vec.bits.y), "+r"(vec.bits.z), "+r"(vec.bits.w));
}

constexpr int log2_of(int x) { return x > 1 ? 1 + log2_of(x / 2) : 0; }

// Heads of a thread in large launches, if heads are rotated whole or in part.
constexpr int kHeadsPerThread = 4;
constexpr int kHeadsPerThreadPartial = 2;

// Threads of a CTA. CTAs are small, so that a slow warp holds few resources of a multiprocessor. On
// an H200, with 16384 tokens and four heads a thread, 32 threads were 2 % faster than 64, and 3 %
// than 128; with two heads 64 were 4 % faster than 128.
constexpr int qk_threads(int heads) { return heads == kHeadsPerThread ? 32 : 64; }

// The warps a multiprocessor that leave a thread the registers it needs: 128 with four heads, 72
// with two. With fewer registers, spills cost up to a third.
constexpr int qk_min_ctas(int heads) { return heads == 4 ? 16 : heads == 2 ? 14 : 1; }

// The CTAs that may prefetch while the previous grid still runs. With the 320 CTAs of 64 tokens,
// prefetches by all of them would cost 9 % on an H200.
constexpr uint32_t kQkCtasThatPrefetch = 256;

// kLanes: a head has 16 kLanes columns, all of which are rotated; 0: any sizes.
template <typename T, bool kInterleave, bool kAligned, int kHeads, int kLanes>
__global__ __launch_bounds__(qk_threads(kHeads), qk_min_ctas(kHeads)) void QkRmsNormRopeKernel(
    const __grid_constant__ QkRmsNormRopeParams p) {
  constexpr int kThreads = qk_threads(kHeads);
  constexpr bool kRotatesWholeHead = kLanes > 0;
  const int rotary_dim = kRotatesWholeHead ? 16 * kLanes : p.source.rotary_dim;
  const int head_dim = kRotatesWholeHead ? 16 * kLanes : p.head_dim;
  const int64_t head_stride = kRotatesWholeHead ? 16 * kLanes : p.head_stride;
  const int lanes = kRotatesWholeHead ? kLanes : 1 << p.lanes_log2;
  const int lanes_log2 = kRotatesWholeHead ? log2_of(kLanes) : p.lanes_log2;
  const int rotating_lanes = (rotary_dim + 15) / 16;  // lanes whose columns are rotated
  const int lane = threadIdx.x & (lanes - 1);
  const uint32_t row = (blockIdx.x * (kThreads >> lanes_log2)) +  //
                       (threadIdx.x >> lanes_log2);
  const uint32_t token = p.groups.divide(row);
  const int group = static_cast<int>(row - token * p.groups.value);
  const bool is_query = group < p.q_groups;
  const int head = is_query ? group * kHeads : p.q_heads + (group - p.q_groups) * kHeads;
  const int left = is_query ? p.q_heads - head : p.q_heads + p.k_heads - head;
  const int heads = token < p.tokens ? min(left, kHeads) : 0;

  // The first columns of the lane's two vectors, and the columns that exist from each on.
  const bool rotates = kRotatesWholeHead || lane < rotating_lanes;
  const int size = rotates ? rotary_dim : head_dim - rotary_dim;
  const int column = (rotates ? lane : lane - rotating_lanes) * 8;
  const int second = rotates && !kInterleave ? rotary_dim / 2 : (size + 15) / 16 * 8;
  const int a = rotates ? column : rotary_dim + column;
  const int b = a + second;
  const int a_left = min(second, size) - column;
  const int b_left = size - second - column;
  const bool has_a = heads > 0 && (kRotatesWholeHead || a_left > 0);
  const bool has_b = has_a && (kRotatesWholeHead || b_left > 0);
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
    if (has_a && rotates && group == 0) {
      Rotation::prefetch(p.source, prefetch_low_word(positions, token), lane);
    }
  }
  wait_on_dependent_grids();

  // Why before the heads: the row of the cache takes two dependent loads and arrives last. After
  // the heads it was 1 % slower on an H200 with 16384 tokens.
  LoadedIndex id;
  int32_t next_position = -1;
  if (has_a && rotates) {
    id = LoadedIndex(positions, token);
    if (p.prefetch_distance > 0 && group == 0 && token + p.prefetch_distance < p.tokens) {
      next_position = load_low_word(positions, token + p.prefetch_distance);
    }
  }
  const int32_t position = id.saturated(positions);
  const bool rotates_token = p.source.cache.has(position);
  Rotation rotation;
  if (rotates_token) {
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
  // Why here: for 64 tokens this was 14 % faster on an H200 than before the loads.
  launch_dependent_grids();

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

  // Why word by word: the weights of all columns are then never unpacked at once.
  float rstd[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    rstd[h] = rsqrtf(sum[h] / head_dim + p.eps);
    force_repack(a_vec[h]);
    force_repack(b_vec[h]);
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
      if (rotates_token) rotation.apply<kInterleave>(i, x, y);
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
  Rotation::prefetch(p.source, next_position, lane);
}

#if !defined(__CUDACC_RTC__)

// Launches of more heads give each thread several.
constexpr int64_t kLargeLaunchHeads = 1 << 16;

template <typename T, bool kInterleave>
cudaError_t launch_qk_rmsnorm_rope_variant(QkRmsNormRopeParams p, bool aligned, bool enable_pdl,
                                           cudaStream_t stream) {
  const int64_t rows = int64_t(p.tokens) * (p.q_heads + p.k_heads);
  const int64_t bytes = rows * p.head_dim * 4;
  const bool many = aligned && rows >= kLargeLaunchHeads;
  const bool whole = p.source.rotary_dim == p.head_dim && p.head_stride == p.head_dim;
  auto kernel = aligned ? QkRmsNormRopeKernel<T, kInterleave, true, 1, 0>
                        : QkRmsNormRopeKernel<T, kInterleave, false, 1, 0>;
  int heads = 1;  // of a thread
  if (many) {
    kernel = QkRmsNormRopeKernel<T, kInterleave, true, kHeadsPerThreadPartial, 0>;
    heads = kHeadsPerThreadPartial;
    if (whole && (p.head_dim == 128 || p.head_dim == 256)) {
      kernel = p.head_dim == 128 ? QkRmsNormRopeKernel<T, kInterleave, true, kHeadsPerThread, 8>
                                 : QkRmsNormRopeKernel<T, kInterleave, true, kHeadsPerThread, 16>;
      heads = kHeadsPerThread;
    }
  }
  p.evict_last = reads_evict_last(bytes, true);
  p.prefetch_distance = many ? prefetch_distance(bytes, p.tokens) : 0;
  p.q_groups = (p.q_heads + heads - 1) / heads;
  p.groups = FastDivmod(static_cast<uint32_t>(p.q_groups + (p.k_heads + heads - 1) / heads));
  const uint64_t groups = uint64_t(p.tokens) * p.groups.value;
  const int threads = qk_threads(heads);
  const uint32_t ctas = static_cast<uint32_t>((groups - 1) / (threads >> p.lanes_log2) + 1);
  return launch(kernel, dim3(ctas), dim3(threads), enable_pdl, stream, p);
}

// Returns the lanes that a head needs, at most 32. Each has 16 rotated columns, or 16 others.
inline int qk_lanes(int64_t head_dim, int64_t rotary_dim) {
  return static_cast<int>((rotary_dim + 15) / 16 + (head_dim - rotary_dim + 15) / 16);
}

// Launches the kernel on `stream`, unless there are no tokens or heads. head_dim must be a multiple
// of 8, rotary_dim even and at most head_dim. Returns cudaErrorInvalidValue if there are more than
// 2^31 heads.
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
  return p.interleave ? launch_qk_rmsnorm_rope_variant<T, true>(p, aligned, enable_pdl, stream)
                      : launch_qk_rmsnorm_rope_variant<T, false>(p, aligned, enable_pdl, stream);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
