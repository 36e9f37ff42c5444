// SPDX-License-Identifier: Apache-2.0
// The numbers of ckv_scales that belong to the tokens of a KV block, on their way from global to
// shared memory. They are loaded a block ahead, and the pages of their tokens two.
#pragma once

#include "precast/attention/kv_rows.cuh"
#include "precast/mla/params.cuh"
#include "precast/mla/tile.cuh"

namespace precast {

#if defined(__CUDACC__)

// A thread has one number of each block. Use:
//
//   start()                       once per work tile, before consumer_wait() of its first block
//   load_next() ... store_next()  for each KV block, behind consumer_wait()
template <typename Tile>
class MlaScaleLoader {
  static constexpr int kGroups = Tile::kScaleGroups;
  static_assert(Tile::kBlockN * kGroups <= Tile::kThreads, "a thread has one number");

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
  __device__ __forceinline__ const float* current() const {
    return smem_ + half_ * (Tile::kBlockN * kGroups);
  }

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
  __device__ __forceinline__ bool exists(const WorkTile& work) const {
    return token_ < work.kv_end && static_cast<int>(threadIdx.x) < Tile::kBlockN * kGroups;
  }

  // Starts to load the page of the thread's token.
  __device__ __forceinline__ void look_up(const WorkTile& work) {
    const uint32_t page = p_.page_size.divide(static_cast<uint32_t>(token_));
    entry_ = token_ - page * p_.page_size.value;
    const uint32_t at = work.kv_start + page;
    page_ = load_page(p_.kv_indices + at, exists(work) && at < p_.num_kv_indices);
  }

  __device__ __forceinline__ void load(const WorkTile& work) {
    value_ = 0.0f;
    if (!exists(work)) return;
    const uint64_t page = page_ < p_.num_pages ? page_ : 0u;
    const uint64_t row = page * p_.page_size.value + entry_;
    value_ = load_scalar(p_.ckv_scales + row * kGroups + threadIdx.x % kGroups);
  }

  __device__ __forceinline__ void store() {
    if (threadIdx.x < Tile::kBlockN * kGroups) {
      smem_[half_ * (Tile::kBlockN * kGroups) + threadIdx.x] = value_;
    }
  }

  const MlaParams& p_;
  float* smem_;
  int32_t token_ = 0;
  uint32_t page_ = 0, entry_ = 0;
  float value_ = 0.0f;
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
