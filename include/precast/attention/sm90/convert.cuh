// SPDX-License-Identifier: Apache-2.0
// The producer warps of attention for sm_90a, for keys and values of e4m3: they convert them to
// f16, in which wgmma multiplies, on their way to shared memory. Two warps convert K and two V. A
// lane reads 16 elements at once, and holds two batches of reads in registers: one is on its way
// while the other is converted, also from block to block.
//
// Why f16: it holds each e4m3 number exactly, and one instruction converts two. To bf16 it takes
// several.
#pragma once

#include "precast/attention/sm90/producer.cuh"
#include "precast/core/fp8.cuh"

namespace precast {

#if defined(__CUDACC__)

// Reads 16 bytes. They pass by L1, because nobody reads them again.
__device__ __forceinline__ uint4 load_once(uint64_t address) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(address));
  return x;
}

// Stores eight e4m3 numbers as f16, at a multiple of 16.
__device__ __forceinline__ void store_as_f16(uint32_t to, uint32_t low, uint32_t high) {
  const auto pair = [](uint32_t bits) {
    const __half2_raw x =
        __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bits), __NV_E4M3);
    return uint32_t(x.x) | uint32_t(x.y) << 16;
  };
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(pair(low)),
               "r"(pair(low >> 16)), "r"(pair(high)), "r"(pair(high >> 16))
               : "memory");
}

template <typename Tile>
class Sm90ConvertProducer : Sm90Producer<Tile> {
  using Base = Sm90Producer<Tile>;
  using Base::buffers_, Base::p_, Base::shared_;
  static constexpr int kRowsOfWarp = Tile::kBlockN / 2;  // of K or V
  static constexpr int kRowsOfLane = kRowsOfWarp / 32;

 public:
  __device__ __forceinline__ Sm90ConvertProducer(const Sm90AttentionParams& params,
                                                 Sm90SharedStorage<Tile>& shared,
                                                 Sm90Buffers<Tile> buffers)
      : Base(params, shared, buffers) {}

  static __device__ __forceinline__ void init(const Sm90AttentionParams&,
                                              Sm90SharedStorage<Tile>& shared) {
    Base::init(shared, 64);
  }
  // The producer warps that read the ring of work.
  static __device__ __forceinline__ uint32_t work_readers(const Sm90AttentionParams&) { return 4; }

  __device__ __forceinline__ void run(int warp) {
    if (warp < 2) {
      convert<Tile::kDimK>(warp, p_.k, shared_.k, buffers_.k(0));
    } else {
      convert<Tile::kDimV>(warp, p_.v, shared_.v, buffers_.v(0));
    }
  }

 private:
  // Converts this warp's rows of each KV block of each work tile, the last block first.
  template <int kDim>
  __device__ __forceinline__ void convert(int warp, const AttentionCache& cache,
                                          PipelineBarriers<Tile::kStages>& barriers,
                                          uint32_t buffer) {
    // A read is 16 of the 64 elements that a panel has of a row; the lanes read eight rows at once.
    constexpr int kPanels = kDim / kPanel, kRowsAtOnce = 8;
    constexpr int kBatch = kPanels == 3 ? 1 : 4 / kPanels;  // in units of eight rows
    constexpr int kBatches = kRowsOfWarp / kRowsAtOnce / kBatch;
    static_assert(kBatches % 2 == 0, "a batch has the same registers in each block");
    PipelineState<Tile::kStages> state;
    const int first_row = warp % 2 * kRowsOfWarp, lane = threadIdx.x % 32;
    this->for_each_work_of_all(warp, [&](const BlockInfo& block) {
      const WorkTile& work = block.work;
      if (work.kv_begin >= work.kv_end) return;
      // Of the block that is read: its first token, and where this lane's rows lie. Rows behind the
      // end of the work tile are those of its last token, which no score sees, and the last block
      // is read twice in part. Why: ptxas waits at once for a read with a condition.
      int32_t begin = work.kv_begin + num_kv_blocks<Tile>(work) * Tile::kBlockN;
      const int32_t last = work.kv_end - 1;
      uint64_t rows[kRowsOfLane];
      uint32_t pages[kRowsOfLane] = {};
      const auto token = [&](int32_t block_begin, int i) {
        return min(block_begin + first_row + 32 * i + lane, last);
      };
      const auto look_up = [&](int32_t block_begin) {
        if (block_begin < work.kv_begin) return;
#pragma unroll
        for (int i = 0; i < kRowsOfLane; ++i) {
          pages[i] = this->find_page(work, token(block_begin, i));
        }
      };
      const auto go_to_next_block = [&] {
        begin -= Tile::kBlockN;
        if (begin < work.kv_begin) return;
#pragma unroll
        for (int i = 0; i < kRowsOfLane; ++i) {
          rows[i] =
              this->row_address(cache, block.kv_head, this->valid_page(pages[i]), token(begin, i));
        }
        look_up(begin - Tile::kBlockN);
      };
      uint4 batches[2][kBatch][kPanels];
      const auto load = [&](int batch) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int first = (batch * kBatch + i) * kRowsAtOnce, row = first + lane / 4;
          const uint64_t from = __shfl_sync(0xffffffffu, rows[first / 32], row) + lane % 4 * 16;
#pragma unroll
          for (int panel = 0; panel < kPanels; ++panel) {
            batches[batch % 2][i][panel] = load_once(from + panel * kPanel);
          }
        }
      };
      look_up(begin - Tile::kBlockN);
      go_to_next_block();
      load(0);
      load(1);
      for (int32_t left = num_kv_blocks<Tile>(work); left > 0; --left) {
        barriers.wait_empty(state, "an empty buffer of K or V");
        // Two rows at a time are stored, to different banks.
        const uint32_t target = buffer + state.stage * Tile::kBlockN * kDim * 2 +
                                (first_row + lane / 4) * kPanelBytes +
                                (lane % 4 * 2 ^ lane / 4) * 16;
#pragma unroll
        for (int batch = 0; batch < kBatches; ++batch) {
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
#pragma unroll
            for (int panel = 0; panel < kPanels; ++panel) {
              const uint4 x = batches[batch % 2][i][panel];
              const uint32_t to = target + panel * (Tile::kBlockN * kPanelBytes) +
                                  (batch * kBatch + i) * (kRowsAtOnce * kPanelBytes);
              store_as_f16(to, x.x, x.y);
              store_as_f16(to ^ 16, x.z, x.w);
            }
          }
          if (batch + 2 == kBatches) go_to_next_block();
          load((batch + 2) % kBatches);
        }
        fence_shared_for_async();
        mbarrier_arrive(&barriers.full[state.stage]);
        state.advance();
      }
    });
  }
};

#endif  // __CUDACC__

}  // namespace precast
