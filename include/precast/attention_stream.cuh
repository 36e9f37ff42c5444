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

__device__ __forceinline__ int32_t load_page(const int32_t* page) {
  int32_t value;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(page) : "memory");
  return value;
}

// A team takes the groups of kTokens tokens number `team`, team + kTeams, ... of the piece. A row's
// chunks belong to kLanes neighbouring lanes, so that lanes share the search for its page.
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
    row_ = thread / kLanes;
    lane_ = thread % kLanes;
    k_ = static_cast<const KV*>(p.k.data) + work.head * p.k.head_stride + lane_ * kPerChunk;
    v_ = static_cast<const KV*>(p.v.data) + work.head * p.v.head_stride + work.value_column +
         lane_ * kPerChunk;
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
      const int32_t page = static_cast<int32_t>(p_.page_size.divide(token));
      entries_[i] = token - page * static_cast<int32_t>(p_.page_size.value);
      pages_[i] = page_start_ + page;
      if (p_.pages != nullptr && token < end_) pages_[i] = load_page(p_.pages + pages_[i]);
    }
  }

  __device__ __forceinline__ void load() {
    const uint32_t stage = ring_ + next_stage_ * Tile::kStageBytes;
    next_stage_ = next_stage_ + 1 == Tile::kStages ? 0 : next_stage_ + 1;
    if (next_ < end_) {
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        const int row = row_ + i * kRowsAtOnce;
        if (Tile::kTokens % kRowsAtOnce != 0 && row >= Tile::kTokens) break;
        const bool exists = next_ + row < end_;
        // Why: a page that is not in the cache must not be read.
        const bool inside = static_cast<uint32_t>(pages_[i]) < p_.page_count;
        const int64_t page = exists && inside ? pages_[i] : 0;
        const KV* k = k_ + page * p_.k.page_stride + entries_[i] * p_.k.entry_stride;
        const KV* v = v_ + page * p_.v.page_stride + entries_[i] * p_.v.entry_stride;
#pragma unroll
        for (int j = 0; j < kKeyChunks / kLanes; ++j) {
          const int chunk = lane_ + j * kLanes;
          copy_async(stage + Tile::KeyRows::offset(row, chunk), k + j * kLanes * kPerChunk, exists);
        }
#pragma unroll
        for (int j = 0; j < kValueChunks / kLanes; ++j) {
          const int chunk = lane_ + j * kLanes;
          copy_async(stage + Tile::kKeyBytes + Tile::ValueRows::offset(row, chunk),
                     v + j * kLanes * kPerChunk, exists);
        }
      }
      next_ += kStep;
      find_pages();
    }
    close_copies();
  }

  const AttentionParams& p_;
  const KV* k_;
  const KV* v_;
  uint32_t ring_;
  int32_t end_;
  int32_t page_start_;
  int32_t row_, lane_;
  int32_t token_, next_;
  int32_t stage_ = 0, next_stage_ = 0;
  int32_t pages_[kRounds];
  int32_t entries_[kRounds];
};

#endif  // __CUDACC__

}  // namespace precast
