// SPDX-License-Identifier: Apache-2.0
// The producer warps of attention for sm_90a, for keys and values of 16 bits. Each warp has one
// task: finding work tiles, or copying Q, K or V of each work tile into its buffers by TMA.
//
// A KV block of ragged keys is one copy. A block of a page table is copied by atoms: eight tokens
// with all their panels. Atoms lie one behind the other, so wgmma reads both layouts by other
// steps of its descriptors. No atom begins in one page and ends in another, because page sizes are
// multiples of eight. Other pages are copied row by row with cp.async, into the layout of ragged
// keys; then each of the four warps copies a quarter of the rows of K and V.
#pragma once

#include "precast/attention/sm90/producer.cuh"
#include "precast/core/cp_async.cuh"

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
    Base::init(shared, params.kv_copy == KvCopy::rows ? kWarpgroupSize : 1);
  }
  // The producer warps that read the ring of work.
  static __device__ __forceinline__ uint32_t work_readers(const Sm90AttentionParams& params) {
    return params.kv_copy == KvCopy::rows ? 4 : 3;
  }

  __device__ __forceinline__ void run(int warp) {
    if (params_.kv_copy == KvCopy::rows) {
      copy_rows_of_work(warp);
    } else if (warp == Base::kWorkWarp) {
      if (threadIdx.x % 32 == 0) this->find_all_work();
    } else if (warp == Base::kQueryWarp) {
      PipelineState<Tile::kQueryStages> state;
      this->for_each_work([&](const BlockInfo& block) { this->copy_queries(block, state); });
    } else if (warp == 0) {
      copy_cache<Tile::kDimK>(params_.k, shared_.k, [&](int stage) { return buffers_.k(stage); });
    } else {
      copy_cache<Tile::kDimV>(params_.v, shared_.v, [&](int stage) { return buffers_.v(stage); });
    }
  }

 private:
  // Copies the KV blocks of each work tile, the last one first. `buffer(stage)` is their address.
  template <int kDim, typename Buffer>
  __device__ __forceinline__ void copy_cache(const TensorMap& map,
                                             PipelineBarriers<Tile::kStages>& barriers,
                                             const Buffer& buffer) {
    PipelineState<Tile::kStages> state;
    const bool has_atoms = params_.kv_copy == KvCopy::atoms;
    const int lane = threadIdx.x % 32;
    this->for_each_work([&](const BlockInfo& block) {
      const WorkTile& work = block.work;
      const int32_t kv_end = work.kv_end, kv_head = block.kv_head;
      int32_t begin = work.kv_begin + num_kv_blocks<Tile>(work) * Tile::kBlockN;
      // The page of a lane's atom is looked up while it waits for a buffer of the block before.
      uint32_t page = 0;
      const auto look_up = [&] {
        if (has_atoms) page = this->find_page(work, begin - Tile::kBlockN + lane * kAtomRows);
      };
      if (begin > work.kv_begin) look_up();
      while (begin > work.kv_begin) {
        begin -= Tile::kBlockN;
        barriers.wait_empty(state, "an empty buffer of K or V");
        uint64_t* const full = &barriers.full[state.stage];
        const uint32_t target = buffer(state.stage);
        if (!has_atoms) {
          if (lane == 0) {
            mbarrier_arrive_expect_tx(full, Tile::kBlockN * kDim * 2);
            copy_box(target, &map, full, 0, work.kv_start + begin, 0, kv_head);
          }
        } else {
          constexpr uint32_t kAtomBytes = kAtomRows * kDim * 2;
          const int atoms = (min(Tile::kBlockN, kv_end - begin) + kAtomRows - 1) / kAtomRows;
          if (lane == 0) mbarrier_arrive_expect_tx(full, atoms * kAtomBytes);
          __syncwarp();
          if (lane < atoms) {
            copy_box(target + lane * kAtomBytes, &map, full, 0,
                     this->entry_of(begin + lane * kAtomRows), 0, kv_head, this->valid_page(page));
          }
        }
        if (begin > work.kv_begin) look_up();
        state.advance();
      }
    });
  }

  // Copies this warp's rows of K and V of each work tile, the last block first.
  __device__ __forceinline__ void copy_rows_of_work(int warp) {
    PipelineState<Tile::kStages> kv;
    const int first_row = warp * kRowsOfWarp, own_row = first_row + threadIdx.x % 32;
    this->for_each_work_of_all(warp, [&](const BlockInfo& block) {
      const WorkTile& work = block.work;
      int32_t begin = work.kv_begin + num_kv_blocks<Tile>(work) * Tile::kBlockN;
      uint32_t next_page = 0;
      const auto look_up = [&] {
        next_page = this->find_page(work, begin - Tile::kBlockN + own_row);
      };
      if (kLooksAhead && begin > work.kv_begin) look_up();
      while (begin > work.kv_begin) {
        if (!kLooksAhead) look_up();
        begin -= Tile::kBlockN;
        const uint32_t page = this->valid_page(next_page);
        copy_rows<Tile::kDimK>(p_.k, block, begin, first_row, page, shared_.k, kv, buffers_.k(0));
        copy_rows<Tile::kDimV>(p_.v, block, begin, first_row, page, shared_.v, kv, buffers_.v(0));
        if (kLooksAhead && begin > work.kv_begin) look_up();
        kv.advance();
      }
    });
  }

  // Copies this warp's rows, from `first_row` on, of the KV block at token `begin`. Those behind
  // the end of the work tile become 0. `page` is that of this lane's row.
  template <int kDim>
  __device__ __forceinline__ void copy_rows(const AttentionCache& cache, const BlockInfo& block,
                                            int32_t begin, int first_row, uint32_t page,
                                            PipelineBarriers<Tile::kStages>& barriers,
                                            const PipelineState<Tile::kStages>& state,
                                            uint32_t buffer) const {
    constexpr int kChunks = kDim / 8;  // of 16 bytes
    constexpr int kUnroll = kLooksAhead ? 2 : 1;
    const int lane = threadIdx.x % 32;
    const uint64_t own = this->row_address(cache, block.kv_head, page, begin + first_row + lane);
    const int32_t count = block.work.kv_end - begin - first_row;
    const uint32_t target = buffer + state.stage * Tile::kBlockN * kDim * 2;
    barriers.wait_empty(state, "an empty buffer of K or V");
#pragma unroll kUnroll
    for (int place = lane; place < kRowsOfWarp * kChunks; place += 32) {
      const int row = place / kChunks, chunk = place % kChunks, block_row = first_row + row;
      const uint64_t source = __shfl_sync(0xffffffffu, own, row);
      const uint32_t offset = chunk / 8 * (Tile::kBlockN * kPanelBytes) + block_row * kPanelBytes +
                              (chunk % 8 ^ row % 8) * 16;
      cp_async(target + offset, reinterpret_cast<const uint4*>(source) + chunk, row < count);
    }
    cp_async_arrive(&barriers.full[state.stage]);
  }
};

#endif  // __CUDACC__

}  // namespace precast
