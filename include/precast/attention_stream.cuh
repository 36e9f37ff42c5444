// SPDX-License-Identifier: Apache-2.0
// The tokens of a piece as they pass through a team's ring in shared memory: page table, copies.
//
// Tokens behind the piece's end are zeros, whatever their page holds: 0 * NaN is NaN.
#pragma once

#include "precast/attention_query.cuh"
#include "precast/core/cp_async.cuh"

namespace precast {

#if defined(__CUDACC__)

constexpr int common_divisor(int a, int b) { return b == 0 ? a : common_divisor(b, a % b); }

__device__ __forceinline__ uint32_t load_page(const int32_t* page) {
  uint32_t value;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(value) : "l"(page) : "memory");
  return value;
}

// A team takes the groups of kTokens tokens number `team`, team + kTeams, ... of the piece. A row's
// chunks belong to kLanes neighbouring lanes, so that lanes share the search for its page.
// Why: the compiler would compute it anew in each round of a loop rather than keep it.
template <typename T>
__device__ __forceinline__ void keep(T& value) {
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(value));
  } else {
    asm volatile("" : "+r"(value));
  }
}

template <typename Tile, typename KV>
class TokenStream {
  static constexpr int kKeyChunks = Tile::KeyRows::kChunks;
  static constexpr int kValueChunks = Tile::ValueRows::kChunks;
  static constexpr int kLanes = common_divisor(common_divisor(kKeyChunks, kValueChunks), 8);
  static constexpr int kRowsAtOnce = Tile::kTeamThreads / kLanes;
  static constexpr int kRounds = (Tile::kTokens + kRowsAtOnce - 1) / kRowsAtOnce;
  static constexpr int kStep = Tile::kTeams * Tile::kTokens;
  static constexpr int kPerChunk = 16 / sizeof(KV);

 public:
  // `ring`: shared address.
  __device__ __forceinline__ TokenStream(const AttentionParams& p, const AttentionWork& work,
                                         uint32_t ring, int team)
      : p_(p), ring_(ring), end_(work.piece.kv_end), page_start_(work.piece.kv_start) {
    const int thread = threadIdx.x % Tile::kTeamThreads;
    const int lane = thread % kLanes;
    row_ = thread / kLanes;
    k_ = static_cast<const uint4*>(p.k.data) + work.head * p.k.head_stride + lane;
    v_ = static_cast<const uint4*>(p.v.data) + work.head * p.v.head_stride +
         work.value_column / kPerChunk + lane;
    key_target_ = ring + Tile::KeyRows::offset(row_, lane);
    value_target_ = ring + Tile::kKeyBytes + Tile::ValueRows::offset(row_, lane);
    keep(row_);
    keep(k_);
    keep(v_);
    keep(key_target_);
    keep(value_target_);
    token_ = next_ = work.piece.kv_begin + team * Tile::kTokens;
    find_pages();
    for (int i = 0; i < Tile::kStages - 1; ++i) load();
  }

  // The first token of the group that is next; the piece ends at or behind it if it is done.
  __device__ __forceinline__ int32_t token() const { return token_; }
  __device__ __forceinline__ bool done() const { return token_ >= end_; }

  // Waits for the next group, and starts to load into the stage that the one before has left.
  // Returns the address of its keys; its values follow.
  __device__ __forceinline__ uint32_t wait() {
    if constexpr (Tile::kStages == 1) {
      barrier();
      load();
      wait_for_copies<0>();
      barrier();
    } else {
      wait_for_copies<Tile::kStages - 2>();
      barrier();
      load();
    }
    const uint32_t stage = ring_ + stage_ * Tile::kStageBytes;
    stage_ = stage_ + 1 == Tile::kStages ? 0 : stage_ + 1;
    return stage;
  }

  __device__ __forceinline__ void advance() { token_ += kStep; }

  static __device__ __forceinline__ void barrier() {
    if constexpr (Tile::kTeamThreads == 32) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

 private:
  // Pages of the group from next_ on, one step ahead of their use.
  __device__ __forceinline__ void find_pages() {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int32_t token = next_ + row_ + i * kRowsAtOnce;
      const uint32_t page = p_.page_size.divide(token);
      entries_[i] = token - page * p_.page_size.value;
      pages_[i] = page_start_ + page;
      if (p_.pages != nullptr && token < end_) {
        const uint32_t entry = pages_[i];
        pages_[i] = entry < p_.page_entries ? load_page(p_.pages + entry) : 0;
      }
    }
  }

  // From a lane's first chunk to that of round i, j kLanes to the right. Stages are multiples of
  // 128 bytes where chunks are swizzled, so low bits of addresses are those of offsets.
  template <typename Rows>
  static __device__ __forceinline__ uint32_t later(uint32_t first, int i, int j) {
    if constexpr (Rows::kXor) {
      static_assert(Tile::kStageBytes % 128 == 0 && Tile::kKeyBytes % 128 == 0, "see above");
      // The change of the row's swizzle, then of the chunk.
      const int row = i * kRowsAtOnce;
      const int flip = (Rows::offset(row, 0) - row * Rows::kStride) / 16;
      const int right = (j * kLanes) & Rows::kMask;
      return (first ^ ((flip ^ right) * 16)) + row * Rows::kStride +
             (j * kLanes & ~Rows::kMask) * 16;
    } else {
      return first + i * kRowsAtOnce * Rows::kStride + j * kLanes * 16;
    }
  }

  __device__ __forceinline__ void load() {
    const uint32_t stage = next_stage_ * Tile::kStageBytes;
    next_stage_ = next_stage_ + 1 == Tile::kStages ? 0 : next_stage_ + 1;
    if (next_ < end_) {
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        const int row = row_ + i * kRowsAtOnce;
        if (Tile::kTokens % kRowsAtOnce != 0 && row >= Tile::kTokens) break;
        const bool exists = next_ + row < end_;
        // Why: a page that is not in the cache must not be read.
        const bool inside = exists && pages_[i] < p_.page_count;
        const uint64_t page = inside ? pages_[i] : 0u, entry = entries_[i];
        const uint4* k = k_ + (page * p_.k.page_stride + entry * p_.k.entry_stride);
        const uint4* v = v_ + (page * p_.v.page_stride + entry * p_.v.entry_stride);
#pragma unroll
        for (int j = 0; j < kKeyChunks / kLanes; ++j) {
          copy_async(stage + later<typename Tile::KeyRows>(key_target_, i, j), k + j * kLanes,
                     exists);
        }
#pragma unroll
        for (int j = 0; j < kValueChunks / kLanes; ++j) {
          copy_async(stage + later<typename Tile::ValueRows>(value_target_, i, j),
                     v + j * kLanes, exists);
        }
      }
      next_ += kStep;
      find_pages();
    }
    close_copies();
  }

  const AttentionParams& p_;
  const uint4* k_;  // of 16 bytes
  const uint4* v_;
  uint32_t ring_;
  int32_t end_;
  int32_t page_start_;
  int32_t row_;
  uint32_t key_target_, value_target_;
  int32_t token_, next_;
  int32_t stage_ = 0, next_stage_ = 0;
  uint32_t pages_[kRounds];
  uint32_t entries_[kRounds];
};

#endif  // __CUDACC__

}  // namespace precast
