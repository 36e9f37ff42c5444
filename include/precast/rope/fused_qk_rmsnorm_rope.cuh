// SPDX-License-Identifier: Apache-2.0
// RMSNorm over all heads of queries and of keys, RoPE by frame, height and width, and a copy of the
// values, of the packed projection of a video model.
//
//   n[t, c]   = round(x[t, c] / sqrt(mean_c(x[t, c]^2) + eps) * weight[c])     x: queries, or keys
//   out[t, h] = round(rope(n[t, h]) * scale), v_out = round(v * v_scale)
//
// with the mean over all heads, the inner rounding for bf16 outputs alone, and the scales for e4m3
// alone. Pair i of a head belongs to frames, height or width, in this order, and is rotated by
// position * frequencies[i] radians in fp32; cosines and sines are multiplied by attention_factor.
//
// Layout   qkv    [tokens, (q_heads + k_heads + v_heads) * head_dim]  bf16  contiguous, as all
//          *_weight [heads * head_dim]  bf16
//          *_out  [tokens, heads, head_dim]  bf16 or e4m3
// Threads  one CTA processes one token. A thread has the same 16 columns of a head of queries, of
//          keys and of values: two vectors of 8, half a head apart. The first threads compute
//          cosines and sines of the token's pairs, which all heads share, in shared memory.
// Traffic  reads qkv once and writes the outputs once; the weights come from L2
// Source   Zhang and Sennrich, arXiv:1910.07467; Su et al., arXiv:2104.09864; Peng et al., YaRN,
//          arXiv:2309.00071
// Measured 2026-11-23 on an H200, 75600 tokens of 3 x 24 heads of 128, with shares of the
//          elementwise ceiling of the same run: to bf16 673 us, 0.94; to e4m3 555 us, 0.85
#pragma once

#include "precast/core/block.cuh"
#include "precast/core/fp8.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/prefetch.cuh"
#include "precast/core/rows.cuh"
#include "precast/core/vec.cuh"

namespace precast {

constexpr int kMaxVideoHeads = 32;  // of queries, of keys and of values
constexpr int kMaxVideoHeadDim = 256;
constexpr int kMaxVideoPairs = kMaxVideoHeadDim / 2;
constexpr int kVideoColumns = 16;  // of a thread
constexpr int kMaxVideoThreads = kMaxVideoHeads * kMaxVideoHeadDim / kVideoColumns;

struct QkRmsNormRope3dParams {
  const void* qkv;       // [tokens, (q_heads + k_heads + v_heads) * head_dim]
  const void* q_weight;  // [q_heads * head_dim]
  const void* k_weight;  // [k_heads * head_dim]
  void* q_out;           // [tokens, q_heads, head_dim]
  void* k_out;           // [tokens, k_heads, head_dim]
  void* v_out;           // [tokens, v_heads, head_dim]
  uint32_t tokens;
  int q_heads;
  int k_heads;
  int v_heads;
  int head_dim_log2;
  FastDivmod sequence;  // tokens of a video
  FastDivmod frame;     // tokens of a frame
  FastDivmod line;      // tokens of a line of a frame
  int height_pairs_begin;
  int width_pairs_begin;
  float eps;
  float attention_factor;
  float qk_scale;
  float v_scale;
  bool normalizes;
  bool interleave;
  bool out_is_fp8;
  float frequencies[kMaxVideoPairs];  // [head_dim / 2]
};

#if defined(__CUDACC__)

// The sum of squares of a thread's elements.
__device__ __forceinline__ float squares(const Vec<bf16> (&vec)[2]) {
  float sum = 0.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float x[8];
    unpack(vec[half], x);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(x[i], x[i], sum);
  }
  return sum;
}

// Stores 8 elements at index `at` of an output.
template <bool kFp8>
__device__ __forceinline__ void store_head(void* out, int64_t at, const float (&x)[8]) {
  if constexpr (kFp8) {
    store_fp8(static_cast<e4m3*>(out) + at, x);
  } else {
    store_vec(static_cast<bf16*>(out) + at, pack<bf16>(x));
  }
}

// Cosines and sines of the 8 pairs of a thread.
struct VideoRotation {
  float cosine[8], sine[8];

  __device__ __forceinline__ void load(const float* cosines, const float* sines, int first,
                                       int second) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = half == 0 ? first : second;
      const float4 c = *reinterpret_cast<const float4*>(cosines + at);
      const float4 s = *reinterpret_cast<const float4*>(sines + at);
      cosine[4 * half] = c.x, cosine[4 * half + 1] = c.y;
      cosine[4 * half + 2] = c.z, cosine[4 * half + 3] = c.w;
      sine[4 * half] = s.x, sine[4 * half + 1] = s.y;
      sine[4 * half + 2] = s.z, sine[4 * half + 3] = s.w;
    }
  }

  __device__ __forceinline__ void apply(int pair, float& x, float& y) const {
    const float first = x;
    x = x * cosine[pair] - y * sine[pair];
    y = y * cosine[pair] + first * sine[pair];
  }
};

// Normalises, rotates and stores the 16 columns of a thread; `a` and `b` are their indices.
template <bool kInterleave, bool kFp8>
__device__ __forceinline__ void write_rotated(const QkRmsNormRope3dParams& p,
                                              const Vec<bf16> (&vec)[2],
                                              const Vec<bf16> (&weight)[2], float rstd,
                                              const VideoRotation& rotation, void* out, int64_t a,
                                              int64_t b) {
  float x[2][8];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unpack(vec[half], x[half]);
    if (p.normalizes) {
      float w[8];
      unpack(weight[half], w);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[half][i] = x[half][i] * rstd * w[i];
      if constexpr (!kFp8) unpack(pack<bf16>(x[half]), x[half]);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if constexpr (kInterleave) {
      rotation.apply(i, x[i / 4][i % 4 * 2], x[i / 4][i % 4 * 2 + 1]);
    } else {
      rotation.apply(i, x[0][i], x[1][i]);
    }
  }
  if constexpr (kFp8) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[0][i] *= p.qk_scale, x[1][i] *= p.qk_scale;
  }
  store_head<kFp8>(out, a, x[0]);
  store_head<kFp8>(out, b, x[1]);
}

template <bool kInterleave, bool kFp8>
__global__ __launch_bounds__(kMaxVideoThreads) void QkRmsNormRope3dKernel(
    const __grid_constant__ QkRmsNormRope3dParams p) {
  __shared__ float scratch[2][kMaxWarps];
  __shared__ alignas(16) float cosines[kMaxVideoPairs];
  __shared__ alignas(16) float sines[kMaxVideoPairs];

  const int head_dim = 1 << p.head_dim_log2, half = head_dim / 2;
  const int lanes = head_dim / kVideoColumns;
  const int head = threadIdx.x >> (p.head_dim_log2 - 4);
  const int column = (threadIdx.x & (lanes - 1)) * 8;
  const int a = head * head_dim + column, b = a + half;  // of queries, keys and values alike
  const int64_t token = blockIdx.x;
  const int heads = p.q_heads + p.k_heads + p.v_heads;
  const bf16* q = static_cast<const bf16*>(p.qkv) + token * heads * head_dim;
  const bf16* k = q + p.q_heads * head_dim;
  const bf16* v = k + p.k_heads * head_dim;
  const bool has_q = head < p.q_heads, has_k = head < p.k_heads, has_v = head < p.v_heads;

  launch_dependent_grids();
  if (may_overlap_previous_grid() && threadIdx.x == 0) {
    prefetch_bytes_to_l2(q, heads * head_dim * int(sizeof(bf16)));
  }
  wait_on_dependent_grids();

  const L2Policy policy = read_policy(true);
  const auto load_pair = [&](const bf16* source, bool exists, Vec<bf16>(&vec)[2]) {
    vec[0] = exists ? load_vec(source + a, policy) : zero_vec<bf16>();
    vec[1] = exists ? load_vec(source + b, policy) : zero_vec<bf16>();
  };
  Vec<bf16> q_vec[2], k_vec[2], v_vec[2], q_weight[2], k_weight[2];
  load_pair(q, has_q, q_vec);
  load_pair(k, has_k, k_vec);
  load_pair(v, has_v, v_vec);
  load_pair(static_cast<const bf16*>(p.q_weight), has_q && p.normalizes, q_weight);
  load_pair(static_cast<const bf16*>(p.k_weight), has_k && p.normalizes, k_weight);

  // Three positions of the token, while the loads are on their way.
  const uint32_t number = blockIdx.x - p.sequence.divide(blockIdx.x) * p.sequence.value;
  const uint32_t frame = p.frame.divide(number), in_frame = number - frame * p.frame.value;
  const uint32_t line = p.line.divide(in_frame);
  for (int pair = threadIdx.x; pair < half; pair += blockDim.x) {
    const uint32_t position = pair >= p.width_pairs_begin    ? in_frame - line * p.line.value
                              : pair >= p.height_pairs_begin ? line
                                                             : frame;
    float sine, cosine;
    sincosf(static_cast<float>(position) * p.frequencies[pair], &sine, &cosine);
    cosines[pair] = cosine * p.attention_factor;
    sines[pair] = sine * p.attention_factor;
  }
  // Values first, because they need no sum: their registers are then free.
  if (has_v) {
    const int64_t row = token * p.v_heads * head_dim;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t at = row + (i == 0 ? a : b);
      if constexpr (kFp8) {
        float x[8];
        unpack(v_vec[i], x);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] *= p.v_scale;
        store_head<true>(p.v_out, at, x);
      } else {
        store_vec(static_cast<bf16*>(p.v_out) + at, v_vec[i]);
      }
    }
  }
  float sums[2] = {squares(q_vec), squares(k_vec)};
  block_sum(sums, scratch);  // its barrier is also that of the cosines and sines

  VideoRotation rotation;
  rotation.load(cosines, sines, kInterleave ? column / 2 : column,
                kInterleave ? (half + column) / 2 : column + 4);
  if (has_q) {
    const float rstd = rsqrtf(sums[0] / (p.q_heads * head_dim) + p.eps);
    const int64_t row = token * p.q_heads * head_dim;
    write_rotated<kInterleave, kFp8>(p, q_vec, q_weight, rstd, rotation, p.q_out, row + a, row + b);
  }
  if (has_k) {
    const float rstd = rsqrtf(sums[1] / (p.k_heads * head_dim) + p.eps);
    const int64_t row = token * p.k_heads * head_dim;
    write_rotated<kInterleave, kFp8>(p, k_vec, k_weight, rstd, rotation, p.k_out, row + a, row + b);
  }
}

#if !defined(__CUDACC_RTC__)

// Launches the kernel on `stream`, unless there are no tokens or heads. head_dim must be 64, 128 or
// 256, there must be at most kMaxVideoHeads heads of a kind, and all tensors must be aligned to 16
// bytes.
inline cudaError_t launch_fused_qk_rmsnorm_rope(const QkRmsNormRope3dParams& p, bool enable_pdl,
                                                cudaStream_t stream) {
  int heads = p.q_heads;
  if (heads < p.k_heads) heads = p.k_heads;
  if (heads < p.v_heads) heads = p.v_heads;
  if (p.tokens == 0 || heads == 0) return cudaSuccess;
  const int threads = (heads << p.head_dim_log2) / kVideoColumns;
  const dim3 block((threads + kWarpSize - 1) / kWarpSize * kWarpSize);
  const auto kernel =
      p.interleave
          ? (p.out_is_fp8 ? QkRmsNormRope3dKernel<true, true> : QkRmsNormRope3dKernel<true, false>)
          : (p.out_is_fp8 ? QkRmsNormRope3dKernel<false, true>
                          : QkRmsNormRope3dKernel<false, false>);
  return launch(kernel, dim3(p.tokens), block, enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
