// SPDX-License-Identifier: Apache-2.0
// The epilogue of a tile of GEMM without scales of blocks for sm_90a: that of epilogue.cuh, or by
// TMA where rows are tokens and outputs have 16 bits. Each warp writes its 16 rows alone, 64
// columns at a time, and goes on while TMA reads the last ones from shared memory.
//
// The last tile of a group may have rows of the next group, which TMA cannot leave out: a warp with
// such rows writes from registers. So it does where rows of the output are no whole vectors,
// because TMA writes 16 bytes at once, also behind the last column.
//
// Why not by the lanes from the same buffers: they wait until the SM takes what they store, and
// 4096 x 4096 x 4096 took 1 % longer.
#pragma once

#include "precast/core/sm90/stmatrix.cuh"
#include "precast/gemm/sm90/epilogue.cuh"
#include "precast/gemm/sm90/plain_tile.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename Types, typename Tile>
class PlainEpilogue : public Fp8GemmEpilogue<typename Types::Out, Tile, PlainLaunchParams<Types>> {
  using T = typename Types::Out;
  using Base = Fp8GemmEpilogue<T, Tile, PlainLaunchParams<Types>>;
  using Acc = float[Tile::kColumns / 2];

 public:
  using Base::Base;

  // `buffers` are those of this warp in shared memory. All its lanes call it.
  __device__ __forceinline__ void write_tile(uint32_t buffers, const Acc& sums) const {
    if constexpr (sizeof(T) == 2 && Tile::kBuffers > 0) {
      const int first = this->tile_.token + warp_row();
      const bool is_whole =
          this->p_.kind == TokenGroups::equal || first + kStoreRows <= this->tile_.token_end;
      if (this->params_.stores_boxes && __all_sync(0xffffffffu, is_whole)) {
        write_boxes(buffers, first, sums);
        return;
      }
    }
    this->write(sums);
  }

 private:
  // The first row of this warp in the tile.
  __device__ __forceinline__ int warp_row() const { return this->row_ - threadIdx.x % 32 / 4; }

  __device__ __forceinline__ void write_boxes(uint32_t buffers, int first, const Acc& sums) const {
    const int lane = threadIdx.x % 32;
    const bool is_chosen = elect_lane();
    // stmatrix takes the address of a row from each lane: rows 0 .. 7 and 8 .. 15 of eight columns,
    // then those of the next eight. The swizzle exchanges the 16-byte parts of a row.
    const int row = lane % 16, part = lane / 16;
    const uint32_t line = buffers + row * (kStoreColumns * 2);
#pragma unroll
    for (int box = 0; box < Tile::kColumns / kStoreColumns; ++box) {
      const uint32_t here = box % Tile::kBuffers * kStoreBytes;
      if (is_chosen) wait_stores_have_read<Tile::kBuffers - 1>();
      __syncwarp();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        typename Base::Pairs pairs;
        const int group = 2 * box + half;
        this->take_pairs(sums, group, pairs);
        this->finish(group, pairs);
#pragma unroll
        for (int step = 0; step < 2; ++step) {  // 16 columns
          uint32_t words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            words[i] = pack_pair(T(), pairs[4 * step + i].x, pairs[4 * step + i].y);
          }
          const int sixteen = (4 * half + 2 * step + part) ^ (row % 8);
          stmatrix_x4(line + here + 16 * sixteen, words);
        }
      }
      fence_shared_for_async();
      __syncwarp();
      if (is_chosen) {
        store_box(&this->params_.out, buffers + here, this->tile_.column + kStoreColumns * box,
                  first, this->tile_.a_group);
        commit_stores();
      }
    }
  }
};

#endif  // __CUDACC__

}  // namespace precast
