// SPDX-License-Identifier: Apache-2.0
// The epilogue of a tile of GEMM of 16-bit operands for sm_90a: that of epilogue.cuh, but for
// outputs of 16 bits in tiles whose rows are tokens. There stmatrix brings 64 columns of a warp's
// 16 rows in order in a buffer of the warp, from which its lanes write whole lines of 128 bytes.
//
// Why not by TMA: it does what it is asked in order, so a box waits for those that the producers
// have asked for, and the warp for its buffer; 4096 x 4096 x 4096 took 3 % longer. And the last
// tile of a group has rows of the next group, which TMA cannot leave out.
#pragma once

#include "precast/core/sm90/stmatrix.cuh"
#include "precast/gemm/sm90/epilogue.cuh"
#include "precast/gemm/sm90/gemm16_tile.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename T, typename Tile, typename Params>
class Gemm16Epilogue : public Fp8GemmEpilogue<T, Tile, Params> {
  using Base = Fp8GemmEpilogue<T, Tile, Params>;
  using Acc = float[Tile::kColumns / 2];

 public:
  using Base::Base;

  // `buffers` are those of this warp in shared memory. All its lanes call it.
  __device__ __forceinline__ void write_tile(uint32_t buffers, const Acc& sums) const {
    if constexpr (sizeof(T) == 2 && Tile::kBuffers > 0) {
      if (this->params_.has_vector_rows) {
        write_lines(buffers, sums);
        return;
      }
    }
    this->write(sums);
  }

 private:
  __device__ __forceinline__ void write_lines(uint32_t buffers, const Acc& sums) const {
    constexpr int kLineBytes = kStoreColumns * 2;
    const int lane = threadIdx.x % 32;
    // The 16-byte parts of a row change places, so that neither the eight rows of a matrix nor the
    // eight parts of a row share a bank. stmatrix takes the address of a row from each lane: rows
    // 0 .. 7 and 8 .. 15 of eight columns, then those of the next eight.
    const int row = lane % 16;
    const uint32_t matrix_row = buffers + row * kLineBytes;
    // What a lane writes: a part of every fourth row.
    const int line = lane / 8, part = lane % 8;
    const int token = this->tile_.token + this->row_ - lane / 4 + line;
    T* out = this->place(token, this->tile_.column + 8 * part);
#pragma unroll
    for (int box = 0; box < Tile::kColumns / kStoreColumns; ++box) {
      const uint32_t here = box % Tile::kBuffers * kStoreBytes;
      if (Tile::kBuffers == 1 && box > 0) __syncwarp();  // it has been read
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        typename Base::Pairs pairs;
        this->take_pairs(sums, 2 * box + half, pairs);
        this->add_bias(2 * box + half, pairs);
#pragma unroll
        for (int step = 0; step < 2; ++step) {  // 16 columns
          uint32_t words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            words[i] = pack_pair(T(), pairs[4 * step + i].x, pairs[4 * step + i].y);
          }
          const int eight = (4 * half + 2 * step + lane / 16) ^ (row % 8);
          stmatrix_x4(matrix_row + here + 16 * eight, words);
        }
      }
      __syncwarp();
      const bool has_column =
          this->tile_.column + box * kStoreColumns + 8 * part < this->p_.columns;
#pragma unroll
      for (int i = 0; i < kStoreRows / 4; ++i) {
        const int at = line + 4 * i;
        const uint4 eight = load_eight(buffers + here + at * kLineBytes + 16 * (part ^ (at % 8)));
        if (has_column && token + 4 * i < this->tile_.token_end) {
          T* const to = out + 4 * i * this->p_.out_row_stride + box * kStoreColumns;
          *reinterpret_cast<uint4*>(to) = eight;
        }
      }
    }
  }

  static __device__ __forceinline__ uint4 load_eight(uint32_t address) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
  }
};

#endif  // __CUDACC__

}  // namespace precast
