// SPDX-License-Identifier: Apache-2.0
// Routing of DeepSeek-V3: the experts of a token, and their weights.
//
//   s[e]    = 1 / (1 + exp(-scores[t, e])),   c[e] = s[e] + bias[e]
//   groups  = the topk_group best of n_group, by the sum of a group's two largest c
//   experts = the topk largest c in these groups, the largest first; of equal ones the first
//   values  = s[experts] * scale / (sum of s[experts] + 1e-20)
//
// Layout   scores   [tokens, experts]  T     any row stride; a group's experts are side by side
//          bias     [experts]          Bias
//          values   [tokens, topk]     T     indices the same in int32, replay in int16 or absent
// Threads  one warp processes one token. Each group has the same power of two of lanes, a lane up
//          to 16 experts side by side, which it keeps in registers. So the first lane of several
//          with an equal key also has the first expert.
// Traffic  reads scores once and bias from L2, writes the results once
// Source   DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv:2412.19437, section 2.1.2
// Measured not yet
#pragma once

#include "precast/core/aligned_bytes.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/prefetch.cuh"
#include "precast/core/warp.cuh"
#include "precast/topk/radix_select.cuh"

namespace precast {

constexpr int kRoutingWarps = 4;  // of a CTA
constexpr int kRoutingQuad = 4;   // experts of a load
constexpr int kMaxRoutingQuads = 4;
constexpr int kMaxRoutingTopK = kWarpSize;
constexpr int kMaxRoutingGroups = kWarpSize;

struct FusedTopKDeepSeekParams {
  const void* scores;  // [tokens, experts]
  const void* bias;    // [experts]
  void* values;        // [tokens, topk]
  int32_t* indices;    // [tokens, topk]
  short* replay;       // [tokens, topk] or null
  int64_t stride;      // of scores, in elements
  uint32_t tokens;
  int n_group;
  int topk_group;
  int topk;
  int experts_per_group;
  float scale;
  int lane_bits;  // a group has 2^lane_bits lanes; set by the launcher, as what follows
  int per_lane;   // experts
};

// The lanes of a group, as a power of two.
inline int routing_lane_bits(int n_group) {
  int bits = 0;
  while ((n_group << (bits + 1)) <= kWarpSize) ++bits;
  return bits;
}

// The most experts that a group may have.
inline int max_experts_per_group(int n_group) {
  return kMaxRoutingQuads * kRoutingQuad << routing_lane_bits(n_group);
}

#if defined(__CUDACC__)

// Loads elements `first` to `first + 3`. Those from `count` on are not read and become zeros.
template <bool kAligned, typename T>
__device__ __forceinline__ void load_quad(const T* source, int count, float (&x)[kRoutingQuad]) {
  if constexpr (kAligned) {
    constexpr int kBytes = kRoutingQuad * sizeof(T);
    AlignedBytes<kBytes> quad = {};
    if (count > 0) {
      quad = AlignedBytes<kBytes>::load(reinterpret_cast<const char*>(source), read_policy(false));
    }
    if constexpr (sizeof(T) == 4) {
      unpack(Vec<f32>{quad.bits}, x);
    } else {
      const float2 low = unpack_pair(T(), quad.bits.x);
      const float2 high = unpack_pair(T(), quad.bits.y);
      x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRoutingQuad; ++i) {
      uint32_t word = 0;
      if (i < count) word = load_word(source + i);
      if constexpr (sizeof(T) == 4) {
        x[i] = __uint_as_float(word);
      } else {
        x[i] = unpack_pair(T(), word).x;
      }
    }
  }
}

// Returns whether the lane's group is among the topk_group best. Every lane must call it.
template <int kPerLane>
__device__ __forceinline__ bool group_is_chosen(const FusedTopKDeepSeekParams& p,
                                                const uint32_t (&keys)[kPerLane], int group) {
  uint32_t largest = 0, second = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    second = max(second, min(largest, keys[i]));
    largest = max(largest, keys[i]);
  }
  for (int distance = 1; distance < 1 << p.lane_bits; distance *= 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, largest, distance);
    const uint32_t other_second = __shfl_xor_sync(0xffffffffu, second, distance);
    second = max(max(second, other_second), min(largest, other));
    largest = max(largest, other);
  }
  float score = __uint_as_float(from_ordered_key<f32>(largest));
  if (p.experts_per_group > 1) score += __uint_as_float(from_ordered_key<f32>(second));
  const uint32_t key = to_ordered_key<f32>(__float_as_uint(score));
  int better = 0;
  for (int g = 0; g < p.n_group; ++g) {
    const uint32_t other = __shfl_sync(0xffffffffu, key, g << p.lane_bits);
    better += other > key || (other == key && g < group);
  }
  return better < p.topk_group;
}

template <typename T, typename Bias, int kQuads, bool kAligned>
__global__ __launch_bounds__(kRoutingWarps* kWarpSize) void FusedTopKDeepSeekKernel(
    const __grid_constant__ FusedTopKDeepSeekParams p) {
  constexpr int kPerLane = kQuads * kRoutingQuad;
  const int lane = threadIdx.x % kWarpSize;
  const uint32_t token = blockIdx.x * kRoutingWarps + threadIdx.x / kWarpSize;
  if (token >= p.tokens) return;
  const int group = lane >> p.lane_bits;
  const int start = (lane & ((1 << p.lane_bits) - 1)) * p.per_lane;  // in the group
  const int first = group * p.experts_per_group + start;
  const int count = group < p.n_group ? min(p.experts_per_group - start, p.per_lane) : 0;
  const T* scores = static_cast<const T*>(p.scores) + token * p.stride + first;
  const Bias* bias = static_cast<const Bias*>(p.bias) + first;

  launch_dependent_grids();
  if (may_overlap_previous_grid() && count > 0) {
    prefetch_to_l2(scores);
    if (blockIdx.x < kSharedPrefetches) prefetch_to_l2(bias);
  }
  wait_on_dependent_grids();

  float weights[kPerLane];  // sigmoids
  uint32_t keys[kPerLane];  // of the biased ones; 0 for none, which no number has
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const int left = count - q * kRoutingQuad;
    float x[kRoutingQuad], b[kRoutingQuad];
    load_quad<kAligned>(scores + q * kRoutingQuad, left, x);
    load_quad<kAligned>(bias + q * kRoutingQuad, left, b);
#pragma unroll
    for (int i = 0; i < kRoutingQuad; ++i) {
      // Why not sigmoid(): experts that differ little must come in the order of the formula.
      const float weight = __frcp_rn(1.0f + expf(-x[i]));
      const uint32_t key = to_ordered_key<f32>(__float_as_uint(weight + b[i]));
      weights[q * kRoutingQuad + i] = weight;
      keys[q * kRoutingQuad + i] = i < left ? key : 0;
    }
  }

  if (p.n_group > 1 && !group_is_chosen(p, keys, group)) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) keys[i] = 0;
  }

  uint32_t largest = 0;  // of the lane
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) largest = max(largest, keys[i]);
  float sum = 0.0f, own_weight = 0.0f;
  int own_expert = 0;
  for (int rank = 0; rank < p.topk; ++rank) {
    const uint32_t best = __reduce_max_sync(0xffffffffu, largest);
    const int winner = __ffs(__ballot_sync(0xffffffffu, largest == best)) - 1;
    float weight = 0.0f;
    int expert = first;
    if (lane == winner) {
      bool found = false;
      largest = 0;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (!found && keys[i] == best) {
          found = true;
          weight = weights[i];
          expert = first + i;
          keys[i] = 0;
        }
        largest = max(largest, keys[i]);
      }
    }
    weight = __shfl_sync(0xffffffffu, weight, winner);
    expert = __shfl_sync(0xffffffffu, expert, winner);
    sum += weight;
    if (lane == rank) {
      own_weight = weight;
      own_expert = expert;
    }
  }

  if (lane < p.topk) {
    const int64_t at = int64_t(token) * p.topk + lane;
    static_cast<T*>(p.values)[at] = from_float<T>(own_weight * p.scale / (sum + 1e-20f));
    p.indices[at] = own_expert;
    if (p.replay != nullptr) p.replay[at] = static_cast<short>(own_expert);
  }
}

#if !defined(__CUDACC_RTC__)

// Launches the routing on `stream`, unless there are no tokens. Sizes must be as the binding
// checks them.
template <typename T, typename Bias>
cudaError_t launch_fused_topk_deepseek(FusedTopKDeepSeekParams p, bool enable_pdl,
                                       cudaStream_t stream) {
  if (p.tokens == 0) return cudaSuccess;
  p.lane_bits = routing_lane_bits(p.n_group);
  p.per_lane = ((p.experts_per_group - 1) >> p.lane_bits) + 1;
  const int quads = (p.per_lane - 1) / kRoutingQuad + 1;
  const auto is_aligned = [](const void* address, int bytes) {
    return reinterpret_cast<uint64_t>(address) % bytes == 0;
  };
  const bool aligned = p.experts_per_group % kRoutingQuad == 0 &&
                       is_aligned(p.scores, kRoutingQuad * sizeof(T)) &&
                       is_aligned(p.bias, kRoutingQuad * sizeof(Bias)) &&
                       (p.tokens == 1 || p.stride % kRoutingQuad == 0);
  auto kernel = FusedTopKDeepSeekKernel<T, Bias, kMaxRoutingQuads, false>;
  if (aligned) {
    p.per_lane = quads * kRoutingQuad;
    kernel = quads == 1   ? FusedTopKDeepSeekKernel<T, Bias, 1, true>
             : quads == 2 ? FusedTopKDeepSeekKernel<T, Bias, 2, true>
             : quads == 3 ? FusedTopKDeepSeekKernel<T, Bias, 3, true>
                          : FusedTopKDeepSeekKernel<T, Bias, 4, true>;
  }
  const uint32_t ctas = (p.tokens - 1) / kRoutingWarps + 1;
  return launch(kernel, dim3(ctas), dim3(kRoutingWarps * kWarpSize), enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
