// SPDX-License-Identifier: Apache-2.0
// The operands of GEMM with a weight of 4 bits for every GPU, as gemm/gemm_operands.cuh has those
// without packed numbers.
//
// Layout   A stage has `a` [tokens, 128 bytes of the depth], then `b` [columns / 16, 512 bytes] as
//          gemm/w4_weight.cuh says. A step is 64 of the depth, but scales are those of 128. Those
//          of MXFP4 follow, [columns / 64, 256 bytes], and two steps copy the same; those of int4
//          are loaded from global memory, once for both.
// Copies   A thread copies 16 bytes of the weight, one in eight a chunk of scales, too.
#pragma once

#include "precast/gemm/gemm_epilogue.cuh"
#include "precast/gemm/int4_weight.cuh"
#include "precast/gemm/mxfp4_weight.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename Weight, typename Out_>
struct W4Gemm {
  using A = bf16;
  using B = Weight;
  using Out = Out_;
  using Params = W4GemmParams;
  static constexpr bool kHasBlockScales = W4Scales<Weight>::kScaleSums;
  static constexpr bool kRowMajorB = false;
  // Of a column in a step: its numbers, and the scales that a stage has.
  static constexpr int kColumnBytes =
      kW4BandBytes / kW4BandColumns + (kHasBlockScales ? 0 : kW4ScaleBytes<Weight> / kW4Columns);
};

template <typename Weight, typename Out>
class SumFinish<W4Gemm<Weight, Out>> : public RescaledFinish<W4Gemm<Weight, Out>> {
 public:
  using RescaledFinish<W4Gemm<Weight, Out>>::RescaledFinish;
};

// Copies the words of a weight, and tokens.
template <typename Tile>
class W4Copies : public TokenCopies<Tile, bf16> {
  static_assert(Tile::kColumns * 2 == Tile::kThreads, "a thread has a chunk of the weight");
  static_assert(kGemmStepBytes == kW4StepDepth * sizeof(bf16), "a step");

 public:
  __device__ __forceinline__ W4Copies(const W4GemmParams& p, const TilePlace& place, uint32_t smem)
      : TokenCopies<Tile, bf16>(p, place, smem) {
    const int thread = threadIdx.x;
    const int band = thread / 32 * kW4BandColumns;
    b_to_ = smem + Tile::kABytes + thread * 16;
    b_exists_ = place.column + band < p.columns;
    b_ = static_cast<const char*>(p.b.data) + place.weight * p.b.group_stride +
         (place.column + band) * p.b.row_stride + thread % 32 * 16;
  }

  __device__ __forceinline__ void start(uint32_t offset) {
    this->start_tokens(offset);
    cp_async(b_to_ + offset, b_, b_exists_);
    b_ += kW4BandBytes;
  }

 private:
  uint32_t b_to_;  // in the first stage
  const char* b_;
  bool b_exists_;
};

template <typename Tile>
class OperandCopies<Tile, bf16, int4_pair, false> : public W4Copies<Tile> {
 public:
  using W4Copies<Tile>::W4Copies;
};

template <typename Tile>
constexpr int kW4ScaleOffset = Tile::kABytes + Tile::kColumns / kW4BandColumns * kW4BandBytes;

template <typename Tile>
class OperandCopies<Tile, bf16, mxfp4, false> : public W4Copies<Tile> {
  static constexpr int kScaleBytes = kW4ScaleBytes<mxfp4>;

 public:
  __device__ __forceinline__ OperandCopies(const W4GemmParams& p, const TilePlace& place,
                                           uint32_t smem)
      : W4Copies<Tile>(p, place, smem) {
    const int thread = threadIdx.x;
    const int block = thread / (kScaleBytes / 16);
    scales_to_ = smem + kW4ScaleOffset<Tile> + thread * 16;
    scales_exist_ = block * kW4Columns < min(Tile::kColumns, p.columns - place.column);
    const int depth_blocks = p.depth / kW4Depth;
    const int64_t first =
        int64_t(place.weight) * (p.columns / kW4Columns) + place.column / kW4Columns + block;
    scales_ = p.b_scales + first * depth_blocks * kScaleBytes + thread % (kScaleBytes / 16) * 16;
  }

  __device__ __forceinline__ void start(uint32_t offset) {
    W4Copies<Tile>::start(offset);
    if (scales_exist_) cp_async(scales_to_ + offset, scales_);
    if (is_second_) scales_ += kScaleBytes;
    is_second_ = !is_second_;
  }

 private:
  uint32_t scales_to_;  // in the first stage
  const unsigned char* scales_;
  bool scales_exist_;
  bool is_second_ = false;  // step of a block of scales
};

// Where a lane's operands are in a stage. It keeps the words of a step, which have all parts.
template <typename Tile, typename Weight>
class W4FragmentLoads : public TokenFragmentLoads<Tile> {
 protected:
  static constexpr int kBands = Tile::kMmaN / 2;  // of a warp

  __device__ __forceinline__ explicit W4FragmentLoads(uint32_t smem)
      : TokenFragmentLoads<Tile>(smem) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    first_band_ = warp % Tile::kColumnWarps * kBands;
    b_ = smem + Tile::kABytes + first_band_ * kW4BandBytes + lane * 16;
  }

  // Loads the words of the stage at `offset`.
  __device__ __forceinline__ void load_words(uint32_t offset) {
#pragma unroll
    for (int band = 0; band < kBands; ++band) {
      uint32_t (&to)[4] = words_[band];
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                   : "r"(b_ + offset + band * kW4BandBytes)
                   : "memory");
    }
  }

  // Of eight columns, the first and the last eight of the depth; then of the other eight.
  static __device__ __forceinline__ void set(uint32_t (&b)[4], const uint32_t (&pairs)[4]) {
    b[0] = pairs[0];
    b[1] = pairs[2];
    b[2] = pairs[1];
    b[3] = pairs[3];
  }

  int first_band_;
  uint32_t words_[kBands][4];

 private:
  uint32_t b_;  // shared address in the first stage
};

template <typename Tile>
class FragmentLoads<Tile, int4_pair, false> : public W4FragmentLoads<Tile, int4_pair> {
  using Base = W4FragmentLoads<Tile, int4_pair>;

 public:
  __device__ __forceinline__ explicit FragmentLoads(uint32_t smem) : Base(smem) {}

  // Called for each step, from the first of a tile.
  __device__ __forceinline__ void begin_step(uint32_t offset) { this->load_words(offset); }

  // The fragments of the `part`-th 16 numbers of the depth.
  __device__ __forceinline__ void load(Fragments<Tile>& to, uint32_t offset, int part) const {
    this->load_tokens(to, offset, part);
#pragma unroll
    for (int band = 0; band < Base::kBands; ++band) {
      uint32_t pairs[4];
      unpack_int4(this->words_[band][part], pairs);
      Base::set(to.b[band], pairs);
    }
  }
};

template <typename Tile>
class FragmentLoads<Tile, mxfp4, false> : public W4FragmentLoads<Tile, mxfp4> {
  using Base = W4FragmentLoads<Tile, mxfp4>;
  using Base::kBands;

 public:
  __device__ __forceinline__ explicit FragmentLoads(uint32_t smem) : Base(smem) {
    scales_ = smem + kW4ScaleOffset<Tile> + threadIdx.x % 32 / 4 * 16;
  }

  // Called for each step, from the first of a tile.
  __device__ __forceinline__ void begin_step(uint32_t offset) {
    this->load_words(offset);
#pragma unroll
    for (int band = 0; band < kBands; ++band) {
      constexpr int kPerBlock = kW4Columns / kW4BandColumns;
      const int at = this->first_band_ + band;
      const uint32_t scales =
          scales_ + offset + at / kPerBlock * kW4ScaleBytes<mxfp4> + at % kPerBlock * 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        scales_of_[band][half] = load_shared_word(scales + half * 128) >> byte_ * 8;
      }
    }
    byte_ ^= 2;
  }

  // The fragments of the `part`-th 16 numbers of the depth.
  __device__ __forceinline__ void load(Fragments<Tile>& to, uint32_t offset, int part) const {
    this->load_tokens(to, offset, part);
#pragma unroll
    for (int band = 0; band < kBands; ++band) {
      uint32_t pairs[4];
      unpack_mxfp4(this->words_[band][part], mxfp4_factor(scales_of_[band][0], part / 2),
                   mxfp4_factor(scales_of_[band][1], part / 2), pairs);
      Base::set(to.b[band], pairs);
    }
  }

 private:
  uint32_t scales_;                // shared address in the first stage
  int byte_ = 0;                   // the first of the step in the scales of 128 of the depth
  uint32_t scales_of_[kBands][2];  // of columns g and g + 8; the lowest bytes are the step's
};

// The scales of int4 columns: a lane has two neighbours of eight.
template <typename Tile>
class BlockScales<Tile, W4GemmParams> {
 public:
  __device__ __forceinline__ BlockScales(const W4GemmParams& p, const TilePlace& place) {
    const int warp = threadIdx.x / 32;
    const int in_tile = warp % Tile::kColumnWarps * Tile::kWarpColumns;
    const int column = min(place.column + in_tile, p.columns - kW4Columns + in_tile % kW4Columns);
    const int64_t block = int64_t(place.weight) * (p.columns / kW4Columns) + column / kW4Columns;
    scales_ = p.b_scales + block * (p.depth / kW4Depth) * kW4ScaleBytes<int4_pair> +
              threadIdx.x % 4 * 32 + column % kW4Columns / 8 * 2;
  }

  // Loads the scales of a step, of each in order, before its products.
  __device__ __forceinline__ void load(int step) {
    if (step % 2 != 0) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int pair = 0; pair < Tile::kMmaN / 2; ++pair) {
        of_columns_[i][pair] = *reinterpret_cast<const uint32_t*>(scales_ + i * 16 + pair * 4);
      }
    }
    scales_ += kW4ScaleBytes<int4_pair>;
  }

  // sums += acc * scales of the step
  __device__ __forceinline__ void promote(TileSums<Tile>& sums, const TileSums<Tile>& acc) const {
#pragma unroll
    for (int n = 0; n < Tile::kMmaN; ++n) {
      const float scales[2] = {of_column(0, n), of_column(1, n)};
#pragma unroll
      for (int m = 0; m < Tile::kMmaM; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums[m][n][i] = fmaf(acc[m][n][i], scales[i % 2], sums[m][n][i]);
        }
      }
    }
  }

 private:
  __device__ __forceinline__ float of_column(int i, int n) const {
    const uint32_t two = of_columns_[i][n / 2];
    return __uint_as_float(n % 2 == 0 ? two << 16 : two & 0xffff0000u);
  }

  const unsigned char* scales_;              // of the next block
  uint32_t of_columns_[2][Tile::kMmaN / 2];  // of the lane's columns of eight, of two eights each
};

#endif  // __CUDACC__

}  // namespace precast
