// SPDX-License-Identifier: Apache-2.0
// The mainloop of an MLA CTA: for each work tile of the tile scheduler, for each KV block
//
//   acc_s = scale (q_nope ckv^T + kpe_ratio q_pe kpe^T), or -inf   mla/scores.cuh
//   row_max = max(row_max, acc_s), over the warps of a row         exchange_max
//   P = 2^(acc_s - row_max), to shared memory                      store_p
//   acc_o += P ckv                                                 gemm_pv, attention/gemm.cuh
//
// then the epilogue (mla/epilogue.cuh), and for a tile that is split the combination of its splits
// (attention/combine.cuh).
//
// Threads  For scores a warp has 16 rows and a part of the tokens, for acc_o 16 kRowTiles rows and
//          a quarter of the columns (mla/tile.cuh). row_max is kept by both, from the same numbers
//          in shared memory; row_sum by scores, until the tile's end. row_max may lag behind by
//          kRescaleThreshold, as attention/softmax.cuh explains.
// Memory   Q, the KV blocks of a cp.async pipeline (attention/kv_pipeline.cuh), P and row_max in
//          shared memory, acc_s and acc_o in registers. With 16-bit caches P takes the place of kpe
//          in the stage of its block, so all warps meet before it is written.
#pragma once

#include "precast/mla/epilogue.cuh"
#include "precast/mla/scales.cuh"
#include "precast/mla/scores.cuh"

namespace precast {

#if defined(__CUDACC__)

// Shared memory of static size. The rest is dynamic: see the members of MlaMainloop.
template <typename Tile>
struct MlaSharedStorage {
  WorkTileQueue<Tile> queue;
  CombineSharedStorage combine;
};

// What gemm_pv() asks of a tile.
template <typename Tile>
struct MlaValueProduct {
  static constexpr int kRowTiles = Tile::kRowTiles, kWarpDimV = Tile::kWarpDimV;
  static constexpr bool kFp8 = Tile::kFp8;
  using ValueRows = typename Tile::ValueRows;
};

// The work of one CTA. All threads of the CTA must call each function.
template <typename Tile, typename Q, typename KV, bool kHasScales>
class MlaMainloop {
  using T = typename MmaType<Q, KV>::type;
  using Pipeline = KvPipeline<Tile, KV>;
  using Scores = MlaScores<Tile, Q, KV, kHasScales>;
  using Part = MlaOutputPart<Tile>;
  using PRows = typename Tile::ProbabilityRows;
  static constexpr float kRescaleThreshold = 8.0f;
  static constexpr int kSteps = Tile::kBlockN / 16;

 public:
  __device__ __forceinline__ MlaMainloop(const MlaParams& p, unsigned char* smem,
                                         MlaSharedStorage<Tile>& shared)
      : p_(p),
        shared_(shared),
        smem_q_(smem),
        smem_kv_(smem + Tile::kFixedBytes),
        row_stats_(reinterpret_cast<float*>(smem_kv_ - Tile::kRowMaxBytes)),
        smem_p_(smem_kv_ - Tile::kRowMaxBytes - Tile::kPBytes),
        table_(smem_p_ - Tile::kTableBytes),
        scales_(p, reinterpret_cast<float*>(smem + Tile::kQueryBytes)),
        scores_(shared_address(smem)),
        p_offset_(rows_first<PRows>()),
        v_offset_(Tile::ValueRows::later(rows_first<typename Tile::ValueRows>(),
                                         Part::first_column() * Tile::kKvBytes / 16)),
        factors_(load_mla_scales(p)) {
    keep_in_register(v_offset_);
  }

  __device__ __forceinline__ void run() {
    using Queue = WorkTileQueue<Tile>;
    Queue& queue = shared_.queue;
    if (threadIdx.x == 0) {
      shared_.combine.begin_clock = clock();
      queue.init(p_);
    }
    __syncthreads();
    if (!queue.is_valid[0]) return;
    Pipeline pipeline(p_, queue, shared_address(smem_kv_), shared_address(table_), 0);
    pipeline.set_next_tile(0);
    copy_mla_q<Tile>(p_, queue.blocks[0], shared_address(smem_q_));
    pipeline.fill();
    if (threadIdx.x < Queue::kFetchCount) queue.fetch(p_, 1);
    cp_async_wait_group<Tile::kStages - 1>();
    __syncthreads();
    for (int tile_idx = 0;; ++tile_idx) {
      const int slot = tile_idx % Queue::kDepth, next = (tile_idx + 1) % Queue::kDepth;
      const bool has_next = queue.is_valid[next];
      const BlockInfo& block = queue.blocks[slot];
      pipeline.set_next_tile(has_next ? next : -1);
      pipeline.fill();
      if (threadIdx.x < Queue::kFetchCount && has_next) queue.fetch(p_, tile_idx + 2);
      if constexpr (Tile::kFp8) {
        permute_mla_q<Tile, Q>(smem_q_);
        __syncthreads();
      }
      process_tile(block, has_next ? &queue.blocks[next] : nullptr, pipeline);
      if (block.work.num_splits > 1) {
        combine_splits<Tile, Q>(p_, block, queue.counters + block.work.counter, !has_next,
                                shared_.combine);
      }
      if (!has_next) return;
      cp_async_wait_group<0>();
      __syncthreads();
    }
  }

 private:
  // Mainloop and epilogue of one work tile, and the copy of the next one's Q.
  __device__ __forceinline__ void process_tile(const BlockInfo& block, const BlockInfo* next,
                                               Pipeline& pipeline) {
    MlaAccumulators<Tile> acc;
#pragma unroll
    for (int i = 0; i < 2 * Tile::kRowTiles; ++i) acc.row_max[i / 2][i % 2] = negative_infinity();
    float row_max[2] = {negative_infinity(), negative_infinity()};  // of the rows of scores
    float row_sum[2] = {0.0f, 0.0f};                                // of this lane's tokens
    MlaValueScales value_scales;
    if constexpr (kHasScales) scales_.start(block.work);
    for (int32_t token = block.work.kv_begin; token < block.work.kv_end; token += Tile::kBlockN) {
      const uint32_t stage = pipeline.consumer_wait();
      pipeline.producer_load();
      pipeline.producer_commit();
      if constexpr (kHasScales) scales_.load_next(block.work);
      typename Scores::AccS acc_s = {};
      scores_.compute(acc_s, stage, factors_.kpe_ratio, kHasScales ? scales_.current() : nullptr);
      const bool is_masked =
          token < block.unmasked_begin || token + Tile::kBlockN > block.unmasked_end;
      mla_logits<Scores>(p_, block, token + Scores::first_token(), factors_.logits, is_masked,
                         acc_s);
      send_max(acc_s);
      barrier_of_scores();
      update_sums(row_max, row_sum);
      const uint32_t smem_p = Tile::kPInKeys ? stage : shared_address(smem_p_);
      store_p(acc_s, row_max, row_sum, smem_p);
      update_accumulators(acc);
      if constexpr (kHasScales) rescale_values(acc, value_scales);
      barrier_of_rows();
      add_values(acc, smem_p, stage + Tile::kKeyBytes, value_scales);
      if constexpr (kHasScales) scales_.store_next();
      pipeline.publish_addresses_ahead();
    }
    share_sums(row_sum);
    __syncthreads();  // row_sum is there, and Q is free
    if (next != nullptr) copy_mla_q<Tile>(p_, *next, shared_address(smem_q_));
    receive_sums(acc);
    if constexpr (kHasScales) {
#pragma unroll
      for (int i = 0; i < 2 * Tile::kRowTiles; ++i) {
        acc.rescale_row(i / 2, i % 2, value_scales.unit());
      }
    }
    if (block.work.num_splits == 1) {
      write_mla_output<Tile, Q>(p_, block, acc);
    } else {
      write_mla_partial<Tile>(p_, block, acc);
    }
  }

  // -- row_max and row_sum ------------------------------------------------------------------------

  // A number of each warp that shares a row, [kTokenWarps, kBlockM].
  __device__ __forceinline__ float& row_stat(int token_warp, int row) const {
    return row_stats_[token_warp * Tile::kBlockM + row];
  }

  // The four warps of the same rows of acc_o; they have the same rows of scores, too.
  static __device__ __forceinline__ void barrier_of_rows() {
    if constexpr (Tile::kRowWarps == 1) {
      __syncthreads();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(1 + threadIdx.x / 128), "n"(128) : "memory");
    }
  }

  // Where P overwrites keys, no warp may compute scores any more.
  static __device__ __forceinline__ void barrier_of_scores() {
    if constexpr (Tile::kPInKeys) {
      __syncthreads();
    } else {
      barrier_of_rows();
    }
  }

  __device__ __forceinline__ void send_max(const typename Scores::AccS& acc_s) const {
    constexpr int kMmaN = Tile::kWarpN / 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = fmaxf(acc_s[0][0][2 * half], acc_s[0][0][2 * half + 1]);
#pragma unroll
      for (int n = 1; n < kMmaN; ++n) {
        x = fmaxf(x, fmaxf(acc_s[0][n][2 * half], acc_s[0][n][2 * half + 1]));
      }
      x = quad_max(x);
      if (threadIdx.x % 4 == 0) row_stat(Scores::token_warp(), Scores::row_of_lane(half)) = x;
    }
  }

  // row_max of a row behind this block.
  __device__ __forceinline__ float new_max(int row, float old_max) const {
    float x = row_stat(0, row);
#pragma unroll
    for (int i = 1; i < Tile::kTokenWarps; ++i) x = fmaxf(x, row_stat(i, row));
    return x > old_max + kRescaleThreshold ? x : old_max;
  }

  __device__ __forceinline__ void update_sums(float (&row_max)[2], float (&row_sum)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float before = row_max[half];
      row_max[half] = new_max(Scores::row_of_lane(half), before);
      row_sum[half] *= exp2_relative(before, row_max[half]);
    }
  }

  __device__ __forceinline__ void update_accumulators(MlaAccumulators<Tile>& acc) const {
    float factors[Tile::kRowTiles][2];
    bool grows = false;
#pragma unroll
    for (int m = 0; m < Tile::kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float before = acc.row_max[m][half];
        acc.row_max[m][half] = new_max(Part::row_of_lane(m, half), before);
        factors[m][half] = exp2_relative(before, acc.row_max[m][half]);
        // A row that has attended to no token has nothing to rescale.
        grows |= before != acc.row_max[m][half] && before != negative_infinity();
      }
    }
    if (!__any_sync(0xffffffffu, grows)) return;
#pragma unroll
    for (int i = 0; i < 2 * Tile::kRowTiles; ++i) {
      acc.rescale_row(i / 2, i % 2, factors[i / 2][i % 2]);
    }
  }

  __device__ __forceinline__ void share_sums(const float (&row_sum)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float x = quad_sum(row_sum[half]);
      if (threadIdx.x % 4 == 0) row_stat(Scores::token_warp(), Scores::row_of_lane(half)) = x;
    }
  }

  __device__ __forceinline__ void receive_sums(MlaAccumulators<Tile>& acc) const {
#pragma unroll
    for (int i = 0; i < 2 * Tile::kRowTiles; ++i) {
      const int row = Part::row_of_lane(i / 2, i % 2);
      float x = row_stat(0, row);
#pragma unroll
      for (int j = 1; j < Tile::kTokenWarps; ++j) x += row_stat(j, row);
      acc.row_sum[i / 2][i % 2] = x;
    }
  }

  // -- P and acc_o --------------------------------------------------------------------------------

  // Computes P, adds it to row_sum and stores it.
  __device__ __forceinline__ void store_p(const typename Scores::AccS& acc_s,
                                          const float (&row_max)[2], float (&row_sum)[2],
                                          uint32_t smem_p) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float max = row_max[half] == negative_infinity() ? 0.0f : row_max[half];
      const int row = Scores::row_of_lane(half);
#pragma unroll
      for (int n = 0; n < Tile::kWarpN / 8; ++n) {
        const float x = fast_exp2(acc_s[0][n][2 * half] - max);
        const float y = fast_exp2(acc_s[0][n][2 * half + 1] - max);
        row_sum[half] += x + y;
        const int chunk = Scores::first_token() / 8 + n;
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(smem_p + PRows::offset(row, chunk) +
                                                     threadIdx.x % 4 * 4),
                     "r"(pack_pair(T(), x, y))
                     : "memory");
      }
    }
  }

  __device__ __forceinline__ void rescale_values(MlaAccumulators<Tile>& acc,
                                                 MlaValueScales& value_scales) const {
    const float factor = value_scales.template update<Tile::kBlockN, Tile::kScaleGroups>(
        scales_.current() + value_group());
    if (factor == 1.0f) return;
#pragma unroll
    for (int i = 0; i < 2 * Tile::kRowTiles; ++i) acc.rescale_row(i / 2, i % 2, factor);
  }

  // The group of columns with one scale that has those of this warp.
  static __device__ __forceinline__ int value_group() {
    static_assert(kMlaScaleColumns % Tile::kWarpDimV == 0, "a warp has columns of one group");
    return Part::first_column() / kMlaScaleColumns;
  }

  __device__ __forceinline__ void add_values(MlaAccumulators<Tile>& acc, uint32_t smem_p,
                                             uint32_t smem_v,
                                             const MlaValueScales& value_scales) const {
    smem_p += Part::first_row() * PRows::kStride + p_offset_;
    // Why not unrolled with scales: ptxas spills registers.
#pragma unroll(kHasScales ? 1 : kSteps)
    for (int step = 0; step < kSteps; ++step) {
      uint32_t p_frag[Tile::kRowTiles][1][4];
#pragma unroll
      for (int m = 0; m < Tile::kRowTiles; ++m) {
        ldmatrix_x4(p_frag[m][0], PRows::later(smem_p + m * 16 * PRows::kStride, 2 * step));
      }
      if constexpr (kHasScales) scale_p(p_frag, step, value_scales);
      gemm_pv<MlaValueProduct<Tile>, Q, KV, 1>(
          acc.acc_o, p_frag, smem_v + step * 16 * Tile::ValueRows::kStride, v_offset_);
    }
  }

  // Multiplies P of 16 tokens by their scales.
  __device__ __forceinline__ void scale_p(uint32_t (&p_frag)[Tile::kRowTiles][1][4], int step,
                                          const MlaValueScales& value_scales) const {
    const float* const scales = scales_.current() + value_group();
#pragma unroll
    for (int i = 0; i < 4; i += 2) {  // tokens 2 q and 2 q + 1, then those behind eight others
      const int token = step * 16 + i / 2 * 8 + threadIdx.x % 4 * 2;
      const float x = value_scales.factor(scales[token * Tile::kScaleGroups]);
      const float y = value_scales.factor(scales[(token + 1) * Tile::kScaleGroups]);
#pragma unroll
      for (int j = 0; j < 2 * Tile::kRowTiles; ++j) {
        uint32_t& pair = p_frag[j / 2][0][i + j % 2];
        const float2 pq = unpack_pair(T(), pair);
        pair = pack_pair(T(), pq.x * x, pq.y * y);
      }
    }
  }

  const MlaParams& p_;
  MlaSharedStorage<Tile>& shared_;
  // Dynamic shared memory, in this order: Q, scales, the address table of the pipeline, P where it
  // has memory of its own, a number for each row and warp, the stages of ckv and kpe.
  unsigned char* smem_q_;
  unsigned char* smem_kv_;  // [kStages, kStageBytes]
  float* row_stats_;
  unsigned char *smem_p_, *table_;
  MlaScaleLoader<Tile> scales_;
  Scores scores_;
  uint32_t p_offset_, v_offset_;
  MlaScales factors_;
};

#endif  // __CUDACC__

}  // namespace precast
