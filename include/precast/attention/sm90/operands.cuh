// SPDX-License-Identifier: Apache-2.0
// What consumers of attention for sm_90a multiply: Q K^T and P V by wgmma, and what they do before
// to Q, K and V in shared memory.
#pragma once

#include "precast/attention/sm90/consumer.cuh"

namespace precast {

#if defined(__CUDACC__)

// -- Products ------------------------------------------------------------------------------------

// Queries that are split count as two or three, of which the lowest ones are first: their sums are
// small, so less of them is rounded off.
template <typename Tile>
template <int kColumns, bool kFew>
__device__ __forceinline__ void Sm90Consumer<Tile>::multiply_qk(
    float (&acc_s)[kColumns / 2]) const {
  using Mma = Wgmma<typename Tile::Key, kColumns>;
  constexpr int kSteps = KeyLayout::kPanels * KeyLayout::kPanelBytes / kStepBytes;
  const int first_row = kFew ? consumer_ * kSharedRows : 0;  // too many, of the descriptor
  const uint64_t q = q_descriptor_ +
                     ((q_.stage * Tile::kQueryBytes - first_row * QueryLayout::kPanelBytes) >> 4),
                 k = k_descriptor_ + (k_.stage * Tile::kKeyBytes >> 4);
#pragma unroll
  for (int i = 0; i < Tile::kTerms * kSteps; ++i) {
    const int step = i % kSteps, term = Tile::kTerms - 1 - i / kSteps;
    const uint64_t a = term < 2 ? q + query_step(step, term) : q_descriptor_ + third_step(step),
                   b = k + key_step(step);
    if (i == 0) {
      Mma::template new_ss<false>(acc_s, a, b);
    } else {
      Mma::template add_ss<false>(acc_s, a, b);
    }
  }
}

// What a step of k adds to the descriptors of Q, with the high numbers as term 0 and the low ones
// as term 1, and of K.
template <typename Tile>
__device__ __forceinline__ uint32_t Sm90Consumer<Tile>::query_step(int step, int term) {
  constexpr int kBytes = kStepBytes * (Tile::kSplitsQueries ? 2 : 1);
  constexpr int kPanelSteps = QueryLayout::kPanelBytes / kBytes;
  const int in_panel = step % kPanelSteps * kBytes + term * kStepBytes;
  return (step / kPanelSteps * Tile::kBlockM * QueryLayout::kPanelBytes + in_panel) >> 4;
}

// The same for third numbers, from the first buffer of Q on.
template <typename Tile>
__device__ __forceinline__ uint32_t Sm90Consumer<Tile>::third_step(int step) {
  constexpr int kPanelSteps = QueryLayout::kPanelBytes / kStepBytes;
  const int in_panel = step % kPanelSteps * kStepBytes;
  return (Sm90Buffers<Tile>::kThirdOffset +
          step / kPanelSteps * Tile::kBlockM * QueryLayout::kPanelBytes + in_panel) >>
         4;
}

template <typename Tile>
__device__ __forceinline__ uint32_t Sm90Consumer<Tile>::key_step(int step) const {
  constexpr int kPanelSteps = KeyLayout::kPanelBytes / kStepBytes;
  return step / kPanelSteps * k_panel_step_ + (step % kPanelSteps * kStepBytes >> 4);
}

template <typename Tile>
__device__ __forceinline__ void Sm90Consumer<Tile>::multiply_pv(AccO& acc_o,
                                                                const OperandP& p) const {
  const uint64_t v = v_descriptor_ + (v_.stage * Tile::kValueBytes >> 4);
#pragma unroll
  for (int step = 0; step < Tile::kBlockN / 16; ++step) {
    Wgmma<typename Tile::Value, Tile::kDimV>::template add_rs<true>(acc_o, p[step],
                                                                    v + step * v_step_);
  }
}

// -- Q, K and V in shared memory ------------------------------------------------------------------

// Turns this consumer's rows of Q into what keys of e4m3 need (attention/sm90/query.cuh).
template <typename Tile>
__device__ __forceinline__ void Sm90Consumer<Tile>::change_queries() {
  const uint32_t queries = buffers_.q(q_.stage);
  if constexpr (Tile::kSplitsQueries) {
    split_queries<Tile>(queries, buffers_.third_of_q(), query_scale_);
  } else {
    convert_queries<Tile>(queries, query_scale_);
  }
  fence_shared_for_async();
  barrier_of<true>();
}

// Rotates this consumer's rows of Q, if it is to be rotated. rotate_keys() must follow.
template <typename Tile>
__device__ __forceinline__ void Sm90Consumer<Tile>::rotate_queries(const BlockInfo& block) const {
  if (!has_rotary()) return;
  const int first_row = 64 * consumer_;
  const int32_t shift = block.work.kv_len - block.work.q_len;
  const auto rows = query_rows<Tile>(buffers_.q(q_.stage) + first_row * QueryLayout::kPanelBytes);
  rotate_rows<Tile, 64, kWarpgroupSize>(
      rows, rotary_freqs(), threadIdx.x % kWarpgroupSize,
      [&](int row) { return PackGqaRow(p_, block, first_row + row).q_idx + shift; });
}

// Rotates the next block of K, together with the other consumers or alone.
template <typename Tile>
template <bool kAlone>
__device__ __forceinline__ void Sm90Consumer<Tile>::rotate_keys(int32_t first_position) const {
  if (!has_rotary()) return;
  const SwizzledRows<KeyLayout> rows = {
      buffers_.k(k_.stage), KeyLayout::kAtomBytes * (has_key_panels_ ? 1u : KeyLayout::kPanels),
      k_panel_step_ << 4};
  rotate_rows<Tile, Tile::kBlockN, kAlone ? kWarpgroupSize : Tile::kThreads>(
      rows, rotary_freqs(), kAlone ? threadIdx.x % kWarpgroupSize : Tile::thread(),
      [&](int row) { return first_position + row; });
  fence_shared_for_async();
  barrier_of<kAlone>();
}

// Sets the values behind the first `count` tokens of the next block to 0. Why: their P is 0, but
// memory that is not the request's may hold NaN.
// With kAlone this consumer does it alone, otherwise all of them together.
template <typename Tile>
template <bool kAlone>
__device__ __forceinline__ void Sm90Consumer<Tile>::clear_values(int32_t count) {
  if constexpr (!kAlone) wait_full(shared_.v, v_, "V of the end");
  constexpr int kChunks = ValueLayout::kPanelBytes / 16, kPanels = ValueLayout::kPanels;
  const uint32_t values = buffers_.v(v_.stage);
  // In units of 16 bytes: from eight rows to the next eight, and from panel to panel.
  const uint32_t atom_step = v_step_ / 2;
  const uint32_t panel_step = has_value_panels_ ? Tile::kBlockN * kChunks : kAtomRows * kChunks;
  const int chunks = (Tile::kBlockN - count) * kPanels * kChunks;
  const int first = kAlone ? threadIdx.x % kWarpgroupSize : Tile::thread();
  for (int i = first; i < chunks; i += kAlone ? kWarpgroupSize : Tile::kThreads) {
    const int row = count + i / (kPanels * kChunks), panel = i / kChunks % kPanels;
    const uint32_t address = values + 16 * (row / kAtomRows * atom_step + panel * panel_step +
                                            row % kAtomRows * kChunks + i % kChunks);
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
  }
  fence_shared_for_async();
  barrier_of<kAlone>();
}

#endif  // __CUDACC__

}  // namespace precast
