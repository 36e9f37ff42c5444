// SPDX-License-Identifier: Apache-2.0
// The mainloop of an attention CTA: for each work tile of the tile scheduler, for each KV block
//
//   acc_s = Q K^T                    gemm_qk      attention/gemm.cuh
//   acc_s = -inf where masked        apply_mask   attention/mask.cuh
//   row_max = max(row_max, acc_s)    update_max   attention/softmax.cuh
//   P = 2^(acc_s - row_max)          exp_scores   attention/softmax.cuh
//   acc_o += P V                     gemm_pv      attention/gemm.cuh
//
// then the epilogue (attention/epilogue.cuh), and for a tile that is split the combination of its
// splits (attention/combine.cuh).
//
// Memory   Q, K and V in shared memory, acc_s and acc_o in registers. K and V pass through the
//          stages of a KvPipeline (attention/kv_pipeline.cuh).
#pragma once

#include "precast/attention/combine.cuh"
#include "precast/attention/gemm.cuh"
#include "precast/attention/kv_rows.cuh"
#include "precast/attention/mask.cuh"
#include "precast/attention/rotary.cuh"
#include "precast/core/launch.cuh"

namespace precast {

#if defined(__CUDACC__)

// Shared memory of static size. The rest is dynamic: see the members of AttentionMainloop.
template <typename Tile>
struct AttentionSharedStorage {
  WorkTileQueue<Tile> queue;
  WarpResults<Tile> results;
  CombineSharedStorage combine;
};

// The work of one CTA. All threads of the CTA must call each function.
template <typename Tile, typename Q, typename KV>
class AttentionMainloop {
  using T = typename MmaType<Q, KV>::type;
  using Pipeline = KvPipeline<Tile, KV>;
  using Softmax = OnlineSoftmax<Tile>;
  // Whether the Q of the next work tile can be copied as soon as a work tile begins, because the
  // current Q is in registers or there is a second buffer. Else it is copied after the mainloop.
  static constexpr bool kCopiesQEarly = Tile::kWarpsSplitKv || QFragments<Tile>::kInRegs;
  // Whether KV blocks with masked tokens have a loop body of their own. The loop over the other KV
  // blocks then has no code for masks.
  static constexpr bool kSplitsMaskedBlocks =
      !Tile::kWarpsSplitKv && !Tile::kPaired && !Tile::kGeneral && Tile::kBlockN >= 32;
  // Whether a KV block is loaded before the scores of another are computed. Why: to convert NVFP4
  // takes registers, which the scores have afterwards.
  static constexpr bool kLoadsFirst = KvFormat<KV>::kIsPacked;

 public:
  __device__ __forceinline__ AttentionMainloop(const AttentionParams& p, unsigned char* smem,
                                               AttentionSharedStorage<Tile>& shared)
      : p_(p),
        smem_q_(smem),
        rotary_freqs_(
            reinterpret_cast<RotaryFreq*>(smem + Tile::kQueryBuffers * Tile::kQueryBytes)),
        pair_(shared_address(smem + Tile::kQueryBuffers * Tile::kQueryBytes + Tile::kRotaryBytes)),
        smem_kv_(smem + Tile::kFixedBytes),
        shared_(shared),
        warp_kv_(Tile::kWarpsSplitKv ? threadIdx.x / 32 : 0) {
    if constexpr (!Tile::kStartsEarly) init_scores();
  }

  __device__ __forceinline__ void run() {
    using Queue = WorkTileQueue<Tile>;
    Queue& queue = shared_.queue;
    if constexpr (!Tile::kWarpsSplitKv) {
      if (threadIdx.x == 0) {
        shared_.combine.begin_clock = clock();
        queue.init(p_);
      }
      __syncthreads();
      if (!queue.is_valid[0]) return;
    }
    unsigned char* table = smem_kv_ - (Tile::kPipelines - warp_kv_) * Tile::kTableBytes;
    Pipeline pipeline(p_, queue, shared_address(smem_kv_ + warp_kv_ * Tile::kPipelineBytes),
                      shared_address(table), warp_kv_);
    if constexpr (Tile::kWarpsSplitKv) {
      if (!start(queue, pipeline)) return;
    } else {
      pipeline.set_next_tile(0);
      start_copies(queue, pipeline);
      __syncthreads();
    }
    int tile_idx = 0, q_buffer = 0;
    while (true) {
      const int slot = tile_idx % Queue::kDepth, next = (tile_idx + 1) % Queue::kDepth;
      const bool has_next = queue.is_valid[next];
      const BlockInfo& block = queue.blocks[slot];
      pipeline.set_next_tile(has_next ? next : -1);
      pipeline.fill();
      if (threadIdx.x < Queue::kFetchCount && has_next) queue.fetch(p_, tile_idx + 2);
      unsigned char* smem_q = smem_q_ + q_buffer * Tile::kQueryBytes;
      if (Tile::kWarpsSplitKv) q_buffer ^= 1;
      unsigned char* next_smem_q = smem_q_ + q_buffer * Tile::kQueryBytes;
      prepare_q(block, smem_q);
      process_tile(block, has_next ? &queue.blocks[next] : nullptr, pipeline, smem_q, next_smem_q);
      if (block.work.num_splits > 1) {
        combine_splits<Tile, Q>(p_, block, queue.counters + block.work.counter, !has_next,
                                shared_.combine);
      }
      if (!has_next) return;
      if constexpr (Tile::kWarpsSplitKv) {
        __syncthreads();
      } else {
        cp_async_wait_group<0>();
        QLoadPartition<Tile>::barrier();
      }
      ++tile_idx;
    }
  }

 private:
  // Prologue: the copies of the first Q and of the first KV blocks.
  __device__ __forceinline__ void start_copies(WorkTileQueue<Tile>& queue, Pipeline& pipeline) {
    copy_q<Tile>(p_, queue.blocks[0], shared_address(smem_q_));
    pipeline.fill();
    if (threadIdx.x < WorkTileQueue<Tile>::kFetchCount) queue.fetch(p_, 1);
    cp_async_wait_group<Tile::kStages - 1>();
  }

  // What a CTA of the 16-row tile (decode) does first: finds work and starts its copies. Returns
  // false if there is no work.
  //
  // With programmatic dependent launch, it does that while the previous grid still runs, which may
  // be about to write lengths, plan or page table. So it waits for that grid before it copies, and
  // reads again what it has started from while the copies are in flight. If anything differs, it
  // starts anew. Until then nothing is written but shared memory, and every address exists whatever
  // was read.
  __device__ __forceinline__ bool start(WorkTileQueue<Tile>& queue, Pipeline& pipeline) {
    using Source = typename WorkTileQueue<Tile>::Source;
    for (bool is_early = Tile::kStartsEarly;; is_early = false) {
      const Source source(p_);
      if constexpr (Tile::kPlansItself) {
        static_assert(sizeof(SelfPlanScratch) <= Tile::kPipelineBytes, "no stage is in use yet");
        queue.init_without_plan(p_, source, *reinterpret_cast<SelfPlanScratch*>(smem_kv_));
      } else if (threadIdx.x < 32) {
        queue.init_by_warp(p_, source, reinterpret_cast<int32_t*>(smem_kv_), is_early);
      }
      __syncthreads();
      const bool is_valid = queue.is_valid[0];
      if (is_early) {
        if (is_valid) pipeline.start_early(0);
        wait_on_previous_grid(p_.overlap);
        init_scores();
        if (!is_valid) {
          __syncthreads();  // all threads know it
          continue;
        }
        pipeline.look_up_again();
      } else {
        if (!is_valid) return false;
        pipeline.set_next_tile(0);
      }
      Source now = source;
      if (is_early) now = Source(p_);
      start_copies(queue, pipeline);
      const bool is_wrong = source.differ(now) | pipeline.has_looked_up_wrong();
      if (!__syncthreads_or(is_early & is_wrong)) return true;
      cp_async_wait_group<0>();
      __syncthreads();
      pipeline.reset();
    }
  }

  // The factor of scores, and what else they need, some of it from global memory.
  __device__ __forceinline__ void init_scores() {
    scale_ = p_.scale * (Tile::kGeneral ? 1.0f : kLog2E);
    if (p_.qk_scale != nullptr) scale_ *= load_scalar(p_.qk_scale);
    if constexpr (Tile::kMayPairHeads) {
      // Kernels of pairs take any scale, since their masks visit each score. A product of minus
      // infinity with 0 would be NaN.
      if (p_.pair_shift > 0) {
        pair_sign_ = scale_ < 0.0f ? -1.0f : 1.0f;
        scale_ = fabsf(scale_);
        if (scale_ < kLeastNormal) scale_ = kLeastNormal;  // NaN stays NaN
      }
    }
    if constexpr (Tile::kGeneral) transform_ = LogitsTransform(p_, scale_);
    if (has_rotary()) init_rotary_freqs<Tile>(p_, rotary_freqs_);
  }

  __device__ __forceinline__ bool has_rotary() const {
    return Tile::kGeneral && p_.positions == PositionEncoding::rope;
  }

  // Turns Q in shared memory into operands of the MMA: rotates it, permutes it for FP8 keys, and
  // converts it for keys in NVFP4.
  __device__ __forceinline__ void prepare_q(const BlockInfo& block, unsigned char* smem_q) {
    if (has_rotary()) {
      rotate_q<Tile, Q>(p_, block, rotary_freqs_, smem_q);
      QLoadPartition<Tile>::barrier();
    }
    if constexpr (Tile::kFp8) {
      permute_q_columns<Tile, Q>(smem_q);
      QLoadPartition<Tile>::barrier();
    } else if constexpr (TypeName<T>::value != TypeName<Q>::value) {
      convert_q_to_f16<Tile>(smem_q);
      QLoadPartition<Tile>::barrier();
    }
  }

  // Mainloop and epilogue of one work tile, and the copy of the next one's Q.
  __device__ __forceinline__ void process_tile(const BlockInfo& block, const BlockInfo* next,
                                               Pipeline& pipeline, unsigned char* smem_q,
                                               unsigned char* next_smem_q) {
    const QFragments<Tile> q_frag(shared_address(smem_q));
    const auto copy_next_q = [&] {
      if constexpr (Tile::kWarpsSplitKv) {
        __syncwarp();
      } else {
        QLoadPartition<Tile>::barrier();
      }
      if (next != nullptr) copy_q<Tile>(p_, *next, shared_address(next_smem_q));
    };
    if constexpr (kCopiesQEarly) copy_next_q();
    const int32_t begin = block.work.kv_begin + warp_kv_ * pipeline.block_tokens();

    Softmax softmax;
    for (int32_t token = begin; token < block.work.kv_end; token += pipeline.token_step()) {
      if constexpr (kSplitsMaskedBlocks) {
        if (token >= block.unmasked_begin) {
          int32_t unmasked_blocks = (block.unmasked_end - token) / Tile::kBlockN;
          if (unmasked_blocks > 0) {
            // Why `token` does not advance: the loop has no register for it.
            do {
              process_kv_block(block, token, pipeline, q_frag, softmax);
            } while (--unmasked_blocks > 0);
            token = block.unmasked_end / Tile::kBlockN * Tile::kBlockN;
            if (token >= block.work.kv_end) break;
          }
        }
        process_masked_kv_block(block, token, pipeline, q_frag, softmax);
      } else {
        process_kv_block(block, token, pipeline, q_frag, softmax);
      }
    }
    if constexpr (!kCopiesQEarly) copy_next_q();
    softmax.finalize(pair_);
    if constexpr (!Tile::kWarpsSplitKv) __syncthreads();  // the last stage is free for the epilogue

    if constexpr (Tile::kWarpsSplitKv) {
      // If few KV blocks followed the copy of the next Q, consumer_wait() has not waited for it.
      if (begin + pipeline.token_step() * Tile::kStages > block.work.kv_end)
        cp_async_wait_group<0>();
      __syncwarp();
      WarpResults<Tile>& results = shared_.results;
      if (threadIdx.x % 32 == 0) results.stage_offsets[warp_kv_] = pipeline.free_stage_offset();
      __syncwarp();
      write_partial<Tile>(softmax, block.num_rows, results.of(smem_kv_, warp_kv_));
      __syncthreads();
      combine_warps<Tile, Q>(p_, block, smem_kv_, results);
    } else if (block.work.num_splits == 1) {
      write_output<Tile, Q>(p_, block, softmax, smem_kv_ + pipeline.free_stage_offset());
    } else {
      write_partial<Tile>(softmax, block.num_rows, partial_result<Tile>(p_, block.work));
    }
  }

  // The next KV block, which begins at `token`. With kSplitsMaskedBlocks it has no masked tokens.
  __device__ __forceinline__ void process_kv_block(const BlockInfo& block, int32_t token,
                                                   Pipeline& pipeline,
                                                   const QFragments<Tile>& q_frag,
                                                   Softmax& softmax) {
    constexpr int kTokens = Tile::kWarpN;
    uint32_t smem_k = pipeline.consumer_wait(), smem_v = smem_k + Tile::kKeyBytes;
    if constexpr (kLoadsFirst) pipeline.producer_load();
    const bool is_unmasked =
        kSplitsMaskedBlocks ||
        (token >= block.unmasked_begin && token + pipeline.block_tokens() <= block.unmasked_end);
    if constexpr (Tile::kPaired) {
      const int first_token = WarpPartition<Tile>::first_token();
      token += first_token;
      smem_k += first_token * Tile::KeyRows::kStride;
      smem_v += WarpPartition<Tile>::first_column() * Tile::kKvBytes;
    }
    typename Softmax::template AccS<kTokens> acc_s = {};
    bool is_computed = false;
    if constexpr (Tile::kGeneral) {
      is_computed = has_rotary();
      if (is_computed) gemm_qk_rotary<Tile, Q, KV>(acc_s, smem_k, q_frag, rotary_freqs_, token);
    }
    if (!is_computed) gemm_qk<Tile, Q, KV>(acc_s, smem_k, lane_offsets_.k, q_frag);
    if constexpr (Tile::kGeneral) {
      logits_transform<Tile>(p_, block, token, transform_, acc_s);
    } else if (Tile::kMayPairHeads && p_.pair_shift > 0) {
      apply_mask_of_pair<Tile>(p_, block, token, is_unmasked, pair_sign_, acc_s);
    } else if (!is_unmasked) {
      apply_mask<Tile>(p_, block, token, acc_s);
    }
    const float scale = Tile::kGeneral ? 1.0f : scale_;
    if constexpr (Tile::kPaired) {
      typename Softmax::template FragP<kTokens> p_frag;
      softmax.update_max(acc_s, scale);
      if constexpr (!kLoadsFirst) pipeline.template producer_load<0, 2>();
      softmax.template exp_scores<T>(acc_s, scale, p_frag);
      gemm_pv_by_pairs(softmax, p_frag, smem_v, pipeline);
    } else {
      if constexpr (!kLoadsFirst) pipeline.producer_load();
      softmax.update_max(acc_s, scale);
      exp_and_gemm_pv<kTokens>(softmax, acc_s, scale, smem_v, [&] { pipeline.producer_commit(); });
    }
    pipeline.publish_addresses_ahead();
  }

  // The next KV block, with masked tokens, in two halves. Often no row attends to the second half,
  // which saves much of the time of short prompts.
  __device__ __forceinline__ void process_masked_kv_block(const BlockInfo& block, int32_t token,
                                                          Pipeline& pipeline,
                                                          const QFragments<Tile>& q_frag,
                                                          Softmax& softmax) {
    constexpr int kTokens = Tile::kBlockN / 2;
    uint32_t smem_k = pipeline.consumer_wait(), smem_v = smem_k + Tile::kKeyBytes;
    pipeline.producer_load();
    pipeline.producer_commit();
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      typename Softmax::template AccS<kTokens> acc_s = {};
      gemm_qk<Tile, Q, KV>(acc_s, smem_k, lane_offsets_.k, q_frag);
      const bool is_unmasked =
          token >= block.unmasked_begin && token + kTokens <= block.unmasked_end;
      if (!is_unmasked) apply_mask<Tile>(p_, block, token, acc_s);
      softmax.update_max(acc_s, scale_);
      exp_and_gemm_pv<kTokens>(softmax, acc_s, scale_, smem_v, [] {});
      token += kTokens;
      if (token >= block.work.kv_end) break;
      smem_k += kTokens * Tile::KeyRows::kStride;
      smem_v += kTokens * Tile::ValueRows::kStride;
    }
    pipeline.publish_addresses_ahead();
  }

  // P from acc_s, and acc_o += P V. `overlap` is called once.
  template <int kTokens, typename Overlap>
  __device__ __forceinline__ void exp_and_gemm_pv(
      Softmax& softmax, const typename Softmax::template AccS<kTokens>& acc_s, float scale,
      uint32_t smem_v, const Overlap& overlap) {
    if constexpr (Softmax::kRowSumByMma) {
      exp_scores_and_gemm_pv<Tile, T>(softmax, acc_s, scale, smem_v, lane_offsets_.v, overlap);
    } else {
      typename Softmax::template FragP<kTokens> p_frag;
      overlap();
      softmax.template exp_scores<T>(acc_s, scale, p_frag);
      gemm_pv<Tile, Q, KV>(softmax.acc_o, p_frag, smem_v, lane_offsets_.v);
    }
  }

  // acc_o += P V of this warp's tokens, and then of the tokens of the other warp of the pair; V has
  // this warp's columns. The copies start in two parts, because the warp stalls when their queue is
  // full.
  __device__ __forceinline__ void gemm_pv_by_pairs(
      Softmax& softmax, typename Softmax::template FragP<Tile::kWarpN>& p_frag, uint32_t smem_v,
      Pipeline& pipeline) {
    constexpr uint32_t kHalfBytes = Tile::kWarpN * Tile::ValueRows::kStride;
    const bool is_second = WarpPartition<Tile>::half() != 0;
    float peer_max[2][2];
    pair_.send(p_frag, softmax.row_max);
    if constexpr (!kLoadsFirst) pipeline.template producer_load<1, 2>();
    pipeline.producer_commit();
    gemm_pv<Tile, Q, KV>(softmax.acc_o, p_frag, smem_v + (is_second ? kHalfBytes : 0),
                         lane_offsets_.v);
    pair_.receive(p_frag, peer_max);
    softmax.template reduce_max<T>(peer_max, p_frag);
    gemm_pv<Tile, Q, KV>(softmax.acc_o, p_frag, smem_v + (is_second ? 0 : kHalfBytes),
                         lane_offsets_.v);
  }

  const AttentionParams& p_;
  // Dynamic shared memory, in this order: Q, rotary frequencies, the exchange of warp pairs, the
  // address tables of the pipelines, the stages of K and V.
  unsigned char* smem_q_;  // [kQueryBuffers, kQueryBytes]
  RotaryFreq* rotary_freqs_;
  WarpPair<Tile> pair_;
  unsigned char* smem_kv_;  // [kPipelines, kStages, kStageBytes]
  AttentionSharedStorage<Tile>& shared_;
  KvLaneOffsets<Tile> lane_offsets_;
  int warp_kv_;  // in the 16-row tile the warp, which takes every kPipelines-th KV block; else 0
  float scale_;  // from scores to logits, which are in base 2 but for general kernels
  float pair_sign_ = 1.0f;     // that of the scale, where tiles have two KV heads
  LogitsTransform transform_;  // of general kernels
};

#endif  // __CUDACC__

}  // namespace precast
