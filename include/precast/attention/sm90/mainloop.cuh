// SPDX-License-Identifier: Apache-2.0
// The mainloop of the consumer warpgroups of attention for sm_90a. For each KV block of a work
// tile, the last one first:
//
//   acc_s = Q K^T                    wgmma, both operands in shared memory
//   acc_s = -inf where masked        only where a row of the tile masks a token of the block
//                                    (in general kernels after what attention/mask.cuh does)
//   P = 2^(acc_s - row_max)          attention/sm90/softmax.cuh
//   acc_o += P V                     wgmma, P in registers
//
// The tensor cores compute Q K^T of one block and then P V of the block before it. Meanwhile
// another warpgroup, or this one for the maxima, computes its softmax. Before that, general kernels
// may rotate Q and K in shared memory (attention/sm90/rotary.cuh).
//
// Source   Shah et al., FlashAttention-3, arXiv:2407.08608, for this order within a warpgroup.
#pragma once

#include "precast/attention/mask.cuh"
#include "precast/attention/sm90/epilogue.cuh"
#include "precast/attention/sm90/rotary.cuh"
#include "precast/core/sm90/wgmma.cuh"

namespace precast {

#if defined(__CUDACC__)

// The work of one consumer warpgroup. All its threads call each function.
template <typename Tile>
class Sm90Consumer {
  using T = typename Tile::Element;
  using Storage = Sm90SharedStorage<Tile>;
  using AccS = float[Tile::kBlockN / 2];
  using AccO = float[Tile::kDimV / 2];
  using OperandP = uint32_t[Tile::kBlockN / 16][4];

  // Named barriers of the first consumer: of its turn, and of its queries.
  static constexpr int kFirstTurn = 2, kConverted = 5;

 public:
  __device__ __forceinline__ Sm90Consumer(const Sm90AttentionParams& params, Storage& shared,
                                          Sm90Buffers<Tile> buffers, int consumer)
      : p_(params.p), shared_(shared), buffers_(buffers), consumer_(consumer) {
    scale_ = p_.scale * (Tile::kGeneral ? 1.0f : kLog2E);
    // Tiles of e4m3 take it with the heads of rows.
    if (p_.qk_scale != nullptr && sizeof(T) > 1) scale_ *= load_scalar(p_.qk_scale);
    if constexpr (Tile::kGeneral) transform_ = LogitsTransform(p_, scale_);
    has_panels_ = params.kv_copy != KvCopy::atoms;
    fences_ = params.kv_copy == KvCopy::rows && !Tile::kConverts;
    constexpr uint32_t kAtomBytes = kAtomRows * kPanelBytes;
    k_panel_step_ = (has_panels_ ? Tile::kBlockN * kPanelBytes : kAtomBytes) >> 4;
    k_descriptor_ = wgmma_descriptor(buffers.k(0),
                                     has_panels_ ? kAtomBytes : Tile::kDimK / kPanel * kAtomBytes);
    const uint32_t v_step = has_panels_ ? kAtomBytes : Tile::kDimV / kPanel * kAtomBytes;
    v_descriptor_ = wgmma_descriptor(buffers.v(0), v_step,
                                     has_panels_ ? Tile::kBlockN * kPanelBytes : kAtomBytes);
    v_step_ = 2 * v_step >> 4;  // 16 tokens
    q_descriptor_ = wgmma_descriptor(buffers.q(0) + consumer * kPanel * kPanelBytes, kAtomBytes);
    if constexpr (Tile::kRotaryBytes > 0) {
      if (has_rotary()) init_rotary_freqs<Tile>(p_, rotary_freqs());
      Tile::barrier();
    }
  }

  __device__ __forceinline__ void run() {
    for_each_work([&](const BlockInfo& block) { process(block); });
  }

 protected:
  // Calls process(block) for each work tile, and combines the splits of those that have some.
  template <typename Process>
  __device__ __forceinline__ void for_each_work(const Process& process) {
    for (uint32_t count = 0;; ++count) {
      const PipelineState<kWorkSlots> state = state_after<kWorkSlots>(count);
      shared_.work.wait_full(state, "work of a consumer");
      const WorkSlot& slot = shared_.slots[state.stage];
      if (!slot.is_valid) return;
      process(slot.block);
      if (slot.block.work.num_splits > 1) {
        const PipelineState<kWorkSlots> next = state_after<kWorkSlots>(count + 1);
        shared_.work.wait_full(next, "the next work of a consumer");
        combine_splits<Tile, typename Tile::Query>(
            p_, slot.block, shared_.counters + slot.block.work.counter,
            !shared_.slots[next.stage].is_valid, shared_.combine);
      }
      release(&shared_.work.empty[count % kWorkSlots]);
    }
  }

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

  // Turns this consumer's rows of Q into f16, each times a power of two by which its largest number
  // comes near 256: so none overflows, and one that becomes 0 is 2^-32 of the largest.
  __device__ __forceinline__ void convert_queries() {
    constexpr uint32_t kAtomBytes = kAtomRows * kPanelBytes;
    const SwizzledRows rows = {buffers_.q(q_.stage), kAtomBytes, Tile::kBlockM * kPanelBytes};
    const int q = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = sm90_row<Tile>(half);
      const auto for_each_chunk = [&](const auto& change) {
#pragma unroll 4
        for (int chunk = q; chunk < Tile::kDimK / 8; chunk += 4) {
          float x[8];
          unpack(rows.chunk<typename Tile::Query>(row, chunk), x);
          change(chunk, x);
        }
      };
      float largest = 0.0f;
      for_each_chunk([&](int, const float (&x)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(x[i]));
      });
      const int exponent =
          max(-100, static_cast<int>(__float_as_uint(quad_max(largest)) >> 23) - 127);
      const float factor = __uint_as_float(uint32_t(127 + 8 - exponent) << 23);
      query_scale_[half] = __uint_as_float(uint32_t(127 - 8 + exponent) << 23);
      for_each_chunk([&](int chunk, float (&x)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] *= factor;
        rows.chunk<T>(row, chunk) = pack<T>(x);
      });
    }
    fence_shared_for_async();
    named_barrier(kConverted + consumer_, kWarpgroupSize);
  }

  __device__ __forceinline__ bool has_rotary() const {
    return p_.positions == PositionEncoding::rope;
  }
  __device__ __forceinline__ RotaryFreq* rotary_freqs() const {
    return reinterpret_cast<RotaryFreq*>(reinterpret_cast<unsigned char*>(&shared_) +
                                         Tile::kStorageBytes);
  }

  // Rotates this consumer's rows of Q, if it is to be rotated. rotate_keys() must follow.
  __device__ __forceinline__ void rotate_queries(const BlockInfo& block) const {
    if (!has_rotary()) return;
    constexpr uint32_t kAtomBytes = kAtomRows * kPanelBytes;
    const int first_row = 64 * consumer_;
    const int32_t shift = block.work.kv_len - block.work.q_len;
    const SwizzledRows rows = {buffers_.q(q_.stage) + first_row * kPanelBytes, kAtomBytes,
                               Tile::kBlockM * kPanelBytes};
    rotate_rows<Tile, 64, kWarpgroupSize>(
        rows, rotary_freqs(), threadIdx.x % kWarpgroupSize,
        [&](int row) { return PackGqaRow(p_, block, first_row + row).q_idx + shift; });
  }

  // Rotates the next block of K, together with the other consumers.
  __device__ __forceinline__ void rotate_keys(int32_t first_position) const {
    if (!has_rotary()) return;
    const SwizzledRows rows = {buffers_.k(k_.stage),
                               kAtomRows * kPanelBytes * (has_panels_ ? 1u : Tile::kDimK / kPanel),
                               k_panel_step_ << 4};
    rotate_rows<Tile, Tile::kBlockN, Tile::kThreads>(rows, rotary_freqs(), Tile::thread(),
                                                     [&](int row) { return first_position + row; });
    fence_shared_for_async();
    Tile::barrier();
  }

  // Says for this warp that it has read a buffer.
  __device__ __forceinline__ void release(uint64_t* empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
  }

  // Waits for a KV block. Why the fence: wgmma reads by another way than cp.async writes.
  __device__ __forceinline__ void wait_full(PipelineBarriers<Tile::kStages>& barriers,
                                            const PipelineState<Tile::kStages>& state,
                                            const char* name) {
    barriers.wait_full(state, name);
    if (fences_) fence_shared_for_async();
  }

  // Computes a work tile and writes its results.
  __device__ __forceinline__ void process(const BlockInfo& block) {
    AccO acc_o;
#pragma unroll
    for (float& x : acc_o) x = 0.0f;
    RowStatistics rows;
    const int32_t kv_begin = block.work.kv_begin;
    int32_t token = kv_begin + num_kv_blocks<Tile>(block.work) * Tile::kBlockN;
    if (token > kv_begin) {
      const int32_t unmasked_begin = block.unmasked_begin, unmasked_end = block.unmasked_end;
      AccS acc_s;
      OperandP p;
      token -= Tile::kBlockN;
      shared_.q.wait_full(q_, "Q");
      if constexpr (Tile::kConvertsQueries) convert_queries();
      if constexpr (Tile::kGeneral) rotate_queries(block);
      wait_full(shared_.k, k_, "the first K");
      if constexpr (Tile::kGeneral) rotate_keys(token);
      if (block.work.kv_end - token <= Tile::kLeastN) {
        process_last_block<Tile::kLeastN>(block, token, rows, p);
      } else {
        process_last_block<Tile::kBlockN>(block, token, rows, p);
      }
      if (!Tile::kConverts && token + Tile::kBlockN > block.work.kv_end) {
        clear_values(block.work.kv_end - token);
      }
      begin_turns();
      while (token > kv_begin) {
        token -= Tile::kBlockN;
        VisibleTokens<Tile::kBlockN> visible[2];
        if constexpr (Tile::kGeneral) find_visible(block, token, visible);
        wait_full(shared_.k, k_, "K");
        if constexpr (Tile::kGeneral) rotate_keys(token);
        take_turn();
        wgmma_fence();
        multiply_qk<Tile::kBlockN>(acc_s);
        wgmma_commit_group();
        wait_full(shared_.v, v_, "V");
        wgmma_fence();
        multiply_pv(acc_o, p);
        wgmma_commit_group();
        pass_turn();
        wgmma_wait_group<1>();
        keep_behind_wait(acc_s);
        release(&shared_.k.empty[k_.stage]);
        k_.advance();
        if constexpr (Tile::kGeneral) {
          transform_and_mask(block, token, visible, acc_s);
        } else if (token < unmasked_begin || token + Tile::kBlockN > unmasked_end) {
          mask<Tile::kBlockN>(block, token, acc_s);
        }
        const bool rescales = rows.update_max(acc_s, scales().of);
        rows.exp_scores(acc_s, scales().of);
        wgmma_wait_group<0>();
        keep_behind_wait(acc_o);
        release(&shared_.v.empty[v_.stage]);
        v_.advance();
        if (rescales) rows.rescale(acc_o);
        pack_operands<T>(acc_s, p);
      }
      end_turns();
      release(&shared_.q.empty[q_.stage]);
      q_.advance();
      wait_full(shared_.v, v_, "the last V");
      wgmma_fence();
      multiply_pv(acc_o, p);
      wgmma_commit_group();
      wgmma_wait_group<0>();
      keep_behind_wait(acc_o);
      release(&shared_.v.empty[v_.stage]);
      v_.advance();
    }
    rows.finalize();
    if (block.work.num_splits == 1) {
      sm90_write_output<Tile>(p_, block, rows, acc_o);
    } else {
      sm90_write_partial<Tile>(p_, block, rows, acc_o);
    }
  }

  // P of the last KV block of a work tile, which is the first to be processed. No row sees more
  // than the first kColumns of its columns.
  template <int kColumns>
  __device__ __forceinline__ void process_last_block(const BlockInfo& block, int32_t token,
                                                     RowStatistics& rows, OperandP& p) {
    float acc_s[kColumns / 2];
    uint32_t first_p[kColumns / 16][4];
    VisibleTokens<kColumns> visible[2];
    if constexpr (Tile::kGeneral) find_visible(block, token, visible);
    wgmma_fence();
    multiply_qk<kColumns>(acc_s);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    keep_behind_wait(acc_s);
    release(&shared_.k.empty[k_.stage]);
    k_.advance();
    if constexpr (Tile::kGeneral) {
      transform_and_mask(block, token, visible, acc_s);
    } else if (token < block.unmasked_begin || token + kColumns > block.unmasked_end) {
      mask<kColumns>(block, token, acc_s);
    }
    rows.update_max(acc_s, scales().of);  // acc_o is still 0
    rows.exp_scores(acc_s, scales().of);
    pack_operands<T>(acc_s, first_p);
#pragma unroll
    for (int i = 0; i < Tile::kBlockN / 4; ++i) {
      p[i / 4][i % 4] = i < kColumns / 4 ? first_p[i / 4 % (kColumns / 16)][i % 4] : 0u;
    }
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

  template <int kColumns>
  __device__ __forceinline__ void multiply_qk(float (&acc_s)[kColumns / 2]) const {
    using Mma = Wgmma<T, kColumns>;
    const uint64_t q = q_descriptor_ + (q_.stage * Tile::kQueryBytes >> 4),
                   k = k_descriptor_ + (k_.stage * Tile::kKeyBytes >> 4);
    Mma::template new_ss<false>(acc_s, q, k);
#pragma unroll
    for (int step = 1; step < Tile::kDimK / 16; ++step) {
      constexpr int kSteps = kPanel / 16;  // of a panel, 32 bytes each
      const int panel = step / kSteps, in_panel = step % kSteps * 2;
      Mma::template add_ss<false>(acc_s, q + (panel * Tile::kBlockM * kPanelBytes >> 4) + in_panel,
                                  k + panel * k_panel_step_ + in_panel);
    }
  }

  __device__ __forceinline__ void multiply_pv(AccO& acc_o, const OperandP& p) const {
    const uint64_t v = v_descriptor_ + (v_.stage * Tile::kValueBytes >> 4);
#pragma unroll
    for (int step = 0; step < Tile::kBlockN / 16; ++step) {
      Wgmma<T, Tile::kDimV>::template add_rs<true>(acc_o, p[step], v + step * v_step_);
    }
  }

  // Sets the scores to -inf that causal mask, window and the end of the tokens hide. `first`: the
  // token of the first column. Columns that no row of the tile masks are left out.
  template <int kColumns>
  __device__ __forceinline__ void mask(const BlockInfo& block, int32_t first,
                                       float (&acc_s)[kColumns / 2]) const {
    int32_t begin[2], end[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const PackGqaRow row(p_, block, sm90_row<Tile>(half));
      const MaskBounds bounds(p_, block.work, row.q_idx);
      begin[half] = bounds.begin - first - threadIdx.x % 4 * 2;
      end[half] = bounds.end - first - threadIdx.x % 4 * 2;
    }
    constexpr int kGroup = 32;  // columns that are looked at together
#pragma unroll
    for (int column = 0; column < kColumns; column += kGroup) {
      const int32_t token = first + column;
      if (token >= block.unmasked_begin && token + kGroup <= block.unmasked_end) continue;
#pragma unroll
      for (int i = column / 2; i < (column + kGroup) / 2; ++i) {
        const int half = i / 2 % 2, offset = i / 4 * 8 + i % 2;
        if (offset < begin[half] || offset >= end[half]) acc_s[i] = negative_infinity();
      }
    }
  }

  // Finds which tokens from `first` on the two rows of this lane see. Why before the scores are
  // computed: it takes registers.
  template <int kColumns>
  __device__ __forceinline__ void find_visible(const BlockInfo& block, int32_t first,
                                               VisibleTokens<kColumns> (&visible)[2]) const {
    const bool is_bounded = first < block.unmasked_begin || first + kColumns > block.unmasked_end;
    if (!is_bounded && p_.mask != AttentionMask::custom && p_.mask != AttentionMask::multi_item) {
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      visible[half] = VisibleTokens<kColumns>(p_, block, sm90_row<Tile>(half), first);
    }
  }

  // Turns the scores of a KV block into logits divided by scale(), and those of hidden tokens into
  // -inf.
  template <int kColumns>
  __device__ __forceinline__ void transform_and_mask(const BlockInfo& block, int32_t first,
                                                     const VisibleTokens<kColumns> (&visible)[2],
                                                     float (&acc_s)[kColumns / 2]) const {
    const auto for_rows = [&](const auto& change) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        change(half, [&](int i) -> float& { return acc_s[i / 2 * 4 + 2 * half + i % 2]; });
      }
    };
    if constexpr (Tile::kScalesRows) {
      for_rows([&](int half, const auto& score) {
#pragma unroll
        for (int i = 0; i < kColumns / 4; ++i) score(i) *= query_scale_[half];
      });
    }
    if (!transform_.is_scale(p_)) {
      for_rows([&](int half, const auto& score) {
        transform_.template apply<kColumns>(p_, PackGqaRow(p_, block, sm90_row<Tile>(half)),
                                            first + threadIdx.x % 4 * 2, score);
      });
    }
    if (__all_sync(0xffffffffu, visible[0].has_all() && visible[1].has_all())) return;
    for_rows([&](int half, const auto& score) { visible[half].apply(score); });
  }

  // Sets the values behind the first `count` tokens of the next block to 0. Why: their P is 0, but
  // memory that is not the request's may hold NaN.
  __device__ __forceinline__ void clear_values(int32_t count) {
    wait_full(shared_.v, v_, "V of the end");
    constexpr int kChunks = kPanelBytes / 16, kPanels = Tile::kDimV / kPanel;
    const uint32_t values = buffers_.v(v_.stage);
    // In units of 16 bytes: from eight rows to the next eight, and from panel to panel.
    const uint32_t atom_step = v_step_ / 2;
    const uint32_t panel_step = has_panels_ ? Tile::kBlockN * kChunks : kAtomRows * kChunks;
    const int chunks = (Tile::kBlockN - count) * kPanels * kChunks;
    for (int i = Tile::thread(); i < chunks; i += Tile::kThreads) {
      const int row = count + i / (kPanels * kChunks), panel = i / kChunks % kPanels;
      const uint32_t address = values + 16 * (row / kAtomRows * atom_step + panel * panel_step +
                                              row % kAtomRows * kChunks + i % kChunks);
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
    }
    fence_shared_for_async();
    Tile::barrier();
  }

  const AttentionParams& p_;
  Storage& shared_;
  const Sm90Buffers<Tile> buffers_;
  const int consumer_;
  float scale_;                // from scores to logits in base 2, but in general kernels
  LogitsTransform transform_;  // in general kernels
  float query_scale_[2];       // what the scores of this lane's rows are too small by
  uint64_t q_descriptor_, k_descriptor_, v_descriptor_;  // of stage 0
  // Whether a KV block lies panel by panel, not atom by atom; and whether cp.async has written it.
  bool has_panels_, fences_;
  uint32_t k_panel_step_, v_step_;  // units of 16 bytes
  PipelineState<Tile::kQueryStages> q_;
  PipelineState<Tile::kStages> k_, v_;
};

#endif  // __CUDACC__

}  // namespace precast
