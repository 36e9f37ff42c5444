// SPDX-License-Identifier: Apache-2.0
// Work tiles of few rows, of which one consumer holds all, in attention for sm_90a. Two consumers
// take the KV blocks in turn.
#pragma once

#include "precast/attention/sm90/operands.cuh"
#include "precast/attention/sm90/scores.cuh"

namespace precast {

#if defined(__CUDACC__)

// Computes a work tile whose rows one consumer holds. Two consumers take its KV blocks in turn,
// each with an online softmax of its own, and the first one adds up what both have. So one
// computes its softmax while the tensor cores work for the other, and a buffer is empty again
// after half of the time: such tiles are read as fast as memory allows.
template <typename Tile>
__device__ __forceinline__ void Sm90Consumer<Tile>::process_few_rows(const BlockInfo& block) {
  AccO acc_o;
#pragma unroll
  for (float& x : acc_o) x = 0.0f;
  RowStatistics rows;
  shared_.q.wait_full(q_, "Q of few rows");
  if constexpr (Tile::kGeneral) {
    if (has_rotary()) {
      if (consumer_ == 0) {
        rotate_queries(block);
        fence_shared_for_async();
      }
      Tile::barrier();
    }
  }
  const int32_t kv_begin = block.work.kv_begin;
  int32_t token = kv_begin + num_kv_blocks<Tile>(block.work) * Tile::kBlockN;
  for (int turn = 0; token > kv_begin; turn ^= 1) {
    token -= Tile::kBlockN;
    if (turn == consumer_) process_own_block(block, token, rows, acc_o);
    k_.advance();
    v_.advance();
  }
  rows.finalize();
  add_up(rows, acc_o);
  release(&shared_.q.empty[q_.stage]);
  q_.advance();
  if (consumer_ != 0) return;
  if (block.work.num_splits == 1) {
    sm90_write_output<Tile>(p_, block, rows, acc_o, Sm90HeadTerms<Tile>(p_, block));
  } else {
    sm90_write_partial<Tile>(p_, block, rows, acc_o);
  }
}

template <typename Tile>
__device__ __forceinline__ void Sm90Consumer<Tile>::process_own_block(const BlockInfo& block,
                                                                      int32_t token,
                                                                      RowStatistics& rows,
                                                                      AccO& acc_o) {
  AccS acc_s;
  OperandP p;
  VisibleTokens<Tile::kBlockN> visible[2];
  if constexpr (Tile::kGeneral) find_visible<true>(block, token, visible);
  wait_full(shared_.k, k_, "K of few rows");
  if constexpr (Tile::kGeneral) rotate_keys<true>(token);
  wgmma_fence();
  multiply_qk<Tile::kBlockN, true>(acc_s);
  wgmma_commit_group();
  wgmma_wait_group<0>();
  keep_behind_wait(acc_s);
  release<true>(&shared_.k.empty[k_.stage]);
  if constexpr (Tile::kGeneral) {
    transform_and_mask<true>(block, token, visible, acc_s);
  } else if (token < block.unmasked_begin || token + Tile::kBlockN > block.unmasked_end) {
    mask<Tile::kBlockN, true>(block, token, acc_s);
  }
  const bool rescales = rows.update_max(acc_s, scales().of);
  rows.exp_scores(acc_s, scales().of);
  if (rescales) rows.rescale(acc_o);
  pack_operands<typename Tile::Value>(acc_s, p);
  wait_full(shared_.v, v_, "V of few rows");
  if (token + Tile::kBlockN > block.work.kv_end) clear_values<true>(block.work.kv_end - token);
  wgmma_fence();
  multiply_pv(acc_o, p);
  wgmma_commit_group();
  wgmma_wait_group<0>();
  keep_behind_wait(acc_o);
  release<true>(&shared_.v.empty[v_.stage]);
}

// Adds the results of the second consumer to those of the first one. All consumers call it. They
// go through the buffer of Q, which none of them needs any more.
template <typename Tile>
__device__ __forceinline__ void Sm90Consumer<Tile>::add_up(RowStatistics& rows, AccO& acc_o) {
  static_assert(kWarpgroupSize * sizeof(AccO) <= Tile::kQueryBytes, "Q has room for it");
  const int thread = threadIdx.x % kWarpgroupSize;
  float4* const sent = static_cast<float4*>(__cvta_shared_to_generic(buffers_.q(q_.stage)));
  Tile::barrier();
  if (consumer_ == 1) {
#pragma unroll
    for (int i = 0; i < Tile::kDimV / 8; ++i) {
      sent[i * kWarpgroupSize + thread] =
          make_float4(acc_o[4 * i], acc_o[4 * i + 1], acc_o[4 * i + 2], acc_o[4 * i + 3]);
    }
    if (thread % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        shared_.row_stats[own_row<true>(half)] =
            make_float2(rows.row_max[half], rows.row_sum[half]);
      }
    }
    fence_shared_for_async();  // TMA writes there next
  }
  Tile::barrier();
  if (consumer_ != 0) return;
  float own[2], theirs[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 stats = shared_.row_stats[own_row<true>(half)];
    const float row_max = fmaxf(rows.row_max[half], stats.x);
    own[half] = exp2_relative(rows.row_max[half], row_max);
    theirs[half] = exp2_relative(stats.x, row_max);
    rows.row_max[half] = row_max;
    rows.row_sum[half] = fmaf(stats.y, theirs[half], rows.row_sum[half] * own[half]);
  }
#pragma unroll
  for (int i = 0; i < Tile::kDimV / 8; ++i) {
    float values[4];
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
                 : "r"(buffers_.q(q_.stage) + (i * kWarpgroupSize + thread) * 16)
                 : "memory");
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float& sum = acc_o[4 * i + j];
      sum = fmaf(values[j], theirs[j / 2], sum * own[j / 2]);
    }
  }
}

#endif  // __CUDACC__

}  // namespace precast
