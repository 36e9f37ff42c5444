// SPDX-License-Identifier: Apache-2.0
// The epilogue of a gated tile of block-scaled GEMM for sm_90a: SwiGLU of two sums, quantised to
// e4m3 with a scale for each 128 columns of a row.
//
// The tile has these 128 columns, and their gates. A thread has both sums of 32 columns of two
// rows; the other columns of a row are in the other lanes of its quad. So a scale takes a maximum
// over four lanes, and lanes exchange codes to write 16 bytes each.
#pragma once

#include "precast/core/quant.cuh"
#include "precast/core/warp.cuh"
#include "precast/gemm/sm90/gated_params.cuh"
#include "precast/gemm/sm90/scheduler.cuh"
#include "precast/gemm/sm90/tile.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename Tile>
class GatedBlocksEpilogue {
  static constexpr int kColumns = kFp8Block;
  static_assert(Tile::kColumns == kColumns && Tile::kParts == 2, "columns, and their gates");
  using Sums = float[2][kColumns / 2];

 public:
  // `row` is the lane's first row of the tile. All lanes of the warp call it.
  static __device__ __forceinline__ void write_tile(const Sm90GatedParams& params,
                                                    const GemmTile& tile, int row,
                                                    const Sums& sums) {
#pragma unroll
    for (int half = 0; half < 2; ++half) write_row(params, tile, row + 8 * half, half, sums);
  }

  // No CTAs share a sum.
  static __device__ __forceinline__ void join_sums_of_cluster() {}

 private:
  // The lane's columns of a row: `half` says which of its two rows it is.
  static __device__ __forceinline__ void write_row(const Sm90GatedParams& params,
                                                   const GemmTile& tile, int row, int half,
                                                   const Sums& sums) {
    const Fp8GemmParams& p = params.p;
    const int q = threadIdx.x % 4, token = tile.token + row;
    const bool exists = token < tile.token_end && tile.column < p.columns;
    float h[kColumns / 4];  // two neighbours of each eight
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      const int at = i / 2 * 4 + 2 * half + i % 2;
      h[i] = silu(sums[1][at]) * sums[0][at];
    }
    const QuantScale scale =
        quant_scale<e4m3>(warp_max(amax_bits(h), 4), params.eps, ScaleFormat::numbers);
    e4m3* const out = static_cast<e4m3*>(p.out) + token * p.out_row_stride + tile.column + 16 * q;
#pragma unroll
    for (int begin = 0; begin < kColumns; begin += 64) {
      uint32_t words[4];  // of two eights each
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* x = h + begin / 4 + 4 * i;
        words[i] = pack_codes<e4m3>(x[0] * scale.reciprocal, x[1] * scale.reciprocal,
                                    x[2] * scale.reciprocal, x[3] * scale.reciprocal);
      }
      transpose_in_quad(words);  // those of two eights, from each lane
      const uint4 codes = make_uint4(
          __byte_perm(words[0], words[1], 0x5410), __byte_perm(words[2], words[3], 0x5410),
          __byte_perm(words[0], words[1], 0x7632), __byte_perm(words[2], words[3], 0x7632));
      if (exists) *reinterpret_cast<uint4*>(out + begin) = codes;
    }
    if (exists && q == 0) {
      params.out_scale[tile.column / kFp8Block * params.out_scale_stride + token] = scale.scale;
    }
  }
};

#endif  // __CUDACC__

}  // namespace precast
