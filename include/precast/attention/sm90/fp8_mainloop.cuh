// SPDX-License-Identifier: Apache-2.0
// The mainloop of attention for sm_90a whose queries, keys and values are all e4m3. For each KV
// block of a work tile, the last one first:
//
//   acc_s = Q K^T                      wgmma, both operands in shared memory
//   P = 2^(acc_s - row_max)            as e4m3; attention/sm90/fp8_softmax.cuh
//   acc_pv = P [V, 1]                  wgmma into an accumulator that is new for each block
//   acc_o = acc_o * factor + acc_pv    and so row_sum, which is the column of ones
//
// Why a new accumulator: tensor cores keep about 14 bits of a sum of products of 8 bits, so P V of
// one block is added up by them, and the blocks in fp32. It takes no instruction more, because
// `factor`, by which a new maximum scales what is there, is part of the addition.
//
// Why a column of ones: it replaces an addition for each score, of which the SM has too many, by
// 6 % more work for the tensor cores, which wait. So row_sum is that of P as it is rounded, and a
// row of the output is a mean of V.
//
// Source   Shah et al., FlashAttention-3, arXiv:2407.08608, section 3.3, for e4m3 and for the order
//          of tokens in P and V^T; DeepSeek-V3, arXiv:2412.19437, section 3.5.2, for the addition.
#pragma once

#include "precast/attention/sm90/fp8_softmax.cuh"
#include "precast/attention/sm90/fp8_tile.cuh"
#include "precast/attention/sm90/scores.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename Tile>
class Sm90Fp8Consumer : Sm90Consumer<Tile> {
  using Base = Sm90Consumer<Tile>;
  using Base::p_, Base::shared_, Base::buffers_, Base::consumer_;
  using AccS = float[Tile::kBlockN / 2];
  using AccO = float[Tile::kDimV / 2];
  using OperandP = uint32_t[Tile::kBlockN / 32][4];
  // Columns of O that are computed at once. Where these are not all, registers are too few for the
  // column of ones beside them.
  static constexpr int kColumnsO = Tile::kDimV > 128 ? 128 : Tile::kDimV;

 public:
  __device__ __forceinline__ Sm90Fp8Consumer(const Sm90AttentionParams& params,
                                             Sm90Fp8Storage<Tile>& shared,
                                             Sm90Buffers<Tile> buffers, int consumer)
      : Base(params, shared, buffers, consumer), params_(params) {
    first_place_ = buffers.q(0) >> 4;
    write_ones();
  }

  __device__ __forceinline__ void run() {
    for_each_work<Tile>(p_, shared_, [&](const BlockInfo& block) { process(block); });
  }

 private:
  // Writes the columns of ones, which are the last rows of each buffer of V^T.
  __device__ __forceinline__ void write_ones() const {
    constexpr int kChunks = Tile::kOnes * 128 / 16;
    for (int i = Tile::thread(); i < Tile::kStages * kChunks; i += Tile::kThreads) {
      const uint32_t place = buffers_.v(i / kChunks) + Tile::kDimV * 128 + i % kChunks * 16;
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(place), "r"(0x38383838)
                   : "memory");
    }
    fence_shared_for_async();
    Tile::barrier();
  }

  // Computes a work tile and writes its results.
  __device__ __forceinline__ void process(const BlockInfo& block) {
    AccO acc_o;
#pragma unroll
    for (float& x : acc_o) x = 0.0f;
    row_sum_[0] = row_sum_[1] = 0.0f;
    Fp8Softmax softmax;
    // Why a count and no token: it is one register, and the rest is in shared memory.
    int left = num_kv_blocks<Tile>(block.work);
    if (left > 0) {
      OperandP p;
      float factor[2];
      const float no_factor[2] = {1.0f, 1.0f};
      --left;
      const int32_t token = block.work.kv_begin + left * Tile::kBlockN;
      shared_.q.wait_full(PipelineState<Tile::kQueryStages>::after(tiles_), "Q");
      load_row_scales(block);
      wait_for_keys("the first K");
      if (block.work.kv_end - token <= Tile::kLeastN) {
        process_last_block<Tile::kLeastN>(block, token, softmax, p, factor);
      } else {
        process_last_block<Tile::kBlockN>(block, token, softmax, p, factor);
      }
      if constexpr (Tile::kOverlaps) {
        Known next = {false, has_masks(block, left - 1)};
        while (left > 0) {
          --left;
          process_block_beside_pv(block, left, softmax, p, acc_o, factor, next);
        }
        release_queries();
        wait_for_values();
        add_pv(acc_o, p, factor);
      } else {
        this->begin_turns();
        for (;;) {
          if (left == 0) release_queries();
          wait_for_values();
          this->take_turn();
          add_pv(acc_o, p, no_factor);
          if (left == 0) break;
          const int32_t token = block.work.kv_begin + --left * Tile::kBlockN;
          wait_for_keys("K");
          const bool grows =
              compute_p<Tile::kBlockN, Tile::kTakesTurns>(block, token, softmax, p, factor);
          if (grows) rescale(acc_o, factor);
        }
        this->pass_turn();
        this->end_turns();
      }
    }
    RowStatistics rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.row_max[half] = softmax.row_max[half];
      rows.row_sum[half] = row_sum_[half];
    }
    if (block.work.num_splits == 1) {
      sm90_write_output<Tile>(p_, block, rows, acc_o, Sm90HeadTerms<Tile>(p_, block));
    } else {
      sm90_write_partial<Tile>(p_, block, rows, acc_o);
    }
  }

  // No K of this work tile will be multiplied with its Q any more.
  __device__ __forceinline__ void release_queries() {
    mbarrier_arrive_of_warp(&shared_.q.empty[tiles_ % Tile::kQueryStages]);
    ++tiles_;
  }

  __device__ __forceinline__ void wait_for_keys(const char* name) {
    shared_.k.wait_full(PipelineState<Tile::kStages>::after(blocks_), name);
  }
  // Those of the block whose P has been computed.
  __device__ __forceinline__ void wait_for_values() {
    shared_.v.wait_full(PipelineState<Tile::kStages>::after(blocks_ - 1), "V^T");
  }

  // The scales of the heads of this lane's rows.
  __device__ __forceinline__ void load_row_scales(const BlockInfo& block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = sm90_row<Tile>(half);
      const int32_t head = PackGqaRow(p_, block, row < block.num_rows ? row : 0).q_head;
      this->query_scale_[half] =
          p_.qk_scale == nullptr ? 1.0f : load_scalar(p_.qk_scale + head * p_.qk_scale_step);
    }
    row_scales_ = this->scales();
  }

  // P of the last KV block of a work tile, which is the first to be processed. No row sees more
  // than the first kColumns of its columns.
  template <int kColumns>
  __device__ __forceinline__ void process_last_block(const BlockInfo& block, int32_t token,
                                                     Fp8Softmax& softmax, OperandP& p,
                                                     float (&factor)[2]) {
    uint32_t first_p[kColumns / 32][4];
    compute_p<kColumns>(block, token, softmax, first_p, factor);
#pragma unroll
    for (int i = 0; i < Tile::kBlockN / 8; ++i) {
      p[i / 4][i % 4] = i < kColumns / 8 ? first_p[i / 4 % (kColumns / 32)][i % 4] : 0u;
    }
  }

  // P of a block, and what acc_o is multiplied by before P V is added; returns whether it is not 1.
  // With kPassesTurn the turn of this consumer ends with its product.
  template <int kColumns, bool kPassesTurn = false>
  __device__ __forceinline__ bool compute_p(const BlockInfo& block, int32_t token,
                                            Fp8Softmax& softmax, uint32_t (&p)[kColumns / 32][4],
                                            float (&factor)[2]) {
    float acc_s[kColumns / 2];
    VisibleTokens<kColumns> visible[2];
    if constexpr (Tile::kGeneral) this->find_visible(block, token, visible);
    wgmma_fence();
    multiply_qk<kColumns>(acc_s);
    wgmma_commit_group();
    if constexpr (kPassesTurn) this->pass_turn();
    wgmma_wait_group<0>();
    keep_behind_wait(acc_s);
    mbarrier_arrive_of_warp(&shared_.k.empty[blocks_ % Tile::kStages]);
    ++blocks_;
    if constexpr (Tile::kGeneral) {
      this->transform_and_mask(block, token, visible, acc_s);
    } else if (token < block.unmasked_begin || token + kColumns > block.unmasked_end) {
      mask<kColumns>(block, token, acc_s);
    }
    const bool grows = softmax.update_max(acc_s, row_scales_.of, factor);
    softmax.exp_scores(acc_s, row_scales_.of);
    pack_fp8_operands(acc_s, p);
    return grows;
  }

  // Sets the scores to -inf that causal mask, window and the end of the tokens hide. Why one row
  // after the other: it takes fewer registers, of which this path has none to spare.
  template <int kColumns>
  __device__ __forceinline__ void mask(const BlockInfo& block, int32_t first,
                                       float (&acc_s)[kColumns / 2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const PackGqaRow row(p_, block, sm90_row<Tile>(half));
      const MaskBounds bounds(p_, block.work, row.q_idx);
      const int32_t before = first + threadIdx.x % 4 * 2;
      const int32_t begin = bounds.begin - before, end = bounds.end - before;
#pragma unroll
      for (int i = 2 * half; i < kColumns / 2; i += 4) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (2 * i + j < begin + 4 * half || 2 * i + j >= end + 4 * half) {
            acc_s[i + j] = negative_infinity();
          }
        }
      }
    }
  }

  // What is known of the next block early, because it takes long to find out.
  struct Known {
    bool is_there;  // its K, and V^T of the block before it
    bool has_masks;
  };

  // Whether a row of the tile masks a token of the block with this number.
  static __device__ __forceinline__ bool has_masks(const BlockInfo& block, int number) {
    const int32_t token = block.work.kv_begin + number * Tile::kBlockN;
    return token < block.unmasked_begin || token + Tile::kBlockN > block.unmasked_end;
  }

  // Adds P V of the block before, and meanwhile computes P of this one. `known` becomes that of the
  // next block.
  __device__ __forceinline__ void process_block_beside_pv(const BlockInfo& block, int number,
                                                          Fp8Softmax& softmax, OperandP& p,
                                                          AccO& acc_o, float (&factor)[2],
                                                          Known& known) {
    AccS acc_s;
    float acc_pv[(kColumnsO + Tile::kOnes) / 2], next_factor[2];
    if (!known.is_there) wait_for_keys("K");
    wgmma_fence();
    multiply_qk<Tile::kBlockN>(acc_s);
    wgmma_commit_group();
    if (!known.is_there) wait_for_values();
    wgmma_fence();
    multiply_pv(acc_pv, p, 0);
    wgmma_commit_group();
    wgmma_wait_group<1>();
    keep_behind_wait(acc_s);
    mbarrier_arrive_of_warp(&shared_.k.empty[blocks_ % Tile::kStages]);
    ++blocks_;
    if (known.has_masks) {
      const int32_t token = block.work.kv_begin + number * Tile::kBlockN;
      mask<Tile::kBlockN>(block, token, acc_s);
    }
    softmax.update_max(acc_s, row_scales_.of, next_factor);
    softmax.exp_scores(acc_s, row_scales_.of);
    wgmma_wait_group<0>();
    keep_behind_wait(acc_pv);
    mbarrier_arrive_of_warp(&shared_.v.empty[(blocks_ - 2) % Tile::kStages]);
    const auto keys = PipelineState<Tile::kStages>::after(blocks_);
    const auto values = PipelineState<Tile::kStages>::after(blocks_ - 1);
    known.is_there = mbarrier_test_parity(&shared_.k.full[keys.stage], keys.parity) &
                     mbarrier_test_parity(&shared_.v.full[values.stage], values.parity);
    known.has_masks = has_masks(block, number - 1);
    add_columns(acc_o, acc_pv, 0, factor);
    factor[0] = next_factor[0];
    factor[1] = next_factor[1];
    pack_fp8_operands(acc_s, p);
  }

  // -- attention/sm90/fp8_products.cuh ------------------------------------------------------------

  template <int kColumns>
  __device__ __forceinline__ void multiply_qk(float (&acc_s)[kColumns / 2]) const;
  template <int kCount>
  __device__ __forceinline__ void multiply_pv(float (&acc_pv)[kCount], const OperandP& p,
                                              int column) const;
  __device__ __forceinline__ uint32_t place(uint32_t offset) const;
  __device__ __forceinline__ void add_pv(AccO& acc_o, const OperandP& p, const float (&factor)[2]);
  template <int kCount>
  __device__ __forceinline__ void multiply_pv_and_wait(float (&acc_pv)[kCount], const OperandP& p,
                                                       int column) const;
  template <int kCount>
  __device__ __forceinline__ void add_columns(AccO& acc_o, const float (&acc_pv)[kCount],
                                              int column, const float (&factor)[2]);
  __device__ __forceinline__ void add_sums(const float (&sums)[Tile::kOnes / 2],
                                           const float (&factor)[2]);
  __device__ __forceinline__ void rescale(AccO& acc_o, const float (&factor)[2]);

  const Sm90AttentionParams& params_;
  uint32_t first_place_;  // units of 16 bytes
  float row_sum_[2];
  typename Base::RowScales row_scales_;
  uint32_t tiles_ = 0, blocks_ = 0;  // whose Q has been read, and whose K
};

#endif  // __CUDACC__

}  // namespace precast
