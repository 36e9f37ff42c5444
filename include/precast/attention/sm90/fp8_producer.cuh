// SPDX-License-Identifier: Apache-2.0
// The producer warps of attention for sm_90a whose queries, keys and values are all e4m3. K and V
// are copied as attention/sm90/copy.cuh says: by TMA, K by warp 0 and V by warp 1, or row by row by
// all four. Then all four transpose V, while the copies of the next block are on their way. A K
// that they have copied is full then, too: the fence behind the transposition is for both.
#pragma once

#include "precast/attention/sm90/fp8_tile.cuh"
#include "precast/attention/sm90/producer.cuh"
#include "precast/attention/sm90/transpose.cuh"
#include "precast/core/cp_async.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename Tile>
class Sm90Fp8Producer : Sm90Producer<Tile> {
  using Base = Sm90Producer<Tile>;
  using Base::buffers_, Base::p_, Base::params_;
  static constexpr int kRowsOfWarp = Tile::kBlockN / 4;
  static_assert(kRowsOfWarp == 32, "a row for each lane");

 public:
  __device__ __forceinline__ Sm90Fp8Producer(const Sm90AttentionParams& params,
                                             Sm90Fp8Storage<Tile>& shared,
                                             Sm90Buffers<Tile> buffers)
      : Base(params, shared, buffers), shared_(shared) {}

  static __device__ __forceinline__ void init(const Sm90AttentionParams& params,
                                              Sm90Fp8Storage<Tile>& shared) {
    shared.k.init(params.kv_copy == KvCopy::rows ? 4 : 1, Tile::kConsumerWarps);
    shared.v.init(4, Tile::kConsumerWarps);
    shared.staged.init(1, 4);
  }
  // The producer warps that read the ring of work.
  static __device__ __forceinline__ uint32_t work_readers(const Sm90AttentionParams&) { return 4; }

  __device__ __forceinline__ void run(int warp) {
    this->for_each_work_of_all(warp, [&](const BlockInfo& block) {
      const WorkTile& work = block.work;
      if (params_.kv_copy == KvCopy::rows) {
        pipeline(
            work,
            [&](int32_t begin, uint32_t number) {
              copy_rows(block, begin, number, kRowsOfWarp * warp);
            },
            [&](bool is_last, int count) {
              if (is_last) {
                cp_async_wait_group<0>();
              } else {
                cp_async_wait_group<1>();
              }
              __syncwarp();
              transpose<false>(count, warp);
            });
      } else {
        pipeline(
            work, [&](int32_t begin, uint32_t number) { copy_block(block, begin, number, warp); },
            [&](bool, int count) {
              shared_.staged.wait_full(state_after<Tile::kStagedStages>(transposed_), "V");
              transpose<true>(count, warp);
            });
      }
    });
  }

 private:
  // Calls copy(first token, number) for each KV block of a work tile, the last one first, and
  // transpose(whether it is the last call, tokens from the block's first one on) one block later.
  template <typename Copy, typename Transpose>
  __device__ __forceinline__ void pipeline(const WorkTile& work, const Copy& copy,
                                           const Transpose& transpose) {
    int32_t begin = work.kv_begin + num_kv_blocks<Tile>(work) * Tile::kBlockN;
    if (begin == work.kv_begin) return;
    copy(begin -= Tile::kBlockN, transposed_);
    for (; begin > work.kv_begin; begin -= Tile::kBlockN) {
      copy(begin - Tile::kBlockN, transposed_ + 1);
      transpose(false, work.kv_end - begin);
    }
    transpose(true, work.kv_end - begin);
  }

  template <bool kHasTma>
  __device__ __forceinline__ void transpose(int count, int warp) {
    constexpr uint32_t kAtomBytes = kAtomRows * Tile::kValueRowBytes;
    const bool has_atoms = kHasTma && params_.kv_copy == KvCopy::atoms;
    const ValueTransposer<Tile::kDimV, Tile::kValueRowBytes> transposer(
        warp, has_atoms ? kAtomRows * Tile::kDimV : kAtomBytes,
        has_atoms ? kAtomBytes : Tile::kBlockN * Tile::kValueRowBytes);
    const int staged = transposed_ % Tile::kStagedStages, stage = transposed_ % Tile::kStages;
    shared_.v.wait_empty(state_after<Tile::kStages>(transposed_), "an empty buffer of V^T");
    transposer.run(staged_values(buffers_, staged), buffers_.v(stage), count, warp);
    fence_shared_for_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      if (!kHasTma) mbarrier_arrive(&shared_.k.full[stage]);
      mbarrier_arrive(&shared_.v.full[stage]);
      if (kHasTma) mbarrier_arrive(&shared_.staged.empty[staged]);
    }
    ++transposed_;
  }

  // -- Copies by TMA ------------------------------------------------------------------------------

  __device__ __forceinline__ void copy_block(const BlockInfo& block, int32_t begin, uint32_t number,
                                             int warp) {
    if (warp == 0) {
      const int stage = number % Tile::kStages;
      shared_.k.wait_empty(state_after<Tile::kStages>(number), "an empty buffer of K");
      copy_cache<Tile::kDimK>(params_.k, block, begin, &shared_.k.full[stage], buffers_.k(stage));
    } else if (warp == 1) {
      const int stage = number % Tile::kStagedStages;
      shared_.staged.wait_empty(state_after<Tile::kStagedStages>(number), "an empty buffer of V");
      copy_cache<Tile::kDimV>(params_.v, block, begin, &shared_.staged.full[stage],
                              staged_values(buffers_, stage));
    }
  }

  template <int kDim>
  __device__ __forceinline__ void copy_cache(const TensorMap& map, const BlockInfo& block,
                                             int32_t begin, uint64_t* full, uint32_t target) {
    const int lane = threadIdx.x % 32;
    if (params_.kv_copy == KvCopy::box) {
      if (lane == 0) {
        mbarrier_arrive_expect_tx(full, Tile::kBlockN * kDim);
        copy_box(target, &map, full, 0, block.work.kv_start + begin, 0, block.kv_head);
      }
      return;
    }
    const int32_t tokens = min(Tile::kBlockN, block.work.kv_end - begin);
    const int atoms = (tokens + kAtomRows - 1) / kAtomRows;
    const int32_t token = begin + lane * kAtomRows;
    const uint32_t page = this->find_page(block.work, token);
    if (lane == 0) mbarrier_arrive_expect_tx(full, atoms * (kAtomRows * kDim));
    __syncwarp();
    if (lane < atoms) {
      copy_box(target + lane * (kAtomRows * kDim), &map, full, 0, this->entry_of(token), 0,
               block.kv_head, this->valid_page(page));
    }
  }

  // -- Copies by rows -----------------------------------------------------------------------------

  // Copies the rows of this warp, from `first_row` on, of the KV block at token `begin`.
  __device__ __forceinline__ void copy_rows(const BlockInfo& block, int32_t begin, uint32_t number,
                                            int first_row) {
    const uint32_t found = this->find_page(block.work, begin + first_row + threadIdx.x % 32);
    const uint32_t page = this->valid_page(found);
    const int stage = number % Tile::kStages;
    shared_.k.wait_empty(state_after<Tile::kStages>(number), "an empty buffer of K");
    copy_rows<Tile::kDimK, Tile::kKeyRowBytes>(p_.k, block, begin, first_row, page,
                                               buffers_.k(stage));
    // This warp alone reads its rows of V, and has read those that were here.
    copy_rows<Tile::kDimV, Tile::kValueRowBytes>(
        p_.v, block, begin, first_row, page, staged_values(buffers_, number % Tile::kStagedStages));
    cp_async_commit_group();
  }

  // Those behind the end of the work tile become 0.
  template <int kDim, int kRowBytes>
  __device__ __forceinline__ void copy_rows(const AttentionCache& cache, const BlockInfo& block,
                                            int32_t begin, int first_row, uint32_t page,
                                            uint32_t target) const {
    constexpr int kChunks = kDim / 16, kChunksOfRow = kRowBytes / 16;
    const int lane = threadIdx.x % 32;
    const uint64_t own = this->row_address(cache, block.kv_head, page, begin + first_row + lane);
    const int32_t count = block.work.kv_end - begin - first_row;
#pragma unroll 1
    for (int place = lane; place < kRowsOfWarp * kChunks; place += 32) {
      const int row = place / kChunks, chunk = place % kChunks;
      const uint64_t source = __shfl_sync(0xffffffffu, own, row);
      const int swizzle = kRowBytes == 128 ? row % 8 : row % 8 / 2;
      const uint32_t offset = chunk / kChunksOfRow * (Tile::kBlockN * kRowBytes) +
                              (first_row + row) * kRowBytes + (chunk % kChunksOfRow ^ swizzle) * 16;
      cp_async(target + offset, reinterpret_cast<const uint4*>(source) + chunk, row < count);
    }
  }

  Sm90Fp8Storage<Tile>& shared_;
  uint32_t transposed_ = 0;  // KV blocks
};

#endif  // __CUDACC__

}  // namespace precast
