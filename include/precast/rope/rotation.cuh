// SPDX-License-Identifier: Apache-2.0
// The rotation that RoPE applies to a token: its position, and the cosines and sines of eight
// pairs.
//
// Pair i of rotary_dim / 2 is rotated by position * f(i) radians,
//
//   f(i) = theta^(-2 i / rotary_dim) * (1 / scale + smooth(i) * (1 - 1 / scale))
//   smooth(i) = clamp(theta^(-2 i / rotary_dim) * smooth_a + smooth_b, 0, 1)
//
// with smooth_a = smooth_b = 0 for the plain form; or the cosines and sines are read from a cache
// of fp32 rows, cosines before sines.
//
// Source   Su et al., RoFormer, arXiv:2104.09864; Grattafiori et al., The Llama 3 Herd of Models,
//          arXiv:2407.21783, whose 3.1 form blends two frequency scales
#pragma once

#include "precast/core/vec.cuh"
#include "precast/core/warp.cuh"
#include "precast/paged/slot_mapping.cuh"

namespace precast {

constexpr int kPairs = 8;  // pairs of a thread
constexpr int kMaxRotaryDim = 512;

#if defined(__CUDACC__)

// An entry of an IndexTensor as it is loaded. Why not load_index(): that branches and sign-extends
// the number at once; this waits for each word only where it is used.
struct LoadedIndex {
  int32_t low, high;  // for int32 both hold the same word

  // -1, the position of padding.
  __device__ __forceinline__ LoadedIndex() : low(-1), high(-1) {}

  // Why two loads without a branch or a predicate: with fits_low_word(), 64 tokens took 7 % less
  // time on an H200 than with a second load that int32 skips, and 10 % less than with one load of 8
  // bytes.
  __device__ __forceinline__ LoadedIndex(const IndexTensor& index, int64_t i) {
    const char* word = static_cast<const char*>(address_of(index, i));
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(low) : "l"(word) : "memory");
    word += index.is_int64 ? 4 : 0;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(high) : "l"(word) : "memory");
  }

  // Whether `low`, if it is not negative, is the whole number.
  __device__ __forceinline__ bool fits_low_word(const IndexTensor& index) const {
    return !index.is_int64 || high == 0;
  }

  // Returns the number saturated to 32 bits. No cache has a position of 2^31 - 1, and no call as
  // many tokens.
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

// Does the same before wait_on_dependent_grids(), while the previous grid may still write the
// number. It reads L2, because L1 would keep the old value for the loads that follow.
__device__ __forceinline__ int32_t prefetch_low_word(const IndexTensor& index, int64_t i) {
  int32_t low;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];"
               : "=r"(low)
               : "l"(address_of(index, i))
               : "memory");
  return low;
}

__device__ __forceinline__ int32_t load_saturated(const IndexTensor& index, int64_t i) {
  return LoadedIndex(index, i).saturated(index);
}

#endif

// One position for each token, or requests of consecutive positions: tokens indptr[b] to indptr[b +
// 1] - 1 belong to request b, and the first of them is at position offsets[b].
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
  // A token whose position is not in the cache, such as the -1 of padding, is not rotated.
  __device__ __forceinline__ bool has(int32_t position) const {
    return static_cast<uint32_t>(position) < max_position;
  }
#endif
};

enum class RopeAngles { cached, computed };

// Everything from which a kernel gets its angles.
struct RopeAngleSource {
  RopePositions positions;
  RopeFrequencies frequencies;  // RopeAngles::computed
  RopeCache cache;              // RopeAngles::cached
  int rotary_dim;
};

#if !defined(__CUDACC_RTC__)

// Returns how many tokens ahead a kernel prefetches rows of the cache, which take two dependent
// loads: about 16 MB of a call's `bytes`, so that they are in L2 when they are needed, and not yet
// evicted. On an H200 this is 1 to 4 % faster than no prefetch, and equal from 8 to 24 MB.
inline uint32_t prefetch_distance(int64_t bytes, uint32_t tokens) {
  const int64_t per_token = bytes / tokens;
  return per_token == 0 ? 0 : static_cast<uint32_t>((int64_t(1) << 24) / per_token);
}

#endif

#if defined(__CUDACC__)

// Finds the requests of a warp's tokens, one request a lane: up to 32 requests take a single round
// of loads. All 32 lanes must call each function.
struct RequestLookup {
  int32_t begin, end, offset;  // of the lane's request; a missing request has no tokens

  // Reads the requests from `low` to `high` - 1, at most 32, one for each lane.
  __device__ __forceinline__ void read(const RopePositions& p, int low, int high) {
    const int request = low + static_cast<int>(threadIdx.x % kWarpSize);
    begin = end = offset = 0;
    if (request < high) {
      begin = load_saturated(p.indptr, request);
      end = load_saturated(p.indptr, request + 1);
      offset = load_saturated(p.offsets, request);
    }
  }

  // Returns the position of the lane's token. A token of no request gets position 0, which does not
  // rotate it. read() of requests 0 to 31 must precede it. Each round searches one lane's token and
  // also serves all lanes whose tokens are in the same request, so that one round mostly suffices.
  __device__ __forceinline__ int32_t position(const RopePositions& p, int32_t token) {
    constexpr uint32_t kAll = 0xffffffffu;
    int32_t position = 0;
    uint32_t pending = kAll;  // lanes whose token is not found yet
    while (pending != 0) {
      const int32_t target_token = __shfl_sync(kAll, token, __ffs(pending) - 1);
      if (p.requests > kWarpSize) {
        const int low = first_of_request_window(p, target_token);
        read(p, low, p.requests);
      }
      const uint32_t holders = __ballot_sync(kAll, begin <= target_token && target_token < end);
      const int holder = holders == 0 ? 0 : __ffs(holders) - 1;
      const int32_t first = __shfl_sync(kAll, begin, holder);
      const int32_t last = __shfl_sync(kAll, end, holder);
      const int32_t start = __shfl_sync(kAll, offset, holder);
      const bool is_in = holders != 0 && first <= token && token < last;
      const int32_t position_in_request = token - first;
      if (is_in) {
        position =
            start > 0x7fffffff - position_in_request ? 0x7fffffff : start + position_in_request;
      }
      pending &= __ballot_sync(kAll, !is_in && token != target_token);
    }
    return position;
  }

 private:
  // Returns the first of at most 32 requests among which the token is, if any request has it.
  static __device__ __forceinline__ int first_of_request_window(const RopePositions& p,
                                                                int32_t token) {
    const int lane = threadIdx.x % kWarpSize;
    // this range holds the first request that ends behind the token
    int low = 0, high = p.requests;
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

// Frequencies in turns (not radians) per position, each as a sum of two fp32 numbers.
struct RopeFrequencyTable {
  float2 turns[kMaxRotaryDim / 2];
};

// Computes the table. All threads of the CTA call it, and synchronise before they use the table. It
// reads no memory. Why double: at position 2^20 an fp32 frequency would be off by 0.06 radians.
__device__ __forceinline__ void fill_frequency_table(RopeFrequencyTable& table,
                                                     const RopeAngleSource& source) {
  const RopeFrequencies& f = source.frequencies;
  for (int i = threadIdx.x; i < source.rotary_dim / 2; i += blockDim.x) {
    const double inverse = exp2(i * f.log2_step);
    const double smooth = fmin(fmax(inverse * f.smooth_a + f.smooth_b, 0.0), 1.0);
    const double radians = inverse * (f.inverse_scale + smooth * (1.0 - f.inverse_scale));
    const double exact = radians * 0.15915494309189533577;
    const float high = static_cast<float>(exact);
    table.turns[i] = make_float2(high, static_cast<float>(exact - high));
  }
}

// The pairs in a thread's two vectors of 8. NeoX: pair `first + j` is element j of both vectors.
// Interleaved: vector `a` holds pairs first to first + 3, vector `b` second to second + 3.
struct RopePairs {
  int first;
  int second;

  template <bool kInterleave>
  __device__ __forceinline__ int at(int j) const {
    return kInterleave ? (j < 4 ? first + j : second + j - 4) : first + j;
  }
};

// Returns the word with elements 2 i and 2 i + 1.
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

  // Loads the rotation from the cache, which must have the position.
  template <bool kInterleave, bool kAligned>
  __device__ __forceinline__ void load(const RopeAngleSource& source, int32_t position,
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

  // Prefetches 32-byte part `part` of the position's cosines and of its sines, if the cache has the
  // position.
  static __device__ __forceinline__ void prefetch(const RopeAngleSource& source, int32_t position,
                                                  int part) {
    if (!source.cache.has(position)) return;
    const float* cosines = source.cache.rows + position * source.cache.stride + part * kPairs;
    prefetch_to_l2(cosines);
    prefetch_to_l2(cosines + source.rotary_dim / 2);
  }

  // The product of position and frequency keeps its rounding error, so the fraction of a turn is
  // exact to 2^-24 below position 2^24. The fast sine and cosine are then in their best range, with
  // an absolute error below 2^-20, far below the rounding to 16 bits.
  template <bool kInterleave>
  __device__ __forceinline__ void compute(const RopeFrequencyTable& table,
                                          const RopeAngleSource& source, int32_t position,
                                          RopePairs pairs) {
    const float at = static_cast<float>(position);
    const int half = source.rotary_dim / 2;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int pair = pairs.at<kInterleave>(j);
      const float2 turn = pair < half ? table.turns[pair] : make_float2(0.0f, 0.0f);
      const float product = __fmul_rn(at, turn.x);
      const float error = __fmaf_rn(at, turn.x, -product);
      const float rest = (product - rintf(product)) + __fmaf_rn(at, turn.y, error);
      const float angle = rest * 6.283185307179586f;
      cosine[j] = __cosf(angle);
      sine[j] = __sinf(angle);
    }
  }

  // Rotates elements 2 i and 2 i + 1 of two vectors.
  template <bool kInterleave>
  __device__ __forceinline__ void apply(int i, float2& a, float2& b) const {
    if constexpr (kInterleave) {
      rotate(a.x, a.y, i);
      rotate(b.x, b.y, i + 4);
    } else {
      rotate(a.x, b.x, 2 * i);
      rotate(a.y, b.y, 2 * i + 1);
    }
  }

  // Rotates the pairs of two vectors.
  template <bool kInterleave>
  __device__ __forceinline__ void apply(float (&a)[8], float (&b)[8]) const {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      float& x = kInterleave ? (j < 4 ? a[2 * j] : b[2 * j - 8]) : a[j];
      float& y = kInterleave ? (j < 4 ? a[2 * j + 1] : b[2 * j - 7]) : b[j];
      rotate(x, y, j);
    }
  }

 private:
  __device__ __forceinline__ void rotate(float& x, float& y, int pair) const {
    const float old = x;
    x = old * cosine[pair] - y * sine[pair];
    y = y * cosine[pair] + old * sine[pair];
  }
};

#endif  // __CUDACC__

}  // namespace precast
