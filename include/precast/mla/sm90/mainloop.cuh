// SPDX-License-Identifier: Apache-2.0
// The mainloop of the two consumer warpgroups of MLA for sm_90a. For each KV block of a work tile,
// the last one first:
//
//   owner             acc_s = Q K^T                 wgmma; the last panels of Q are in registers
//                     acc_s = -inf where masked
//                     P = 2^(acc_s - row_max)       to shared memory, with row_max
//   both, their half  acc_o = acc_o * factor + P V  wgmma; the owner has P in registers, the other
//                                                   one reads it from shared memory
//
// Consumer 0 owns the blocks 0, 2, ..., and consumer 1 the blocks 1, 3, .... Both add up P V in the
// order of the blocks, so a P is never rescaled, and a new row_max rescales acc_o alone. Time goes
// down; S is a softmax, and each consumer's wgmma run in their order:
//
//   consumer 0                  consumer 1
//   Q K0^T
//   S0                          Q K1^T
//   P0 V0                       P0 V0        consumer 1 waits for P0 while its Q K1^T runs
//                               S1           beside its P0 V0
//   P1 V1   Q K2^T              P1 V1
//   S2                          Q K3^T
//
// So the tensor cores multiply for one consumer while the other one computes a softmax. Consumer 0
// multiplies P1 before it waits for K2, because its half of the stage of block 1 becomes empty so,
// for a copy that takes as long as its Q K2^T. Consumer 1 multiplies P0 behind its Q K1^T, because
// the tensor cores would have nothing to do in S1.
//
// Few heads   A tile of 16 rows (16 heads, one token) is computed like one of 64, three quarters of
//             it for nothing. A block then takes 2176 cycles of the tensor cores, and memory needs
//             about 3700 for it, so nothing is lost. Both consumers could take blocks of their own
//             instead, as attention does (Sm90Consumer::process_few_rows), but a row of acc_o has
//             512 columns, which one warpgroup cannot hold for 64 rows of an MMA.
// Source      DeepSeek's FlashMLA ("A Deep-Dive Into the New Flash MLA Kernel", 2025) for two
//             warpgroups that share the columns of acc_o and take blocks in turn. New here: the
//             order of P V, which needs no rescaled P; P in the place of kpe; a producer, for pages
//             of any size.
#pragma once

#include "precast/attention/sm90/epilogue.cuh"
#include "precast/mla/sm90/consumer.cuh"

namespace precast {

#if defined(__CUDACC__) && defined(PRECAST_SM)

// The work of one consumer warpgroup.
template <typename Tile, int kSide>
class MlaConsumer : MlaConsumerBase<Tile, kSide> {
  using Base = MlaConsumerBase<Tile, kSide>;
  using Base::p_, Base::rows_, Base::shared_;
  using typename Base::AccO, typename Base::AccS, typename Base::OperandP, typename Base::Stage;

 public:
  __device__ __forceinline__ MlaConsumer(const MlaSm90Params& params, MlaSm90Storage<Tile>& shared,
                                         MlaSm90Buffers<Tile> buffers)
      : Base(params, shared, buffers) {}

  __device__ __forceinline__ void run() {
    for_each_work<Tile>(p_, shared_, [&](const BlockInfo& block) { process(block); });
  }

 private:
  // Computes a work tile and writes its results.
  __device__ __forceinline__ void process(const BlockInfo& block) {
    AccO acc_o;
#pragma unroll
    for (float& x : acc_o) x = 0.0f;
    rows_ = SharedRowStatistics();
    const int32_t blocks = num_kv_blocks<Tile>(block.work);
    if (blocks > 0) {
      if constexpr (Tile::kConverts) this->convert_queries();
      if (kSide == 0 || blocks > 1) this->load_queries();
      if constexpr (kSide == 0) {
        process_even_blocks(block, blocks, acc_o);
      } else {
        process_odd_blocks(block, blocks, acc_o);
      }
      this->counts_.add_tile(blocks);
    }
    rows_.finalize();
    constexpr int kFirstColumn = kSide * Tile::kHalfColumns;
    if (block.work.num_splits == 1) {
      sm90_write_output<Tile>(p_, block, rows_, acc_o, Sm90HeadTerms<Tile>(p_, block),
                              kFirstColumn);
    } else {
      sm90_write_partial<Tile>(p_, block, rows_, acc_o, kFirstColumn);
    }
  }

  // The order of consumer 0.
  __device__ __forceinline__ void process_even_blocks(const BlockInfo& block, int32_t blocks,
                                                      AccO& acc_o) {
    int32_t i = 0;
    for (; i + 1 < blocks; i += 2) {
      const Stage own = this->own_stage(i), other = this->other_stage(i + 1);
      start_block(block, blocks, i, own, acc_o);
      this->finish_products(acc_o);
      this->release_half(own);
      this->wait_for_p(other);
      if (this->adopt_statistics(blocks, i + 1, other)) rows_.rescale(acc_o);
      this->multiply_other(other, acc_o);
      this->finish_products(acc_o);
      this->release_half(other);
    }
    if (i < blocks) {
      const Stage own = this->own_stage(i);
      start_block(block, blocks, i, own, acc_o);
      this->finish_products(acc_o);
      this->release_half(own);
    }
  }

  // Computes P of a block of consumer 0 and starts P V.
  __device__ __forceinline__ void start_block(const BlockInfo& block, int32_t blocks, int32_t i,
                                              const Stage& own, AccO& acc_o) {
    AccS acc_s;
    OperandP p;
    this->multiply_qk(own, i == 0, acc_s);
    wgmma_wait_group<0>();
    keep_behind_wait(acc_s);
    if (i + 2 >= blocks) this->release_queries();
    if (this->compute_p(block, blocks, i, own, acc_s, p) && i > 0) rows_.rescale(acc_o);
    if (i == 0) this->clear_values(block, blocks, own);
    this->multiply_own(own, p, acc_o);
  }

  // The order of consumer 1.
  __device__ __forceinline__ void process_odd_blocks(const BlockInfo& block, int32_t blocks,
                                                     AccO& acc_o) {
    int32_t i = 0;
    for (; i + 1 < blocks; i += 2) {
      const Stage own = this->own_stage(i + 1), other = this->other_stage(i);
      AccS acc_s;
      OperandP p;
      this->multiply_qk(own, i == 0, acc_s);
      start_block_of_other(block, blocks, i, other, acc_o);
      wgmma_wait_group<1>();
      keep_behind_wait(acc_s);
      if (i + 3 >= blocks) this->release_queries();
      const bool rescales = this->compute_p(block, blocks, i + 1, own, acc_s, p);
      this->finish_products(acc_o);
      this->release_half(other);
      if (rescales) rows_.rescale(acc_o);
      this->multiply_own(own, p, acc_o);
      this->finish_products(acc_o);
      this->release_half(own);
    }
    if (i < blocks) {
      const Stage other = this->other_stage(i);
      start_block_of_other(block, blocks, i, other, acc_o);
      // Why not before: a warp that arrives while Q of the work tile before is not yet released
      // counts for that one.
      if (i == 0) this->release_queries();
      this->finish_products(acc_o);
      this->release_half(other);
    }
  }

  // Starts P V of a block of consumer 0. Q K^T of the next block may be running.
  __device__ __forceinline__ void start_block_of_other(const BlockInfo& block, int32_t blocks,
                                                       int32_t i, const Stage& other, AccO& acc_o) {
    this->wait_for_p(other);
    if (this->adopt_statistics(blocks, i, other) && i > 0) {
      // Why: ptxas waits here if this does not, for all wgmma, and says so. It is rare.
      this->finish_products(acc_o);
      rows_.rescale(acc_o);
    }
    if (i == 0) this->clear_values(block, blocks, other);
    this->multiply_other(other, acc_o);
  }
};

// Both consumers.
template <typename Tile>
class MlaConsumers {
 public:
  __device__ __forceinline__ MlaConsumers(const MlaSm90Params& params, MlaSm90Storage<Tile>& shared,
                                          MlaSm90Buffers<Tile> buffers, int consumer)
      : params_(params), shared_(shared), buffers_(buffers), consumer_(consumer) {}

  __device__ __forceinline__ void run() {
    if (consumer_ == 0) {
      MlaConsumer<Tile, 0>(params_, shared_, buffers_).run();
    } else {
      MlaConsumer<Tile, 1>(params_, shared_, buffers_).run();
    }
  }

 private:
  const MlaSm90Params& params_;
  MlaSm90Storage<Tile>& shared_;
  const MlaSm90Buffers<Tile> buffers_;
  const int consumer_;
};

#endif  // __CUDACC__ && PRECAST_SM

}  // namespace precast
