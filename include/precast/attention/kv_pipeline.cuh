// SPDX-License-Identifier: Apache-2.0
// KvPipeline: copies of keys and values from global to shared memory, by cp.async through a
// circular buffer of Tile::kStages stages, with look-up of the page table. All threads are
// producers and consumers. The pipeline does not drain between work tiles: while the last KV blocks
// of one are in use, the first of the next arrive.
//
// Layout   a stage holds K [kBlockN, KeyRows::kStride bytes], then V [kBlockN, ValueRows::kStride]
// Threads  in the 16-row tile each warp has a pipeline of its own, else the CTA has one
//
// This file has the class and its stages. attention/kv_pages.cuh finds out where rows lie, and
// attention/kv_rows.cuh, which is to be included, copies them.
#pragma once

#include "precast/attention/kv_format.cuh"
#include "precast/attention/query.cuh"
#include "precast/core/cp_async.cuh"

namespace precast {

#if defined(__CUDACC__)

constexpr int common_divisor(int a, int b) { return b == 0 ? a : common_divisor(b, a % b); }

__device__ __forceinline__ void store_address(uint32_t to, const void* address) {
  asm volatile("st.shared.u64 [%0], %1;" ::"r"(to), "l"(address) : "memory");
}

__device__ __forceinline__ void load_addresses(uint64_t (&x)[2], uint32_t from) {
  asm volatile("ld.shared.v2.u64 {%0, %1}, [%2];" : "=l"(x[0]), "=l"(x[1]) : "r"(from) : "memory");
}

// The pipeline of a warp (16-row tile) or of the CTA. With `warp_kv` = w of kPipelines, it takes
// the KV blocks w, w + kPipelines, ... of a work tile. Use:
//
//   set_next_tile(); fill();                     once per work tile
//   consumer_wait() ... producer_load() ...      for each KV block
//   producer_commit() ... publish_addresses_ahead()
//
// Each KV block commits one group of copies, which is empty if there is nothing to load. So
// consumer_wait() always waits for the same number of groups.
template <typename Tile, typename KV>
class KvPipeline {
  static constexpr int kKeyChunks = Tile::KeyRows::kChunks;
  static constexpr int kValueChunks = Tile::ValueRows::kChunks;
  static constexpr int kLanes = common_divisor(common_divisor(kKeyChunks, kValueChunks), 8);
  static constexpr int kRowsPerRound = Tile::kPipelineThreads / kLanes;
  static constexpr int kRounds = (Tile::kBlockN + kRowsPerRound - 1) / kRowsPerRound;
  static constexpr int kElementsPerChunk = 128 / KvFormat<KV>::kBits;  // of global memory
  static constexpr bool kIsPacked = KvFormat<KV>::kIsPacked;
  static_assert(!kIsPacked || Tile::kVSplits == 1, "a CTA has all columns of packed values");
  // Rounds of packed rows that are in flight together in the 16-row tile, up to 16 chunks of a
  // lane.
  static constexpr int kChunksPerRound = (kKeyChunks + kValueChunks) / kLanes;
  static constexpr int kFittingRounds = kChunksPerRound >= 16 ? 1 : 16 / kChunksPerRound;
  static constexpr int kPackedRounds = kFittingRounds < kRounds ? kFittingRounds : kRounds;
  // Whether K and V of a token are looked up by different threads, or, where there are fewer
  // threads than that needs, by one.
  static constexpr bool kSeparateKvLookups = 2 * Tile::kBlockN <= Tile::kPipelineThreads;
  // Whether rows of K and of V lie alike in their halves of a stage.
  static constexpr bool kSameStride = Tile::KeyRows::kStride == Tile::ValueRows::kStride;
  static constexpr int kLookupThreads = (kSeparateKvLookups ? 2 : 1) * Tile::kBlockN;

 public:
  // Whether copies start between the MMAs, by producer_load(), and not in consumer_wait(). Why: to
  // start them all at once before the MMAs took the warps a fifth of the time of the 128-row tile.
  static constexpr bool kOverlapsMma = !Tile::kWarpsSplitKv && Tile::kStages > 1;

  // `smem_kv` [kStages] and `table` [2, kBlockN, K and V] are shared addresses.
  __device__ __forceinline__ KvPipeline(const AttentionParams& p, const WorkTileQueue<Tile>& queue,
                                        uint32_t smem_kv, uint32_t table, int warp_kv)
      : p_(p), queue_(queue), smem_kv_(smem_kv), table_(table), warp_kv_(warp_kv) {
    row_ = thread() / kLanes;
    lane_ = thread() % kLanes;
    k_target_ = smem_kv + Tile::KeyRows::offset(row_, lane_);
    keep_in_register(row_);
    keep_in_register(k_target_);
    if constexpr (!kSameStride) {
      v_target_ = smem_kv + Tile::kKeyBytes + Tile::ValueRows::offset(row_, lane_);
      keep_in_register(v_target_);
    }
  }

  // Sets the queue slot of the work tile to load once all copies of the current one have started;
  // -1: there is none.
  __device__ __forceinline__ void set_next_tile(int slot) {
    if (next_slot_ >= 0) start_next_tile();
    next_slot_ = slot;
    if (next_slot_ >= 0 && next_token_ >= end_token_) start_next_tile();
  }

  // Instead of set_next_tile(), before the previous grid has ended: looks up pages as they are now,
  // and prefetches the first KV block. look_up_again() must follow after that grid, and then
  // has_looked_up_wrong() before what fill() copies is used.
  __device__ __forceinline__ void start_early(int slot) {
    next_slot_ = slot;
    switch_tile();
    look_up_pages<true>();
    early_page_ = page_;
    prefetch_block();
  }

  __device__ __forceinline__ void look_up_again() {
    look_up_pages();
    late_page_ = page_;
    page_ = early_page_;
  }

  __device__ __forceinline__ bool has_looked_up_wrong() const { return late_page_ != early_page_; }

  // Back to the state before the first work tile. Its copies must have ended.
  __device__ __forceinline__ void reset() {
    read_stage_ = loaded_stages_ = 0;
    next_token_ = end_token_ = 0;
    table_half_ = 0;
    next_slot_ = -1;
  }

  // Tokens of a KV block, and from one block of this pipeline to the next.
  __device__ __forceinline__ int32_t block_tokens() const {
    return Tile::kBlockN >> (Tile::kMayPairHeads ? p_.pair_shift : 0);
  }
  __device__ __forceinline__ int32_t token_step() const {
    return Tile::kPipelines * block_tokens();
  }

  // Starts copies until all stages but one are loaded. Call it before the first consumer_wait() of
  // a work tile.
  __device__ __forceinline__ void fill() {
    for (int i = loaded_stages_; i < Tile::kStages - 1; ++i) {
      publish_addresses();
      barrier();
      load_block();
    }
    if constexpr (kOverlapsMma) publish_addresses();
  }

  // Waits for the next KV block and returns the shared address of its keys; its values follow.
  // Without kOverlapsMma it also starts the copies of another block.
  __device__ __forceinline__ uint32_t consumer_wait() {
    if constexpr (Tile::kStages == 1) {
      publish_addresses();
      barrier();
      load_block();
      cp_async_wait_group<0>();
      barrier();
    } else {
      cp_async_wait_group<Tile::kStages - 2>();
      if constexpr (!kOverlapsMma) publish_addresses();
      barrier();
      if constexpr (!kOverlapsMma) load_block();
    }
    const uint32_t stage = smem_kv_ + read_stage_ * Tile::kStageBytes;
    if constexpr (!kOverlapsMma) advance_read_stage();
    return stage;
  }

  // With kOverlapsMma: starts the copies of another KV block, in kParts calls, once after each
  // consumer_wait(). After the last block it copies zeros to a stage that is not read. With three
  // stages it must not: it would write the same stage twice, with the first copies in flight.
  template <int kPart = 0, int kParts = 1>
  __device__ __forceinline__ void producer_load() {
    if constexpr (kOverlapsMma) {
      if (Tile::kStages > 2 && next_token_ >= end_token_) return;
      constexpr int kBegin = kPart * kRounds / kParts, kEnd = (kPart + 1) * kRounds / kParts;
      if constexpr (kIsPacked) {
        convert_rows<kBegin, kEnd>();
        return;
      }
      uint64_t rows[2][2];  // addresses of K and V, of this round and the next
      load_addresses(rows[0], table_entry(kBegin));
#pragma unroll
      for (int i = kBegin; i < kEnd; ++i) {
        if (i + 1 < kEnd) load_addresses(rows[(i + 1 - kBegin) % 2], table_entry(i + 1));
        copy_row(i, rows[(i - kBegin) % 2]);
      }
    }
  }

  // With kOverlapsMma: commits those copies. Call it after the last producer_load() of the block.
  __device__ __forceinline__ void producer_commit() {
    if constexpr (kOverlapsMma) {
      advance_write_block();
      cp_async_commit_group();
      advance_read_stage();
    }
  }

  // With kOverlapsMma: call it between producer_commit() and the next consumer_wait(), as late as
  // possible, because the page table is still being read.
  __device__ __forceinline__ void publish_addresses_ahead() {
    if constexpr (kOverlapsMma) publish_addresses();
  }

  // Between work tiles: the offset of a stage that nothing is copied to before the next
  // consumer_wait().
  __device__ __forceinline__ int free_stage_offset() const {
    return (read_stage_ == 0 ? Tile::kStages - 1 : read_stage_ - 1) * Tile::kStageBytes;
  }

 private:
  static __device__ __forceinline__ int thread() { return threadIdx.x % Tile::kPipelineThreads; }

  static __device__ __forceinline__ void barrier() {
    if constexpr (Tile::kPipelineThreads == 32) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  // The token, in its KV block, of a row of a stage.
  __device__ __forceinline__ int token_of(int row) const {
    return Tile::kMayPairHeads ? row >> p_.pair_shift : row;
  }

  // Whether this thread looks up the page of a token for V.
  static __device__ __forceinline__ bool looks_up_v() {
    return kSeparateKvLookups && thread() >= Tile::kBlockN;
  }

  __device__ __forceinline__ void advance_read_stage() {
    --loaded_stages_;
    read_stage_ = read_stage_ + 1 == Tile::kStages ? 0 : read_stage_ + 1;
  }

  __device__ __forceinline__ uint32_t v_target() const {
    return kSameStride ? k_target_ + Tile::kKeyBytes : v_target_;
  }

  // The half of the table for the KV block that is loaded next.
  __device__ __forceinline__ uint32_t table_half() const {
    return table_ + (Tile::kStages == 2 && !kOverlapsMma ? write_stage() : table_half_) *
                        (Tile::kBlockN * 16);
  }

  // The stage that is loaded next.
  __device__ __forceinline__ int write_stage() const {
    const int stage = read_stage_ + loaded_stages_;
    return stage >= Tile::kStages ? stage - Tile::kStages : stage;
  }

  // Counts the KV block at next_token_ as loaded, if there is one, and goes on to the one after it.
  __device__ __forceinline__ void advance_write_block() {
    table_half_ ^= 1;
    if (next_token_ >= end_token_) return;
    ++loaded_stages_;
    next_token_ += token_step();
    if (next_token_ >= end_token_ && next_slot_ >= 0) switch_tile();
    look_up_pages();
  }

  // Starts and commits the copies of a KV block.
  __device__ __forceinline__ void load_block() {
    if (next_token_ < end_token_) {
      if constexpr (kIsPacked) {
        convert_rows<0, kRounds>();
      } else {
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
          uint64_t rows[2];  // addresses of K and V
          load_addresses(rows, table_entry(i));
          copy_row(i, rows);
        }
      }
      advance_write_block();
    }
    cp_async_commit_group();
  }

  // -- attention/kv_pages.cuh ---------------------------------------------------------------------

  __device__ __forceinline__ void start_next_tile();
  __device__ __forceinline__ void switch_tile();
  template <bool kEarly = false>
  __device__ __forceinline__ void look_up_pages();
  __device__ __forceinline__ void prefetch_block() const;
  __device__ __forceinline__ void publish_addresses();
  __device__ __forceinline__ const uint4* base(bool is_v) const;

  // -- attention/kv_rows.cuh ----------------------------------------------------------------------

  __device__ __forceinline__ uint32_t table_entry(int i) const;
  __device__ __forceinline__ void copy_row(int i, const uint64_t (&rows)[2]);
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void convert_rows();
  template <int kCount, int kChunks>
  __device__ __forceinline__ void load_packed_rows(PackedChunk (&chunks)[kCount][kChunks],
                                                   int first, const AttentionCache& cache,
                                                   const AttentionScales& scales) const;
  template <int kCount>
  __device__ __forceinline__ void load_packed_row(PackedChunk (&chunks)[kCount],
                                                  const AttentionCache& cache,
                                                  const AttentionScales& scales, uint64_t slot,
                                                  bool exists) const;
  template <typename Rows, int kCount, int kChunks>
  __device__ __forceinline__ void store_packed_rows(const PackedChunk (&chunks)[kCount][kChunks],
                                                    int first, uint32_t target) const;
  template <typename Rows>
  static __device__ __forceinline__ uint32_t chunk_address(uint32_t first, int i, int j);

  const AttentionParams& p_;
  const WorkTileQueue<Tile>& queue_;
  uint32_t smem_kv_;  // [kStages, K and V]
  uint32_t table_;    // [2, kBlockN, K and V] global addresses of rows
  int warp_kv_;
  uint32_t row_, lane_;           // the first row that this thread copies, and its lane in it
  uint32_t k_target_, v_target_;  // the shared addresses of its first chunks in stage 0
  CopyPolicy<Tile::kWarpsSplitKv>
      policy_;             // other tiles' tokens are read by many CTAs, so L2 keeps them
  int read_stage_ = 0;     // the stage that is consumed next
  int loaded_stages_ = 0;  // stages from read_stage_ on that are loaded or in flight
  // The work tile that is loaded.
  int slot_ = 0;  // in the queue
  const uint4* base_[2];
  uint32_t kv_start_ = 0;
  int32_t next_token_ = 0, end_token_ = 0;  // where the KV block begins that is loaded next
  uint32_t page_ = 0, page_entry_ = 0;      // of this thread's token of that block
  int table_half_ = 0;
  uint32_t early_page_ = 0, late_page_ = 0;  // see start_early()
  int next_slot_ = -1;                       // the slot of the work tile after it
  int32_t kv_head_ = 0;                      // of packed rows
};

#endif  // __CUDACC__

}  // namespace precast
