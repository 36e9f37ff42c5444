// SPDX-License-Identifier: Apache-2.0
// The epilogue of a gated tile of GEMM for sm_90a: two sums become an output.
//
// A thread has the sums of a column and of its gate, because the weight's rows lie in a tile by
// eights: eight of the first half, then their gates (encode_gated_weight()). Where rows of the
// weight are columns of wgmma, they are two blocks of eight columns; where they are rows, they are
// the two rows of a lane, eight apart.
#pragma once

#include "precast/gemm/sm90/gated_params.cuh"
#include "precast/gemm/sm90/plain_epilogue.cuh"

namespace precast {

#if defined(__CUDACC__)

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
    // Why a branch for the usual one: its loop has nothing but the function.
    if (this->p_.function == ExpertFunction::swiglu && this->p_.bias == nullptr) {
      apply([](float up, float gate) { return silu(gate) * up; }, sums, outputs);
    } else {
      apply_any(sums, outputs);
    }
    if constexpr (Tile::kSwapped) {
      write_swapped(outputs);
    } else {
      Base::write_tile(buffers, outputs);
    }
  }

 private:
  // Where the sum of an output is; that of its gate is kGate further.
  static constexpr int kGate = Tile::kSwapped ? 2 : 4;
  static __device__ __forceinline__ constexpr int place_of_up(int output) {
    return Tile::kSwapped ? output / 2 * 4 + output % 2 : output / 4 * 8 + output % 4;
  }

  template <typename Function>
  static __device__ __forceinline__ void apply(const Function& function, const Sums& sums,
                                               Outputs& outputs) {
#pragma unroll
    for (int i = 0; i < Tile::kColumns / 4; ++i) {
      const int up = place_of_up(i);
      outputs[i] = function(sums[up], sums[up + kGate]);
    }
  }

  __device__ __forceinline__ void apply_any(const Sums& sums, Outputs& outputs) const {
    const GatedGemmParams& p = this->p_;
    const int weight = this->tile_.b_group;
    SwigluNumbers numbers;
    if (p.swiglu_alpha != nullptr) numbers.alpha = p.swiglu_alpha[weight];
    if (p.swiglu_beta != nullptr) numbers.beta = p.swiglu_beta[weight];
    if (p.swiglu_limit != nullptr) numbers.limit = p.swiglu_limit[weight];
    Sums y;
#pragma unroll
    for (int i = 0; i < Tile::kColumns / 2; ++i) y[i] = sums[i];
    if (p.bias != nullptr) add_biases(weight, y);
    use_gated_function(p.function, numbers,
                       [&](const auto& function) { apply(function, y, outputs); });
  }

  __device__ __forceinline__ void add_biases(int weight, Sums& y) const {
    const int columns = this->p_.columns, lane = threadIdx.x % 32;
    const T* const ups = static_cast<const T*>(this->p_.bias) + int64_t(weight) * 2 * columns;
    const auto load = [&](int column, int gate) {
      return column < columns ? to_float(ups[gate * columns + column]) : 0.0f;
    };
    if constexpr (Tile::kSwapped) {
      const int column = first_column() + lane / 4;
      const float up = load(column, 0), gate = load(column, 1);
#pragma unroll
      for (int i = 0; i < Tile::kColumns / 4; ++i) {
        y[place_of_up(i)] += up;
        y[place_of_up(i) + kGate] += gate;
      }
    } else {
#pragma unroll
      for (int j = 0; j < Tile::kColumns / 16; ++j) {  // eight columns
        const int column = this->tile_.column + 8 * j + lane % 4 * 2;
#pragma unroll
        for (int gate = 0; gate < 2; ++gate) {
          const float of_column[2] = {load(column, gate), load(column + 1, gate)};
#pragma unroll
          for (int i = 0; i < 4; ++i) y[8 * j + 4 * gate + i] += of_column[i % 2];
        }
      }
    }
  }

  // The first of the eight columns of this warp in a swapped tile.
  __device__ __forceinline__ int first_column() const {
    return this->tile_.column + (this->row_ - static_cast<int>(threadIdx.x) % 32 / 4) / 2;
  }

  // Eight columns for each warp, of 32 tokens at once: four matrices of eight by eight, of which
  // each lane of a quad writes a row.
  __device__ __forceinline__ void write_swapped(const Outputs& outputs) const {
    static_assert(sizeof(T) == 2, "pairs of 32 bits");
    const int lane = threadIdx.x % 32;
    const int column = first_column();
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
