// SPDX-License-Identifier: Apache-2.0
// The operands of GEMM with a weight of MXFP4 for every GPU, as gemm/gemm_operands.cuh has those
// without packed numbers.
//
// Layout   A stage has `a` [tokens, 128 bytes of the depth], then `b` [columns / 16, 512 bytes] and
//          its scales [columns / 64, 256 bytes], as gemm/mxfp4_weight.cuh says. A step is 64 of the
//          depth, but scales are those of 128: two steps copy the same.
// Copies   A thread copies 16 bytes of the weight, one in eight a chunk of scales, too.
#pragma once

#include "precast/gemm/gemm_epilogue.cuh"
#include "precast/gemm/mxfp4_weight.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename Out_>
struct Mxfp4Gemm {
  using A = bf16;
  using B = mxfp4;
  using Out = Out_;
  using Params = Mxfp4GemmParams;
  static constexpr bool kHasBlockScales = false;
  static constexpr bool kRowMajorB = false;
  // Of a column in a step: its numbers and the scales.
  static constexpr int kColumnBytes =
      kMxfp4BandBytes / kMxfp4BandColumns + kMxfp4ScaleBytes / kMxfp4Columns;
};

template <typename Out>
class SumFinish<Mxfp4Gemm<Out>> : public RescaledFinish<Mxfp4Gemm<Out>> {
 public:
  using RescaledFinish<Mxfp4Gemm<Out>>::RescaledFinish;
};

template <typename Tile>
constexpr int kMxfp4ScaleOffset =
    Tile::kABytes + Tile::kColumns / kMxfp4BandColumns * kMxfp4BandBytes;

template <typename Tile>
class OperandCopies<Tile, bf16, mxfp4, false> : public TokenCopies<Tile, bf16> {
  static_assert(Tile::kColumns * 2 == Tile::kThreads, "a thread has a chunk of the weight");
  static_assert(kGemmStepBytes == kMxfp4StepDepth * sizeof(bf16), "a step");

 public:
  __device__ __forceinline__ OperandCopies(const Mxfp4GemmParams& p, const TilePlace& place,
                                           uint32_t smem)
      : TokenCopies<Tile, bf16>(p, place, smem) {
    const int thread = threadIdx.x;
    const int band = thread / 32 * kMxfp4BandColumns;
    b_to_ = smem + Tile::kABytes + thread * 16;
    b_exists_ = place.column + band < p.columns;
    b_ = static_cast<const char*>(p.b.data) + place.weight * p.b.group_stride +
         (place.column + band) * p.b.row_stride + thread % 32 * 16;
    const int block = thread / (kMxfp4ScaleBytes / 16);
    scales_to_ = smem + kMxfp4ScaleOffset<Tile> + thread * 16;
    scales_exist_ = block * kMxfp4Columns < min(Tile::kColumns, p.columns - place.column);
    const int depth_blocks = p.depth / kMxfp4Depth;
    const int64_t first =
        int64_t(place.weight) * (p.columns / kMxfp4Columns) + place.column / kMxfp4Columns + block;
    scales_ = p.b_scales + first * depth_blocks * kMxfp4ScaleBytes +
              thread % (kMxfp4ScaleBytes / 16) * 16;
  }

  __device__ __forceinline__ void start(uint32_t offset) {
    this->start_tokens(offset);
    cp_async(b_to_ + offset, b_, b_exists_);
    if (scales_exist_) cp_async(scales_to_ + offset, scales_);
    b_ += kMxfp4BandBytes;
    if (is_second_) scales_ += kMxfp4ScaleBytes;
    is_second_ = !is_second_;
  }

 private:
  uint32_t b_to_, scales_to_;  // in the first stage
  const char* b_;
  const unsigned char* scales_;
  bool b_exists_, scales_exist_;
  bool is_second_ = false;  // step of a block of scales
};

// Where a lane's operands are in a stage. It keeps the words of a step, which have all parts.
template <typename Tile>
class FragmentLoads<Tile, mxfp4, false> : public TokenFragmentLoads<Tile> {
  static constexpr int kBands = Tile::kMmaN / 2;  // of a warp

 public:
  __device__ __forceinline__ explicit FragmentLoads(uint32_t smem)
      : TokenFragmentLoads<Tile>(smem) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    first_band_ = warp % Tile::kColumnWarps * kBands;
    b_ = smem + Tile::kABytes + first_band_ * kMxfp4BandBytes + lane * 16;
    scales_ = smem + kMxfp4ScaleOffset<Tile> + lane / 4 * 16;
  }

  // Loads the words of the stage at `offset`. It is called for each step, from the first of a tile.
  __device__ __forceinline__ void begin_step(uint32_t offset) {
#pragma unroll
    for (int band = 0; band < kBands; ++band) {
      load_shared(words_[band], b_ + offset + band * kMxfp4BandBytes);
      constexpr int kPerBlock = kMxfp4Columns / kMxfp4BandColumns;
      const int at = first_band_ + band;
      const uint32_t scales =
          scales_ + offset + at / kPerBlock * kMxfp4ScaleBytes + at % kPerBlock * 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t four;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(four) : "r"(scales + half * 128) : "memory");
        scales_of_[band][half] = four >> byte_ * 8;
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
      unpack_mxfp4(words_[band][part], mxfp4_factor(scales_of_[band][0], part / 2),
                   mxfp4_factor(scales_of_[band][1], part / 2), pairs);
      // Of eight columns, the first and the last eight of the depth; then of the other eight.
      to.b[band][0] = pairs[0];
      to.b[band][1] = pairs[2];
      to.b[band][2] = pairs[1];
      to.b[band][3] = pairs[3];
    }
  }

 private:
  static __device__ __forceinline__ void load_shared(uint32_t (&to)[4], uint32_t from) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
  }

  uint32_t b_, scales_;  // shared addresses in the first stage
  int first_band_;
  int byte_ = 0;  // the first of the step in the scales of 128 of the depth
  uint32_t words_[kBands][4];
  uint32_t scales_of_[kBands][2];  // of columns g and g + 8; the lowest bytes are the step's
};

#endif  // __CUDACC__

}  // namespace precast
