// SPDX-License-Identifier: Apache-2.0
// What a consumer warpgroup of MLA for sm_90a does with a KV block: it waits for panels and for the
// other consumer, multiplies, and computes P. mla/sm90/mainloop.cuh has the order of it.
#pragma once

#include "precast/attention/sm90/mask_scores.cuh"
#include "precast/attention/sm90/query.cuh"
#include "precast/attention/sm90/work_tiles.cuh"
#include "precast/core/mma.cuh"
#include "precast/core/sm90/stmatrix.cuh"
#include "precast/core/sm90/wgmma.cuh"
#include "precast/mla/sm90/params.cuh"
#include "precast/mla/sm90/softmax.cuh"

namespace precast {

#if defined(__CUDACC__) && defined(PRECAST_SM)

// A consumer that has the columns [kSide kHalfColumns, (kSide + 1) kHalfColumns) of acc_o. All its
// threads call each function.
template <typename Tile, int kSide>
class MlaConsumerBase {
 protected:
  using Storage = MlaSm90Storage<Tile>;
  using Stage = MlaStage<Tile>;
  using Element = typename Tile::Element;
  using AccS = float[Tile::kBlockN / 2];
  using AccO = float[Tile::kHalfColumns / 2];
  using OperandP = uint32_t[Tile::kBlockN / 16][4];
  static constexpr int kOther = 1 - kSide;
  static constexpr int kAloneBarrier = 2 + kSide;  // a named barrier of this consumer
  // Of Q: the panels that are in shared memory alone, before those in registers.
  static constexpr int kSharedPanels = Tile::kQueryPanels - Tile::kRegisterPanels;
  static constexpr bool kFences = !Tile::kConverts && !Tile::kCopiesBoxes;  // cp.async writes K
  static constexpr int kSteps = Tile::kPanelColumns / 16;

  __device__ __forceinline__ MlaConsumerBase(const MlaSm90Params& params, Storage& shared,
                                             MlaSm90Buffers<Tile> buffers)
      : p_(params.p), shared_(shared), buffers_(buffers), scales_(load_mla_scales(params.p)) {}

  // -- Stages -------------------------------------------------------------------------------------

  // The stages of a block of this consumer, and of one of the other.
  __device__ __forceinline__ Stage own_stage(int32_t i) const {
    return {kSide, counts_.blocks(kSide, i / 2)};
  }
  __device__ __forceinline__ Stage other_stage(int32_t i) const {
    return {kOther, counts_.blocks(kOther, i / 2)};
  }

  // Waits for a panel. Why the fence: wgmma reads by another way than cp.async writes.
  __device__ __forceinline__ void wait_for_panel(const Stage& stage, int panel) const {
    mbarrier_wait_parity(&shared_.full[stage.index][panel], stage.parity, "a panel of K");
    if (kFences) fence_shared_for_async();
  }

  // Waits for P of the other consumer, and for this one's half of V: that has been there for long,
  // but another thread's wait for it does not make it visible to this one. Why V first: its waits
  // are over before P comes.
  __device__ __forceinline__ void wait_for_p(const Stage& stage) const {
#pragma unroll
    for (int i = 0; i < Tile::kHalfPanels; ++i) {
      wait_for_panel(stage, kSide * Tile::kHalfPanels + i);
    }
    mbarrier_wait_parity(&shared_.p_full[stage.index], stage.parity, "P of the other consumer");
  }

  // No wgmma of this warp reads this consumer's half of a stage any more, nor P there.
  __device__ __forceinline__ void release_half(const Stage& stage) const {
    mbarrier_arrive_of_warp(&shared_.empty[stage.index][kSide]);
  }

  // No K of this work tile will be multiplied with its Q any more.
  __device__ __forceinline__ void release_queries() const {
    mbarrier_arrive_of_warp(&shared_.query_empty);
  }

  // -- Products -----------------------------------------------------------------------------------

  // The descriptor of a panel whose rows are contiguous along k.
  static __device__ __forceinline__ uint64_t descriptor(uint32_t address) {
    return wgmma_descriptor(address, Tile::Panel::kAtomBytes);
  }

  // Loads the panels of Q that stay in registers. Why only a consumer that multiplies with them:
  // one without a block may miss this phase of Q.
  __device__ __forceinline__ void load_queries() {
    const int lane = threadIdx.x % 32, row = threadIdx.x % kWarpgroupSize / 32 * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < Tile::kRegisterPanels; ++i) {
      const int panel = kSharedPanels + i;
      mbarrier_wait_parity(&shared_.query_full[panel], counts_.tile_parity(), "a last panel of Q");
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        ldmatrix_x4(q_[i][step], buffers_.q() + panel * Tile::kPanelBytes +
                                     Tile::Panel::offset(row, 2 * step + lane / 16));
      }
    }
  }

  // Starts Q K^T of a block of this consumer, panel by panel as they come. `is_first`: Q may still
  // be on its way. Why not always: a wait between the panels costs time, although it ends at once.
  __device__ __forceinline__ void multiply_qk(const Stage& own, bool is_first, AccS& acc_s) const {
    using Mma = Wgmma<Element, Tile::kBlockN>;
    const uint64_t q = descriptor(buffers_.q()), k = descriptor(buffers_.stage(own.index));
#pragma unroll
    for (int panel = 0; panel < Tile::kQueryPanels; ++panel) {
      if (is_first && panel < kSharedPanels) {
        mbarrier_wait_parity(&shared_.query_full[panel], counts_.tile_parity(), "a panel of Q");
      }
      wait_for_panel(own, panel);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint32_t offset = (panel * Tile::kPanelBytes + step * kStepBytes) >> 4;
        if (panel >= kSharedPanels) {
          Mma::template add_rs<false>(acc_s, q_[panel - kSharedPanels][step], k + offset);
        } else if (panel == 0 && step == 0) {
          Mma::template new_ss<false>(acc_s, q + offset, k + offset);
        } else {
          Mma::template add_ss<false>(acc_s, q + offset, k + offset);
        }
      }
    }
    wgmma_commit_group();
  }

  // V of 16 tokens: this consumer's columns.
  __device__ __forceinline__ uint64_t values(const Stage& stage, int step) const {
    const int half = kSide * Tile::kHalfPanels * Tile::kPanelBytes;
    return wgmma_descriptor(buffers_.stage(stage.index) + half, Tile::Panel::kAtomBytes,
                            Tile::kPanelBytes) +
           (step * 2 * Tile::Panel::kAtomBytes >> 4);
  }

  // Starts acc_o += P V of a block of this consumer.
  __device__ __forceinline__ void multiply_own(const Stage& own, const OperandP& p,
                                               AccO& acc_o) const {
    using Mma = Wgmma<Element, Tile::kHalfColumns>;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Mma::template add_rs<true>(acc_o, p[step], values(own, step));
    }
    wgmma_commit_group();
  }

  // The same for a block of the other consumer.
  __device__ __forceinline__ void multiply_other(const Stage& other, AccO& acc_o) const {
    using Mma = Wgmma<Element, Tile::kHalfColumns>;
    const uint64_t p = descriptor(place_of_p(other));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Mma::template add_ss<true>(acc_o, p + (step * kStepBytes >> 4), values(other, step));
    }
    wgmma_commit_group();
  }

  // Waits for all wgmma of this consumer.
  static __device__ __forceinline__ void finish_products(AccO& acc_o) {
    wgmma_wait_group<0>();
    keep_behind_wait(acc_o);
  }

  // -- Softmax ------------------------------------------------------------------------------------

  // P of a block of this consumer, in registers and in shared memory. Returns whether acc_o must be
  // rescaled.
  __device__ __forceinline__ bool compute_p(const BlockInfo& block, int32_t blocks, int32_t i,
                                            const Stage& own, AccS& acc_s, OperandP& p) {
    const int32_t token = first_token<Tile>(block.work, blocks, i);
    if (token + Tile::kBlockN > block.unmasked_end) {
      mask_scores<Tile::kBlockN>(
          p_, block, token, [](int half) { return sm90_row<Tile>(half); }, acc_s);
    }
    float scale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scale[half] = Tile::kConverts ? shared_.logits_scale[sm90_row<Tile>(half)] : scales_.logits;
    }
    const bool rescales = rows_.update_max(acc_s, scale);
    rows_.exp_scores(acc_s, scale);
    pack_operands<Element>(acc_s, p);
    // P takes the place of kpe, which another warp of this consumer may still be multiplying.
    if (Tile::kDimKpe > 0) alone_barrier();
    const int lane = threadIdx.x % 32, row = threadIdx.x % kWarpgroupSize / 32 * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      stmatrix_x4(place_of_p(own) + Tile::Panel::offset(row, 2 * step + lane / 16), p[step]);
    }
    const bool has_sums = i + 2 >= blocks;  // the other consumer needs them once
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = has_sums ? rows_.total(half) : 0.0f;
      if (lane % 4 == 0) {
        shared_.row_stats[own.index][sm90_row<Tile>(half)] = make_float2(rows_.row_max[half], sum);
      }
    }
    fence_shared_for_async();
    __syncwarp();
    mbarrier_arrive_of_warp(&shared_.p_full[own.index]);
    return rescales;
  }

  // Takes what the other consumer has found with its block: row_max, and, with the last two blocks,
  // row_sum. That of the last one has all blocks, that of the block before only the other's.
  // Returns whether acc_o must be rescaled.
  __device__ __forceinline__ bool adopt_statistics(int32_t blocks, int32_t i, const Stage& other) {
    float row_max[2], row_sum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 stats = shared_.row_stats[other.index][sm90_row<Tile>(half)];
      row_max[half] = stats.x;
      row_sum[half] = stats.y;
    }
    const bool rescales = rows_.adopt_max(row_max);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (i + 1 == blocks) {
        rows_.template take_sum<true>(half, row_sum[half]);
      } else {
        rows_.template take_sum<false>(half, row_sum[half]);
      }
    }
    return rescales;
  }

  // -- Parts --------------------------------------------------------------------------------------

  __device__ __forceinline__ uint32_t place_of_p(const Stage& stage) const {
    return buffers_.stage(stage.index) + Tile::kPanelOfP * Tile::kPanelBytes;
  }

  __device__ __forceinline__ void alone_barrier() const {
    named_barrier(kAloneBarrier, kWarpgroupSize);
  }

  // Sets this consumer's half of the values behind the end of the work tile to 0, which are in its
  // block 0. Why: their P is 0, but memory that is not the request's may hold NaN. The scores of
  // the block must have been computed. cp.async has written zeros there itself.
  __device__ __forceinline__ void clear_values(const BlockInfo& block, int32_t blocks,
                                               const Stage& stage) const {
    const int count = block.work.kv_end - first_token<Tile>(block.work, blocks, 0);
    if (count >= Tile::kBlockN || kFences) return;
    constexpr int kChunks = Tile::kHalfPanels * 8;  // of 16 bytes, of a row
    const uint32_t half =
        buffers_.stage(stage.index) + kSide * Tile::kHalfPanels * Tile::kPanelBytes;
    // Every warp of this consumer has multiplied the block, or waited for those that have.
    alone_barrier();
    for (int i = threadIdx.x % kWarpgroupSize; i < (Tile::kBlockN - count) * kChunks;
         i += kWarpgroupSize) {
      const int row = count + i / kChunks, panel = i / 8 % Tile::kHalfPanels;
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(
                       half + panel * Tile::kPanelBytes + row * 128 + i % 8 * 16),
                   "r"(0)
                   : "memory");
    }
    fence_shared_for_async();
    alone_barrier();
  }

  // Converts Q to f16, half of the rows, and the other consumer those between.
  __device__ __forceinline__ void convert_queries() const {
#pragma unroll
    for (int panel = 0; panel < Tile::kQueryPanels; ++panel) {
      mbarrier_wait_parity(&shared_.query_full[panel], counts_.tile_parity(), "Q to be converted");
    }
    // Why not scales_: it would take registers in the loop over blocks.
    const MlaScales scales = load_mla_scales(p_);
    const int row = sm90_row<Tile>(kSide);
    const SwizzledRows<typename Tile::Panel> rows = {buffers_.q(), Tile::Panel::kAtomBytes,
                                                     Tile::kPanelBytes};
    const float scale = convert_query<typename Tile::Query, Tile::kQueryPanels * 8>(
        rows, row, [&](int chunk, float (&x)[8]) {
          if (chunk < Tile::kCkvPanels * 8) return;
#pragma unroll
          for (float& element : x) element *= scales.kpe_ratio;
        });
    if (threadIdx.x % 4 == 0) shared_.logits_scale[row] = scale * scales.logits;
    fence_shared_for_async();
    Tile::barrier();
  }

  const MlaParams& p_;
  Storage& shared_;
  const MlaSm90Buffers<Tile> buffers_;
  const MlaScales scales_;
  SharedRowStatistics rows_;
  // Of Q, and one that is never used, because no array may be empty.
  uint32_t q_[Tile::kRegisterPanels + 1][kSteps][4];
  MlaCounts<Tile> counts_;  // of the work tiles before this one
};

#endif  // __CUDACC__ && PRECAST_SM

}  // namespace precast
