// SPDX-License-Identifier: Apache-2.0
// The numbers of ckv_scales that belong to the tokens of a KV block, on their way from global to
// shared memory. They are loaded a block ahead, and the pages of their tokens two.
#pragma once

#include "precast/attention/kv_rows.cuh"
#include "precast/mla/params.cuh"
#include "precast/mla/tile.cuh"

namespace precast {

#if defined(__CUDACC__)

// A thread has the numbers threadIdx.x, threadIdx.x + kThreads, ... of each block. Use:
//
//   start()                       once per work tile, before consumer_wait() of its first block
//   load_next() ... store_next()  for each KV block, behind consumer_wait()
template <typename Tile>
class MlaScaleLoader {
  static constexpr int kGroups = Tile::kScaleGroups;
  static constexpr int kBlockNumbers = Tile::kBlockN * kGroups;
  static constexpr int kNumbers = (kBlockNumbers + Tile::kThreads - 1) / Tile::kThreads;
  static_assert(Tile::kThreads % kGroups == 0, "all numbers of a thread are of one group");

 public:
  // `smem`: [2, kBlockN, kGroups]
  __device__ __forceinline__ MlaScaleLoader(const MlaParams& p, float* smem) : p_(p), smem_(smem) {}

  __device__ __forceinline__ void start(const WorkTile& work) {
    token_ = work.kv_begin + static_cast<int32_t>(threadIdx.x) / kGroups;
    half_ = 0;
    look_up(work);
    load(work);
    store();
    token_ += Tile::kBlockN;
    look_up(work);
  }

  // The numbers of the block that consumer_wait() gave.
  __device__ __forceinline__ const float* current() const { return smem_ + half_ * kBlockNumbers; }

  __device__ __forceinline__ void load_next(const WorkTile& work) {
    load(work);
    token_ += Tile::kBlockN;
    look_up(work);
  }

  __device__ __forceinline__ void store_next() {
    half_ ^= 1;
    store();
  }

 private:
  __device__ __forceinline__ int32_t token(int i) const {
    return token_ + i * (Tile::kThreads / kGroups);
  }

  static __device__ __forceinline__ bool is_in_block(int i) {
    return static_cast<int>(threadIdx.x) + i * Tile::kThreads < kBlockNumbers;
  }

  __device__ __forceinline__ bool exists(const WorkTile& work, int i) const {
    return token(i) < work.kv_end && is_in_block(i);
  }

  // Starts to load the pages of the thread's tokens.
  __device__ __forceinline__ void look_up(const WorkTile& work) {
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      const uint32_t page = p_.page_size.divide(static_cast<uint32_t>(token(i)));
      entry_[i] = token(i) - page * p_.page_size.value;
      const uint32_t at = work.kv_start + page;
      page_[i] = load_page(p_.kv_indices + at, exists(work, i) && at < p_.num_kv_indices);
    }
  }

  __device__ __forceinline__ void load(const WorkTile& work) {
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      value_[i] = 0.0f;
      if (!exists(work, i)) continue;
      const uint64_t page = page_[i] < p_.num_pages ? page_[i] : 0u;
      const uint64_t row = page * p_.page_size.value + entry_[i];
      value_[i] = load_scalar(p_.ckv_scales + row * kGroups + threadIdx.x % kGroups);
    }
  }

  __device__ __forceinline__ void store() {
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      if (is_in_block(i)) {
        smem_[half_ * kBlockNumbers + threadIdx.x + i * Tile::kThreads] = value_[i];
      }
    }
  }

  const MlaParams& p_;
  float* smem_;
  int32_t token_ = 0;  // of the first number
  uint32_t page_[kNumbers] = {}, entry_[kNumbers] = {};
  float value_[kNumbers] = {};
  int half_ = 0;
};

// The scales of a group of columns of values, as factors of P. P times a scale is rounded to f16,
// which has few exponents, so the scales are relative to a power of two, at least as large as each
// of them so far; acc_o is relative to it, too.
class MlaValueScales {
 public:
  // Takes the scales of a block's kTokens tokens; `scales` is that of token 0, the others follow in
  // steps of kStep. Returns what acc_o must be multiplied by. All lanes of a warp call it.
  template <int kTokens, int kStep>
  __device__ __forceinline__ float update(const float* scales) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kTokens; i += 32) {
      largest = fmaxf(largest, scales[(i + threadIdx.x % 32) * kStep]);
    }
    // Numbers that are not negative compare as their bits do.
    const uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));
    if (bits <= __float_as_uint(unit_)) return 1.0f;
    const float before = unit_;
    unit_ = __uint_as_float(min(max((bits + 0x7fffffu) & 0x7f800000u, 0x00800000u), 0x7e800000u));
    inverse_ = 1.0f / unit_;
    return before * inverse_;
  }

  // What P of a token is multiplied by.
  __device__ __forceinline__ float factor(float scale) const { return scale * inverse_; }

  // What acc_o is multiplied by at last.
  __device__ __forceinline__ float unit() const { return unit_; }

 private:
  float unit_ = 0.0f, inverse_ = 0.0f;
};

#endif  // __CUDACC__

}  // namespace precast
