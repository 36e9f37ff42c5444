// SPDX-License-Identifier: Apache-2.0
// What the producer warps of attention for sm_90a share: the work tiles that one of their threads
// finds, the copies of Q, and the pages of tokens.
#pragma once

#include "precast/attention/sm90/pipeline.cuh"
#include "precast/core/cp_async.cuh"
#include "precast/core/vec.cuh"

namespace precast {

#if defined(__CUDACC__)

// Brings what this CTA reads first of a plan to L2, where the previous grid may still be writing
// it. One warp calls it, before wait_on_dependent_grids(). All CTAs together bring the first
// requests and entries.
__device__ __forceinline__ void prefetch_plan(const TileSchedulerParams& params) {
  constexpr int kLineInts = 32;
  const int32_t cta = blockIdx.x, batch = params.shape.batch, line = cta * kLineInts;
  const PlanLayout layout(batch, params.shape.ctas);
  const int lane = threadIdx.x % 32;
  const auto prefetch = [&](int of_lane, int64_t place) {
    if (lane == of_lane) prefetch_to_l2(params.plan + place);
  };
  prefetch(0, 0);
  prefetch(1, layout.starts + int64_t(cta) * kStartInts);
  prefetch(2, layout.starts + int64_t(cta + 2) * kStartInts - 1);
  if (line < batch * kRequestInts) prefetch(3, layout.requests + line);
  if (line < batch * kEntryInts) prefetch(4, layout.entries + line);
}

// Brings the sinks to L2, which the rows of a tile need when everything else is done.
__device__ __forceinline__ void prefetch_sinks(const AttentionParams& p) {
  constexpr int kLineFloats = 32;
  if (p.sinks == nullptr) return;
  const int heads = p.kv_heads * static_cast<int>(p.group_size.value);
  for (int head = threadIdx.x % 32 * kLineFloats; head < heads; head += 32 * kLineFloats) {
    prefetch_to_l2(p.sinks + head);
  }
}

// Which share of the work this CTA has.
__device__ __forceinline__ int32_t share_of_cta(const AttentionParams&) { return blockIdx.x; }

// What finds work tiles and pages, for producers of any KV blocks. Params are AttentionParams or
// what has more.
template <typename Tile, typename Storage, typename Params>
class Sm90WorkProducer {
 protected:
  static constexpr int kQueryWarp = 2, kWorkWarp = 3;

  __device__ __forceinline__ Sm90WorkProducer(const Params& p, Storage& shared)
      : p_(p), shared_(shared) {}

  // -- Work ---------------------------------------------------------------------------------------

  // Fills the ring, and does nothing else. One thread calls it.
  __device__ __forceinline__ void find_all_work() {
    start_work();
    for (PipelineState<Tile::kWorkSlots> state; find_work(state); state.advance()) continue;
  }

  // Calls visit(block) for each work tile, by all lanes of a warp.
  template <typename Visit>
  __device__ __forceinline__ void for_each_work(const Visit& visit) {
    for (PipelineState<Tile::kWorkSlots> state;; state.advance()) {
      shared_.work.wait_full(state, "work of a producer");
      const WorkSlot& slot = shared_.slots[state.stage];
      if (!slot.is_valid) return;
      visit(slot.block);
      leave_work(state.stage);
    }
  }

  // The same where all four warps copy K or V: then one of them calls copy_queries(block), too, and
  // one of its lanes finds work. If there are registers, it finds the next work tile before its
  // warp copies this one, so that the others need not wait for it.
  template <typename CopyQueries, typename Visit>
  __device__ __forceinline__ void for_each_work_of_all(int warp, const CopyQueries& copy_queries,
                                                       const Visit& visit) {
    constexpr bool kLooksAhead = Tile::kProducerRegisters >= 56;
    const bool finds_work = warp == kWorkWarp && threadIdx.x % 32 == 0;
    if (finds_work) start_work();
    const auto process = [&](int stage) {
      const BlockInfo& block = shared_.slots[stage].block;
      if (warp == kQueryWarp) copy_queries(block);
      visit(block);
      leave_work(stage);
    };
    for (uint32_t count = 0;; ++count) {  // work tiles until now
      const auto next = PipelineState<Tile::kWorkSlots>::after(count);
      if (finds_work) find_work(next);
      if (kLooksAhead && count > 0) process((count - 1) % Tile::kWorkSlots);
      shared_.work.wait_full(next, "work of a producer");
      if (!shared_.slots[next.stage].is_valid) return;
      if (!kLooksAhead) process(next.stage);
    }
  }

  // -- Pages --------------------------------------------------------------------------------------

  // The page of a token as the table has it, or 0 behind the end of the work tile.
  __device__ __forceinline__ uint32_t find_page(const WorkTile& work, uint32_t token) const {
    const uint32_t index = work.kv_start + p_.page_size.divide(token);
    if (token >= static_cast<uint32_t>(work.kv_end)) return 0;
    if (p_.kv_indices == nullptr) return index;
    return index < p_.num_kv_indices ? p_.kv_indices[index] : 0;
  }

  // A page of the cache, whatever the table has. Why apart: no copy has to wait for the next page.
  __device__ __forceinline__ uint32_t valid_page(uint32_t page) const {
    return page < p_.num_pages ? page : 0;
  }

  // The place of a token in its page.
  __device__ __forceinline__ uint32_t entry_of(uint32_t token) const {
    return token - p_.page_size.divide(token) * p_.page_size.value;
  }

  // Where the row of a token lies.
  __device__ __forceinline__ uint64_t row_address(const AttentionCache& cache, int32_t kv_head,
                                                  uint32_t page, uint32_t token) const {
    return reinterpret_cast<uint64_t>(cache.data) +
           16 * (kv_head * cache.head_stride + uint64_t(page) * cache.page_stride +
                 uint64_t(entry_of(token)) * cache.entry_stride);
  }

  const Params& p_;
  Storage& shared_;

 private:
  using Scheduler = typename Storage::Scheduler;

  __device__ __forceinline__ Scheduler& scheduler() {
    return *reinterpret_cast<Scheduler*>(shared_.scheduler);
  }

  __device__ __forceinline__ void start_work() {
    scheduler() = Scheduler(p_.schedule, share_of_cta(p_));
    shared_.counters = scheduler().counters();
  }

  // Says for this warp that it needs a slot no more.
  __device__ __forceinline__ void leave_work(int stage) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&shared_.work.empty[stage]);
  }

  // Fills the next slot of the ring, and returns whether there is work in it. Work is taken only
  // from the plan of this call.
  __device__ __forceinline__ bool find_work(const PipelineState<Tile::kWorkSlots>& state) {
    shared_.work.wait_empty(state, "an empty slot of work");
    WorkSlot& slot = shared_.slots[state.stage];
    slot.is_valid =
        is_planned(p_.schedule, p_.max_partials) && scheduler().take_work(slot.block.work);
    if (slot.is_valid) {
      slot.block.kv_head = slot.block.work.head;
      slot.block.v_column = 0;
      complete_block(p_, slot.block, p_.schedule.shape.block_m);
    }
    mbarrier_arrive(&shared_.work.full[state.stage]);
    return slot.is_valid;
  }
};

template <typename Tile>
class Sm90Producer : protected Sm90WorkProducer<Tile, Sm90SharedStorage<Tile>, AttentionParams> {
  using Storage = Sm90SharedStorage<Tile>;
  using Base = Sm90WorkProducer<Tile, Storage, AttentionParams>;

 protected:
  using Base::p_, Base::shared_;

  __device__ __forceinline__ Sm90Producer(const Sm90AttentionParams& params, Storage& shared,
                                          Sm90Buffers<Tile> buffers)
      : Base(params.p, shared), params_(params), buffers_(buffers) {}

  // The arrivals are those that fill a stage of K, and of V.
  static __device__ __forceinline__ void init(Storage& shared, uint32_t key_arrivals,
                                              uint32_t value_arrivals) {
    shared.k.init(key_arrivals, Tile::kConsumerWarps);
    shared.v.init(value_arrivals, Tile::kConsumerWarps);
  }

  // Calls visit(block) for each work tile, by all four warps, of which one copies Q.
  template <typename Visit>
  __device__ __forceinline__ void for_each_work_of_all(int warp, const Visit& visit) {
    uint32_t queries = 0;
    Base::for_each_work_of_all(
        warp, [&](const BlockInfo& block) { copy_queries(block, queries); }, visit);
  }

  // -- Queries ------------------------------------------------------------------------------------

  // Copies the queries of a work tile that has KV tokens. `count`: how often this was done.
  __device__ __forceinline__ void copy_queries(const BlockInfo& block, uint32_t& count) {
    using Layout = typename Tile::QueryLayout;
    if (block.work.kv_begin >= block.work.kv_end) return;
    const auto state = PipelineState<Tile::kQueryStages>::after(count);
    shared_.q.wait_empty(state, "an empty buffer of Q");
    if (threadIdx.x % 32 == 0) {
      uint64_t* const full = &shared_.q.full[state.stage];
      const int32_t group = static_cast<int32_t>(p_.group_size.value);
      const int32_t token = block.work.q_begin + block.first_row / group;
      const uint32_t rows = p_.schedule.shape.block_m;
      mbarrier_arrive_expect_tx(full, rows * Tile::kQueryRowBytes);
#pragma unroll
      for (int panel = 0; panel < Layout::kPanels; ++panel) {
        copy_box(buffers_.q(state.stage) + panel * Tile::kBlockM * Layout::kPanelBytes, &params_.q,
                 full, panel * Tile::kQueryPanel, 0, token, block.kv_head);
      }
    }
    ++count;
  }

  // -- Keys and values by TMA ---------------------------------------------------------------------

  // The tokens of a box of pages: each lane copies one.
  __device__ __forceinline__ int rows_of_box() const {
    return params_.kv_copy == KvCopy::quads ? kQuadRows : kAtomRows;
  }

  // The page of this lane's box of the KV block at token `begin`.
  __device__ __forceinline__ uint32_t find_page_of_box(const WorkTile& work, int32_t begin) const {
    if (params_.kv_copy == KvCopy::box) return 0;
    return this->find_page(work, begin + threadIdx.x % 32 * rows_of_box());
  }

  // Copies the KV block at token `begin` to `target`, and completes `full`. `page` is that of this
  // lane's box. All lanes of a warp call it.
  template <typename Layout>
  __device__ __forceinline__ void copy_block(const TensorMap& map, uint32_t target, uint64_t* full,
                                             const BlockInfo& block, int32_t begin,
                                             uint32_t page) const {
    if (params_.kv_copy == KvCopy::box) {
      copy_box_of_block<Layout>(map, target, full, block, begin);
    } else {
      copy_boxes<Layout, Tile::kBlockN>(map, target, full, block, begin, 0, this->valid_page(page));
    }
  }

  template <typename Layout>
  __device__ __forceinline__ void copy_box_of_block(const TensorMap& map, uint32_t target,
                                                    uint64_t* full, const BlockInfo& block,
                                                    int32_t begin) const {
    if (threadIdx.x % 32 != 0) return;
    mbarrier_arrive_expect_tx(full, Tile::kBlockN * Layout::kPanels * Layout::kPanelBytes);
    copy_box(target, &map, full, 0, block.work.kv_start + begin, 0, block.kv_head);
  }

  // Copies kRows rows of a KV block from `first_row` on, as far as they exist, and arrives once.
  template <typename Layout, int kRows>
  __device__ __forceinline__ void copy_boxes(const TensorMap& map, uint32_t target, uint64_t* full,
                                             const BlockInfo& block, int32_t begin, int first_row,
                                             uint32_t page) const {
    constexpr int kRowBytes = Layout::kPanels * Layout::kPanelBytes;
    const int lane = threadIdx.x % 32, rows = rows_of_box();
    begin += first_row;
    const int tokens = max(0, min(kRows, block.work.kv_end - begin));
    const int boxes = (tokens + rows - 1) / rows, row = first_row + lane * rows;
    if (lane == 0) mbarrier_arrive_expect_tx(full, boxes * rows * kRowBytes);
    __syncwarp();
    if (lane >= boxes) return;
    const uint32_t entry = this->entry_of(begin + lane * rows);
    if (Layout::kPanels == 1 || params_.kv_copy == KvCopy::atoms) {
      copy_box(target + row * kRowBytes, &map, full, 0, entry, 0, block.kv_head, page);
    } else {
#pragma unroll
      for (int panel = 0; panel < Layout::kPanels; ++panel) {
        copy_box(target + (panel * Tile::kBlockN + row) * Layout::kPanelBytes, &map, full, 0, entry,
                 panel, block.kv_head, page);
      }
    }
  }

  // -- Keys and values by threads -----------------------------------------------------------------

  // Copies rows of a KV block with cp.async: kRows rows from `first_row` on. `own` is where the row
  // of this lane lies, of which `count` exist; the others become 0. All lanes of a warp call it.
  template <typename Layout, int kRows, int kUnroll>
  __device__ __forceinline__ void copy_rows(uint64_t own, uint32_t target, int first_row,
                                            int32_t count) const {
    constexpr int kPanelChunks = Layout::kPanelBytes / 16, kChunks = Layout::kPanels * kPanelChunks;
    const int lane = threadIdx.x % 32;
#pragma unroll kUnroll
    for (int place = lane; place < kRows * kChunks; place += 32) {
      const int row = place / kChunks, chunk = place % kChunks;
      const uint64_t source = __shfl_sync(0xffffffffu, own, row);
      const uint32_t offset = chunk / kPanelChunks * (Tile::kBlockN * Layout::kPanelBytes) +
                              Layout::offset(first_row + row, chunk % kPanelChunks);
      cp_async(target + offset, reinterpret_cast<const uint4*>(source) + chunk, row < count);
    }
  }

  const Sm90AttentionParams& params_;
  const Sm90Buffers<Tile> buffers_;
};

#endif  // __CUDACC__

}  // namespace precast
