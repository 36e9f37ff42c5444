// SPDX-License-Identifier: Apache-2.0
// The products of attention for sm_90a whose queries, keys and values are all e4m3, and the
// addition of P V to O in fp32. attention/sm90/fp8_mainloop.cuh says why it is not left to the
// tensor cores.
#pragma once

#include "precast/attention/sm90/fp8_mainloop.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename Tile>
template <int kColumns>
__device__ __forceinline__ void Sm90Fp8Consumer<Tile>::multiply_qk(
    float (&acc_s)[kColumns / 2]) const {
  using Mma = Wgmma<e4m3, kColumns>;
  using Layout = typename Tile::KeyLayout;  // as that of queries
  constexpr uint64_t kQueryLayout = wgmma_descriptor(0, Layout::kAtomBytes, 0, Layout::kPanelBytes);
  constexpr uint64_t kKeyLayout =
      wgmma_descriptor(0, Layout::kPanels * Layout::kAtomBytes, 0, Layout::kPanelBytes);
  const bool has_atoms = Layout::kPanels > 1 && params_.kv_copy == KvCopy::atoms;
  const uint64_t q = kQueryLayout | place(tiles_ % Tile::kQueryStages * Tile::kQueryBytes +
                                          this->consumer_ * 64 * Layout::kPanelBytes);
  const uint64_t k =
      (has_atoms ? kKeyLayout : kQueryLayout) |
      place(Tile::kQueryStages * Tile::kQueryBytes + blocks_ % Tile::kStages * Tile::kKeyBytes);
  const uint32_t panel_step = has_atoms ? Layout::kAtomBytes : Tile::kBlockN * Layout::kPanelBytes;
  Mma::template new_ss<false>(acc_s, q, k);
#pragma unroll
  for (int step = 1; step < Tile::kDimK / 32; ++step) {
    constexpr int kSteps = Layout::kPanelBytes / kStepBytes;  // of a panel
    const int panel = step / kSteps, in_panel = step % kSteps * 2;
    Mma::template add_ss<false>(acc_s,
                                q + panel * (Tile::kBlockM * Layout::kPanelBytes >> 4) + in_panel,
                                k + panel * (panel_step >> 4) + in_panel);
  }
}

// P V of some columns from `column` on.
template <typename Tile>
template <int kCount>
__device__ __forceinline__ void Sm90Fp8Consumer<Tile>::multiply_pv(float (&acc_pv)[kCount],
                                                                   const OperandP& p,
                                                                   int column) const {
  using Mma = Wgmma<e4m3, 2 * kCount>;
  constexpr uint64_t kLayout = wgmma_descriptor(0, kAtomRows * 128, 0);
  const uint64_t v =
      kLayout | place(Tile::kQueryStages * Tile::kQueryBytes + Tile::kStages * Tile::kKeyBytes +
                      (blocks_ - 1) % Tile::kStages * Tile::kValueBytes + column * 128);
  Mma::template new_rs<false>(acc_pv, p[0], v);
#pragma unroll
  for (int step = 1; step < Tile::kBlockN / 32; ++step) {
    Mma::template add_rs<false>(acc_pv, p[step], v + step * 2);
  }
}

// What a descriptor says of a place so many bytes behind the first one. Why so and not 64 bits of
// each operand: these are constants but for one register.
template <typename Tile>
__device__ __forceinline__ uint32_t Sm90Fp8Consumer<Tile>::place(uint32_t offset) const {
  return first_place_ + (offset >> 4);
}

// Adds P V of a block, whose V^T is there.
template <typename Tile>
__device__ __forceinline__ void Sm90Fp8Consumer<Tile>::add_pv(AccO& acc_o, const OperandP& p,
                                                              const float (&factor)[2]) {
  if constexpr (kColumnsO == Tile::kDimV) {
    float acc_pv[(kColumnsO + Tile::kOnes) / 2];
    multiply_pv_and_wait(acc_pv, p, 0);
    add_columns(acc_o, acc_pv, 0, factor);
  } else {
#pragma unroll
    for (int column = 0; column < Tile::kDimV; column += kColumnsO) {
      float acc_pv[kColumnsO / 2];
      multiply_pv_and_wait(acc_pv, p, column);
      add_columns(acc_o, acc_pv, column, factor);
    }
    float sums[Tile::kOnes / 2];
    multiply_pv_and_wait(sums, p, Tile::kDimV);
    add_sums(sums, factor);
  }
  mbarrier_arrive_of_warp(&shared_.v.empty[(blocks_ - 1) % Tile::kStages]);
}

template <typename Tile>
template <int kCount>
__device__ __forceinline__ void Sm90Fp8Consumer<Tile>::multiply_pv_and_wait(float (&acc_pv)[kCount],
                                                                            const OperandP& p,
                                                                            int column) const {
  wgmma_fence();
  multiply_pv(acc_pv, p, column);
  wgmma_commit_group();
  wgmma_wait_group<0>();
  keep_behind_wait(acc_pv);
}

// Adds columns of P V to acc_o, and those of ones to row_sum.
template <typename Tile>
template <int kCount>
__device__ __forceinline__ void Sm90Fp8Consumer<Tile>::add_columns(AccO& acc_o,
                                                                   const float (&acc_pv)[kCount],
                                                                   int column,
                                                                   const float (&factor)[2]) {
  constexpr int kOutputs = kCount < kColumnsO / 2 ? kCount : kColumnsO / 2;
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) {
    acc_o[column / 2 + i] = fmaf(acc_o[column / 2 + i], factor[i / 2 % 2], acc_pv[i]);
  }
  if constexpr (kCount > kColumnsO / 2) {
    float sums[Tile::kOnes / 2];
#pragma unroll
    for (int i = 0; i < Tile::kOnes / 2; ++i) sums[i] = acc_pv[kColumnsO / 2 + i];
    add_sums(sums, factor);
  }
}

// Adds P times ones, of which a lane has two equal columns of each row.
template <typename Tile>
__device__ __forceinline__ void Sm90Fp8Consumer<Tile>::add_sums(
    const float (&sums)[Tile::kOnes / 2], const float (&factor)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    row_sum_[half] = fmaf(row_sum_[half], factor[half], sums[2 * half]);
  }
}

template <typename Tile>
__device__ __forceinline__ void Sm90Fp8Consumer<Tile>::rescale(AccO& acc_o,
                                                               const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < Tile::kDimV / 2; ++i) acc_o[i] *= factor[i / 2 % 2];
  row_sum_[0] *= factor[0];
  row_sum_[1] *= factor[1];
}

#endif  // __CUDACC__

}  // namespace precast
