// SPDX-License-Identifier: Apache-2.0
// The tokens of a CTA's pieces as they pass through a team's ring in shared memory: page table,
// copies. The ring runs on from piece to piece: while the last tokens of one are in use, the first
// of the next arrive.
//
// Tokens behind a piece's end are zeros, whatever their page holds: 0 * NaN is NaN.
#pragma once

#include "precast/attention/query.cuh"
#include "precast/core/cp_async.cuh"

namespace precast {

#if defined(__CUDACC__)

constexpr int common_divisor(int a, int b) { return b == 0 ? a : common_divisor(b, a % b); }

// 0 if it does not exist; without a branch.
__device__ __forceinline__ uint32_t load_page(const int32_t* page, bool exists) {
  uint32_t value = 0;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %2, 0;\n"
      "@p ld.global.u32 %0, [%1];\n"
      "}"
      : "+r"(value)
      : "l"(page), "r"(exists ? 1u : 0u)
      : "memory");
  return value;
}

__device__ __forceinline__ void store_address(uint32_t to, const void* address) {
  asm volatile("st.shared.u64 [%0], %1;" ::"r"(to), "l"(address) : "memory");
}

__device__ __forceinline__ void load_addresses(uint64_t (&x)[2], uint32_t from) {
  asm volatile("ld.shared.v2.u64 {%0, %1}, [%2];" : "=l"(x[0]), "=l"(x[1]) : "r"(from) : "memory");
}

// A team takes the groups of kTokens tokens number `team`, team + kTeams, ... of a piece. One
// thread a token looks up its page, one group ahead, and puts the addresses of its rows into a
// table in shared memory; kLanes neighbouring lanes copy a row. A group of copies is closed for
// each group of tokens, and an empty one where there are none to load: so the number of groups that
// may be open when tokens are awaited is always the same.
template <typename Tile, typename KV>
class TokenStream {
  static constexpr int kKeyChunks = Tile::KeyRows::kChunks;
  static constexpr int kValueChunks = Tile::ValueRows::kChunks;
  static constexpr int kLanes = common_divisor(common_divisor(kKeyChunks, kValueChunks), 8);
  static constexpr int kRowsAtOnce = Tile::kTeamThreads / kLanes;
  static constexpr int kRounds = (Tile::kTokens + kRowsAtOnce - 1) / kRowsAtOnce;
  static constexpr int kPerChunk = 16 / sizeof(KV);
  // Threads look up a token each, for keys and values alike where they are too few for both.
  static constexpr bool kSplit = 2 * Tile::kTokens <= Tile::kTeamThreads;
  // Rows of keys and values lie alike in their halves of a stage.
  static constexpr bool kAlike = Tile::KeyRows::kStride == Tile::ValueRows::kStride;
  static constexpr int kLookUps = (kSplit ? 2 : 1) * Tile::kTokens;

 public:
  static constexpr int kStep = Tile::kTeams * Tile::kTokens;
  // Whether copies start beside the products: load_beside() and publish_beside(). Why: started all
  // at once in front of them they held up the warps for a fifth of the time of the wide tile.
  static constexpr bool kLoadsBeside = !Tile::kNarrow && Tile::kStages > 1;

  // `ring` and `table` [2, kTokens, keys and values] are shared addresses.
  __device__ __forceinline__ TokenStream(const AttentionParams& p,
                                         const AttentionQueue<Tile>& queue, uint32_t ring,
                                         uint32_t table, int team)
      : p_(p), queue_(queue), ring_(ring), table_(table), team_(team) {
    row_ = thread() / kLanes;
    lane_ = thread() % kLanes;
    key_target_ = ring + Tile::KeyRows::offset(row_, lane_);
    keep(row_);
    keep(key_target_);
    if constexpr (!kAlike) {
      value_target_ = ring + Tile::kKeyBytes + Tile::ValueRows::offset(row_, lane_);
      keep(value_target_);
    }
  }

  // The slot of what to load when all of the piece before is under way; -1: nothing.
  __device__ __forceinline__ void follow(int slot) {
    if (waiting_ >= 0) begin();
    waiting_ = slot;
    if (waiting_ >= 0 && next_ >= end_) begin();
  }

  // Starts copies until the ring is full; before the first wait() of a piece.
  __device__ __forceinline__ void fill() {
    for (int i = loading_; i < Tile::kStages - 1; ++i) {
      publish_rows();
      barrier();
      load();
    }
    if constexpr (kLoadsBeside) publish_rows();
  }

  // Waits for the next group of tokens, and starts to load into the stage that the one before has
  // left, if not beside the products. Returns the address of its keys; its values follow.
  __device__ __forceinline__ uint32_t wait() {
    if constexpr (Tile::kStages == 1) {
      publish_rows();
      barrier();
      load();
      wait_for_copies<0>();
      barrier();
    } else {
      wait_for_copies<Tile::kStages - 2>();
      if constexpr (!kLoadsBeside) publish_rows();
      barrier();
      if constexpr (!kLoadsBeside) load();
    }
    const uint32_t stage = ring_ + stage_ * Tile::kStageBytes;
    if constexpr (!kLoadsBeside) leave_stage();
    return stage;
  }

  // Once after each wait(), part by part: starts the copies that wait() did not. Behind the last
  // group these are zeros into a stage that is not read; of three stages it would be the same one
  // twice, with the first copies still under way.
  template <int kPart = 0, int kParts = 1>
  __device__ __forceinline__ void load_beside() {
    if constexpr (kLoadsBeside) {
      if (Tile::kStages > 2 && next_ >= end_) return;
      constexpr int kBegin = kPart * kRounds / kParts, kEnd = (kPart + 1) * kRounds / kParts;
      uint64_t rows[2][2];
      load_addresses(rows[0], entry_of(kBegin));
#pragma unroll
      for (int i = kBegin; i < kEnd; ++i) {
        if (i + 1 < kEnd) load_addresses(rows[(i + 1 - kBegin) % 2], entry_of(i + 1));
        copy_rows(i, rows[(i - kBegin) % 2]);
      }
    }
  }

  // Then.
  __device__ __forceinline__ void look_ahead() {
    if constexpr (kLoadsBeside) {
      count_load();
      close_copies();
      leave_stage();
    }
  }

  // Once between look_ahead() and the next wait(), where the look-up has had time.
  __device__ __forceinline__ void publish_beside() {
    if constexpr (kLoadsBeside) publish_rows();
  }

  // Between pieces: bytes from the ring's start to a stage that nothing is loaded into before the
  // next wait().
  __device__ __forceinline__ int free_stage() const {
    return (stage_ == 0 ? Tile::kStages - 1 : stage_ - 1) * Tile::kStageBytes;
  }

 private:
  static __device__ __forceinline__ int thread() { return threadIdx.x % Tile::kTeamThreads; }

  static __device__ __forceinline__ void barrier() {
    if constexpr (Tile::kTeamThreads == 32) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  static __device__ __forceinline__ bool takes_values() {
    return kSplit && thread() >= Tile::kTokens;
  }

  __device__ __forceinline__ void leave_stage() {
    --loading_;
    stage_ = stage_ + 1 == Tile::kStages ? 0 : stage_ + 1;
  }

  __device__ __forceinline__ uint32_t value_target() const {
    return kAlike ? key_target_ + Tile::kKeyBytes : value_target_;
  }

  // The half of the table for the group that is loaded next.
  __device__ __forceinline__ uint32_t side() const {
    return table_ +
           (Tile::kStages == 2 && !kLoadsBeside ? next_number() : side_) * (Tile::kTokens * 16);
  }

  // The stage that is loaded next.
  __device__ __forceinline__ int next_number() const {
    const int stage = stage_ + loading_;
    return stage >= Tile::kStages ? stage - Tile::kStages : stage;
  }

  // Goes on to the piece that waits.
  __device__ __forceinline__ void begin() {
    take_piece();
    find_pages();
  }

  __device__ __forceinline__ void take_piece() {
    const AttentionWork& work = queue_.works[waiting_];
    next_ = work.piece.kv_begin + team_ * Tile::kTokens;
    end_ = work.piece.kv_end;
    current_ = waiting_;
    if constexpr (Tile::kNarrow) {
      page_start_ = work.piece.kv_start;
      const uint4* k = static_cast<const uint4*>(p_.k.data) + work.head * p_.k.head_stride;
      const uint4* v = static_cast<const uint4*>(p_.v.data) + work.head * p_.v.head_stride +
                       work.value_column / kPerChunk;
      base_[0] = takes_values() ? v : k;
      base_[1] = v;
    }
    waiting_ = -1;
  }

  // Starts to look up the pages of the group from next_ on.
  __device__ __forceinline__ void find_pages() {
    if (kLookUps < Tile::kTeamThreads && thread() >= kLookUps) return;
    const uint32_t token = next_ + thread() % Tile::kTokens;
    const uint32_t page = p_.page_size.divide(token);
    page_ = (Tile::kNarrow ? page_start_ : queue_.works[current_].piece.kv_start) + page;
    entry_ = token - page * p_.page_size.value;
    if (p_.pages == nullptr) return;
    const bool exists = static_cast<int32_t>(token) < end_ && page_ < p_.page_entries;
    page_ = load_page(p_.pages + page_, exists);
  }

  // Those pages become addresses in the table. Why not at once: the look-up takes long. Where there
  // is nothing to load, what it writes is not used.
  __device__ __forceinline__ void publish_rows() {
    if (!kLoadsBeside && next_ >= end_) return;
    if (kLookUps < Tile::kTeamThreads && thread() >= kLookUps) return;
    // Why: a page that is not in the cache must not be read.
    const uint64_t page = page_ < p_.page_count ? page_ : 0u, entry = entry_;
    const uint32_t to = side() + thread() % Tile::kTokens * 16;
    const bool is_v = takes_values();
    store_address(to + (is_v ? 8 : 0),
                  base(is_v) + (page * (is_v ? p_.v.page_stride : p_.k.page_stride) +
                                entry * (is_v ? p_.v.entry_stride : p_.k.entry_stride)));
    if constexpr (!kSplit) {
      store_address(to + 8, base(true) + (page * p_.v.page_stride + entry * p_.v.entry_stride));
    }
  }

  // Page or token 0 of what this thread looks up. Why not in registers but for the narrow tile: the
  // wide one has none left.
  __device__ __forceinline__ const uint4* base(bool is_v) const {
    if constexpr (Tile::kNarrow) {
      return base_[is_v && !kSplit];
    } else {
      return is_v ? queue_.works[current_].values : queue_.works[current_].keys;
    }
  }

  // From a lane's first chunk to that of round i, j kLanes to the right. Stages are multiples of
  // 128 bytes where chunks are swizzled, so low bits of addresses are those of offsets.
  template <typename Rows>
  static __device__ __forceinline__ uint32_t later(uint32_t first, int i, int j) {
    const int row = i * kRowsAtOnce;
    if constexpr (Rows::kXor) {
      static_assert(Tile::kStageBytes % 128 == 0 && Tile::kKeyBytes % 128 == 0, "see above");
      const int flip = (Rows::offset(row, 0) - row * Rows::kStride) / 16;  // the row's swizzle
      const int right = j * kLanes;
      return (first ^ ((flip ^ (right & Rows::kMask)) * 16)) + row * Rows::kStride +
             (right & ~Rows::kMask) * 16;
    } else {
      return first + row * Rows::kStride + j * kLanes * 16;
    }
  }

  // Where the table has the addresses of this thread's row in round i; without one, of another.
  __device__ __forceinline__ uint32_t entry_of(int i) const {
    const int row = static_cast<int>(row_) + i * kRowsAtOnce;
    return side() + (Tile::kTokens % kRowsAtOnce == 0 ? row : min(row, Tile::kTokens - 1)) * 16;
  }

  // Copies the row of round i of the group from next_ on; zeros if it does not exist.
  __device__ __forceinline__ void copy_rows(int i, const uint64_t (&rows)[2]) {
    const uint32_t stage = next_number() * Tile::kStageBytes;
    const int row = static_cast<int>(row_) + i * kRowsAtOnce;
    if (Tile::kTokens % kRowsAtOnce != 0 && row >= Tile::kTokens) return;
    const bool exists = next_ + row < end_;
    const uint4* k = reinterpret_cast<const uint4*>(rows[0]) + lane_;
    const uint4* v = reinterpret_cast<const uint4*>(rows[1]) + lane_;
#pragma unroll
    for (int j = 0; j < kKeyChunks / kLanes; ++j) {
      copy_async(stage + later<typename Tile::KeyRows>(key_target_, i, j), k + j * kLanes, exists,
                 policy_);
    }
#pragma unroll
    for (int j = 0; j < kValueChunks / kLanes; ++j) {
      copy_async(stage + later<typename Tile::ValueRows>(value_target(), i, j), v + j * kLanes,
                 exists, policy_);
    }
  }

  // The group from next_ on, if there is one, is under way; on to the one behind it.
  __device__ __forceinline__ void count_load() {
    side_ ^= 1;
    if (next_ >= end_) return;
    ++loading_;
    next_ += kStep;
    if (next_ >= end_ && waiting_ >= 0) take_piece();
    find_pages();
  }

  __device__ __forceinline__ void load() {
    if (next_ < end_) {
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        uint64_t rows[2];  // addresses of keys and values
        load_addresses(rows, entry_of(i));
        copy_rows(i, rows);
      }
      count_load();
    }
    close_copies();
  }

  const AttentionParams& p_;
  const AttentionQueue<Tile>& queue_;
  uint32_t ring_;
  uint32_t table_;  // [2, kTokens, keys and values] addresses
  int team_;
  uint32_t row_, lane_;
  uint32_t key_target_, value_target_;
  CopyPolicy<Tile::kNarrow> policy_;  // the tokens of other tiles are read by many CTAs
  int stage_ = 0;                     // that is consumed next
  int loading_ = 0;                   // stages from it on that are loaded, or under way
  // What is loaded.
  int current_ = 0;  // its slot
  const uint4* base_[2];
  uint32_t page_start_ = 0;
  int32_t next_ = 0, end_ = 0;
  uint32_t page_ = 0, entry_ = 0;  // of this thread's token, of the group from next_ on
  int side_ = 0;                   // of the table
  int waiting_ = -1;               // comes after it
};

#endif  // __CUDACC__

}  // namespace precast
