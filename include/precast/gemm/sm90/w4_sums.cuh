// SPDX-License-Identifier: Apache-2.0
// The sums of a tile of GEMM with a weight of 4 bits for sm_90a. A warpgroup computes 64 rows of
// it, over the whole depth, 16 of it at a time:
//
//   a = unpacked words              registers, 64 rows by 16 of the depth
//   sums += a B                     one wgmma; for few tokens, an mma of each warp for 8 of them
//
// While the tensor cores multiply one part by wgmma, the warpgroup unpacks the next ones into other
// registers. Four parts at a time, with more instructions to unpack them, took up to 6 % longer.
#pragma once

#include "precast/core/mma_operand.cuh"
#include "precast/core/sm90/wgmma.cuh"
#include "precast/gemm/sm90/scheduler.cuh"
#include "precast/gemm/sm90/w4_tile.cuh"

namespace precast {

#if defined(__CUDACC__)

// `Barriers` are those of the stages.
template <typename Tile, typename Barriers, typename Params>
class W4Sums {
  using Mma = Wgmma<bf16, Tile::kColumns>;
  using Scales = W4Scales<typename Tile::Weight>;
  using Acc = float[Tile::kColumns / 2];
  using State = PipelineState<Tile::kStages>;
  static constexpr int kParts = Tile::kPanelDepth / 16;  // wgmma of a half, and sets of registers
  static_assert(Tile::kParts == 1 && Tile::kPanels == 2, "64 rows for each warpgroup, two halves");

 public:
  using Sums = Acc[1];

  // The stages begin at the address `base`.
  __device__ __forceinline__ W4Sums(const Params& params, Barriers& stages, uint32_t base)
      : stages_(stages),
        blocks_(DepthRange(params).count()),
        first_place_(uniform((base & 0x3ffff) >> 4)),
        releases_in_(cta_to_release(params.use)),
        zero_(kept(static_cast<int>(params.use) >> 4)) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
    constexpr int kBands = kW4Columns / kW4BandColumns;  // of a block of scales
    tokens_ = base + lane % 8 * Tile::kRowBytes + (lane / 8 ^ lane % 8) * 16;
    words_ = base + Tile::kTokenBytes + warp * Tile::kBandBytes + lane * 16;
    scales_ = base + Tile::kScaleOffset + warp / kBands * kW4ScaleBytes<typename Tile::Weight> +
              lane / 4 * 16 + warp % kBands * 4;
  }

  // Computes the sums of a tile, and gives its stages back.
  __device__ __forceinline__ void compute(int, Sums& sums) {
    Acc& acc = sums[0];
#pragma unroll
    for (float& x : acc) x = 0.0f;
    State at = {uniform(state_.stage), static_cast<uint32_t>(uniform(state_.parity))};
    if constexpr (Tile::kUsesMma) {
      multiply_by_mma(at, acc);
    } else if constexpr (Scales::kScaleSums) {
      multiply_scaled_by_wgmma(at, acc);
    } else {
      multiply_by_wgmma(at, acc);
    }
    state_ = at;
#pragma unroll
    for (float& x : acc) x *= MmaOperands<bf16, typename Tile::Weight>::kRescale;
  }

 private:
  // Each warp multiplies its 16 rows by itself; nothing is left to wait for. All of a stage is
  // loaded before the first product, and four sums of eight tokens grow side by side: with tiles of
  // 16 tokens that was 3 to 8 % faster than two parts at a time, from one run to the next.
  __device__ __forceinline__ void multiply_by_mma(State& at, Acc& acc) const {
    constexpr int kEights = Tile::kColumns / 8, kChains = 4 / kEights, kPairs = kParts;
    float sums[kChains][kEights][4] = {};
    bool is_full = false;
#pragma unroll 1
    for (int left = uniform(blocks_); left > 0; --left) {
      if (!is_full) stages_.wait_full(at, "a full stage");
      const uint32_t stage = at.stage * Tile::kStageBytes;
      const Scales scales(scales_ + stage);
      uint2 words[kPairs];
      uint32_t b[kPairs][kEights][4];
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        constexpr int kInHalf = kPairs / 2;
        const int half = pair / kInHalf, in_half = pair % kInHalf;
        words[pair] = load_words(words_ + stage + half * kW4BandBytes + in_half * 8);
#pragma unroll
        for (int i = 0; i < kEights; ++i) {
          ldmatrix_x4(b[pair][i], (tokens_ ^ in_half * 64) + stage + half * Tile::kPanelBytes +
                                      i * 8 * Tile::kRowBytes);
        }
      }
#pragma unroll
      for (int part = 0; part < 2 * kPairs; ++part) {
        const int pair = part / 2, odd = part % 2;
        uint32_t a[4];
        scales.unpack(odd ? words[pair].y : words[pair].x, pair, a);
#pragma unroll
        for (int i = 0; i < kEights; ++i) {
          mma_m16n8k16<bf16>(sums[part % kChains][i], a, b[pair][i][2 * odd],
                             b[pair][i][2 * odd + 1]);
        }
      }
      // The GPU may arrive before its loads have answered, unless the barrier's address depends on
      // what they read; and a producer may write the stage at once.
      uint32_t read = scales.loaded();
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        read &= words[pair].x;
#pragma unroll
        for (int i = 0; i < kEights; ++i) read &= b[pair][i][0];
      }
      __syncwarp();
      mbarrier_arrive_in_cta_if(&stages_.empty[at.stage], releases_in_,
                                static_cast<int>(read) & zero_);
      at.advance();
      is_full = mbarrier_test_parity(&stages_.full[at.stage], at.parity);
      if constexpr (Scales::kScaleSums) {
        Acc of_stage;
        add_chains(sums, of_stage);
        add_scaled(scales, of_stage, acc);
      }
    }
    if constexpr (!Scales::kScaleSums) add_chains(sums, acc);
  }

  // Writes the sum of all chains, which begin again with zeros.
  template <int kChains, int kEights>
  static __device__ __forceinline__ void add_chains(float (&sums)[kChains][kEights][4], Acc& acc) {
#pragma unroll
    for (int i = 0; i < Tile::kColumns / 2; ++i) {
      acc[i] = 0.0f;
#pragma unroll
      for (int chain = 0; chain < kChains; ++chain) {
        float& sum = sums[chain][i / 4][i % 4];
        acc[i] += sum;
        sum = 0.0f;
      }
    }
  }

  // acc += of_stage * the scales of its rows
  static __device__ __forceinline__ void add_scaled(const Scales& scales, const Acc& of_stage,
                                                    Acc& acc) {
#pragma unroll
    for (int i = 0; i < Tile::kColumns / 2; ++i) {
      acc[i] = fmaf(of_stage[i], i % 4 < 2 ? scales.low() : scales.high(), acc[i]);
    }
  }

  __device__ __forceinline__ void multiply_by_wgmma(State& at, Acc& acc) const {
    State last = at;
    int last_releases_in = kNoCta;
    uint32_t a[kParts][4];
    bool is_full = false;
#pragma unroll 1
    for (int left = uniform(blocks_); left > 0; --left) {
      if (!is_full) stages_.wait_full(at, "a full stage");
      const uint32_t stage = at.stage * Tile::kStageBytes;
      const Scales scales(scales_ + stage);
      uint2 words = load_words(words_ + stage);  // of two parts
#pragma unroll
      for (int part = 0; part < 2 * kParts; ++part) {
        // The wgmma that read the same registers is complete.
        wgmma_wait_group<kParts - 1>();
        // So are all of the stage before.
        if (part == kParts - 1) {
          mbarrier_arrive_in_cta_if(&stages_.empty[last.stage], last_releases_in);
        }
        scales.unpack(part % 2 == 0 ? words.x : words.y, part / 2, a[part % kParts]);
        multiply(at, part, a[part % kParts], acc);
        // Why not all of a lane's 16 bytes at once: the compiler would unpack them at once, too.
        if (part % 2 != 0 && part + 1 < 2 * kParts) {
          const int next = part + 1;
          words = load_words(words_ + stage + next / kParts * kW4BandBytes + next % kParts * 4);
        }
      }
      last = at;
      last_releases_in = releases_in_;
      at.advance();
      is_full = mbarrier_test_parity(&stages_.full[at.stage], at.parity);
    }
    wgmma_wait_group<0>();
    keep_behind_wait(acc);
    mbarrier_arrive_in_cta_if(&stages_.empty[last.stage], last_releases_in);
  }

  // The same where the sums of a stage are multiplied by its scales. Meanwhile the tensor cores
  // have the wgmma of the other warpgroups of the SM.
  __device__ __forceinline__ void multiply_scaled_by_wgmma(State& at, Acc& acc) const {
    uint32_t a[kParts][4];
    bool is_full = false;
#pragma unroll 1
    for (int left = uniform(blocks_); left > 0; --left) {
      if (!is_full) stages_.wait_full(at, "a full stage");
      const uint32_t stage = at.stage * Tile::kStageBytes;
      const Scales scales(scales_ + stage);
      uint2 words = load_words(words_ + stage);  // of two parts
      Acc of_stage;
#pragma unroll
      for (float& x : of_stage) x = 0.0f;
#pragma unroll
      for (int part = 0; part < 2 * kParts; ++part) {
        if (part >= kParts) wgmma_wait_group<kParts - 1>();
        scales.unpack(part % 2 == 0 ? words.x : words.y, part / 2, a[part % kParts]);
        multiply(at, part, a[part % kParts], of_stage);
        if (part % 2 != 0 && part + 1 < 2 * kParts) {
          const int next = part + 1;
          words = load_words(words_ + stage + next / kParts * kW4BandBytes + next % kParts * 4);
        }
      }
      wgmma_wait_group<0>();
      keep_behind_wait(of_stage);
      mbarrier_arrive_in_cta_if(&stages_.empty[at.stage], releases_in_,
                                static_cast<int>(scales.loaded() & words.x) & zero_);
      at.advance();
      is_full = mbarrier_test_parity(&stages_.full[at.stage], at.parity);
      add_scaled(scales, of_stage, acc);
    }
  }

  static __device__ __forceinline__ uint2 load_words(uint32_t from) {
    uint2 x;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(from) : "memory");
    return x;
  }

  // Starts the product of a part.
  __device__ __forceinline__ void multiply(const State& at, int part, const uint32_t (&a)[4],
                                           Acc& acc) const {
    constexpr uint64_t kLayout = wgmma_descriptor(0, 8 * Tile::kRowBytes, 0);
    const uint32_t panel = first_place_ + at.stage * (Tile::kStageBytes >> 4) +
                           part / kParts * (Tile::kPanelBytes >> 4);
    wgmma_fence();
    Mma::template add_rs<false>(acc, a, kLayout | (panel + part % kParts * 2));
    wgmma_commit_group();
  }

  Barriers& stages_;
  const int blocks_;                  // of the depth, in a tile
  const uint32_t first_place_;        // of the stages, in units of 16 bytes
  const int releases_in_;             // a CTA of the cluster
  const int zero_;                    // zero, which the compiler does not know
  uint32_t tokens_, words_, scales_;  // shared addresses of this lane's, in the first stage
  State state_;
};

#endif  // __CUDACC__

}  // namespace precast
