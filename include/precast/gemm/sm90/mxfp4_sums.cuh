// SPDX-License-Identifier: Apache-2.0
// The sums of a tile of GEMM with a weight of MXFP4 for sm_90a. A warpgroup computes 64 rows of it,
// over the whole depth, in halves of a stage:
//
//   a = unpacked words              registers, 64 rows by 64 of the depth
//   sums += a B                     wgmma over 64 of the depth
//
// While the tensor cores multiply one half, the warpgroup unpacks the next one into other
// registers.
#pragma once

#include "precast/core/sm90/wgmma.cuh"
#include "precast/gemm/sm90/mxfp4_tile.cuh"
#include "precast/gemm/sm90/scheduler.cuh"

namespace precast {

#if defined(__CUDACC__)

// `Barriers` are those of the stages.
template <typename Tile, typename Barriers, typename Params>
class Mxfp4Sums {
  using Mma = Wgmma<bf16, Tile::kColumns>;
  using Acc = float[Tile::kColumns / 2];
  using State = PipelineState<Tile::kStages>;
  static constexpr int kParts = Tile::kPanelDepth / 16;  // wgmma of a half
  static_assert(Tile::kParts == 1 && Tile::kPanels == 2, "64 rows for each warpgroup, two halves");

  // What a lane has of a stage: the words of both halves, the scales of rows g and g + 8.
  struct Weight {
    uint4 words[2];
    uint32_t low, high;
  };

 public:
  using Sums = Acc[1];

  // The stages begin at the address `base`.
  __device__ __forceinline__ Mxfp4Sums(const Params& params, Barriers& stages, uint32_t base)
      : stages_(stages),
        blocks_(DepthRange(params).count()),
        first_place_(uniform((base & 0x3ffff) >> 4)),
        releases_in_(cta_to_release(params.use)) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
    constexpr int kBands = kMxfp4Columns / kMxfp4BandColumns;  // of a block of scales
    words_ = base + Tile::kTokenBytes + warp * Tile::kBandBytes + lane * 16;
    scales_ = base + Tile::kScaleOffset + warp / kBands * kMxfp4ScaleBytes + lane / 4 * 16 +
              warp % kBands * 4;
  }

  // Computes the sums of a tile, and gives its stages back.
  __device__ __forceinline__ void compute(int, Sums& sums) {
    Acc& acc = sums[0];
#pragma unroll
    for (float& x : acc) x = 0.0f;
    State at = {uniform(state_.stage), static_cast<uint32_t>(uniform(state_.parity))};
    State last = at;
    int last_releases_in = kNoCta;
    uint32_t a[2][kParts][4];
    bool is_full = false;
#pragma unroll 1
    for (int left = uniform(blocks_); left > 0; --left) {
      if (!is_full) stages_.wait_full(at, "a full stage");
      const Weight weight = load(at);
      unpack<0>(weight, a[0]);
      multiply<0>(at, a[0], acc);
      unpack<1>(weight, a[1]);
      // The stage before has been multiplied.
      mbarrier_arrive_in_cta_if(&stages_.empty[last.stage], last_releases_in);
      multiply<1>(at, a[1], acc);
      last = at;
      last_releases_in = releases_in_;
      at.advance();
      is_full = mbarrier_test_parity(&stages_.full[at.stage], at.parity);
    }
    wgmma_wait_group<0>();
    keep_behind_wait(acc);
    mbarrier_arrive_in_cta_if(&stages_.empty[last.stage], last_releases_in);
    state_ = at;
#pragma unroll
    for (float& x : acc) x *= MmaOperands<bf16, mxfp4>::kRescale;
  }

 private:
  __device__ __forceinline__ Weight load(const State& at) const {
    const uint32_t stage = at.stage * Tile::kStageBytes;
    Weight weight;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4& words = weight.words[half];
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                   : "r"(words_ + stage + half * kMxfp4BandBytes)
                   : "memory");
    }
    uint32_t low, high;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(low) : "r"(scales_ + stage) : "memory");
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(high) : "r"(scales_ + stage + 128) : "memory");
    weight.low = mxfp4_scales(low);
    weight.high = mxfp4_scales(high);
    return weight;
  }

  // Unpacks a half, once the wgmma that read the same registers are complete: all but those of the
  // other half.
  template <int kHalf>
  static __device__ __forceinline__ void unpack(const Weight& weight, uint32_t (&a)[kParts][4]) {
    wgmma_wait_group<1>();
    const uint4& four = weight.words[kHalf];
    const uint32_t words[kParts] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int byte = 2 * kHalf + part / 2;
      unpack_mxfp4(words[part], mxfp4_factor(weight.low, byte), mxfp4_factor(weight.high, byte),
                   a[part]);
    }
  }

  // Starts the product of a half.
  template <int kHalf>
  __device__ __forceinline__ void multiply(const State& at, const uint32_t (&a)[kParts][4],
                                           Acc& acc) const {
    constexpr uint64_t kLayout = wgmma_descriptor(0, 8 * Tile::kRowBytes, 0);
    const uint32_t panel =
        first_place_ + at.stage * (Tile::kStageBytes >> 4) + kHalf * (Tile::kPanelBytes >> 4);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Mma::template add_rs<false>(acc, a[part], kLayout | (panel + part * 2));
    }
    wgmma_commit_group();
  }

  Barriers& stages_;
  const int blocks_;            // of the depth, in a tile
  const uint32_t first_place_;  // of the stages, in units of 16 bytes
  const int releases_in_;       // a CTA of the cluster
  uint32_t words_, scales_;     // shared addresses of this lane's, in the first stage
  State state_;
};

#endif  // __CUDACC__

}  // namespace precast
