// SPDX-License-Identifier: Apache-2.0
// The epilogue of a tile of GEMM without scales of blocks for sm_90a: that of epilogue.cuh, or by
// TMA where rows are tokens and outputs have 16 bits. Each warp writes its 16 rows alone, 64
// or 32 columns at a time, and goes on while TMA reads the last ones from shared memory.
//
// The last tile of a group may have rows of the next group, which TMA cannot leave out: the lanes
// of a warp with such rows copy them from shared memory. So they do where rows of the output are no
// whole vectors, because TMA writes 16 bytes at once, also behind the last column.
//
// Why by TMA where it can: lanes wait until the SM takes what they store, and 4096 x 4096 x 4096
// took 1 % longer so.
#pragma once

#include "precast/gemm/sm90/epilogue.cuh"
#include "precast/gemm/sm90/plain_tile.cuh"
#include "precast/gemm/sm90/store_boxes.cuh"

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
      using Box = typename Tile::Box;
      const int first = this->tile_.token + warp_row();
      const bool is_whole =
          this->p_.kind == TokenGroups::equal || first + Box::kRows <= this->tile_.token_end;
      const bool by_tma = this->params_.stores_boxes && __all_sync(0xffffffffu, is_whole);
      write_boxes<T, Box, Tile::kColumns, Tile::kBuffers, 1>(
          by_tma, &this->params_.out, buffers, 0, this->tile_.column, first, this->tile_.a_group,
          this->p_.columns,
          [&](int group, typename Base::Pairs& pairs) {
            this->take_pairs(sums, group, pairs);
            this->finish(group, pairs);
          },
          [&](uint32_t box, int column) { this->template write_box<Box>(box, first, column); });
    } else {
      this->write(sums);
    }
  }

 private:
  // The first row of this warp in the tile.
  __device__ __forceinline__ int warp_row() const { return this->row_ - threadIdx.x % 32 / 4; }
};

#endif  // __CUDACC__

}  // namespace precast
