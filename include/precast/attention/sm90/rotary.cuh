// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding inside of attention for sm_90a: consumers rotate Q and K in shared
// memory, where TMA has written them and wgmma reads them. attention/rotary.cuh says how.
#pragma once

#include "precast/attention/rotary.cuh"
#include "precast/attention/sm90/tile.cuh"

namespace precast {

#if defined(__CUDACC__)

// Where rows lie in a buffer of Q or K.
template <typename Layout>
struct SwizzledRows {
  uint32_t address;
  uint32_t atom_step;   // bytes from eight rows to the next eight
  uint32_t panel_step;  // bytes from a panel to the next

  // A chunk of eight elements of a row.
  template <typename T>
  __device__ __forceinline__ Vec<T>& chunk(int row, int chunk) const {
    constexpr int kChunks = Layout::kPanelBytes / 16;
    const uint32_t place = address + row / kAtomRows * atom_step + chunk / kChunks * panel_step +
                           Layout::offset(row % kAtomRows, chunk % kChunks);
    return *static_cast<Vec<T>*>(__cvta_shared_to_generic(place));
  }
};

// Rotates kRows rows, which kThreads threads share; this is number `thread`. position(row) is that
// of a row. fence_shared_for_async() and a barrier must follow.
template <typename Tile, int kRows, int kThreads, typename Layout, typename Position>
__device__ __forceinline__ void rotate_rows(const SwizzledRows<Layout>& rows,
                                            const RotaryFreq* freqs, int thread,
                                            const Position& position) {
  using T = typename Tile::Key;
  constexpr int kPairs = Tile::kDimK / 16;  // pairs of chunks of eight columns
#pragma unroll 1
  for (int i = thread; i < kRows * kPairs; i += kThreads) {
    const int row = i / kPairs, chunk = i % kPairs;
    rotate_chunks<T>(freqs, position(row), chunk, rows.template chunk<T>(row, chunk),
                     rows.template chunk<T>(row, chunk + kPairs));
  }
}

#endif  // __CUDACC__

}  // namespace precast
