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
  // The producer warps that read work tiles.
  static __device__ __forceinline__ uint32_t work_readers(const Sm90AttentionParams&) { return 4; }

  __device__ __forceinline__ void run(int warp) {
    this->for_each_work_of_all(warp, [&](const BlockInfo& block) {
      const WorkTile& work = block.work;
      if (params_.kv_copy == KvCopy::rows) {
        pipeline(
            work,
            [&](int32_t begin, uint32_t number) {
              copy_rows_of_warp(block, begin, number, kRowsOfWarp * warp);
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
            work, [&](int32_t begin, uint32_t number) { copy_boxes(block, begin, number, warp); },
            [&](bool, int count) {
              shared_.staged.wait_full(PipelineState<Tile::kStagedStages>::after(transposed_), "V");
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
    using Layout = typename Tile::ValueLayout;
    const bool has_atoms = kHasTma && params_.kv_copy == KvCopy::atoms;
    const ValueTransposer<Tile::kDimV, Layout::kPanelBytes> transposer(
        warp, has_atoms ? Layout::kPanels * Layout::kAtomBytes : Layout::kAtomBytes,
        has_atoms ? Layout::kAtomBytes : Tile::kBlockN * Layout::kPanelBytes);
    const int staged = transposed_ % Tile::kStagedStages, stage = transposed_ % Tile::kStages;
    shared_.v.wait_empty(PipelineState<Tile::kStages>::after(transposed_),
                         "an empty buffer of V^T");
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

  __device__ __forceinline__ void copy_boxes(const BlockInfo& block, int32_t begin, uint32_t number,
                                             int warp) {
    if (warp == 0) {
      const int stage = number % Tile::kStages;
      shared_.k.wait_empty(PipelineState<Tile::kStages>::after(number), "an empty buffer of K");
      copy_boxes<typename Tile::KeyLayout>(params_.k, block, begin, &shared_.k.full[stage],
                                           buffers_.k(stage));
    } else if (warp == 1) {
      const int stage = number % Tile::kStagedStages;
      shared_.staged.wait_empty(PipelineState<Tile::kStagedStages>::after(number),
                                "an empty buffer of V");
      copy_boxes<typename Tile::ValueLayout>(params_.v, block, begin, &shared_.staged.full[stage],
                                             staged_values(buffers_, stage));
    }
  }

  template <typename Layout>
  __device__ __forceinline__ void copy_boxes(const TensorMap& map, const BlockInfo& block,
                                             int32_t begin, uint64_t* full, uint32_t target) const {
    this->template copy_block<Layout>(map, target, full, block, begin,
                                      this->find_page_of_box(block.work, begin));
  }

  // -- Copies by rows -----------------------------------------------------------------------------

  // Copies the rows of this warp, from `first_row` on, of the KV block at token `begin`.
  __device__ __forceinline__ void copy_rows_of_warp(const BlockInfo& block, int32_t begin,
                                                    uint32_t number, int first_row) {
    const uint32_t token = begin + first_row + threadIdx.x % 32;
    const uint32_t page = this->valid_page(this->find_page(block.work, token));
    const int32_t count = block.work.kv_end - begin - first_row;
    const auto copy = [&](auto layout, const AttentionCache& cache, uint32_t target) {
      this->template copy_rows<decltype(layout), kRowsOfWarp, 1>(
          this->row_address(cache, block.kv_head, page, token), target, first_row, count);
    };
    shared_.k.wait_empty(PipelineState<Tile::kStages>::after(number), "an empty buffer of K");
    copy(typename Tile::KeyLayout(), p_.k, buffers_.k(number % Tile::kStages));
    // This warp alone reads its rows of V, and has read those that were here.
    copy(typename Tile::ValueLayout(), p_.v, staged_values(buffers_, number % Tile::kStagedStages));
    cp_async_commit_group();
  }

  Sm90Fp8Storage<Tile>& shared_;
  uint32_t transposed_ = 0;  // KV blocks
};

#endif  // __CUDACC__

}  // namespace precast
