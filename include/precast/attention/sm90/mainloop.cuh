// SPDX-License-Identifier: Apache-2.0
// The mainloop of the consumer warpgroups of attention for sm_90a. For each KV block of a work
// tile, the last one first:
//
//   acc_s = Q K^T                    wgmma, both operands in shared memory
//   acc_s = -inf where masked        only where a row of the tile masks a token of the block
//   P = 2^(acc_s - row_max)          attention/sm90/softmax.cuh
//   acc_o += P V                     wgmma, P in registers
//
// The tensor cores compute Q K^T of a block, and then P V of the block before it, while the warps
// compute the softmax. The loop goes over the blocks of all work tiles of the CTA: the first block
// of a tile is computed beside the last P V of the tile before.
//
// Source   Shah et al., FlashAttention-3, arXiv:2407.08608, for this order within a warpgroup.
#pragma once

#include "precast/attention/sm90/epilogue.cuh"
#include "precast/core/sm90/wgmma.cuh"

namespace precast {

#if defined(__CUDACC__)

// The work of one consumer warpgroup. All its threads call each function.
template <typename Tile>
class Sm90Consumer {
  using T = typename Tile::Element;
  using Storage = Sm90SharedStorage<Tile>;
  using QkMma = Wgmma<T, Tile::kBlockN>;
  using PvMma = Wgmma<T, Tile::kDimV>;
  using AccS = float[Tile::kBlockN / 2];
  using AccO = float[Tile::kDimV / 2];
  using OperandP = uint32_t[Tile::kBlockN / 16][4];

 public:
  __device__ __forceinline__ Sm90Consumer(const Sm90AttentionParams& params, Storage& shared,
                                          Sm90Buffers<Tile> buffers, int warpgroup)
      : p_(params.p), shared_(shared), buffers_(buffers) {
    scale_ = p_.scale * kLog2E;
    if (p_.qk_scale != nullptr) scale_ *= load_scalar(p_.qk_scale);
    // One copy of ragged tokens is panel by panel, copies of pages are atom by atom.
    const bool ragged = is_ragged(p_);
    constexpr uint32_t kAtomBytes = kAtomRows * kPanelBytes;
    k_panel_step_ = (ragged ? Tile::kBlockN * kPanelBytes : kAtomBytes) >> 4;
    k_descriptor_ =
        wgmma_descriptor(buffers.k(0), ragged ? kAtomBytes : Tile::kDimK / kPanel * kAtomBytes);
    const uint32_t v_step = ragged ? kAtomBytes : Tile::kDimV / kPanel * kAtomBytes;
    v_descriptor_ =
        wgmma_descriptor(buffers.v(0), v_step, ragged ? Tile::kBlockN * kPanelBytes : kAtomBytes);
    v_step_ = 2 * v_step >> 4;  // 16 tokens
    q_descriptor_ = wgmma_descriptor(buffers.q(0) + warpgroup * kPanel * kPanelBytes, kAtomBytes);
  }

  __device__ __forceinline__ void run() {
    AccS acc_s;
    AccO acc_o;
    OperandP p;
    RowStatistics rows;
    shared_.work.wait_full(work_, "the first work");
    if (!slot().is_valid) return;
    begin_tile();
    shared_.k.wait_full(k_, "the first K");
    wgmma_fence();
    multiply_qk(acc_s);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    keep_behind_wait(acc_s);
    release(shared_.k.empty, k_);
    mask_if_needed(acc_s);
    rows.update_max(acc_s, scale_);
    rows.exp_scores(acc_s, scale_);
    set_zero(acc_o);
    pack_operands<T>(acc_s, p);
    clear_values_past_end();
    while (true) {
      // Here P of a block is in `p`, and its V is the next one.
      const int stage = work_.stage;
      token_ -= Tile::kBlockN;
      const bool begins_tile = token_ < kv_begin_;
      if (begins_tile) {
        work_.advance();
        release(shared_.q.empty, q_);
        shared_.work.wait_full(work_, "work");
        if (!slot().is_valid) break;
        begin_tile();
      }
      shared_.k.wait_full(k_, "K");
      wgmma_fence();
      multiply_qk(acc_s);
      wgmma_commit_group();
      shared_.v.wait_full(v_, "V");
      wgmma_fence();
      multiply_pv(acc_o, p);
      wgmma_commit_group();
      wgmma_wait_group<1>();
      keep_behind_wait(acc_s);
      release(shared_.k.empty, k_);
      mask_if_needed(acc_s);
      const RowStatistics finished = rows;
      if (begins_tile) rows = RowStatistics();
      const bool rescales = rows.update_max(acc_s, scale_);
      rows.exp_scores(acc_s, scale_);
      rows.finish_exp();
      wgmma_wait_group<0>();
      keep_behind_wait(acc_o);
      release(shared_.v.empty, v_);
      pack_operands<T>(acc_s, p);
      if (begins_tile) {
        finish_tile(stage, finished, acc_o, false);
        set_zero(acc_o);
        clear_values_past_end();
      } else if (rescales) {
        rows.rescale(acc_o);
      }
    }
    const int stage = (work_.stage + kWorkSlots - 1) % kWorkSlots;
    shared_.v.wait_full(v_, "the last V");
    wgmma_fence();
    multiply_pv(acc_o, p);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    keep_behind_wait(acc_o);
    finish_tile(stage, rows, acc_o, true);
  }

 private:
  __device__ __forceinline__ const WorkSlot& slot() const { return shared_.slots[work_.stage]; }

  // Says for this warp that it has read a buffer, and goes on to the next one.
  template <int kStages>
  __device__ __forceinline__ void release(uint64_t (&empty)[kStages],
                                          PipelineState<kStages>& state) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&empty[state.stage]);
    state.advance();
  }

  // Goes on to the last KV block of the work tile in slot().
  __device__ __forceinline__ void begin_tile() {
    const BlockInfo& block = slot().block;
    kv_begin_ = block.work.kv_begin;
    token_ = kv_begin_ + (num_kv_blocks<Tile>(block.work) - 1) * Tile::kBlockN;
    unmasked_begin_ = block.unmasked_begin;
    unmasked_end_ = block.unmasked_end;
    shared_.q.wait_full(q_, "Q");
  }

  static __device__ __forceinline__ void set_zero(AccO& acc_o) {
#pragma unroll
    for (int i = 0; i < Tile::kDimV / 2; ++i) acc_o[i] = 0.0f;
  }

  // Writes the results of the work tile in a slot.
  __device__ __forceinline__ void finish_tile(int stage, RowStatistics rows, const AccO& acc_o,
                                              bool is_last_work) {
    const BlockInfo& block = shared_.slots[stage].block;
    rows.finalize();
    if (block.work.num_splits == 1) {
      sm90_write_output<Tile>(p_, block, rows, acc_o);
    } else {
      sm90_write_partial<Tile>(p_, block, rows, acc_o);
      combine_splits<Tile, T>(p_, block, shared_.counters + block.work.counter, is_last_work,
                              shared_.combine);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&shared_.work.empty[stage]);
  }

  __device__ __forceinline__ void multiply_qk(AccS& acc_s) const {
    const uint64_t q = q_descriptor_ + (q_.stage * Tile::kQueryBytes >> 4),
                   k = k_descriptor_ + (k_.stage * Tile::kKeyBytes >> 4);
    QkMma::template new_ss<false>(acc_s, q, k);
#pragma unroll
    for (int step = 1; step < Tile::kDimK / 16; ++step) {
      constexpr int kSteps = kPanel / 16;  // of a panel, 32 bytes each
      const int panel = step / kSteps, in_panel = step % kSteps * 2;
      QkMma::template add_ss<false>(acc_s,
                                    q + (panel * Tile::kBlockM * kPanelBytes >> 4) + in_panel,
                                    k + panel * k_panel_step_ + in_panel);
    }
  }

  __device__ __forceinline__ void multiply_pv(AccO& acc_o, const OperandP& p) const {
    const uint64_t v = v_descriptor_ + (v_.stage * Tile::kValueBytes >> 4);
#pragma unroll
    for (int step = 0; step < Tile::kBlockN / 16; ++step) {
      PvMma::template add_rs<true>(acc_o, p[step], v + step * v_step_);
    }
  }

  __device__ __forceinline__ void mask_if_needed(AccS& acc_s) const {
    if (token_ < unmasked_begin_ || token_ + Tile::kBlockN > unmasked_end_) mask(acc_s);
  }

  // Sets the scores to -inf that causal mask, window and the end of the tokens hide. Columns that
  // no row of the tile masks are left out.
  __device__ __forceinline__ void mask(AccS& acc_s) const {
    const BlockInfo& block = slot().block;
    int32_t begin[2], end[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const PackGqaRow row(p_, block, sm90_row<Tile>(half));
      const MaskBounds bounds(p_, block.work, row.q_idx);
      begin[half] = bounds.begin - token_ - threadIdx.x % 4 * 2;
      end[half] = bounds.end - token_ - threadIdx.x % 4 * 2;
    }
    constexpr int kColumns = 32;  // that are looked at together
#pragma unroll
    for (int column = 0; column < Tile::kBlockN; column += kColumns) {
      const int32_t token = token_ + column;
      if (token >= unmasked_begin_ && token + kColumns <= unmasked_end_) continue;
#pragma unroll
      for (int i = column / 2; i < (column + kColumns) / 2; ++i) {
        const int half = i / 2 % 2, offset = i / 4 * 8 + i % 2;
        if (offset < begin[half] || offset >= end[half]) acc_s[i] = negative_infinity();
      }
    }
  }

  // Sets the values of the block to 0 that are behind the end of the work tile. Why: their P is 0,
  // but memory that is not the request's may hold NaN.
  __device__ __forceinline__ void clear_values_past_end() {
    const int32_t count = slot().block.work.kv_end - token_;
    if (count >= Tile::kBlockN) return;
    shared_.v.wait_full(v_, "V of the end");
    constexpr int kChunks = kPanelBytes / 16, kPanels = Tile::kDimV / kPanel;
    const uint32_t values = buffers_.v(v_.stage);
    // In units of 16 bytes: from eight rows to the next eight, and from panel to panel.
    const uint32_t atom_step = v_step_ / 2;
    const uint32_t panel_step = is_ragged(p_) ? Tile::kBlockN * kChunks : kAtomRows * kChunks;
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
  float scale_;                                          // from scores to logits in base 2
  uint64_t q_descriptor_, k_descriptor_, v_descriptor_;  // of stage 0
  uint32_t k_panel_step_, v_step_;                       // units of 16 bytes
  // The KV block that is computed, and its work tile.
  int32_t token_, kv_begin_, unmasked_begin_, unmasked_end_;
  PipelineState<kWorkSlots> work_;
  PipelineState<Tile::kQueryStages> q_;
  PipelineState<Tile::kStages> k_, v_;
};

#endif  // __CUDACC__

}  // namespace precast
