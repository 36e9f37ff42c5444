// SPDX-License-Identifier: Apache-2.0
// A mixture of experts for at most eight tokens: what its two kernels share.
//
//   h[p, i] = silu(g_i) * u_i,  (u, g) = round(x_t W1_e^T)     p = (t, s),  e = selected[t, s]
//   out[t]  = round(sum_s weights[t, s] * round(h[p] W2_e^T))  in the order of s
//   where e4m3 multiplies e4m3: x and h are quantised with a scale for 128 columns, as
//   moe_permute_quant.cuh and moe_activation.cuh do it
//
// Eight tokens are the columns of one MMA. Every token is multiplied by every expert that any token
// has chosen, and what nobody chose is dropped, so rows are neither sorted nor copied, and each
// weight is read once. A column depends on no other one: a token's result has the same bits beside
// any other tokens.
//
// Lanes l = 4 g + q take 64 bytes of a row of weights as four vectors of 16 bytes, and the same 64
// bytes of a token. So a lane's words have another order of columns than the fragments of
// core/mma.cuh, but both operands have the same one, and a sum does not depend on it.
// Source   Shazeer et al., Outrageously Large Neural Networks, arXiv:1701.06538
#pragma once

#include "precast/core/fp8_to_f16.cuh"
#include "precast/core/host_device.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/mma.cuh"
#include "precast/core/prefetch.cuh"
#include "precast/core/quant.cuh"
#include "precast/core/vec.cuh"
#include "precast/core/warp.cuh"
#include "precast/moe/expert_rows.cuh"

namespace precast {

constexpr int kFewTokens = 8;      // columns of an MMA
constexpr int kMaxFewPairs = 128;  // slots of all tokens
constexpr int kMaxFewExperts = 1024;
constexpr int kMaxFewShared = 72 * 1024;  // bytes of tokens or activations in shared memory
constexpr int kFewWarps = 8;
constexpr int kFewThreads = 256;
constexpr int kFewRows = 16;        // of weights, of an MMA
constexpr int kFewStepBytes = 128;  // of each row, which a warp loads at once
constexpr int kFewDepth = 4;        // steps that a warp has in flight
constexpr int kMaxRoutedTopK = 8;   // with logits
constexpr int kMaxRoutedExperts = 256;

enum class FewTokensRouting : int { given, softmax, sigmoid };

struct MoeFewTokensParams {
  const void* x;            // [tokens, hidden] T
  const int32_t* selected;  // [tokens, slots]; there with Routing::given
  const float* weights;     // [tokens, slots], or null: 1; not there with logits
  const void* logits;       // [tokens, experts] T; there without Routing::given
  const void* fc1;          // [experts, 2 * inter, hidden] W
  const void* fc2;          // [experts, hidden, inter] W
  const float* fc1_scale;   // [experts, 2 * inter / 128, hidden / 128], with e4m3
  const float* fc2_scale;   // [experts, hidden / 128, inter / 128], with e4m3
  void* h;                  // [tokens * slots, inter] f32, or T with 16-bit weights: scratch
  void* out;                // [tokens, hidden] T
  int tokens;               // 1 to 8
  int slots;
  int experts;
  int first_expert;  // whose number in `selected` belongs to the first of `experts`
  int hidden;
  int inter;
  // Tile j of fc1 has eight rows of `up` and eight of `gate`, from these on plus j * tile_rows.
  int up_row;
  int gate_row;
  int tile_rows;
  bool gate_first;  // in fc1_scale
  FewTokensRouting routing;
  bool renormalize;
  int sms;     // multiprocessors of the GPU
  int splits;  // warps of the second kernel that share the columns of an expert, few_splits()
};

// How many warps share the columns of an expert in the second kernel, a power of two. Why not by
// the experts of all tokens: a token's sum would depend on other tokens. With fewer than 16 for all
// slots of a token, a CTA has at most kMaxFewPairs sums.
inline int few_splits(int slots, int steps) {
  int splits = 1;
  while (splits * slots < kFewWarps && 2 * splits <= steps) splits *= 2;
  return splits;
}

// The experts that all tokens may have together.
inline int most_experts(const MoeFewTokensParams& p) {
  const int pairs = p.tokens * p.slots;
  return pairs < p.experts ? pairs : p.experts;
}

// The CTAs of the first kernel, whose tiles have `columns` of h: at most one for each SM.
inline int few_up_ctas(const MoeFewTokensParams& p, int columns) {
  const int most = most_experts(p) * (p.inter / columns);
  return most < p.sms ? most : p.sms;
}

#if defined(__CUDACC__)

// -- which experts the tokens have ----------------------------------------------------------------

struct FewTokensRoute {
  // The first pair with this expert and token, or kNoPair. Two tokens are read at once.
  alignas(8) int32_t pair[kMaxFewPairs][kFewTokens];
  uint32_t bits[kWarpSize];       // one for each expert
  int32_t before[kWarpSize];      // experts that come before a word of bits
  int32_t count;                  // of experts that a token has
  int32_t experts[kMaxFewPairs];  // these, in ascending order
  int32_t index[kMaxFewPairs];    // of a pair's expert among these, or -1
  float weights[kMaxFewPairs];    // of pairs
};

constexpr int32_t kNoPair = 0x7fffffff;

// One warp chooses the experts of a token by its logits: the largest, of equal ones the first. A
// logit that is not finite counts as the lowest finite number.
template <typename T>
__device__ __forceinline__ void choose_experts(const MoeFewTokensParams& p, int token,
                                               FewTokensRoute& route) {
  constexpr int kSize = Vec<T>::kSize;
  static_assert(kSize * kWarpSize == kMaxRoutedExperts, "a lane has the logits of one vector");
  constexpr bool kIsBf16 = TypeName<T>::value == DType::bf16;
  constexpr uint32_t kInfinity = kIsBf16 ? 0x7f80u : 0x7c00u;
  const int lane = threadIdx.x % kWarpSize;
  Vec<T> loaded = zero_vec<T>();
  if (lane * kSize < p.experts) {
    loaded = load_vec(static_cast<const T*>(p.logits) + token * p.experts + lane * kSize);
  }
  const uint32_t words[4] = {loaded.bits.x, loaded.bits.y, loaded.bits.z, loaded.bits.w};
  // The upper half has the order of the numbers, the lower half that of the experts.
  uint32_t keys[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    uint32_t bits = words[i / 2] >> (i % 2 * 16) & 0xffffu;
    if ((bits & 0x7fffu) >= kInfinity) bits = 0x8000u | (kInfinity - 1);
    if (bits == 0x8000u) bits = 0;  // -0 is 0
    const uint32_t key = bits & 0x8000u ? ~bits & 0xffffu : bits | 0x8000u;
    const int expert = lane * kSize + i;
    keys[i] = expert < p.experts ? key << 16 | (0xffffu - expert) : 0u;
  }
  const auto logit_of = [](uint32_t key) {
    const uint32_t half = key >> 16;
    return unpack_pair(T(), half & 0x8000u ? half & 0x7fffu : ~half & 0xffffu).x;
  };
  uint32_t left[kSize], own = 0u, first = 0u;
#pragma unroll
  for (int i = 0; i < kSize; ++i) left[i] = keys[i];
  for (int slot = 0; slot < p.slots; ++slot) {
    uint32_t most = 0u;
#pragma unroll
    for (int i = 0; i < kSize; ++i) most = max(most, left[i]);
    const uint32_t best = __reduce_max_sync(0xffffffffu, most);
#pragma unroll
    for (int i = 0; i < kSize; ++i) left[i] = left[i] == best ? 0u : left[i];
    if (slot == 0) first = best;
    if (lane == slot) own = best;
  }
  const float most = logit_of(first), logit = logit_of(own);
  const bool is_slot = lane < p.slots;
  float weight = 0.0f, sum = 0.0f;
  if (p.routing == FewTokensRouting::softmax) {
    if (is_slot) weight = expf(logit - most);
    sum = weight;
    if (!p.renormalize) {
      sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (keys[i] != 0u) sum += expf(logit_of(keys[i]) - most);
      }
    }
  } else {
    if (is_slot) weight = __frcp_rn(1.0f + expf(-logit));
    sum = weight;
  }
  sum = warp_sum(sum);
  if (p.routing == FewTokensRouting::softmax || (p.renormalize && sum > 0.0f)) weight /= sum;
  if (is_slot) {
    route.index[token * p.slots + lane] = static_cast<int>(0xffffu - (own & 0xffffu));
    route.weights[token * p.slots + lane] = weight;
  }
}

// Finds out which experts the tokens have. All threads of the CTA must call it; the result is valid
// in all.
template <typename T>
__device__ __forceinline__ void find_route(const MoeFewTokensParams& p, FewTokensRoute& route) {
  const int thread = threadIdx.x, pairs = p.tokens * p.slots;
  for (int i = thread; i < pairs * kFewTokens; i += kFewThreads) (&route.pair[0][0])[i] = kNoPair;
  if (thread < kWarpSize) route.bits[thread] = 0u;
  if (p.routing != FewTokensRouting::given) {
    static_assert(kFewWarps >= kFewTokens, "a warp for each token");
    if (thread / kWarpSize < p.tokens) choose_experts<T>(p, thread / kWarpSize, route);
  } else if (thread < pairs) {
    // Unsigned, so that no number of another rank is one of these experts.
    const uint32_t expert = static_cast<uint32_t>(load_number(p.selected + thread)) -
                            static_cast<uint32_t>(p.first_expert);
    const bool is_here = expert < static_cast<uint32_t>(p.experts);
    route.index[thread] = is_here ? static_cast<int>(expert) : -1;
    route.weights[thread] = p.weights == nullptr ? 1.0f : load_scalar(p.weights + thread);
  }
  __syncthreads();
  int expert = -1;
  if (thread < pairs) expert = route.index[thread];
  const uint32_t bit = 1u << (expert & 31);
  const bool is_first = expert >= 0 && (atomicOr(&route.bits[expert >> 5], bit) & bit) == 0u;
  __syncthreads();
  if (thread < kWarpSize) {
    const int here = __popc(route.bits[thread]);
    int sum = here;
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const int below = __shfl_up_sync(0xffffffffu, sum, distance);
      if (thread >= distance) sum += below;
    }
    route.before[thread] = sum - here;
    if (thread == kWarpSize - 1) route.count = sum;
  }
  __syncthreads();
  if (expert >= 0) {
    const int at = route.before[expert >> 5] + __popc(route.bits[expert >> 5] & (bit - 1));
    route.index[thread] = at;
    if (is_first) route.experts[at] = expert;
    atomicMin(&route.pair[at][thread / p.slots], thread);
  }
  __syncthreads();
}

// -- sixteen rows of weights by eight tokens ------------------------------------------------------

// What a warp loads in one step: 128 bytes of sixteen rows, and the scales of both halves of rows.
struct FewStep {
  uint4 low[2];   // row g, two times 64 bytes of four lanes
  uint4 high[2];  // row g + 8
  float scale[2];
};

template <typename W>
__device__ __forceinline__ void load_step(FewStep& step, const char* low, const char* high) {
  step.low[0] = load_vec(reinterpret_cast<const W*>(low)).bits;
  step.low[1] = load_vec(reinterpret_cast<const W*>(low + kFewStepBytes / 2)).bits;
  step.high[0] = load_vec(reinterpret_cast<const W*>(high)).bits;
  step.high[1] = load_vec(reinterpret_cast<const W*>(high + kFewStepBytes / 2)).bits;
}

// How 16 bytes of a lane's rows and of its token become MMAs.
template <typename W>
struct FewMma {
  static constexpr bool kIsScaled = false;
  __device__ __forceinline__ static void multiply(const uint4& low, const uint4& high,
                                                  const uint4& token, float (&sum)[4]) {
    const uint32_t first[4] = {low.x, high.x, low.y, high.y};
    mma_m16n8k16<W>(sum, first, token.x, token.y);
    const uint32_t second[4] = {low.z, high.z, low.w, high.w};
    mma_m16n8k16<W>(sum, second, token.z, token.w);
  }
};

template <>
struct FewMma<e4m3> {
  static constexpr bool kIsScaled = true;
  // Of both operands.
  static constexpr float kRescale = Fp8Rescale<e4m3>::kScale * Fp8Rescale<e4m3>::kScale;
  __device__ __forceinline__ static void multiply(const uint4& low, const uint4& high,
                                                  const uint4& token, float (&sum)[4]) {
    const uint32_t lows[4] = {low.x, low.y, low.z, low.w};
    const uint32_t highs[4] = {high.x, high.y, high.z, high.w};
    const uint32_t tokens[4] = {token.x, token.y, token.z, token.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t a[4], b[2];
      fp8x4_to_f16x2_with_nan<e4m3>(lows[i], a[0], a[2]);
      fp8x4_to_f16x2_with_nan<e4m3>(highs[i], a[1], a[3]);
      fp8x4_to_f16x2_with_nan<e4m3>(tokens[i], b[0], b[1]);
      mma_m16n8k16<f16>(sum, a, b[0], b[1]);
    }
  }
};

// Adds the products of a step to `sum`, a C fragment: rows by tokens. `of_tokens` are the scales of
// tokens 2 q and 2 q + 1.
template <typename W>
__device__ __forceinline__ void multiply_step(const FewStep& step, const uint4 (&token)[2],
                                              float2 of_tokens, float (&sum)[4]) {
  if constexpr (FewMma<W>::kIsScaled) {
    float products[4] = {};
    FewMma<W>::multiply(step.low[0], step.high[0], token[0], products);
    FewMma<W>::multiply(step.low[1], step.high[1], token[1], products);
    const float low = step.scale[0] * FewMma<W>::kRescale;
    const float high = step.scale[1] * FewMma<W>::kRescale;
    sum[0] = fmaf(products[0], low * of_tokens.x, sum[0]);
    sum[1] = fmaf(products[1], low * of_tokens.y, sum[1]);
    sum[2] = fmaf(products[2], high * of_tokens.x, sum[2]);
    sum[3] = fmaf(products[3], high * of_tokens.y, sum[3]);
  } else {
    FewMma<W>::multiply(step.low[0], step.high[0], token[0], sum);
    FewMma<W>::multiply(step.low[1], step.high[1], token[1], sum);
  }
}

// Quantises 128 columns of a row, eight in each of 16 lanes; returns a lane's codes. All 32 lanes
// must call it.
__device__ __forceinline__ uint2 quantize_group(const float (&x)[8], float& scale) {
  const uint32_t amax = warp_max(amax_bits(x), kExpertGroup / 8);
  const QuantScale by = quant_scale<e4m3>(amax, kExpertEps, ScaleFormat::numbers);
  scale = by.scale;
  const float r = by.reciprocal;
  return make_uint2(pack_fp8<e4m3>(x[0] * r, x[1] * r, x[2] * r, x[3] * r),
                    pack_fp8<e4m3>(x[4] * r, x[5] * r, x[6] * r, x[7] * r));
}

#endif  // __CUDACC__

}  // namespace precast
