// SPDX-License-Identifier: Apache-2.0
// Q of a tile: its copy from global to shared memory, its conversion for FP8 keys, and the
// fragments of Q as operands of Q K^T.
#pragma once

#include "precast/attention/warp_pair.cuh"
#include "precast/attention/work_queue.cuh"
#include "precast/core/cp_async.cuh"
#include "precast/core/mma.cuh"
#include "precast/core/vec.cuh"

namespace precast {

#if defined(__CUDACC__)

// Which threads copy, convert and rotate which rows of Q. In the 16-row tile all warps read all
// rows, so the CTA copies them together, and copies the Q of the next work tile to a second buffer
// meanwhile. In larger tiles a warp has rows of its own, and may overwrite them as soon as it has
// read them; of a pair each warp copies one half of the rows.
template <typename Tile>
struct QLoadPartition {
  static constexpr int kThreads = Tile::kWarpsSplitKv ? Tile::kThreads : 32;
  static constexpr int kRows = Tile::kPaired ? 16 : 16 * Tile::kRowTiles;

  static __device__ __forceinline__ int first_row() {
    return Tile::kWarpsSplitKv ? 0 : threadIdx.x / 32 * kRows;
  }
  // Synchronizes the threads that read the same rows.
  static __device__ __forceinline__ void barrier() {
    if constexpr (Tile::kWarpsSplitKv) {
      __syncthreads();
    } else if constexpr (Tile::kPaired) {
      WarpPair<Tile>::barrier();
    } else {
      __syncwarp();
    }
  }
};

// The offsets of rows in Q or in the output, in units of 16 bytes. Each lane computes one row for
// its warp.
class RowOffsets {
 public:
  static constexpr uint32_t kNoRow = 0xffffffffu;

  // For `count` rows from `first` on. Strides are in elements of 2 bytes.
  __device__ __forceinline__ RowOffsets(const AttentionParams& p, const BlockInfo& block, int first,
                                        int count, int64_t stride, int64_t head_stride) {
    const int row = first + threadIdx.x % 32 % count;
    const PackGqaRow packed(p, block, row);
    const int64_t offset =
        int64_t(block.work.q_begin + packed.q_idx) * stride + packed.q_head * head_stride;
    lane_offset_ = row < block.num_rows ? static_cast<uint32_t>(offset / 8) : kNoRow;
  }

  // The offset of a row, counted from `first`; kNoRow if the row does not exist. All lanes must
  // call this.
  __device__ __forceinline__ uint32_t of(int row) const {
    return __shfl_sync(0xffffffffu, lane_offset_, row);
  }

 private:
  uint32_t lane_offset_;
};

// Starts the copies of Q to shared memory and commits them as one group. Rows that do not exist
// become zeros.
template <typename Tile>
__device__ __forceinline__ void copy_q(const AttentionParams& p, const BlockInfo& block,
                                       uint32_t smem_q) {
  using Partition = QLoadPartition<Tile>;
  constexpr int kChunks = Tile::kDimK / 8;  // chunks of 16 bytes in a row
  constexpr int kTotal = Partition::kRows * kChunks;
  const RowOffsets offsets(p, block, Partition::first_row(), Partition::kRows, p.q_stride,
                           p.q_head_stride);
#pragma unroll 4
  for (int first = 0; first < kTotal; first += Partition::kThreads) {
    const int i = first + threadIdx.x % Partition::kThreads;
    const int row = i / kChunks, chunk = i % kChunks;
    const uint32_t offset = offsets.of(row % 32);
    if (kTotal % Partition::kThreads != 0 && i >= kTotal) continue;
    const bool exists = offset != RowOffsets::kNoRow;
    cp_async(smem_q + Tile::QueryRows::offset(Partition::first_row() + row, chunk),
             static_cast<const uint4*>(p.q) + (exists ? offset + chunk : 0u), exists);
  }
  cp_async_commit_group();
}

// Clamps x to [-limit, limit]; NaN stays NaN.
__device__ __forceinline__ float clamp_magnitude(float x, float limit) {
  return fabsf(x) > limit ? copysignf(limit, x) : x;
}

// Converts two columns to f16, which has more mantissa bits, clamped to its largest number.
__device__ __forceinline__ uint32_t bf16_pair_to_f16(uint32_t pair) {
  const float2 x = unpack_pair(bf16(), pair);
  return pack_pair(f16(), clamp_magnitude(x.x, 65504.0f), clamp_magnitude(x.y, 65504.0f));
}

// Converts the bf16 rows of Q in shared memory, for keys that are f16 there.
// QLoadPartition::barrier() must come before and after.
template <typename Tile>
__device__ __forceinline__ void convert_q_to_f16(unsigned char* smem_q) {
  using Partition = QLoadPartition<Tile>;
  constexpr int kChunks = Tile::kDimK / 8;
  for (int i = threadIdx.x % Partition::kThreads; i < Partition::kRows * kChunks;
       i += Partition::kThreads) {
    const int row = Partition::first_row() + i / kChunks;
    uint4* chunk = reinterpret_cast<uint4*>(smem_q + Tile::QueryRows::offset(row, i % kChunks));
    const uint4 x = *chunk;
    *chunk = make_uint4(bf16_pair_to_f16(x.x), bf16_pair_to_f16(x.y), bf16_pair_to_f16(x.z),
                        bf16_pair_to_f16(x.w));
  }
}

// Sixteen columns of Q in the order that the MMA with FP8 keys needs. A fragment of FP8 keys holds
// four neighbouring columns in a register, so the column pairs 0, 2, 4, 6 come before 1, 3, 5, 7.
// bf16 becomes f16, which FP8 keys are converted to; f16 has more mantissa bits, and is clamped to
// its largest number.
template <typename Q>
__device__ __forceinline__ void permute_q_columns(uint4& low, uint4& high) {
  uint32_t pairs[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  if constexpr (TypeName<Q>::value == DType::bf16) {
#pragma unroll
    for (uint32_t& pair : pairs) pair = bf16_pair_to_f16(pair);
  }
  low = make_uint4(pairs[0], pairs[2], pairs[4], pairs[6]);
  high = make_uint4(pairs[1], pairs[3], pairs[5], pairs[7]);
}

// Permutes the columns of Q in shared memory. QLoadPartition::barrier() must come before and after.
template <typename Tile, typename Q>
__device__ __forceinline__ void permute_q_columns(unsigned char* smem_q) {
  using Partition = QLoadPartition<Tile>;
  constexpr int kGroups = Tile::kDimK / 16;
  for (int i = threadIdx.x % Partition::kThreads; i < Partition::kRows * kGroups;
       i += Partition::kThreads) {
    const int row = Partition::first_row() + i / kGroups, chunk = i % kGroups * 2;
    uint4* low = reinterpret_cast<uint4*>(smem_q + Tile::QueryRows::offset(row, chunk));
    uint4* high = reinterpret_cast<uint4*>(smem_q + Tile::QueryRows::offset(row, chunk + 1));
    uint4 x = *low, y = *high;
    permute_q_columns<Q>(x, y);
    *low = x;
    *high = y;
  }
}

// The fragments of a warp's Q. They stay in registers where there is room, for all k steps or for
// the first few; the other steps are loaded from shared memory each time.
template <typename Tile>
struct QFragments {
  static constexpr int kSteps = Tile::kDimK / 16;  // k steps of 16 columns
  static constexpr bool kInRegs = !Tile::kGeneral && Tile::kRowTiles == 1 && Tile::kDimK <= 128;
  static constexpr bool kPartlyInRegs = !Tile::kGeneral && Tile::kPaired && !Tile::kFp8;
  static constexpr int kRegSteps = kInRegs ? kSteps : kPartlyInRegs ? 4 : 0;

  __device__ __forceinline__ explicit QFragments(uint32_t smem_q) {
    smem_rows_ = smem_q + WarpPartition<Tile>::first_row() * Tile::QueryRows::kStride;
    lane_offset_ = rows_first<typename Tile::QueryRows>();
    keep_in_register(lane_offset_);
#pragma unroll
    for (int step = 0; step < kRegSteps; ++step) {
#pragma unroll
      for (int m = 0; m < Tile::kRowTiles; ++m) ldmatrix_x4(frag_[step][m], address(m, step));
    }
  }

  // The A operands of a k step, one for each m16 tile.
  __device__ __forceinline__ void load(uint32_t (&a)[Tile::kRowTiles][4], int step) const {
#pragma unroll
    for (int m = 0; m < Tile::kRowTiles; ++m) {
      if (step < kRegSteps) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = frag_[step][m][i];
      } else {
        ldmatrix_x4(a[m], address(m, step));
      }
    }
  }

 private:
  __device__ __forceinline__ uint32_t address(int m, int step) const {
    return smem_rows_ + m * 16 * Tile::QueryRows::kStride +
           Tile::QueryRows::later(lane_offset_, 2 * step);
  }

  uint32_t smem_rows_;
  uint32_t lane_offset_;
  uint32_t frag_[kRegSteps > 0 ? kRegSteps : 1][Tile::kRowTiles][4];
};

#endif  // __CUDACC__

}  // namespace precast
