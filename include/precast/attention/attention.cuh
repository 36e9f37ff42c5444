// SPDX-License-Identifier: Apache-2.0
// Attention of paged or ragged keys and values, for prefill and decode.
//
//   out[i, h] = sum_j softmax_j(logit(i, j)) v[j, h / group]
//   logit(i, j) = scale * q[i, h] . k[j, h / group], -inf where the mask hides token j from query i
//
// Layout   q, out   [tokens, heads, head_dim]             any two strides, unit stride in a row
//          k, v     [pages, page_size, kv_heads, head_dim] any three strides; or [tokens, ...]
//          lse      [tokens, heads]                        base 2
// Threads  a CTA walks the pieces that the plan gives it (attention/scheduler.cuh); of a piece it
//          keeps queries in shared memory, sums in registers, and lets the tokens pass through a
//          ring of cp.async copies (attention/tile.cuh, attention/kv_pipeline.cuh).
// Traffic  reads keys and values once for every tile of packed queries: once in decode.
// Source   Dao, FlashAttention-2, arXiv:2307.08691; Ye et al., FlashInfer, arXiv:2501.01005 for
//          packed heads, page tables and the merge of parts.
// Measured 2026-11-22 on an H200 where torch read 4305 GB/s, bf16, 32 query and 8 KV heads of 128,
//          pages of 16. Decode, us and share of that ceiling; beside it with KV of e4m3:
//            1 x 1024       6.8           6.9
//            1 x 8192      13.4          11.1
//            64 x 4096    247.9  1.01   135.9  0.92
//            64 x 16384   963.0  1.04   526.7  0.95
//            256 x 4096   964.5  1.04   532.8  0.94
//          Causal prefill, TFLOP/s, paged and ragged; beside it times FlashInfer's fa2:
//            1 x 1024, tiles of 64 rows      226  228    1.55  1.34
//            1 x 4096, 128 rows from here    382  359    1.39  1.27
//            1 x 16384                       395  366    1.16  1.06
//            1 x 32768                       387  361    1.12  1.03
//            8 x 2048                        350  328    1.18  1.05
//            32 x 512                        251  246    1.20  0.98
//          There matrix units are busy for 55 to 58 % of the time: registers allow two warps a
//          scheduler, which often are both at something else.
#pragma once

#include "precast/attention/prefetch.cuh"
#include "precast/attention/combine.cuh"
#include "precast/attention/gemm.cuh"
#include "precast/attention/rotary.cuh"
#include "precast/attention/mask.cuh"
#include "precast/attention/kv_pipeline.cuh"
#include "precast/core/launch.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename Tile>
struct AttentionShared {
  AttentionQueue<Tile> queue;
  TeamResults<Tile> results;
  MergeShared merge;
};

// A CTA at its pieces. All threads of the CTA call everything alike.
template <typename Tile, typename Q, typename KV>
class Attention {
  using T = typename ProductType<Q, KV>::type;
  using Stream = TokenStream<Tile, KV>;
  using States = RowStates<Tile>;
  // Whether the next piece's queries may be copied as soon as a piece begins, rather than after its
  // tokens.
  static constexpr bool kCopiesEarly = Tile::kNarrow || QueryOperands<Tile>::kHeld;
  // Whether groups that some row does not see whole are taken apart from the others, whose loop
  // then holds nothing of masks.
  static constexpr bool kHasEdges =
      !Tile::kNarrow && !Tile::kPaired && !Tile::kGeneral && Tile::kTokens >= 32;

 public:
  __device__ __forceinline__ Attention(const AttentionParams& p, unsigned char* memory,
                                       AttentionShared<Tile>& shared)
      : p_(p),
        queries_(memory),
        turns_(reinterpret_cast<RopeTurns*>(memory + Tile::kQueryBuffers * Tile::kQueryBytes)),
        pair_(shared_address(memory + Tile::kQueryBuffers * Tile::kQueryBytes + Tile::kTurnBytes)),
        rings_(memory + Tile::kFixedBytes),
        shared_(shared),
        team_(Tile::kNarrow ? threadIdx.x / 32 : 0) {
    scale_ = p.scale * (Tile::kGeneral ? 1.0f : kLog2E);
    if (p.qk_scale != nullptr) scale_ *= load_scalar(p.qk_scale);
    if (turns_keys()) fill_turns<Tile>(p, turns_);
  }

  __device__ __forceinline__ void run() {
    using Queue = AttentionQueue<Tile>;
    Queue& queue = shared_.queue;
    if (threadIdx.x == 0) {
      shared_.merge.began = clock();
      queue.start(p_);
    }
    __syncthreads();
    if (!queue.exists[0]) return;
    unsigned char* table = rings_ - (Tile::kTeams - team_) * Tile::kTableBytes;
    Stream stream(p_, queue, shared_address(rings_ + team_ * Tile::kRingBytes),
                  shared_address(table), team_);
    stream.follow(0);
    copy_queries<Tile>(p_, queue.works[0], shared_address(queries_));
    stream.fill();
    if (threadIdx.x < Queue::kAtOnce) queue.take(p_, 1);
    wait_for_copies<Tile::kStages - 1>();
    __syncthreads();
    int number = 0, buffer = 0;
    while (true) {
      const int slot = number % Queue::kSlots, next = (number + 1) % Queue::kSlots;
      const bool goes_on = queue.exists[next];
      const AttentionWork& work = queue.works[slot];
      stream.follow(goes_on ? next : -1);
      stream.fill();
      if (threadIdx.x < Queue::kAtOnce && goes_on) queue.take(p_, number + 2);
      unsigned char* queries = queries_ + buffer * Tile::kQueryBytes;
      if (Tile::kNarrow) buffer ^= 1;
      unsigned char* next_queries = queries_ + buffer * Tile::kQueryBytes;
      order(work, queries);
      attend(work, goes_on ? &queue.works[next] : nullptr, stream, queries, next_queries);
      if (work.piece.parts > 1) {
        merge_parts<Tile, Q>(p_, work, queue.counters + work.piece.counter, !goes_on,
                             shared_.merge);
      }
      if (!goes_on) return;
      if constexpr (Tile::kNarrow) {
        __syncthreads();
      } else {
        wait_for_copies<0>();
        QueryRowsOfWarp<Tile>::barrier();
      }
      ++number;
    }
  }

 private:
  __device__ __forceinline__ bool turns_keys() const {
    return Tile::kGeneral && p_.positions == PositionEncoding::rope;
  }

  // Makes operands of the queries as they lie in memory.
  __device__ __forceinline__ void order(const AttentionWork& work, unsigned char* queries) {
    if (turns_keys()) {
      turn_queries<Tile, Q>(p_, work, turns_, queries);
      QueryRowsOfWarp<Tile>::barrier();
    }
    if constexpr (Tile::kFp8) {
      order_queries<Tile, Q>(queries);
      QueryRowsOfWarp<Tile>::barrier();
    }
  }

  // One piece, and the copies of the next one's queries.
  __device__ __forceinline__ void attend(const AttentionWork& work, const AttentionWork* next,
                                         Stream& stream, unsigned char* queries,
                                         unsigned char* next_queries) {
    const QueryOperands<Tile> operands(shared_address(queries));
    const auto copy_next = [&] {
      if constexpr (Tile::kNarrow) {
        __syncwarp();
      } else {
        QueryRowsOfWarp<Tile>::barrier();
      }
      if (next != nullptr) copy_queries<Tile>(p_, *next, shared_address(next_queries));
    };
    if constexpr (kCopiesEarly) copy_next();
    const int32_t begin = work.piece.kv_begin + team_ * Tile::kTokens;

    States states;
    for (int32_t token = begin; token < work.piece.kv_end; token += Stream::kStep) {
      if constexpr (kHasEdges) {
        if (token >= work.seen_begin) {
          int32_t groups = (work.seen_end - token) / Tile::kTokens;
          if (groups > 0) {
            // Why `token` stays behind: the loop has no register for it.
            do {
              attend_group(work, token, stream, operands, states);
            } while (--groups > 0);
            token = work.seen_end / Tile::kTokens * Tile::kTokens;
            if (token >= work.piece.kv_end) break;
          }
        }
        attend_edge(work, token, stream, operands, states);
      } else {
        attend_group(work, token, stream, operands, states);
      }
    }
    if constexpr (!kCopiesEarly) copy_next();
    states.finish(pair_);
    if constexpr (!Tile::kNarrow) __syncthreads();  // the last stage is free for results

    if constexpr (Tile::kNarrow) {
      // The next queries are behind fewer groups of copies than stream.wait() leaves open.
      if (begin + Stream::kStep * Tile::kStages > work.piece.kv_end) wait_for_copies<0>();
      __syncwarp();
      TeamResults<Tile>& results = shared_.results;
      if (threadIdx.x % 32 == 0) results.stages[team_] = stream.free_stage();
      __syncwarp();
      write_partial<Tile>(states, work.rows, results.of(rings_, team_));
      __syncthreads();
      merge_teams<Tile, Q>(p_, work, rings_, results);
    } else if (work.piece.parts == 1) {
      write_rows<Tile, Q>(p_, work, states, rings_ + stream.free_stage());
    } else {
      write_partial<Tile>(states, work.rows, slot_of<Tile>(p_, work.piece));
    }
  }

  // The next group of tokens, from `token` on; where there are edges, one that all rows see whole.
  __device__ __forceinline__ void attend_group(const AttentionWork& work, int32_t token,
                                               Stream& stream, const QueryOperands<Tile>& operands,
                                               States& states) {
    constexpr int kScored = Tile::kWarpTokens;
    uint32_t keys = stream.wait(), values = keys + Tile::kKeyBytes;
    const bool is_seen =
        kHasEdges || (token >= work.seen_begin && token + Tile::kTokens <= work.seen_end);
    if constexpr (Tile::kPaired) {
      const int first = WarpShare<Tile>::first_token();
      token += first;
      keys += first * Tile::KeyRows::kStride;
      values += WarpShare<Tile>::first_column() * sizeof(KV);
    }
    typename States::template Scores<kScored> scores = {};
    bool is_multiplied = false;
    if constexpr (Tile::kGeneral) {
      is_multiplied = turns_keys();
      if (is_multiplied) multiply_turned_keys<Tile, Q, KV>(scores, keys, operands, turns_, token);
    }
    if (!is_multiplied) multiply_keys<Tile, Q, KV>(scores, keys, lanes_.keys, operands);
    if constexpr (Tile::kGeneral) {
      logits_of_scores<Tile>(p_, work, token, scale_, scores);
    } else if (!is_seen) {
      limit_scores<Tile>(p_, work, token, scores);
    }
    const float scale = Tile::kGeneral ? 1.0f : scale_;
    if constexpr (Tile::kPaired) {
      typename States::template Weights<kScored> weights;
      states.see(scores, scale);
      stream.template load_beside<0, 2>();
      states.template weigh<T>(scores, scale, weights);
      multiply_values_by_pairs(states, weights, values, stream);
    } else {
      stream.load_beside();
      states.see(scores, scale);
      weigh_and_multiply<kScored>(states, scores, scale, values, [&] { stream.look_ahead(); });
    }
    stream.publish_beside();
  }

  // The same where some row does not see all of the group: by halves, of which often the second has
  // no token that any row sees. Of short prompts that is a large share.
  __device__ __forceinline__ void attend_edge(const AttentionWork& work, int32_t token,
                                              Stream& stream, const QueryOperands<Tile>& operands,
                                              States& states) {
    constexpr int kScored = Tile::kTokens / 2;
    uint32_t keys = stream.wait(), values = keys + Tile::kKeyBytes;
    stream.load_beside();
    stream.look_ahead();
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      typename States::template Scores<kScored> scores = {};
      multiply_keys<Tile, Q, KV>(scores, keys, lanes_.keys, operands);
      const bool is_seen = token >= work.seen_begin && token + kScored <= work.seen_end;
      if (!is_seen) limit_scores<Tile>(p_, work, token, scores);
      states.see(scores, scale_);
      weigh_and_multiply<kScored>(states, scores, scale_, values, [] {});
      token += kScored;
      if (token >= work.piece.kv_end) break;
      keys += kScored * Tile::KeyRows::kStride;
      values += kScored * Tile::ValueRows::kStride;
    }
    stream.publish_beside();
  }

  // Weights, from scores, times values. `beside` is called once.
  template <int kScored, typename Beside>
  __device__ __forceinline__ void weigh_and_multiply(
      States& states, const typename States::template Scores<kScored>& scores, float scale,
      uint32_t values, const Beside& beside) {
    if constexpr (States::kSumsByProduct) {
      weigh_values<Tile, T>(states, scores, scale, values, lanes_.values, beside);
    } else {
      typename States::template Weights<kScored> weights;
      beside();
      states.template weigh<T>(scores, scale, weights);
      multiply_values<Tile, Q, KV>(states.sums, weights, values, lanes_.values);
    }
  }

  // The weights of this warp's tokens and then of the other's, times the values of its columns.
  // Copies in two parts, for the queue of them stops the warp.
  __device__ __forceinline__ void multiply_values_by_pairs(
      States& states, typename States::template Weights<Tile::kWarpTokens>& weights,
      uint32_t values, Stream& stream) {
    constexpr uint32_t kOthers = Tile::kWarpTokens * Tile::ValueRows::kStride;
    const bool is_second = WarpShare<Tile>::half() != 0;
    float top[2][2];
    pair_.send(weights, states.top);
    stream.template load_beside<1, 2>();
    stream.look_ahead();
    multiply_values<Tile, Q, KV>(states.sums, weights, values + (is_second ? kOthers : 0),
                                 lanes_.values);
    pair_.receive(weights, top);
    states.template agree<T>(top, weights);
    multiply_values<Tile, Q, KV>(states.sums, weights, values + (is_second ? 0 : kOthers),
                                 lanes_.values);
  }

  const AttentionParams& p_;
  // Shared memory: queries, turns of RoPE, what pairs exchange, tables of rows, rings.
  unsigned char* queries_;  // [kQueryBuffers, kQueryBytes]
  RopeTurns* turns_;
  WarpPair<Tile> pair_;
  unsigned char* rings_;  // [kTeams, kStages, keys and values]
  AttentionShared<Tile>& shared_;
  ProductLanes<Tile> lanes_;
  int team_;
  float scale_;
};

template <typename Tile, typename Q, typename KV>
__global__ __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm) void AttentionKernel(
    const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) unsigned char attention_memory[];
  __shared__ AttentionShared<Tile> shared;
  static_assert(sizeof shared <= Tile::kStaticBytes, "there is room");
  allow_next_grid();
  if constexpr (Tile::kNarrow) prefetch_first_tokens<Tile, KV>(p);
  wait_for_previous_grid();
  Attention<Tile, Q, KV>(p, attention_memory, shared).run();
}

#if !defined(__CUDACC_RTC__)

template <typename Q, typename KV, int kDimQ, int kDimV, int kRows, bool kGeneral>
cudaError_t launch_attention_tile(const AttentionParams& p, bool enable_pdl, cudaStream_t stream) {
  using Tile = AttentionTile<sizeof(KV), kDimQ, kDimV, kRows, kGeneral>;
  const auto kernel = AttentionKernel<Tile, Q, KV>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes);
  if (error != cudaSuccess) return error;
  return launch(kernel, dim3(p.schedule.shape.ctas), dim3(Tile::kThreads), enable_pdl, stream, p,
                Tile::kSharedBytes);
}

template <typename Q, typename KV, int kDimQ, int kDimV, bool kGeneral>
cudaError_t launch_attention_rows(const AttentionParams& p, bool enable_pdl, cudaStream_t stream) {
  switch (p.schedule.shape.tile_rows) {
    case kNarrowRows:
      return launch_attention_tile<Q, KV, kDimQ, kDimV, kNarrowRows, kGeneral>(p, enable_pdl,
                                                                               stream);
    case kMiddleRows:
      return launch_attention_tile<Q, KV, kDimQ, kDimV, kMiddleRows, kGeneral>(p, enable_pdl,
                                                                               stream);
    case kWideRows:
      if constexpr (has_wide_tile(kDimV)) {
        return launch_attention_tile<Q, KV, kDimQ, kDimV, kWideRows, kGeneral>(p, enable_pdl,
                                                                               stream);
      }
  }
  return cudaErrorInvalidValue;
}

// Launches the tile that the plan is for.
template <typename Q, typename KV, int kDimQ, int kDimV>
cudaError_t launch_attention(const AttentionParams& p, bool enable_pdl, cudaStream_t stream) {
  if (p.schedule.shape.ctas == 0) return cudaSuccess;
  const bool is_plain = p.mask != AttentionMask::custom && p.mask != AttentionMask::items &&
                        p.positions == PositionEncoding::none && p.soft_cap <= 0.0f &&
                        p.scale > 0.0f;
  AttentionParams widened = p;
  widened.scale *= Widened<KV>::kScale;
  widened.out_scale *= Widened<KV>::kScale;
  if (is_plain) {
    return launch_attention_rows<Q, KV, kDimQ, kDimV, false>(widened, enable_pdl, stream);
  }
  return launch_attention_rows<Q, KV, kDimQ, kDimV, true>(widened, enable_pdl, stream);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
