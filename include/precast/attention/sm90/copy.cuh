// SPDX-License-Identifier: Apache-2.0
// The producer warps of attention for sm_90a, for keys and values of 16 bits. Each warp has one
// task: finding work tiles, or copying Q, K or V of each work tile into its buffers by TMA.
//
// A KV block of ragged keys is one copy. A block of a page table is copied by atoms: eight tokens
// with all their panels. Atoms lie one behind the other, so wgmma reads both layouts by other
// steps of its descriptors. No atom begins in one page and ends in another, because page sizes are
// multiples of eight. Of pages of other multiples of four, a copy takes four tokens of one panel,
// into the layout of ragged keys. Pages of other sizes are copied row by row with cp.async, into
// that layout, too; then each of the four warps copies a quarter of the rows of K and V.
#pragma once

#include "precast/attention/sm90/producer.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename Tile>
class Sm90CopyProducer : Sm90Producer<Tile> {
  using Base = Sm90Producer<Tile>;
  using Base::buffers_, Base::p_, Base::params_, Base::shared_;
  static constexpr int kRowsOfWarp = Tile::kBlockN / 4;  // that are copied with cp.async
  // Whether there are registers to look up the pages of the next block early, and for two copies
  // at once.
  static constexpr bool kLooksAhead = Tile::kProducerRegisters >= 56;

 public:
  __device__ __forceinline__ Sm90CopyProducer(const Sm90AttentionParams& params,
                                              Sm90SharedStorage<Tile>& shared,
                                              Sm90Buffers<Tile> buffers)
      : Base(params, shared, buffers) {}

  static __device__ __forceinline__ void init(const Sm90AttentionParams& params,
                                              Sm90SharedStorage<Tile>& shared) {
    const uint32_t arrivals = params.kv_copy == KvCopy::rows ? kWarpgroupSize : 1;
    Base::init(shared, arrivals, arrivals);
  }
  // The producer warps that read work tiles: all of them, or all but the one that finds them.
  static __device__ __forceinline__ uint32_t work_readers(const Sm90AttentionParams& params) {
    return params.kv_copy == KvCopy::rows ? 4 : 3;
  }

  __device__ __forceinline__ void run(int warp) {
    if (params_.kv_copy == KvCopy::rows) {
      copy_rows_of_work(warp);
    } else if (warp == Base::kWorkWarp) {
      if (threadIdx.x % 32 == 0) this->find_all_work();
    } else if (warp == Base::kQueryWarp) {
      uint32_t count = 0;
      this->for_each_work([&](const BlockInfo& block) { this->copy_queries(block, count); });
    } else if (warp == 0) {
      copy_cache<typename Tile::KeyLayout>(params_.k, shared_.k,
                                           [&](int stage) { return buffers_.k(stage); });
    } else {
      copy_cache<typename Tile::ValueLayout>(params_.v, shared_.v,
                                             [&](int stage) { return buffers_.v(stage); });
    }
  }

 private:
  // Copies the KV blocks of each work tile, the last one first. `buffer(stage)` is their address.
  template <typename Layout, typename Buffer>
  __device__ __forceinline__ void copy_cache(const TensorMap& map,
                                             PipelineBarriers<Tile::kStages>& barriers,
                                             const Buffer& buffer) {
    PipelineState<Tile::kStages> state;
    this->for_each_work([&](const BlockInfo& block) {
      const WorkTile& work = block.work;
      int32_t begin = work.kv_begin + num_kv_blocks<Tile>(work) * Tile::kBlockN;
      // The page of a lane's box is looked up while it waits for a buffer of the block before.
      uint32_t page = 0;
      const auto look_up = [&] { page = this->find_page_of_box(work, begin - Tile::kBlockN); };
      if (begin > work.kv_begin) look_up();
      while (begin > work.kv_begin) {
        begin -= Tile::kBlockN;
        barriers.wait_empty(state, "an empty buffer of K or V");
        this->template copy_block<Layout>(map, buffer(state.stage), &barriers.full[state.stage],
                                          block, begin, page);
        if (begin > work.kv_begin) look_up();
        state.advance();
      }
    });
  }

  // Copies this warp's rows of K and V of each work tile, the last block first.
  __device__ __forceinline__ void copy_rows_of_work(int warp) {
    uint32_t count = 0;  // KV blocks until now
    const int first_row = warp * kRowsOfWarp;
    this->for_each_work_of_all(warp, [&](const BlockInfo& block) {
      const WorkTile& work = block.work;
      int32_t begin = work.kv_begin + num_kv_blocks<Tile>(work) * Tile::kBlockN;
      uint32_t next_page = 0;
      const auto own_row = [&] { return first_row + threadIdx.x % 32; };
      const auto look_up = [&] {
        next_page = this->find_page(work, begin - Tile::kBlockN + own_row());
      };
      if (kLooksAhead && begin > work.kv_begin) look_up();
      while (begin > work.kv_begin) {
        if (!kLooksAhead) look_up();
        begin -= Tile::kBlockN;
        const uint32_t page = this->valid_page(next_page);
        const auto state = PipelineState<Tile::kStages>::after(count++);
        const auto copy = [&](auto layout, const AttentionCache& cache, auto& barriers,
                              uint32_t buffer) {
          const uint64_t own = this->row_address(cache, block.kv_head, page, begin + own_row());
          barriers.wait_empty(state, "an empty buffer of K or V");
          this->template copy_rows<decltype(layout), kRowsOfWarp, kLooksAhead ? 2 : 1>(
              own, buffer, first_row, work.kv_end - begin - first_row);
          cp_async_arrive(&barriers.full[state.stage]);
        };
        copy(typename Tile::KeyLayout(), p_.k, shared_.k, buffers_.k(state.stage));
        copy(typename Tile::ValueLayout(), p_.v, shared_.v, buffers_.v(state.stage));
        if (kLooksAhead && begin > work.kv_begin) look_up();
      }
    });
  }
};

#endif  // __CUDACC__

}  // namespace precast
