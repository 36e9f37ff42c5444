// SPDX-License-Identifier: Apache-2.0
// Attention of paged or ragged keys and values, for prefill and decode.
//
//   out[i, h] = sum_j softmax_j(logit(i, j)) v[j, h / group]
//   logit(i, j) = scale * q[i, h] . k[j, h / group], -inf where the mask hides token j from query i
//
// Layout   q, out   [tokens, heads, head_dim]             any two strides, unit stride in a row
//          k, v     [pages, page_size, kv_heads, head_dim] any three strides; or [tokens, ...]
//          lse      [tokens, heads]                        base 2
// Threads  a CTA walks the pieces that the plan gives it (attention_schedule.cuh); of a piece it
//          keeps queries in shared memory, sums in registers, and lets the tokens pass through a
//          ring of cp.async copies (attention_tile.cuh, attention_stream.cuh).
// Traffic  reads keys and values once for every tile of packed queries: once in decode.
// Source   Dao, FlashAttention-2, arXiv:2307.08691; Ye et al., FlashInfer, arXiv:2501.01005 for
//          packed heads, page tables and the merge of parts.
#pragma once

#include "precast/attention_products.cuh"
#include "precast/attention_result.cuh"
#include "precast/attention_rope.cuh"
#include "precast/attention_scores.cuh"
#include "precast/attention_stream.cuh"
#include "precast/core/launch.cuh"

namespace precast {

#if defined(__CUDACC__)

// The operands of a warp's queries: from shared memory each time, or held in registers where they
// leave room.
template <typename Tile>
struct QueryOperands {
  static constexpr int kSteps = Tile::kDimK / 16;
  static constexpr bool kHeld = !Tile::kGeneral && Tile::kRowTiles == 1 && Tile::kDimK <= 128;

  __device__ __forceinline__ explicit QueryOperands(uint32_t queries) {
    const int warp = Tile::kNarrow ? 0 : threadIdx.x / 32;
    rows_ = queries + warp * Tile::kRowTiles * 16 * Tile::QueryRows::kStride;
    lane_ = LaneOffset<typename Tile::QueryRows>::rows_first();
    if constexpr (kHeld) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load_matrices(held_[step], address(0, step));
    }
  }

  __device__ __forceinline__ void load(uint32_t (&a)[Tile::kRowTiles][4], int step) const {
#pragma unroll
    for (int m = 0; m < Tile::kRowTiles; ++m) {
      if constexpr (kHeld) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = held_[step][i];
      } else {
        load_matrices(a[m], address(m, step));
      }
    }
  }

 private:
  __device__ __forceinline__ uint32_t address(int m, int step) const {
    return rows_ + m * 16 * Tile::QueryRows::kStride + Tile::QueryRows::later(lane_, 2 * step);
  }

  uint32_t rows_;
  int lane_;
  uint32_t held_[kHeld ? kSteps : 1][4];
};

// One piece: all threads of the CTA call, and may reuse shared memory after it.
template <typename Tile, typename Q, typename KV>
__device__ __forceinline__ void attend(const AttentionParams& p, const AttentionWork& work,
                                       unsigned char* memory, int32_t* tickets) {
  using T = typename ProductType<Q, KV>::type;
  unsigned char* rings = memory + Tile::kFixedBytes;
  const RopeTurns* turns = reinterpret_cast<const RopeTurns*>(memory + Tile::kQueryBytes);
  const int team = Tile::kNarrow ? threadIdx.x / 32 : 0;
  unsigned char* ring = rings + team * Tile::kRingBytes;

  TokenStream<Tile, KV> stream(p, work, shared_address(ring), team);
  const bool turns_keys = Tile::kGeneral && p.positions == PositionEncoding::rope;
  if (turns_keys) {
    const int32_t first = work.piece.kv_len - work.piece.q_len;
    load_queries<Tile, Q>(p, work, memory, [&](const Q* row, int column, int32_t query) {
      return turned_query<Tile>(row, column, turns, first + query);
    });
  } else {
    load_queries<Tile, Q>(p, work, memory, [&](const Q* row, int column, int32_t) {
      return load_vec(row + column).bits;
    });
  }
  // Tokens that all rows of the tile see.
  const AttentionRow first(p, work, 0), last(p, work, work.rows - 1);
  const int32_t seen_begin = TokenLimits(p, work.piece, last.query).begin;
  const int32_t seen_end = TokenLimits(p, work.piece, first.query).end;
  __syncthreads();

  const QueryOperands<Tile> queries(shared_address(memory));
  RowStates<Tile> states;
  float scale = p.scale * (Tile::kGeneral ? 1.0f : kLog2E);
  if (p.qk_scale != nullptr) scale *= load_scalar(p.qk_scale);
  for (; !stream.done(); stream.advance()) {
    const uint32_t keys = stream.wait();
    typename RowStates<Tile>::Scores scores = {};
    const int32_t token = stream.token();
    typename RowStates<Tile>::Weights weights;
    if constexpr (Tile::kGeneral) {
      if (turns_keys) {
        multiply_turned_keys<Tile, Q, KV>(scores, keys, queries, turns, token);
      } else {
        multiply_keys<Tile, Q, KV>(scores, keys, queries);
      }
      logits_of_scores<Tile>(p, work, token, scale, scores);
      states.template add<T>(scores, 1.0f, weights);
    } else {
      multiply_keys<Tile, Q, KV>(scores, keys, queries);
      if (token < seen_begin || token + Tile::kTokens > seen_end) {
        limit_scores<Tile>(p, work, token, scores);
      }
      states.template add<T>(scores, scale, weights);
    }
    multiply_values<Tile, Q, KV>(states.sums, weights, keys + Tile::kKeyBytes);
  }
  wait_for_copies<0>();
  states.finish();

  if constexpr (Tile::kNarrow) {
    __syncwarp();
    write_partial<Tile>(states, work.rows, PartialRows::team<Tile>(rings, team));
    __syncthreads();
    merge_teams<Tile, Q>(p, work, rings);
  } else if (work.piece.parts == 1) {
    write_rows<Tile, Q>(p, work, states);
  } else {
    const int32_t slot = work.piece.slot(work.piece.part);
    write_partial<Tile>(states, work.rows, PartialRows::slot<Tile>(p, slot));
  }
  if (work.piece.parts > 1) merge_parts<Tile, Q>(p, work, tickets + work.piece.counter);
  __syncthreads();
}

template <typename Tile, typename Q, typename KV>
__global__ __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm) void AttentionKernel(
    const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) unsigned char attention_memory[];
  allow_next_grid();
  wait_for_previous_grid();
  if (Tile::kGeneral && p.positions == PositionEncoding::rope) {
    fill_turns<Tile>(p, reinterpret_cast<RopeTurns*>(attention_memory + Tile::kQueryBytes));
    __syncthreads();
  }
  PieceIterator pieces(p.schedule, blockIdx.x);
  AttentionWork work;
  while (pieces.next(work.piece)) {
    work.template complete<Tile>(p);
    attend<Tile, Q, KV>(p, work, attention_memory, pieces.counters());
  }
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
