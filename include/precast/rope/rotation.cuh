// SPDX-License-Identifier: Apache-2.0
// The rotation that RoPE gives a token: its position, and the cosines and sines of eight pairs.
//
// Pair i of rotary_dim / 2 turns by position * f(i) radians,
//
//   f(i) = theta^(-2 i / rotary_dim) * (1 / scale + smooth(i) * (1 - 1 / scale))
//   smooth(i) = clamp(theta^(-2 i / rotary_dim) * smooth_a + smooth_b, 0, 1)
//
// with smooth_a = smooth_b = 0 for the plain form, or it is read from a cache of fp32 rows,
// cosines before sines.
//
// Source   Su et al., RoFormer, arXiv:2104.09864; Grattafiori et al., The Llama 3 Herd of Models,
//          arXiv:2407.21783, whose 3.1 form blends two frequency scales.
#pragma once

#include "precast/core/vec.cuh"
#include "precast/core/warp.cuh"
#include "precast/paged/slot_mapping.cuh"

namespace precast {

constexpr int kPairs = 8;  // whose rotation a thread holds
constexpr int kMaxRotaryDim = 512;

#if defined(__CUDACC__)

// A number of an Index as it is loaded. Why not load_index(): it branches, and extends the number
// at once; this waits for each word only where that is used.
struct RawIndex {
  int32_t low, high;  // of int32 the same word twice

  // -1, the position of padding.
  __device__ __forceinline__ RawIndex() : low(-1), high(-1) {}

  // Why two loads without a branch or a predicate: with is_low(), 64 tokens took 7 % less on H200
  // than with a second load that int32 leaves out, and 10 % less than with one of 8 bytes.
  __device__ __forceinline__ RawIndex(const IndexTensor& index, int64_t i) {
    const char* word = static_cast<const char*>(address_of(index, i));
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(low) : "l"(word) : "memory");
    word += index.is_int64 ? 4 : 0;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(high) : "l"(word) : "memory");
  }

  // Whether a `low` that is not negative is the number.
  __device__ __forceinline__ bool is_low(const IndexTensor& index) const {
    return !index.is_int64 || high == 0;
  }

  // As 32 bits; what is beyond them becomes the nearest. No cache has a position of 2^31 - 1, and
  // no call as many tokens.
  __device__ __forceinline__ int32_t saturated(const IndexTensor& index) const {
    if (!index.is_int64 || high == low >> 31) return low;
    return high < 0 ? -0x7fffffff - 1 : 0x7fffffff;
  }
};

// For hints, which may be wrong.
__device__ __forceinline__ int32_t load_low_word(const IndexTensor& index, int64_t i) {
  int32_t low;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(low) : "l"(address_of(index, i)) : "memory");
  return low;
}

// The same before wait_for_previous_grid(), while the grid before may still write the number: from
// L2, because L1 would keep what is old then for the loads that count.
__device__ __forceinline__ int32_t guess_low_word(const IndexTensor& index, int64_t i) {
  int32_t low;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];"
               : "=r"(low)
               : "l"(address_of(index, i))
               : "memory");
  return low;
}

__device__ __forceinline__ int32_t load_saturated(const IndexTensor& index, int64_t i) {
  return RawIndex(index, i).saturated(index);
}

#endif

// One position for each token, or requests of consecutive positions: tokens indptr[b] to
// indptr[b + 1] are request b, the first of them at position offsets[b].
struct RopePositions {
  IndexTensor ids;      // [tokens]; data is null for requests
  IndexTensor indptr;   // [requests + 1]
  IndexTensor offsets;  // [requests]
  int requests;
};

struct RopeFrequencies {
  double log2_step;  // theta^(-2 i / rotary_dim) = 2^(i * log2_step)
  double inverse_scale;
  double smooth_a;
  double smooth_b;
};

struct RopeCache {
  const float* rows;  // [max_position, rotary_dim]
  int64_t stride;     // elements between rows
  uint32_t max_position;

#if defined(__CUDACC__)
  // A token whose position it does not have, such as the -1 of padding, is not turned.
  __device__ __forceinline__ bool has(int32_t position) const {
    return static_cast<uint32_t>(position) < max_position;
  }
#endif
};

enum class RopeAngles { cached, computed };

// Everything about angles that a kernel gets.
struct RopeSource {
  RopePositions positions;
  RopeFrequencies frequencies;  // RopeAngles::computed
  RopeCache cache;              // RopeAngles::cached
  int rotary_dim;
};

#if !defined(__CUDACC_RTC__)

// How many tokens ahead a kernel asks for rows of the cache, which are needed two reads deep: about
// 16 MB of a call's `bytes`, so that they are in L2 when their turn comes, and still there. On H200
// 1 to 4 % faster than without, and flat from 8 to 24 MB.
inline uint32_t tokens_ahead(int64_t bytes, uint32_t tokens) {
  const int64_t per_token = bytes / tokens;
  return per_token == 0 ? 0 : static_cast<uint32_t>((int64_t(1) << 24) / per_token);
}

#endif

#if defined(__CUDACC__)

// The search of a warp for the requests of its tokens, one request a lane: up to 32 requests take a
// single round of loads. All 32 lanes must call.
struct RequestSearch {
  int32_t begin, end, offset;  // of the lane's request; none is a request without tokens

  // Request `low` + lane of those below `high`.
  __device__ __forceinline__ void read(const RopePositions& p, int low, int high) {
    const int request = low + static_cast<int>(threadIdx.x % kWarpSize);
    begin = end = offset = 0;
    if (request < high) {
      begin = load_saturated(p.indptr, request);
      end = load_saturated(p.indptr, request + 1);
      offset = load_saturated(p.offsets, request);
    }
  }

  // The position of the lane's token; one that no request holds is at position 0, which leaves it
  // as it is. After read() of requests 0 to 31. The lanes look for one lane's token at a time, and
  // whoever is in the same request is done, too: most often all are.
  __device__ __forceinline__ int32_t position(const RopePositions& p, int32_t token) {
    constexpr uint32_t kAll = 0xffffffffu;
    int32_t position = 0;
    uint32_t open = kAll;  // lanes that still look
    while (open != 0) {
      const int32_t wanted = __shfl_sync(kAll, token, __ffs(open) - 1);
      if (p.requests > kWarpSize) {
        const int low = first_of_32(p, wanted);
        read(p, low, p.requests);
      }
      const uint32_t holders = __ballot_sync(kAll, begin <= wanted && wanted < end);
      const int holder = holders == 0 ? 0 : __ffs(holders) - 1;
      const int32_t first = __shfl_sync(kAll, begin, holder);
      const int32_t last = __shfl_sync(kAll, end, holder);
      const int32_t start = __shfl_sync(kAll, offset, holder);
      const bool is_in = holders != 0 && first <= token && token < last;
      const int32_t place = token - first;
      if (is_in) position = start > 0x7fffffff - place ? 0x7fffffff : start + place;
      open &= __ballot_sync(kAll, !is_in && token != wanted);
    }
    return position;
  }

 private:
  // The first of 32 requests or fewer, of which one holds the token if any does.
  static __device__ __forceinline__ int first_of_32(const RopePositions& p, int32_t token) {
    const int lane = threadIdx.x % kWarpSize;
    int low = 0, high = p.requests;  // the first request that ends behind the token is in here
    while (high - low > kWarpSize) {
      const int step = (high - low) / kWarpSize;
      const bool ends_before = load_saturated(p.indptr, low + (lane + 1) * step) <= token;
      const int steps = __popc(__ballot_sync(0xffffffffu, ends_before));
      if (steps < kWarpSize) high = low + (steps + 1) * step;
      low += steps * step;
    }
    return low;
  }
};

// Frequencies in turns (not radians) a position, each as a sum of two fp32.
struct RopeTurns {
  float2 of[kMaxRotaryDim / 2];
};

// All threads of the CTA call it, and synchronise before they use the table. Reads no memory.
// Why double: at position 2^20 an fp32 frequency would be off by 0.06 radians.
__device__ __forceinline__ void fill_turns(RopeTurns& turns, const RopeSource& source) {
  const RopeFrequencies& f = source.frequencies;
  for (int i = threadIdx.x; i < source.rotary_dim / 2; i += blockDim.x) {
    const double inverse = exp2(i * f.log2_step);
    const double smooth = fmin(fmax(inverse * f.smooth_a + f.smooth_b, 0.0), 1.0);
    const double radians = inverse * (f.inverse_scale + smooth * (1.0 - f.inverse_scale));
    const double exact = radians * 0.15915494309189533577;
    const float high = static_cast<float>(exact);
    turns.of[i] = make_float2(high, static_cast<float>(exact - high));
  }
}

// Which pairs a thread's two vectors of 8 hold. NeoX: pair `first + j` is element j of either
// vector. Interleaved: vector `a` holds pairs first to first + 3, vector `b` second to second + 3.
struct RopePairs {
  int first;
  int second;

  template <bool kInterleave>
  __device__ __forceinline__ int at(int j) const {
    return kInterleave ? (j < 4 ? first + j : second + j - 4) : first + j;
  }
};

// The word of elements 2 i and 2 i + 1.
template <typename T>
__device__ __forceinline__ uint32_t word_of(const Vec<T>& vec, int i) {
  return i == 0 ? vec.bits.x : i == 1 ? vec.bits.y : i == 2 ? vec.bits.z : vec.bits.w;
}

template <typename T>
__device__ __forceinline__ uint32_t& word_of(Vec<T>& vec, int i) {
  return i == 0 ? vec.bits.x : i == 1 ? vec.bits.y : i == 2 ? vec.bits.z : vec.bits.w;
}

struct Rotation {
  float cosine[kPairs];
  float sine[kPairs];

  // From the cache, which must have the position.
  template <bool kInterleave, bool kAligned>
  __device__ __forceinline__ void load(const RopeSource& source, int32_t position,
                                       RopePairs pairs) {
    const int half = source.rotary_dim / 2;
    const float* cosines = source.cache.rows + position * source.cache.stride;  // [half]
    const float* sines = cosines + half;                                        // [half]
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int pair = pairs.at<kInterleave>(part * 4);
      float c[4], s[4];
      unpack(precast::load<kAligned>(cosines + pair, half - pair), c);
      unpack(precast::load<kAligned>(sines + pair, half - pair), s);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        cosine[part * 4 + j] = c[j];
        sine[part * 4 + j] = s[j];
      }
    }
  }

  // Asks for the `part`th 32 bytes of the position's cosines, and of its sines, if the cache has
  // them.
  static __device__ __forceinline__ void prefetch(const RopeSource& source, int32_t position,
                                                  int part) {
    if (!source.cache.has(position)) return;
    const float* cosines = source.cache.rows + position * source.cache.stride + part * kPairs;
    prefetch_to_l2(cosines);
    prefetch_to_l2(cosines + source.rotary_dim / 2);
  }

  // The product of position and frequency keeps its rounding error, so what is left after the
  // whole turns is exact to 2^-24 of a turn below position 2^24. The fast sine and cosine are
  // then in their best range, with an absolute error below 2^-20, far under a 16-bit rounding.
  template <bool kInterleave>
  __device__ __forceinline__ void compute(const RopeTurns& turns, const RopeSource& source,
                                          int32_t position, RopePairs pairs) {
    const float at = static_cast<float>(position);
    const int half = source.rotary_dim / 2;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int pair = pairs.at<kInterleave>(j);
      const float2 turn = pair < half ? turns.of[pair] : make_float2(0.0f, 0.0f);
      const float product = __fmul_rn(at, turn.x);
      const float error = __fmaf_rn(at, turn.x, -product);
      const float rest = (product - rintf(product)) + __fmaf_rn(at, turn.y, error);
      const float angle = rest * 6.283185307179586f;
      cosine[j] = __cosf(angle);
      sine[j] = __sinf(angle);
    }
  }

  // Turns elements 2 i and 2 i + 1 of two vectors.
  template <bool kInterleave>
  __device__ __forceinline__ void apply(int i, float2& a, float2& b) const {
    if constexpr (kInterleave) {
      turn(a.x, a.y, i);
      turn(b.x, b.y, i + 4);
    } else {
      turn(a.x, b.x, 2 * i);
      turn(a.y, b.y, 2 * i + 1);
    }
  }

  // Turns the pairs of two vectors.
  template <bool kInterleave>
  __device__ __forceinline__ void apply(float (&a)[8], float (&b)[8]) const {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      float& x = kInterleave ? (j < 4 ? a[2 * j] : b[2 * j - 8]) : a[j];
      float& y = kInterleave ? (j < 4 ? a[2 * j + 1] : b[2 * j - 7]) : b[j];
      turn(x, y, j);
    }
  }

 private:
  __device__ __forceinline__ void turn(float& x, float& y, int pair) const {
    const float old = x;
    x = old * cosine[pair] - y * sine[pair];
    y = y * cosine[pair] + old * sine[pair];
  }
};

#endif  // __CUDACC__

}  // namespace precast
