// SPDX-License-Identifier: Apache-2.0
// What a KvPipeline (attention/kv_pipeline.cuh) copies: kLanes neighbouring lanes a row, in rounds
// of as many rows as it has lanes for.
//
// NVFP4 is converted to f16 on the way: a lane loads the codes of eight numbers and the scale of
// their block, and stores what a chunk of f16 is.
//
// Tokens past the end of a work tile become zeros, whatever their page holds. Why: P is 0 for them,
// but 0 * NaN is NaN.
#pragma once

#include "precast/attention/kv_pages.cuh"

namespace precast {

#if defined(__CUDACC__)

// The table entry of this thread's row in round i. A thread without a row gets that of another.
template <typename Tile, typename KV>
__device__ __forceinline__ uint32_t KvPipeline<Tile, KV>::table_entry(int i) const {
  const int row = static_cast<int>(row_) + i * kRowsPerRound;
  return table_half() +
         (Tile::kBlockN % kRowsPerRound == 0 ? row : min(row, Tile::kBlockN - 1)) * 16;
}

// Starts the copy of this thread's row in round i of the KV block at next_token_. A token past
// the end becomes zeros.
template <typename Tile, typename KV>
__device__ __forceinline__ void KvPipeline<Tile, KV>::copy_row(int i, const uint64_t (&rows)[2]) {
  const uint32_t stage = write_stage() * Tile::kStageBytes;
  const int row = static_cast<int>(row_) + i * kRowsPerRound;
  if (Tile::kBlockN % kRowsPerRound != 0 && row >= Tile::kBlockN) return;
  const bool exists = next_token_ + token_of(row) < end_token_;
  const uint4* k = reinterpret_cast<const uint4*>(rows[0]) + lane_;
  const uint4* v = reinterpret_cast<const uint4*>(rows[1]) + lane_;
#pragma unroll
  for (int j = 0; j < kKeyChunks / kLanes; ++j) {
    cp_async(stage + chunk_address<typename Tile::KeyRows>(k_target_, i, j), k + j * kLanes, exists,
             policy_);
  }
#pragma unroll
  for (int j = 0; j < kValueChunks / kLanes; ++j) {
    cp_async(stage + chunk_address<typename Tile::ValueRows>(v_target(), i, j), v + j * kLanes,
             exists, policy_);
  }
}

// The same for packed rows in rounds from kBegin to kEnd, which arrive at once. Why larger tiles
// take one round and one of K and V at a time: they have no registers left.
template <typename Tile, typename KV>
template <int kBegin, int kEnd>
__device__ __forceinline__ void KvPipeline<Tile, KV>::convert_rows() {
  if constexpr (Tile::kWarpsSplitKv) {
#pragma unroll
    for (int i = kBegin; i < kEnd; i += kPackedRounds) {
      PackedChunk k[kPackedRounds][kKeyChunks / kLanes];
      PackedChunk v[kPackedRounds][kValueChunks / kLanes];
      load_packed_rows(k, i, p_.k, p_.k_scales);
      load_packed_rows(v, i, p_.v, p_.v_scales);
      store_packed_rows<typename Tile::KeyRows>(k, i, k_target_);
      store_packed_rows<typename Tile::ValueRows>(v, i, v_target());
    }
  } else {
#pragma unroll 1
    for (int i = kBegin; i < kEnd; ++i) {
      PackedChunk k[1][kKeyChunks / kLanes], v[1][kValueChunks / kLanes];
      load_packed_rows(k, i, p_.k, p_.k_scales);
      store_packed_rows<typename Tile::KeyRows>(k, i, k_target_);
      load_packed_rows(v, i, p_.v, p_.v_scales);
      store_packed_rows<typename Tile::ValueRows>(v, i, v_target());
    }
  }
}

// Loads this lane's chunks of rows of K or V in kCount rounds from `first` on.
template <typename Tile, typename KV>
template <int kCount, int kChunks>
__device__ __forceinline__ void KvPipeline<Tile, KV>::load_packed_rows(
    PackedChunk (&chunks)[kCount][kChunks], int first, const AttentionCache& cache,
    const AttentionScales& scales) const {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int row = static_cast<int>(row_) + (first + i) * kRowsPerRound;
    const bool exists = row < Tile::kBlockN && next_token_ + row < end_token_;
    uint64_t slot[2];  // page and entry, and what is not used
    load_addresses(slot, table_entry(first + i));
    load_packed_row(chunks[i], cache, scales, slot[0], exists);
  }
}

// Loads this lane's chunks of a row of K or V; `slot`: its page and entry.
template <typename Tile, typename KV>
template <int kCount>
__device__ __forceinline__ void KvPipeline<Tile, KV>::load_packed_row(PackedChunk (&chunks)[kCount],
                                                                      const AttentionCache& cache,
                                                                      const AttentionScales& scales,
                                                                      uint64_t slot,
                                                                      bool exists) const {
  const uint64_t page = slot >> 32, entry = slot & 0xffffffffu;
  const int64_t head = kv_head_;
  const unsigned char* codes = reinterpret_cast<const unsigned char*>(
      static_cast<const uint4*>(cache.data) + head * cache.head_stride +
      (page * cache.page_stride + entry * cache.entry_stride));
  const unsigned char* factors = scales.data + head * scales.head_stride +
                                 static_cast<int64_t>(page) * scales.page_stride +
                                 static_cast<int64_t>(entry) * scales.entry_stride;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const int chunk = static_cast<int>(lane_) + j * kLanes;  // of eight numbers
    chunks[j].load(codes + chunk * 4, factors + chunk / 2, exists);
  }
}

// Stores chunks of rows to the stage that is loaded; `target`: the shared address of the first one.
template <typename Tile, typename KV>
template <typename Rows, int kCount, int kChunks>
__device__ __forceinline__ void KvPipeline<Tile, KV>::store_packed_rows(
    const PackedChunk (&chunks)[kCount][kChunks], int first, uint32_t target) const {
  const uint32_t stage = write_stage() * Tile::kStageBytes;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int row = static_cast<int>(row_) + (first + i) * kRowsPerRound;
    if (row >= Tile::kBlockN) continue;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      chunks[i][j].store(stage + chunk_address<Rows>(target, first + i, j));
    }
  }
}

// The shared address of a lane's chunk in round i, j * kLanes chunks to the right, from that of
// its first chunk. Where chunks are swizzled, stages are multiples of 128 bytes, so the low bits
// of addresses are those of offsets.
template <typename Tile, typename KV>
template <typename Rows>
__device__ __forceinline__ uint32_t KvPipeline<Tile, KV>::chunk_address(uint32_t first, int i,
                                                                        int j) {
  const int row = i * kRowsPerRound;
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

#endif  // __CUDACC__

}  // namespace precast
