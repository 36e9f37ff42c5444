// SPDX-License-Identifier: Apache-2.0
// How the rows, columns and tokens of a tile are partitioned among its warps, and the exchange
// between two warps that share rows (Tile::kPaired).
//
// Both warps of a pair hold all rows of the pair. Of a KV block each warp computes acc_s for one
// half of the tokens, and of acc_o each keeps one half of the columns. So each warp sends P of its
// tokens to the other, through shared memory. P is packed from accumulators in the layout of an MMA
// operand, so a lane needs what the same lane of the other warp wrote.
//
// Why not 16 rows per warp: a warp of 32 rows has two m16 tiles, which share each fragment of keys
// and values. That halves the shared-memory reads of V and, because Q is not in registers, saves a
// third of the reads for Q K^T.
#pragma once

#include "precast/attention/tile.cuh"

namespace precast {

#if defined(__CUDACC__)

// The part of a tile and of a KV block that this warp computes.
template <typename Tile>
struct WarpPartition {
  static constexpr int kRows = 16 * Tile::kRowTiles;

  // Which warp of a pair this is; 0 without pairs.
  static __device__ __forceinline__ int half() { return Tile::kPaired ? threadIdx.x / 32 % 2 : 0; }
  static __device__ __forceinline__ int first_row() {
    return Tile::kWarpsSplitKv ? 0 : threadIdx.x / (Tile::kPaired ? 64 : 32) * kRows;
  }
  static __device__ __forceinline__ int first_token() { return half() * Tile::kWarpN; }
  static __device__ __forceinline__ int first_column() { return half() * Tile::kWarpDimV; }
};

// The exchange of a pair. All lanes of both warps must call each function. `smem` is the shared
// address of Tile::kPairBytes. A barrier of the CTA must come between a receive() and the next
// send().
template <typename Tile, bool kExists = Tile::kPaired>
class WarpPair {
  static constexpr int kThreads = 64;
  static constexpr int kSteps = Tile::kWarpN / 16;
  static constexpr int kSlotBytes = 512;  // 16 bytes per lane

 public:
  using RowScalars = float[2][2];        // one number for each row of a lane
  using FragP = uint32_t[2][kSteps][4];  // P as the A operand, two 16-bit numbers per register

  __device__ __forceinline__ explicit WarpPair(uint32_t smem) {
    const int warp = threadIdx.x / 32;
    own_ = smem + warp * Tile::kWarpPairBytes + threadIdx.x % 32 * 16;
    peer_ = smem + (warp ^ 1) * Tile::kWarpPairBytes + threadIdx.x % 32 * 16;
  }

  // Synchronizes the two warps.
  static __device__ __forceinline__ void barrier() {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + threadIdx.x / 64), "n"(kThreads) : "memory");
  }

  // Sends P of this warp's tokens, and the row_max that it is relative to.
  __device__ __forceinline__ void send(const FragP& p_frag, const RowScalars& row_max) const {
    store(0, row_max);
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) store(1 + i, p_frag[i / kSteps][i % kSteps]);
    asm volatile("bar.arrive %0, %1;" ::"r"(exchange_barrier(0)), "n"(kThreads) : "memory");
  }

  // Receives what the other warp sent.
  __device__ __forceinline__ void receive(FragP& p_frag, RowScalars& row_max) const {
    asm volatile("bar.sync %0, %1;" ::"r"(exchange_barrier(1)), "n"(kThreads) : "memory");
    load(0, row_max);
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) load(1 + i, p_frag[i / kSteps][i % kSteps]);
  }

  // Adds the other warp's numbers of the same rows.
  __device__ __forceinline__ void reduce_sum(RowScalars& own) const {
    RowScalars peer;
    barrier();  // Why: the other warp may still read what send() wrote.
    store(0, own);
    barrier();
    load(0, peer);
#pragma unroll
    for (int i = 0; i < 4; ++i) own[i / 2][i % 2] += peer[i / 2][i % 2];
  }

 private:
  // The named barrier of what this warp (0) or the other warp (1) sends. Barrier 0 is that of
  // __syncthreads(), and 1 to 4 are those of barrier().
  static __device__ __forceinline__ int exchange_barrier(int sender) {
    return 6 + (threadIdx.x / 32 ^ sender);
  }

  __device__ __forceinline__ void store(int slot, const uint32_t (&x)[4]) const {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(own_ + slot * kSlotBytes),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
  }
  __device__ __forceinline__ void store(int slot, const RowScalars& x) const {
    const uint32_t bits[4] = {__float_as_uint(x[0][0]), __float_as_uint(x[0][1]),
                              __float_as_uint(x[1][0]), __float_as_uint(x[1][1])};
    store(slot, bits);
  }

  __device__ __forceinline__ void load(int slot, uint32_t (&x)[4]) const {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(peer_ + slot * kSlotBytes)
                 : "memory");
  }
  __device__ __forceinline__ void load(int slot, RowScalars& x) const {
    uint32_t bits[4];
    load(slot, bits);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i / 2][i % 2] = __uint_as_float(bits[i]);
  }

  uint32_t own_, peer_;
};

template <typename Tile>
class WarpPair<Tile, false> {
 public:
  __device__ __forceinline__ explicit WarpPair(uint32_t) {}
};

#endif  // __CUDACC__

}  // namespace precast
