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
#include "precast/attention/sm90/consumer.cuh"
#include "precast/attention/sm90/query.cuh"
#include "precast/core/sm90/wgmma.cuh"

namespace precast {

#if defined(__CUDACC__)

// The work of one consumer warpgroup. All its threads call each function.
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
    for_each_work([&](const BlockInfo& block) { process(block); });
  }

 protected:
  // Calls process(block) for each work tile.
  template <typename Process>
  __device__ __forceinline__ void for_each_work(const Process& process) {
    precast::for_each_work<Tile>(p_, shared_, process);
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

  // Turns this consumer's rows of Q into what keys of e4m3 need (attention/sm90/query.cuh).
  __device__ __forceinline__ void change_queries() {
    const uint32_t queries = buffers_.q(q_.stage);
    if constexpr (Tile::kSplitsQueries) {
      split_queries<Tile>(queries, query_scale_);
    } else {
      convert_queries<Tile>(queries, query_scale_);
    }
    fence_shared_for_async();
    barrier_of<true>();
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
    const int first_row = 64 * consumer_;
    const int32_t shift = block.work.kv_len - block.work.q_len;
    const auto rows = query_rows<Tile>(buffers_.q(q_.stage) + first_row * QueryLayout::kPanelBytes);
    rotate_rows<Tile, 64, kWarpgroupSize>(
        rows, rotary_freqs(), threadIdx.x % kWarpgroupSize,
        [&](int row) { return PackGqaRow(p_, block, first_row + row).q_idx + shift; });
  }

  // Rotates the next block of K, together with the other consumers or alone.
  template <bool kAlone = false>
  __device__ __forceinline__ void rotate_keys(int32_t first_position) const {
    if (!has_rotary()) return;
    const SwizzledRows<KeyLayout> rows = {
        buffers_.k(k_.stage), KeyLayout::kAtomBytes * (has_key_panels_ ? 1u : KeyLayout::kPanels),
        k_panel_step_ << 4};
    rotate_rows<Tile, Tile::kBlockN, kAlone ? kWarpgroupSize : Tile::kThreads>(
        rows, rotary_freqs(), kAlone ? threadIdx.x % kWarpgroupSize : Tile::thread(),
        [&](int row) { return first_position + row; });
    fence_shared_for_async();
    barrier_of<kAlone>();
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

  // Computes a work tile and writes its results.
  __device__ __forceinline__ void process(const BlockInfo& block) {
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

  // -- Tiles of few rows --------------------------------------------------------------------------

  // Computes a work tile whose rows one consumer holds. Two consumers take its KV blocks in turn,
  // each with an online softmax of its own, and the first one adds up what both have. So one
  // computes its softmax while the tensor cores work for the other, and a buffer is empty again
  // after half of the time: such tiles are read as fast as memory allows.
  __device__ __forceinline__ void process_few_rows(const BlockInfo& block) {
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
      sm90_write_output<Tile>(p_, block, rows, acc_o);
    } else {
      sm90_write_partial<Tile>(p_, block, rows, acc_o);
    }
  }

  __device__ __forceinline__ void process_own_block(const BlockInfo& block, int32_t token,
                                                    RowStatistics& rows, AccO& acc_o) {
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
  __device__ __forceinline__ void add_up(RowStatistics& rows, AccO& acc_o) {
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

  // -- Parts of both ------------------------------------------------------------------------------

  // The row of the tile that this lane holds; with kFew every consumer holds the first rows.
  template <bool kFew>
  static __device__ __forceinline__ int own_row(int half) {
    const int row = sm90_row<Tile>(half);
    return kFew ? row % kSharedRows : row;
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
    pack_operands<typename Tile::Value>(acc_s, first_p);
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

  // Queries that are split count as two, of which the low ones are first: their sums are small, so
  // less of them is rounded off.
  template <int kColumns, bool kFew = false>
  __device__ __forceinline__ void multiply_qk(float (&acc_s)[kColumns / 2]) const {
    using Mma = Wgmma<typename Tile::Key, kColumns>;
    constexpr int kSteps = KeyLayout::kPanels * KeyLayout::kPanelBytes / kStepBytes;
    constexpr int kParts = Tile::kSplitsQueries ? 2 : 1;
    const int first_row = kFew ? consumer_ * kSharedRows : 0;  // too many, of the descriptor
    const uint64_t q = q_descriptor_ +
                       ((q_.stage * Tile::kQueryBytes - first_row * QueryLayout::kPanelBytes) >> 4),
                   k = k_descriptor_ + (k_.stage * Tile::kKeyBytes >> 4);
#pragma unroll
    for (int i = 0; i < kParts * kSteps; ++i) {
      const int step = i % kSteps, is_low = i / kSteps < kParts - 1;
      const uint64_t a = q + query_step(step, is_low), b = k + key_step(step);
      if (i == 0) {
        Mma::template new_ss<false>(acc_s, a, b);
      } else {
        Mma::template add_ss<false>(acc_s, a, b);
      }
    }
  }

  // What a step of k adds to the descriptors of Q and K.
  static __device__ __forceinline__ uint32_t query_step(int step, bool is_low) {
    constexpr int kBytes = kStepBytes * (Tile::kSplitsQueries ? 2 : 1);
    constexpr int kPanelSteps = QueryLayout::kPanelBytes / kBytes;
    const int in_panel = step % kPanelSteps * kBytes + is_low * kStepBytes;
    return (step / kPanelSteps * Tile::kBlockM * QueryLayout::kPanelBytes + in_panel) >> 4;
  }
  __device__ __forceinline__ uint32_t key_step(int step) const {
    constexpr int kPanelSteps = KeyLayout::kPanelBytes / kStepBytes;
    return step / kPanelSteps * k_panel_step_ + (step % kPanelSteps * kStepBytes >> 4);
  }

  __device__ __forceinline__ void multiply_pv(AccO& acc_o, const OperandP& p) const {
    const uint64_t v = v_descriptor_ + (v_.stage * Tile::kValueBytes >> 4);
#pragma unroll
    for (int step = 0; step < Tile::kBlockN / 16; ++step) {
      Wgmma<typename Tile::Value, Tile::kDimV>::template add_rs<true>(acc_o, p[step],
                                                                      v + step * v_step_);
    }
  }

  // mask_scores() of this lane's rows. `first`: the token of the first column.
  template <int kColumns, bool kFew = false>
  __device__ __forceinline__ void mask(const BlockInfo& block, int32_t first,
                                       float (&acc_s)[kColumns / 2]) const {
    mask_scores<kColumns>(p_, block, first, [](int half) { return own_row<kFew>(half); }, acc_s);
  }

  // Finds which tokens from `first` on the two rows of this lane see. Why before the scores are
  // computed: it takes registers.
  template <bool kFew = false, int kColumns>
  __device__ __forceinline__ void find_visible(const BlockInfo& block, int32_t first,
                                               VisibleTokens<kColumns> (&visible)[2]) const {
    const bool is_bounded = first < block.unmasked_begin || first + kColumns > block.unmasked_end;
    if (!is_bounded && p_.mask != AttentionMask::custom && p_.mask != AttentionMask::multi_item) {
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      visible[half] = VisibleTokens<kColumns>(p_, block, own_row<kFew>(half), first);
    }
  }

  // Turns the scores of a KV block into logits divided by scale(), and those of hidden tokens into
  // -inf.
  template <bool kFew = false, int kColumns>
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
        transform_.template apply<kColumns>(p_, PackGqaRow(p_, block, own_row<kFew>(half)),
                                            first + threadIdx.x % 4 * 2, score);
      });
    }
    if (__all_sync(0xffffffffu, visible[0].has_all() && visible[1].has_all())) return;
    for_rows([&](int half, const auto& score) { visible[half].apply(score); });
  }

  // Sets the values behind the first `count` tokens of the next block to 0. Why: their P is 0, but
  // memory that is not the request's may hold NaN.
  // With kAlone this consumer does it alone, otherwise all of them together.
  template <bool kAlone>
  __device__ __forceinline__ void clear_values(int32_t count) {
    if constexpr (!kAlone) wait_full(shared_.v, v_, "V of the end");
    constexpr int kChunks = ValueLayout::kPanelBytes / 16, kPanels = ValueLayout::kPanels;
    const uint32_t values = buffers_.v(v_.stage);
    // In units of 16 bytes: from eight rows to the next eight, and from panel to panel.
    const uint32_t atom_step = v_step_ / 2;
    const uint32_t panel_step = has_value_panels_ ? Tile::kBlockN * kChunks : kAtomRows * kChunks;
    const int chunks = (Tile::kBlockN - count) * kPanels * kChunks;
    const int first = kAlone ? threadIdx.x % kWarpgroupSize : Tile::thread();
    for (int i = first; i < chunks; i += kAlone ? kWarpgroupSize : Tile::kThreads) {
      const int row = count + i / (kPanels * kChunks), panel = i / kChunks % kPanels;
      const uint32_t address = values + 16 * (row / kAtomRows * atom_step + panel * panel_step +
                                              row % kAtomRows * kChunks + i % kChunks);
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
    }
    fence_shared_for_async();
    barrier_of<kAlone>();
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
