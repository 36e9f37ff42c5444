// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup of attention for sm_90a: what it holds, how it takes work tiles, and how it
// waits for buffers and leaves them. Its members for one step of the formula each are declared here
// and defined in the file of that step, which attention/sm90/mainloop.cuh calls.
#pragma once

#include "precast/attention/mask.cuh"
#include "precast/attention/sm90/query.cuh"
#include "precast/attention/sm90/work_tiles.cuh"
#include "precast/core/sm90/wgmma.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename Tile>
class Sm90Consumer {
  using QueryLayout = typename Tile::QueryLayout;
  using KeyLayout = typename Tile::KeyLayout;
  using ValueLayout = typename Tile::ValueLayout;
  using Storage = Sm90SharedStorage<Tile>;
  using AccS = float[Tile::kBlockN / 2];
  using AccO = float[Tile::kDimV / 2];
  using OperandP = uint32_t[Tile::kBlockN / 16][4];

  // Named barriers of the first consumer: of its turn, and of its warps.
  static constexpr int kFirstTurn = 2, kConsumerAlone = 5;
  // The most rows of a tile that the consumers share.
  static constexpr int kSharedRows = 64;

 public:
  __device__ __forceinline__ Sm90Consumer(const Sm90AttentionParams& params, Storage& shared,
                                          Sm90Buffers<Tile> buffers, int consumer)
      : p_(params.p), shared_(shared), buffers_(buffers), consumer_(consumer) {
    scale_ = p_.scale * (Tile::kGeneral ? 1.0f : kLog2E);
    // Tiles with scales of heads take it with the heads of rows.
    if (p_.qk_scale != nullptr && !Tile::kScalesHeads) scale_ *= load_scalar(p_.qk_scale);
    if constexpr (Tile::kGeneral) transform_ = LogitsTransform(p_, scale_);
    fences_ = params.kv_copy == KvCopy::rows && !Tile::kConvertsKeys;
    has_key_panels_ = Tile::kConvertsKeys || params.kv_copy != KvCopy::atoms;
    has_value_panels_ = Tile::kConverts || has_key_panels_;
    const uint32_t k_step = KeyLayout::kAtomBytes * (has_key_panels_ ? 1 : KeyLayout::kPanels);
    const uint32_t v_step =
        ValueLayout::kAtomBytes * (has_value_panels_ ? 1 : ValueLayout::kPanels);
    k_panel_step_ =
        (has_key_panels_ ? Tile::kBlockN * KeyLayout::kPanelBytes : KeyLayout::kAtomBytes) >> 4;
    v_step_ = 2 * v_step >> 4;  // 16 tokens
    q_descriptor_ = wgmma_descriptor(buffers.q(0) + consumer * 64 * QueryLayout::kPanelBytes,
                                     QueryLayout::kAtomBytes, 16, QueryLayout::kPanelBytes);
    k_descriptor_ = wgmma_descriptor(buffers.k(0), k_step, 16, KeyLayout::kPanelBytes);
    v_descriptor_ = wgmma_descriptor(
        buffers.v(0), v_step,
        has_value_panels_ ? Tile::kBlockN * ValueLayout::kPanelBytes : ValueLayout::kAtomBytes,
        ValueLayout::kPanelBytes);
    if constexpr (Tile::kRotaryBytes > 0) {
      if (has_rotary()) init_rotary_freqs<Tile>(p_, rotary_freqs());
      Tile::barrier();
    }
  }

  __device__ __forceinline__ void run() {
    for_each_work<Tile>(p_, shared_, [&](const BlockInfo& block) { process(block); });
  }

 protected:
  // From the scores of a row, as transform_and_mask() leaves them, to logits in base 2.
  struct RowScales {
    float of[2];
  };
  __device__ __forceinline__ RowScales scales() const {
    float scale = scale_;
    if constexpr (Tile::kGeneral) scale = transform_.is_scale(p_) ? transform_.scale() : 1.0f;
    if constexpr (Tile::kGeneral || !Tile::kScalesRows) return {{scale, scale}};
    return {{scale * query_scale_[0], scale * query_scale_[1]}};
  }

  __device__ __forceinline__ bool has_rotary() const {
    return p_.positions == PositionEncoding::rope;
  }
  __device__ __forceinline__ RotaryFreq* rotary_freqs() const {
    return reinterpret_cast<RotaryFreq*>(reinterpret_cast<unsigned char*>(&shared_) +
                                         Tile::kStorageBytes);
  }

  // Says for this warp that it has read a buffer; with kAlone for those of the other consumers,
  // too.
  template <bool kAlone = false>
  __device__ __forceinline__ void release(uint64_t* empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty, kAlone ? Tile::kConsumers : 1);
  }

  // Waits for a KV block. Why the fence: wgmma reads by another way than cp.async writes.
  __device__ __forceinline__ void wait_full(PipelineBarriers<Tile::kStages>& barriers,
                                            const PipelineState<Tile::kStages>& state,
                                            const char* name) {
    barriers.wait_full(state, name);
    if (fences_) fence_shared_for_async();
  }

  // A barrier of this consumer, or of all.
  template <bool kAlone>
  __device__ __forceinline__ void barrier_of() const {
    if constexpr (kAlone) {
      named_barrier(kConsumerAlone + consumer_, kWarpgroupSize);
    } else {
      Tile::barrier();
    }
  }

  // The row of the tile that this lane holds; with kFew every consumer holds the first rows.
  template <bool kFew>
  static __device__ __forceinline__ int own_row(int half) {
    const int row = sm90_row<Tile>(half);
    return kFew ? row % kSharedRows : row;
  }

  // The consumers take turns in starting their wgmma, so that one computes its softmax while the
  // tensor cores work for another. They do so in the loop over the KV blocks of a work tile.
  __device__ __forceinline__ void begin_turns() const {
    if (Tile::kTakesTurns && consumer_ == Tile::kConsumers - 1) arrive_at_turn_of(0);
  }
  __device__ __forceinline__ void take_turn() const {
    if (Tile::kTakesTurns) named_barrier(kFirstTurn + consumer_, 2 * kWarpgroupSize);
  }
  __device__ __forceinline__ void pass_turn() const {
    if (Tile::kTakesTurns) {
      arrive_at_turn_of(consumer_ == Tile::kConsumers - 1 ? 0 : consumer_ + 1);
    }
  }
  __device__ __forceinline__ void end_turns() const {
    if (Tile::kTakesTurns && consumer_ == 0) take_turn();
  }
  static __device__ __forceinline__ void arrive_at_turn_of(int consumer) {
    named_barrier_arrive(kFirstTurn + consumer, 2 * kWarpgroupSize);
  }

  // -- attention/sm90/mainloop.cuh ----------------------------------------------------------------

  __device__ __forceinline__ void process(const BlockInfo& block);
  template <int kColumns>
  __device__ __forceinline__ void process_last_block(const BlockInfo& block, int32_t token,
                                                     RowStatistics& rows, OperandP& p);

  // -- attention/sm90/few_rows.cuh ----------------------------------------------------------------

  __device__ __forceinline__ void process_few_rows(const BlockInfo& block);
  __device__ __forceinline__ void process_own_block(const BlockInfo& block, int32_t token,
                                                    RowStatistics& rows, AccO& acc_o);
  __device__ __forceinline__ void add_up(RowStatistics& rows, AccO& acc_o);

  // -- attention/sm90/operands.cuh ----------------------------------------------------------------

  template <int kColumns, bool kFew = false>
  __device__ __forceinline__ void multiply_qk(float (&acc_s)[kColumns / 2]) const;
  static __device__ __forceinline__ uint32_t query_step(int step, int term);
  static __device__ __forceinline__ uint32_t third_step(int step);
  __device__ __forceinline__ uint32_t key_step(int step) const;
  __device__ __forceinline__ void multiply_pv(AccO& acc_o, const OperandP& p) const;
  __device__ __forceinline__ void change_queries();
  __device__ __forceinline__ void rotate_queries(const BlockInfo& block) const;
  template <bool kAlone = false>
  __device__ __forceinline__ void rotate_keys(int32_t first_position) const;
  template <bool kAlone>
  __device__ __forceinline__ void clear_values(int32_t count);

  // -- attention/sm90/scores.cuh ------------------------------------------------------------------

  template <int kColumns, bool kFew = false>
  __device__ __forceinline__ void mask(const BlockInfo& block, int32_t first,
                                       float (&acc_s)[kColumns / 2]) const;
  template <bool kFew = false, int kColumns>
  __device__ __forceinline__ void find_visible(const BlockInfo& block, int32_t first,
                                               VisibleTokens<kColumns> (&visible)[2]) const;
  template <bool kFew = false, int kColumns>
  __device__ __forceinline__ void transform_and_mask(const BlockInfo& block, int32_t first,
                                                     const VisibleTokens<kColumns> (&visible)[2],
                                                     float (&acc_s)[kColumns / 2]) const;

  const AttentionParams& p_;
  Storage& shared_;
  const Sm90Buffers<Tile> buffers_;
  const int consumer_;
  float scale_;                // from scores to logits in base 2, but in general kernels
  LogitsTransform transform_;  // in general kernels
  float query_scale_[2];       // what the scores of this lane's rows are too small by
  uint64_t q_descriptor_, k_descriptor_, v_descriptor_;  // of stage 0
  // Whether K and V lie panel by panel, not atom by atom; and whether cp.async has written K.
  bool has_key_panels_, has_value_panels_, fences_;
  uint32_t k_panel_step_, v_step_;  // units of 16 bytes
  PipelineState<Tile::kQueryStages> q_;
  PipelineState<Tile::kStages> k_, v_;
};

#endif  // __CUDACC__

}  // namespace precast
