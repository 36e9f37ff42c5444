// SPDX-License-Identifier: Apache-2.0
// The epilogue of a gated tile of GEMM for sm_90a: two sums become an output.
//
// A thread has the sums of a column and of its gate, because the weight's rows lie in a tile by
// eights: eight of the first half, then their gates (encode_gated_weight()). Where rows of the
// weight are columns of wgmma, they are two blocks of eight columns; where they are rows, they are
// the two rows of a lane, eight apart.
#pragma once

#include "precast/core/math.cuh"
#include "precast/gemm/sm90/plain_epilogue.cuh"

namespace precast {

#if defined(__CUDACC__)

// Functions of a sum of the first half of the weight, `up`, and of its gate.
struct Swiglu {
  static __device__ __forceinline__ float apply(float up, float gate) { return silu(gate) * up; }
};

// A tile as what is written of it: half as many columns, if rows are tokens.
template <typename Tile>
struct GatedOutputTile : Tile {
  static constexpr int kColumns = Tile::kSwapped ? Tile::kColumns : Tile::kColumns / 2;
};

template <typename Types, typename Tile>
class GatedEpilogue : public PlainEpilogue<Types, GatedOutputTile<Tile>> {
  using T = typename Types::Out;
  using Base = PlainEpilogue<Types, GatedOutputTile<Tile>>;
  using Sums = float[Tile::kColumns / 2];
  // Those of a row of wgmma follow each other: of blocks of eight tokens, or of eight columns.
  using Outputs = float[Tile::kColumns / 4];

 public:
  using Base::Base;

  // As PlainEpilogue has it.
  __device__ __forceinline__ void write_tile(uint32_t buffers, const Sums& sums) const {
    Outputs outputs;
    if constexpr (Tile::kSwapped) {
#pragma unroll
      for (int i = 0; i < Tile::kColumns / 4; ++i) {
        const int up = i / 2 * 4 + i % 2;
        outputs[i] = Types::Function::apply(sums[up], sums[up + 2]);
      }
      write_swapped(outputs);
    } else {
#pragma unroll
      for (int i = 0; i < Tile::kColumns / 4; ++i) {
        const int up = i / 4 * 8 + i % 4;
        outputs[i] = Types::Function::apply(sums[up], sums[up + 4]);
      }
      Base::write_tile(buffers, outputs);
    }
  }

 private:
  // Eight columns for each warp, of 32 tokens at once: four matrices of eight by eight, of which
  // each lane of a quad writes a row.
  __device__ __forceinline__ void write_swapped(const Outputs& outputs) const {
    static_assert(sizeof(T) == 2, "pairs of 32 bits");
    const int lane = threadIdx.x % 32;
    const int column = this->tile_.column + (this->row_ - lane / 4) / 2;
#pragma unroll
    for (int begin = 0; begin < Tile::kColumns; begin += 32) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = (begin + 8 * i) / 4;
        words[i] = 0;
        if (begin + 8 * i < Tile::kColumns) {
          words[i] = transpose_8x8(pack_pair(T(), outputs[at], outputs[at + 1]));
        }
      }
      const int in_tile = begin + 8 * (lane % 4) + lane / 4, token = this->tile_.token + in_tile;
      const bool exists =
          (Tile::kColumns % 32 == 0 || in_tile < Tile::kColumns) && this->has_token(token);
      this->write_words(words, token, exists, column);
    }
  }
};

#endif  // __CUDACC__

}  // namespace precast
