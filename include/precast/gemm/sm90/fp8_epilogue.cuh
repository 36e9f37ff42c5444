// SPDX-License-Identifier: Apache-2.0
// The epilogue of a tile of block-scaled GEMM for sm_90a: that of epilogue.cuh, or by TMA where
// rows are tokens and outputs have 16 bits. A warp has buffers for all that it writes of a tile, so
// it goes on with the next tile at once.
//
// TMA cannot leave out rows of a box. Where not all 16 rows of a warp belong to the group, at the
// end of a group, the warp writes by its lanes.
#pragma once

#include "precast/gemm/sm90/epilogue.cuh"
#include "precast/gemm/sm90/store_boxes.cuh"

namespace precast {

#if defined(__CUDACC__)

// The groups of a lane's two rows, where each token says its own. Why loaded before the tile is
// multiplied: a load takes some hundred clocks.
struct RowGroups {
  int of_row[2];
};

template <typename T, typename Tile>
class Fp8BoxEpilogue : public Fp8GemmEpilogue<T, Tile> {
  using Base = Fp8GemmEpilogue<T, Tile>;
  using Acc = float[Tile::kColumns / 2];

 public:
  using Base::Base;
  static constexpr bool kStoresBoxes = sizeof(T) == 2 && Tile::kBuffers > 0;

  static __device__ __forceinline__ RowGroups load_groups(const Sm90GemmParams& params,
                                                          const GemmTile& tile, int row) {
    RowGroups groups = {};
    if constexpr (kStoresBoxes && Tile::kTokens <= kFp8Block) {
      if (params.p.kind == TokenGroups::blocks) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int token = tile.token + row + 8 * half;
          groups.of_row[half] = token < tile.token_end ? group_number(params.p, token) : -1;
        }
      }
    }
    return groups;
  }

  // Writes part `kPart` of the tile. All lanes of the warp call it.
  template <int kPart>
  __device__ __forceinline__ void write_tile(const Acc& sums, const RowGroups& groups) const {
    if constexpr (kStoresBoxes) {
      const int first = this->tile_.token + this->row_ - static_cast<int>(threadIdx.x) % 32 / 4;
      bool exist =
          this->p_.kind == TokenGroups::equal || first + Tile::Box::kRows <= this->tile_.token_end;
      bool some_exist = first < this->tile_.token_end;
      if (this->p_.kind == TokenGroups::blocks) {
        const int own = this->tile_.b_group;
        exist = __all_sync(0xffffffffu, groups.of_row[0] == own && groups.of_row[1] == own);
        some_exist = __any_sync(0xffffffffu, groups.of_row[0] == own || groups.of_row[1] == own);
      }
      if (!some_exist) return;
      if (exist) {
        write_boxes<T, typename Tile::Box, Tile::kBoxes, Tile::kBuffers>(
            &this->params_.out, this->buffer_, kPart * Tile::kBoxes, this->tile_.column, first,
            this->tile_.a_group, this->p_.columns,
            [&](int group, float2(&pairs)[8]) { this->take_pairs(sums, group, pairs); });
        return;
      }
      finish_boxes();
    }
    this->write(sums);
  }
};

#endif  // __CUDACC__

}  // namespace precast
