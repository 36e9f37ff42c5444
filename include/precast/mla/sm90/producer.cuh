// SPDX-License-Identifier: Apache-2.0
// The producer warps of MLA for sm_90a. All four copy KV blocks; one of them copies Q, too, and a
// lane of another one finds work tiles.
//
// A panel has a barrier of its own, so that the first of them is multiplied while the others are on
// their way. Pages of a multiple of four tokens are copied by TMA: a warp takes every fourth panel,
// and each lane a box of it, whose tokens lie in one page. A page of 64 tokens is one box a panel,
// or two. Pages of other sizes are copied with cp.async: a warp takes a quarter of the rows of each
// panel. All of this makes the same panels, so the page size does not change a bit of the result.
//
// What lies behind the end of a work tile is not copied. It is scores that are masked, and values
// that the consumers set to 0.
#pragma once

#include "precast/attention/sm90/producer.cuh"
#include "precast/mla/sm90/params.cuh"

namespace precast {

#if defined(__CUDACC__) && defined(PRECAST_SM)

// What producers that copy and those that convert share: the copies of Q, and which stage is next.
template <typename Tile>
class MlaProducer : protected Sm90WorkProducer<Tile, MlaSm90Storage<Tile>, MlaParams> {
 protected:
  using Storage = MlaSm90Storage<Tile>;
  using Base = Sm90WorkProducer<Tile, Storage, MlaParams>;
  using Base::p_, Base::shared_;

  __device__ __forceinline__ MlaProducer(const MlaSm90Params& params, Storage& shared,
                                         MlaSm90Buffers<Tile> buffers)
      : Base(params.p, shared), params_(params), buffers_(buffers) {}

 public:
  // The producer warps that read work tiles.
  static __device__ __forceinline__ uint32_t work_readers(const MlaSm90Params&) { return 4; }

 protected:
  // Calls copy(block, blocks) for each work tile with KV tokens, of which it has so many blocks.
  template <typename Copy>
  __device__ __forceinline__ void for_each_work_of_all(int warp, const Copy& copy) {
    Base::for_each_work_of_all(
        warp, [&](const BlockInfo& block) { copy_queries(block); },
        [&](const BlockInfo& block) {
          const int32_t blocks = num_kv_blocks<Tile>(block.work);
          if (blocks <= 0) return;
          copy(block, blocks);
          counts_.add_tile(blocks);
        });
  }

  // The stage of KV block i of the work tile.
  __device__ __forceinline__ MlaStage<Tile> stage_of(int32_t i) const {
    return {i % 2, counts_.blocks(i % 2, i / 2)};
  }

  // Waits until half a stage is empty.
  __device__ __forceinline__ void wait_empty(const MlaStage<Tile>& stage, int half) const {
    mbarrier_wait_parity(&shared_.empty[stage.index][half], stage.parity ^ 1,
                         "an empty half of a stage");
  }

  // Copies the queries of a work tile that has KV tokens, the first panels first. All lanes of a
  // warp call it.
  __device__ __forceinline__ void copy_queries(const BlockInfo& block) const {
    if (block.work.kv_begin >= block.work.kv_end) return;
    mbarrier_wait_parity(&shared_.query_empty, counts_.tile_parity() ^ 1, "an empty buffer of Q");
    // Why not threadIdx.x: what follows from it would take registers in the loop over blocks.
    const int lane = static_cast<uint32_t>(Tile::thread()) % 32, rows = params_.query_box_rows;
    const int boxes = (block.num_rows + rows - 1) / rows;
    const uint32_t bytes = boxes * rows * 128;
    if (lane < Tile::kQueryPanels) mbarrier_arrive_expect_tx(&shared_.query_full[lane], bytes);
    __syncwarp();
    for (int i = lane; i < boxes * Tile::kQueryPanels; i += 32) {
      const int panel = i / boxes, row = (i - panel * boxes) * rows;
      const PackGqaRow packed(p_, block, row);
      const bool is_pe = Tile::kDimKpe > 0 && panel == Tile::kCkvPanels;
      copy_box(buffers_.q() + panel * Tile::kPanelBytes + row * 128,
               is_pe ? &params_.q_pe : &params_.q, &shared_.query_full[panel],
               is_pe ? 0 : panel * Tile::kPanelColumns, packed.q_head,
               block.work.q_begin + packed.q_idx, 0);
    }
  }

  const MlaSm90Params& params_;
  const MlaSm90Buffers<Tile> buffers_;

 private:
  MlaCounts<Tile> counts_;  // of the work tiles before this one
};

template <typename Tile>
class MlaCopyProducer : MlaProducer<Tile> {
  using Base = MlaProducer<Tile>;
  using Base::buffers_, Base::p_, Base::params_, Base::shared_;
  static constexpr int kWarps = 4, kRowsOfWarp = Tile::kBlockN / kWarps;

 public:
  using Base::work_readers;

  __device__ __forceinline__ MlaCopyProducer(const MlaSm90Params& params,
                                             MlaSm90Storage<Tile>& shared,
                                             MlaSm90Buffers<Tile> buffers)
      : Base(params, shared, buffers) {}

  static __device__ __forceinline__ void init(const MlaSm90Params&, MlaSm90Storage<Tile>& shared) {
    shared.init(Tile::kCopiesBoxes ? 1 : kWarpgroupSize);
  }

  __device__ __forceinline__ void run(int warp) {
    this->for_each_work_of_all(warp, [&](const BlockInfo& block, int32_t blocks) {
      if constexpr (Tile::kCopiesBoxes) {
        copy_boxes(warp, block, blocks);
      } else {
        copy_rows(warp, block, blocks);
      }
    });
  }

 private:
  // Calls copy(panel) for each panel of a stage that this warp copies, once its place is empty:
  // those of ckv half by half, and then that of kpe, in whose place was the P that the consumer who
  // does not own the stage has read. Why no warp waits for what it does not copy: a stage is used
  // again without it, so that it may miss a phase.
  template <typename Copies, typename Copy>
  __device__ __forceinline__ void for_each_panel(const MlaStage<Tile>& stage, const Copies& copies,
                                                 const Copy& copy) const {
#pragma unroll
    for (int half = 0; half < Tile::kConsumers; ++half) {
      const int first = half * Tile::kHalfPanels;
      bool has_panels = false;
#pragma unroll
      for (int i = 0; i < Tile::kHalfPanels; ++i) has_panels |= copies(first + i);
      if (!has_panels) continue;
      this->wait_empty(stage, half);
#pragma unroll
      for (int i = 0; i < Tile::kHalfPanels; ++i) {
        if (copies(first + i)) copy(first + i);
      }
    }
    if (Tile::kDimKpe > 0 && copies(Tile::kCkvPanels)) {
      this->wait_empty(stage, 1 - stage.index % 2);
      copy(Tile::kCkvPanels);
    }
  }

  // Copies this warp's panels of each KV block by TMA.
  __device__ __forceinline__ void copy_boxes(int warp, const BlockInfo& block, int32_t blocks) {
    const WorkTile& work = block.work;
    const int rows = params_.box_rows, row = threadIdx.x % 32 * rows;
    const auto look_up = [&](int32_t begin) {
      return row < Tile::kBlockN ? this->find_page(work, begin + row) : 0;
    };
    // The page of a lane's box is looked up behind the copies of the block before, for which they
    // need not wait.
    uint32_t next_page = look_up(first_token<Tile>(work, blocks, 0));
#pragma unroll 1
    for (int32_t i = 0; i < blocks; ++i) {
      const int32_t begin = first_token<Tile>(work, blocks, i);
      const uint32_t page = this->valid_page(next_page), entry = this->entry_of(begin + row);
      const int boxes = (min(Tile::kBlockN, work.kv_end - begin) + rows - 1) / rows;
      const MlaStage<Tile> stage = this->stage_of(i);
      const uint32_t target = buffers_.stage(stage.index) + row * 128;
      const auto copies = [&](int panel) { return panel % kWarps == warp; };
      for_each_panel(stage, copies, [&](int panel) {
        uint64_t* const full = &shared_.full[stage.index][panel];
        if (threadIdx.x % 32 == 0) mbarrier_arrive_expect_tx(full, boxes * rows * 128);
        __syncwarp();
        if (row >= boxes * rows) return;
        const bool is_kpe = panel == Tile::kCkvPanels;
        // L2 has better use for its memory than what is read once, or twice at about the same time.
        copy_box_by_policy(target + panel * Tile::kPanelBytes, is_kpe ? &params_.kpe : &params_.ckv,
                           full, evict_first_policy(), is_kpe ? 0 : panel * Tile::kPanelColumns,
                           entry, page, 0);
      });
      if (i + 1 < blocks) next_page = look_up(begin - Tile::kBlockN);
    }
  }

  // Copies this warp's rows of each KV block with cp.async. A lane copies the same 16 bytes of a
  // panel's row in four rows.
  __device__ __forceinline__ void copy_rows(int warp, const BlockInfo& block, int32_t blocks) {
    constexpr int kRowsOfLane = kRowsOfWarp / 4;
    const WorkTile& work = block.work;
    const int lane = threadIdx.x % 32, chunk = lane % 8, first_row = warp * kRowsOfWarp;
    const int own_row = first_row + lane % kRowsOfWarp;  // whose page this lane looks up
    uint32_t next_page = this->find_page(work, first_token<Tile>(work, blocks, 0) + own_row);
#pragma unroll 1
    for (int32_t i = 0; i < blocks; ++i) {
      const int32_t begin = first_token<Tile>(work, blocks, i), count = work.kv_end - begin;
      const uint32_t page = this->valid_page(next_page);
      const MlaStage<Tile> stage = this->stage_of(i);
      uint64_t rows[kRowsOfLane];
      const auto find_rows = [&](const AttentionCache& cache) {
        const uint64_t own = this->row_address(cache, 0, page, begin + own_row);
#pragma unroll
        for (int j = 0; j < kRowsOfLane; ++j) {
          rows[j] = __shfl_sync(0xffffffffu, own, 4 * j + lane / 8) + chunk * 16;
        }
      };
      find_rows(p_.v);
      const auto copies = [](int) { return true; };
      for_each_panel(stage, copies, [&](int panel) {
        if (panel == Tile::kCkvPanels) find_rows(p_.k);
        const uint32_t target = buffers_.stage(stage.index) + panel * Tile::kPanelBytes;
        const int column = panel == Tile::kCkvPanels ? 0 : panel * 128;  // bytes
#pragma unroll
        for (int j = 0; j < kRowsOfLane; ++j) {
          const int row = first_row + 4 * j + lane / 8;
          cp_async(target + Tile::Panel::offset(row, chunk),
                   reinterpret_cast<const void*>(rows[j] + column), row < count);
        }
        cp_async_arrive(&shared_.full[stage.index][panel]);
      });
      if (i + 1 < blocks) next_page = this->find_page(work, begin - Tile::kBlockN + own_row);
    }
  }
};

#endif  // __CUDACC__ && PRECAST_SM

}  // namespace precast
