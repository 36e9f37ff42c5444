// SPDX-License-Identifier: Apache-2.0
// The two products of attention on a group of tokens in shared memory: scores = queries x keys^T,
// and sums += probabilities x values. Keys and values of 8 bits become f16 in registers.
#pragma once

#include "precast/attention/tile.cuh"
#include "precast/core/fp8.cuh"
#include "precast/core/mma.cuh"
#include "precast/core/vec.cuh"

namespace precast {

#if defined(__CUDACC__)

// The type that products take.
template <typename Q, typename KV>
struct ProductType {
  using type = Q;
};
template <typename Q>
struct ProductType<Q, e4m3> {
  using type = f16;
};
template <typename Q>
struct ProductType<Q, e5m2> {
  using type = f16;
};

// What widened numbers are to be multiplied by: below compute capability 8.9 e4m3 becomes f16 by
// moving its bits, and exponents then count from 15 instead of 7. There NaN comes out as 480, with
// its sign: to tell it apart would cost the loop more than the conversion.
template <typename KV>
struct Widened {
  static constexpr float kScale = 1.0f;
};
#if PRECAST_SM < 89
template <>
struct Widened<e4m3> {
  static constexpr float kScale = 256.0f;
};
#endif

// Four bytes as f16: the first two, and the last two.
template <typename KV>
__device__ __forceinline__ void widen(uint32_t x, uint32_t& low, uint32_t& high);
template <>
__device__ __forceinline__ void widen<e5m2>(uint32_t x, uint32_t& low, uint32_t& high) {
  low = __byte_perm(x, 0u, 0x1404);
  high = __byte_perm(x, 0u, 0x3424);
}
template <>
__device__ __forceinline__ void widen<e4m3>(uint32_t x, uint32_t& low, uint32_t& high) {
#if PRECAST_SM < 89
  const uint32_t a = __byte_perm(x, 0u, 0x1404), b = __byte_perm(x, 0u, 0x3424);
  low = (a & 0x80008000u) | (a >> 1 & 0x3f803f80u);
  high = (b & 0x80008000u) | (b >> 1 & 0x3f803f80u);
#else
  // Why not the intrinsic: it costs a shift for the upper half.
  asm("{\n"
      ".reg .b16 a, b;\n"
      "mov.b32 {a, b}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, a;\n"
      "cvt.rn.f16x2.e4m3x2 %1, b;\n"
      "}"
      : "=r"(low), "=r"(high)
      : "r"(x));
#endif
}

// Offsets of a lane's first rows in keys and values, which products add to the address of a group.
template <typename Tile>
struct ProductLanes {
  uint32_t keys, values;

  __device__ __forceinline__ ProductLanes()
      : keys(Tile::kFp8 ? rows_first<typename Tile::KeyRows>()
                        : chunks_first<typename Tile::KeyRows>()),
        values(rows_first<typename Tile::ValueRows>()) {
    keep(keys);
    keep(values);
  }
};

// scores += queries [16 kRowTiles, kDimK] x keys [8 kEights, kDimK]^T. `query(step, tile)` gives
// the operand of 16 columns.
template <typename Tile, typename Q, typename KV, typename Queries, int kEights>
__device__ __forceinline__ void multiply_keys(float (&scores)[Tile::kRowTiles][kEights][4],
                                              uint32_t keys, int lane, const Queries& queries) {
  using T = typename ProductType<Q, KV>::type;
  using Rows = typename Tile::KeyRows;
  constexpr int kSteps = Tile::kDimK / 16;
  if constexpr (!Tile::kFp8) {
    uint32_t operands[2][Tile::kRowTiles][4];
    queries.load(operands[0], 0);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const auto& a = operands[step % 2];
#pragma unroll
      for (int pair = 0; pair < kEights / 2; ++pair) {
        uint32_t b[4];
        load_matrices(b, keys + Rows::later(lane, 2 * step) + pair * 16 * Rows::kStride);
        if (pair == 0 && step + 1 < kSteps) queries.load(operands[(step + 1) % 2], step + 1);
#pragma unroll
        for (int m = 0; m < Tile::kRowTiles; ++m) {
          multiply_add<T>(scores[m][2 * pair], a[m], b[0], b[1]);
          multiply_add<T>(scores[m][2 * pair + 1], a[m], b[2], b[3]);
        }
      }
    }
  } else {
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      const bool is_pair = step + 1 < kSteps;
      uint32_t a[2][Tile::kRowTiles][4];
      queries.load(a[0], step);
      if (is_pair) queries.load(a[1], step + 1);
      // The last chunk of an odd number is loaded twice.
      const int from =
          is_pair ? Rows::later(lane, step) : Rows::offset(threadIdx.x % 16, 0) + step * 16;
#pragma unroll
      for (int pair = 0; pair < kEights / 2; ++pair) {
        uint32_t b[4];
        load_matrices(b, keys + from + pair * 16 * Rows::kStride);
#pragma unroll
        for (int i = 0; i < (is_pair ? 4 : 2); ++i) {
          uint32_t b0, b1;
          widen<KV>(b[i], b0, b1);
#pragma unroll
          for (int m = 0; m < Tile::kRowTiles; ++m) {
            multiply_add<T>(scores[m][2 * pair + i % 2], a[i / 2][m], b0, b1);
          }
        }
      }
    }
  }
}

// sums += weights [16 kRowTiles, 16 kSteps] x values [16 kSteps, kWarpDimV]; the weights are
// operands of 16 tokens each. Of values of 8 bits, sums 2 i and 2 i + 1 are the even and the odd
// columns of 16: value_column().
template <typename Tile, typename Q, typename KV, int kSteps>
__device__ __forceinline__ void multiply_values(
    float (&sums)[Tile::kRowTiles][Tile::kWarpDimV / 8][4],
    const uint32_t (&weights)[Tile::kRowTiles][kSteps][4], uint32_t values, int lane) {
  using T = typename ProductType<Q, KV>::type;
  using Rows = typename Tile::ValueRows;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if constexpr (!Tile::kFp8) {
#pragma unroll
      for (int column = 0; column < Tile::kWarpDimV / 16; ++column) {
        uint32_t b[4];
        load_matrices_transposed(
            b, values + Rows::later(lane, 2 * column) + step * 16 * Rows::kStride);
#pragma unroll
        for (int m = 0; m < Tile::kRowTiles; ++m) {
          multiply_add<T>(sums[m][2 * column], weights[m][step], b[0], b[1]);
          multiply_add<T>(sums[m][2 * column + 1], weights[m][step], b[2], b[3]);
        }
      }
    } else {
      constexpr int kColumns = Tile::kWarpDimV / 16;
#pragma unroll
      for (int column = 0; column < kColumns; column += 2) {
        const bool is_pair = column + 1 < kColumns;
        const int from =
            is_pair ? Rows::later(lane, column) : Rows::offset(threadIdx.x % 16, 0) + column * 16;
        uint32_t b[4];
        load_matrices_transposed(b, values + from + step * 16 * Rows::kStride);
#pragma unroll
        for (int i = 0; i < (is_pair ? 2 : 1); ++i) {
          // Bytes: token, column; token, column + 1; token + 1, column; token + 1, column + 1.
          uint32_t even[2], odd[2];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            widen<KV>(__byte_perm(b[2 * i + j], 0u, 0x3120), even[j], odd[j]);
          }
#pragma unroll
          for (int m = 0; m < Tile::kRowTiles; ++m) {
            multiply_add<T>(sums[m][2 * (column + i)], weights[m][step], even[0], even[1]);
            multiply_add<T>(sums[m][2 * (column + i) + 1], weights[m][step], odd[0], odd[1]);
          }
        }
      }
    }
  }
}

// The same of 16-bit values, with weights that are made of scores a step ahead of the product that
// takes them: all at once they would need registers that there are not. Their sums are products,
// too, with ones. `beside` is called while the first exponentials are under way.
template <typename Tile, typename T, typename States, int kEights, typename Beside>
__device__ __forceinline__ void weigh_values(States& states,
                                             const float (&scores)[Tile::kRowTiles][kEights][4],
                                             float scale, uint32_t values, int lane,
                                             const Beside& beside) {
  using Rows = typename Tile::ValueRows;
  constexpr int kSteps = kEights / 2;
  const uint32_t ones = pack_pair(T(), 1.0f, 1.0f);
  uint32_t weights[2][Tile::kRowTiles][4];
  states.template weigh_step<T>(scores, scale, 0, weights[0]);
  beside();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const auto& a = weights[step % 2];
    if (step + 1 < kSteps) {
      states.template weigh_step<T>(scores, scale, step + 1, weights[(step + 1) % 2]);
    }
#pragma unroll
    for (int column = 0; column < Tile::kWarpDimV / 16; ++column) {
      uint32_t b[4];
      load_matrices_transposed(b,
                               values + Rows::later(lane, 2 * column) + step * 16 * Rows::kStride);
#pragma unroll
      for (int m = 0; m < Tile::kRowTiles; ++m) {
        multiply_add<T>(states.sums[m][2 * column], a[m], b[0], b[1]);
        multiply_add<T>(states.sums[m][2 * column + 1], a[m], b[2], b[3]);
      }
    }
#pragma unroll
    for (int m = 0; m < Tile::kRowTiles; ++m) multiply_add<T>(states.products[m], a[m], ones, ones);
  }
}

#endif  // __CUDACC__

}  // namespace precast
