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

#include "precast/attention/sm90/few_rows.cuh"

namespace precast {

#if defined(__CUDACC__)

// Computes a work tile and writes its results.
template <typename Tile>
__device__ __forceinline__ void Sm90Consumer<Tile>::process(const BlockInfo& block) {
  if constexpr (Tile::kSharesRows) {
    if (block.num_rows <= kSharedRows && block.work.kv_begin < block.work.kv_end) {
      process_few_rows(block);
      return;
    }
  }
  AccO acc_o;
#pragma unroll
  for (float& x : acc_o) x = 0.0f;
  RowStatistics rows;
  Sm90HeadTerms<Tile> heads;
  const int32_t kv_begin = block.work.kv_begin;
  int32_t token = kv_begin + num_kv_blocks<Tile>(block.work) * Tile::kBlockN;
  if (token > kv_begin) {
    const int32_t unmasked_begin = block.unmasked_begin, unmasked_end = block.unmasked_end;
    AccS acc_s;
    OperandP p;
    token -= Tile::kBlockN;
    shared_.q.wait_full(q_, "Q");
    if constexpr (Tile::kConvertsQueries || Tile::kSplitsQueries) change_queries();
    if constexpr (Tile::kGeneral) rotate_queries(block);
    wait_full(shared_.k, k_, "the first K");
    if constexpr (Tile::kGeneral) rotate_keys(token);
    if (block.work.kv_end - token <= Tile::kLeastN) {
      process_last_block<Tile::kLeastN>(block, token, rows, p);
    } else {
      process_last_block<Tile::kBlockN>(block, token, rows, p);
    }
    if (!Tile::kConverts && token + Tile::kBlockN > block.work.kv_end) {
      clear_values<false>(block.work.kv_end - token);
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
      pack_operands<typename Tile::Value>(acc_s, p);
    }
    end_turns();
    release(&shared_.q.empty[q_.stage]);
    q_.advance();
    if (block.work.num_splits == 1) heads = Sm90HeadTerms<Tile>(p_, block);
    wait_full(shared_.v, v_, "the last V");
    wgmma_fence();
    multiply_pv(acc_o, p);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    keep_behind_wait(acc_o);
    release(&shared_.v.empty[v_.stage]);
    v_.advance();
  } else {
    heads = Sm90HeadTerms<Tile>(p_, block);
  }
  rows.finalize();
  if (block.work.num_splits == 1) {
    sm90_write_output<Tile>(p_, block, rows, acc_o, heads);
  } else {
    sm90_write_partial<Tile>(p_, block, rows, acc_o);
  }
}

// P of the last KV block of a work tile, which is the first to be processed. No row sees more
// than the first kColumns of its columns.
template <typename Tile>
template <int kColumns>
__device__ __forceinline__ void Sm90Consumer<Tile>::process_last_block(const BlockInfo& block,
                                                                       int32_t token,
                                                                       RowStatistics& rows,
                                                                       OperandP& p) {
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
  pack_operands<typename Tile::Value>(acc_s, first_p);
#pragma unroll
  for (int i = 0; i < Tile::kBlockN / 4; ++i) {
    p[i / 4][i % 4] = i < kColumns / 4 ? first_p[i / 4 % (kColumns / 16)][i % 4] : 0u;
  }
}

#endif  // __CUDACC__

}  // namespace precast
