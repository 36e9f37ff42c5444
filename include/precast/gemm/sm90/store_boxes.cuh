// SPDX-License-Identifier: Apache-2.0
// Outputs of 16 bits that a consumer warp of a GEMM for sm_90a writes: boxes of its 16 rows, which
// it brings in order in shared memory and leaves to TMA while it goes on. What TMA cannot write,
// the lanes copy from there. Why from there: a second way from the registers to memory would be
// compiled for every column of every tile.
#pragma once

#include "precast/core/mma.cuh"
#include "precast/core/sm90/stmatrix.cuh"
#include "precast/core/sm90/tensor_map.cuh"
#include "precast/core/sm90/warpgroup.cuh"
#include "precast/core/vec.cuh"

namespace precast {

// A box as TMA reads it: rows of 128 or 64 bytes whose parts of 16 bytes have changed places.
template <int kBoxColumns>
struct StoreBox {
  static constexpr int kRows = 16, kColumns = kBoxColumns;
  static constexpr int kRowBytes = kColumns * 2, kBytes = kRows * kRowBytes;
  static_assert(kColumns == 64 || kColumns == 32, "128 or 64 bytes are swizzled");

#if defined(__CUDACC__)
  // Where eight columns of a row are, in bytes from the box.
  static __device__ __forceinline__ uint32_t place(int row, int eight) {
    return row * kRowBytes + (eight ^ (kColumns == 64 ? row % 8 : row / 2 % 4)) * 16;
  }
#endif
};

// The columns of the boxes of a tile that has so many.
constexpr int store_box_columns(int columns) { return columns % 64 == 0 ? 64 : 32; }

#if defined(__CUDACC__)

// Writes `kColumns` columns as boxes side by side, the first of them at these coordinates of the
// map; columns from `columns` on do not exist. take(group, pairs) gives a lane's pairs of sums of
// 32 columns, in the order of the accumulator of wgmma. `buffers` are kBuffers boxes of this warp,
// of which `first` is the next one; kAtOnce boxes are stored together. Without `by_tma`, which is
// the same in all lanes, and where the columns end in a box, copy(box, column) writes the box in
// shared memory at that address by all lanes. All lanes call it; behind the last call,
// finish_boxes().
template <typename T, typename Box, int kColumns, int kBuffers, int kAtOnce, typename Take,
          typename Copy>
__device__ __forceinline__ void write_boxes(bool by_tma, const TensorMap* map, uint32_t buffers,
                                            int first, int column, int row, int group, int columns,
                                            const Take& take, const Copy& copy) {
  constexpr int kBoxes = ceil_div(kColumns, Box::kColumns);
  static_assert(kBuffers % kAtOnce == 0 && kBoxes % kAtOnce == 0, "boxes take turns in buffers");
  // stmatrix takes the address of a row from each lane: rows 0 .. 7 and 8 .. 15 of eight columns,
  // then those of the next eight.
  const int lane = threadIdx.x % 32, own_row = lane % 16, own_eight = lane / 16;
  const bool is_chosen = elect_lane();
#pragma unroll
  for (int begin = 0; begin < kBoxes; begin += kAtOnce) {
    const uint32_t here = buffers + (first + begin) % kBuffers * Box::kBytes;
    if (is_chosen) wait_stores_have_read<kBuffers / kAtOnce - 1>();
    __syncwarp();
#pragma unroll
    for (int box = 0; box < kAtOnce; ++box) {
#pragma unroll
      for (int part = 0; part < Box::kColumns / 32; ++part) {
        float2 pairs[8];
        take((begin + box) * (Box::kColumns / 32) + part, pairs);
#pragma unroll
        for (int step = 0; step < 2; ++step) {  // 16 columns
          uint32_t words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            words[i] = pack_pair(T(), pairs[4 * step + i].x, pairs[4 * step + i].y);
          }
          stmatrix_x4(
              here + box * Box::kBytes + Box::place(own_row, 4 * part + 2 * step + own_eight),
              words);
        }
      }
    }
    const bool is_stored = by_tma && (begin + kAtOnce) * Box::kColumns <= kColumns;
    if (is_stored) fence_shared_for_async();
    __syncwarp();
    if (!is_stored) {
#pragma unroll 1
      for (int box = 0; box < kAtOnce; ++box) {
        copy(here + box * Box::kBytes, column + (begin + box) * Box::kColumns);
      }
      __syncwarp();
    }
    if (is_chosen) {
#pragma unroll
      for (int box = 0; box < kAtOnce; ++box) {
        const int at = column + (begin + box) * Box::kColumns;
        if (is_stored && at < columns) store_box(map, here + box * Box::kBytes, at, row, group);
      }
      // Why also where lanes have copied: a buffer is free when the groups before the last are
      // done.
      commit_stores();
    }
  }
}

// Waits until TMA has read all boxes of this warp: before other data takes their place, and before
// the CTA exits.
__device__ __forceinline__ void finish_boxes() {
  if (elect_lane()) wait_stores_have_read<0>();
  __syncwarp();
}

#endif  // __CUDACC__

}  // namespace precast
