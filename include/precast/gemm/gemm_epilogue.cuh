// SPDX-License-Identifier: Apache-2.0
// The epilogue of the GEMMs for every GPU: sums are scaled, rounded once and written.
//
// A lane has two neighbouring columns of a token in each MMA and writes them together, or one by
// one where columns or strides are odd.
#pragma once

#include "precast/core/vec.cuh"
#include "precast/gemm/gemm_mainloop.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename T>
__device__ __forceinline__ void store_pair(T* to, float x, float y) {
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float2*>(to) = make_float2(x, y);
  } else {
    *reinterpret_cast<uint32_t*>(to) = pack_pair(T(), x, y);
  }
}

// The bias has the type of 16-bit operands, else that of the output.
template <typename Gemm, bool k16Bits = sizeof(typename Gemm::A) == 2>
struct BiasType {
  using type = typename Gemm::Out;
};
template <typename Gemm>
struct BiasType<Gemm, true> {
  using type = typename Gemm::A;
};

// What is left to do to the sum of a token and a column; block scales have been applied.
template <typename Gemm>
class SumFinish {
 public:
  __device__ __forceinline__ SumFinish(const Fp8GemmParams&, const TilePlace&) {}
  __device__ __forceinline__ void set_token(int) {}
  __device__ __forceinline__ float operator()(float sum, int) const { return sum; }
};

template <typename A, typename B, typename Out, bool kRowMajorB>
class SumFinish<PlainGemm<A, B, Out, kRowMajorB>> {
  using Bias = typename BiasType<PlainGemm<A, B, Out, kRowMajorB>>::type;

 public:
  __device__ __forceinline__ SumFinish(const GemmParams& p, const TilePlace& place)
      : p_(p), scale_(p.alpha == nullptr ? 1.0f : *p.alpha) {
    a_scale_ = p.a_scale.data + place.a_group * p.a_scale.group_stride;
    b_scale_ = p.b_scale.data + place.weight * p.b_scale.group_stride;
  }

  __device__ __forceinline__ void set_token(int token) {
    of_token_ =
        p_.a_scale.data == nullptr ? scale_ : scale_ * a_scale_[token * p_.a_scale.row_stride];
  }

  __device__ __forceinline__ float operator()(float sum, int column) const {
    float scale = of_token_;
    if (p_.b_scale.data != nullptr) scale *= b_scale_[column * p_.b_scale.row_stride];
    sum *= MmaOperands<A, B>::kRescale;
    sum *= scale;
    return p_.bias == nullptr ? sum : sum + to_float(static_cast<const Bias*>(p_.bias)[column]);
  }

 private:
  const GemmParams& p_;
  float scale_, of_token_ = 1.0f;
  const float *a_scale_, *b_scale_;
};

// Sums without scales of rows, of operands whose products are too small by a power of two.
template <typename Gemm>
class RescaledFinish {
 public:
  template <typename Params>
  __device__ __forceinline__ RescaledFinish(const Params&, const TilePlace&) {}
  __device__ __forceinline__ void set_token(int) {}
  __device__ __forceinline__ float operator()(float sum, int) const {
    return sum * MmaOperands<typename Gemm::A, typename Gemm::B>::kRescale;
  }
};

template <typename Tile, typename Gemm>
__device__ __forceinline__ void write_tile(const typename Gemm::Params& p, const TilePlace& place,
                                           const TileSums<Tile>& sums) {
  using Out = typename Gemm::Out;
  SumFinish<Gemm> finish(p, place);
  Out* out = static_cast<Out*>(p.out) + place.a_group * p.out_group_stride;  // [tokens, columns]
  const int first_column = place.column +
                           threadIdx.x / 32 % Tile::kColumnWarps * Tile::kWarpColumns +
                           threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2 * Tile::kMmaM; ++i) {
    const int token = place.token + first_token_of_lane<Tile>() + i * 8;
    if (token >= place.token_end) continue;
    if (p.kind == TokenGroups::blocks && group_number(p, token) != place.weight) continue;
    finish.set_token(token);
    Out* row = out + token * p.out_row_stride;
    const bool has_pairs =
        (reinterpret_cast<uint64_t>(row + first_column) & (2 * sizeof(Out) - 1)) == 0;
#pragma unroll
    for (int n = 0; n < Tile::kMmaN; ++n) {
      const int column = first_column + n * 8;
      if (column >= p.columns) continue;
      const float x = finish(sums[i / 2][n][i % 2 * 2], column);
      if (column + 1 == p.columns) {
        row[column] = from_float<Out>(x);
        continue;
      }
      const float y = finish(sums[i / 2][n][i % 2 * 2 + 1], column + 1);
      if (has_pairs) {
        store_pair(row + column, x, y);
      } else {
        row[column] = from_float<Out>(x);
        row[column + 1] = from_float<Out>(y);
      }
    }
  }
}

#endif  // __CUDACC__

}  // namespace precast
