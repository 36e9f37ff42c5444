// SPDX-License-Identifier: Apache-2.0
// Warps that share rows by twos (Tile::kPaired). Both have all rows of the pair. Of a group of
// tokens each scores one half, and of the sums each keeps one half of the columns; so each gives
// the other the weights of its tokens, by shared memory. Packed accumulators are operands: a lane
// takes what the lane of its number in the other warp has put down.
//
// Why not 16 rows a warp: two m16 tiles share each fragment of keys and values. Of a group that
// halves the reads of values and, for queries are not held in registers, takes a third off those
// for scores.
#pragma once

#include "precast/attention/tile.cuh"

namespace precast {

#if defined(__CUDACC__)

// What a warp has of the rows and the columns of a tile, and of a group of tokens.
template <typename Tile>
struct WarpShare {
  static constexpr int kRows = 16 * Tile::kRowTiles;

  static __device__ __forceinline__ int half() { return Tile::kPaired ? threadIdx.x / 32 % 2 : 0; }
  static __device__ __forceinline__ int first_row() {
    return Tile::kNarrow ? 0 : threadIdx.x / (Tile::kPaired ? 64 : 32) * kRows;
  }
  static __device__ __forceinline__ int first_token() { return half() * Tile::kWarpTokens; }
  static __device__ __forceinline__ int first_column() { return half() * Tile::kWarpDimV; }
};

// All lanes of both warps call alike. `memory` is a shared address of Tile::kPairBytes; between a
// receive() and the next send() is a barrier of the CTA.
template <typename Tile, bool kExists = Tile::kPaired>
class WarpPair {
  static constexpr int kThreads = 64;
  static constexpr int kSteps = Tile::kWarpTokens / 16;
  static constexpr int kLineBytes = 512;  // 16 bytes a lane

 public:
  using Numbers = float[2][2];  // of the rows of a lane
  using Weights = uint32_t[2][kSteps][4];

  __device__ __forceinline__ explicit WarpPair(uint32_t memory) {
    const int warp = threadIdx.x / 32;
    own_ = memory + warp * Tile::kWarpPairBytes + threadIdx.x % 32 * 16;
    other_ = memory + (warp ^ 1) * Tile::kWarpPairBytes + threadIdx.x % 32 * 16;
  }

  static __device__ __forceinline__ void barrier() {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + threadIdx.x / 64), "n"(kThreads) : "memory");
  }

  // Weights of this warp's tokens, and the maxima that they are relative to.
  __device__ __forceinline__ void send(const Weights& weights, const Numbers& top) const {
    store(0, top);
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) store(1 + i, weights[i / kSteps][i % kSteps]);
    asm volatile("bar.arrive %0, %1;" ::"r"(sent(0)), "n"(kThreads) : "memory");
  }

  // The other's.
  __device__ __forceinline__ void receive(Weights& weights, Numbers& top) const {
    asm volatile("bar.sync %0, %1;" ::"r"(sent(1)), "n"(kThreads) : "memory");
    load(0, top);
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) load(1 + i, weights[i / kSteps][i % kSteps]);
  }

  // Adds the numbers that the other has of the same rows.
  __device__ __forceinline__ void add(Numbers& mine) const {
    Numbers others;
    barrier();  // the other has received
    store(0, mine);
    barrier();
    load(0, others);
#pragma unroll
    for (int i = 0; i < 4; ++i) mine[i / 2][i % 2] += others[i / 2][i % 2];
  }

 private:
  // The barrier of what this warp, or the other, sends. 0 is the CTA's, 1 to 4 those of pairs.
  static __device__ __forceinline__ int sent(int by_other) {
    return 6 + (threadIdx.x / 32 ^ by_other);
  }

  __device__ __forceinline__ void store(int line, const uint32_t (&x)[4]) const {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(own_ + line * kLineBytes),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
  }
  __device__ __forceinline__ void store(int line, const Numbers& x) const {
    const uint32_t bits[4] = {__float_as_uint(x[0][0]), __float_as_uint(x[0][1]),
                              __float_as_uint(x[1][0]), __float_as_uint(x[1][1])};
    store(line, bits);
  }

  __device__ __forceinline__ void load(int line, uint32_t (&x)[4]) const {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(other_ + line * kLineBytes)
                 : "memory");
  }
  __device__ __forceinline__ void load(int line, Numbers& x) const {
    uint32_t bits[4];
    load(line, bits);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i / 2][i % 2] = __uint_as_float(bits[i]);
  }

  uint32_t own_, other_;
};

template <typename Tile>
class WarpPair<Tile, false> {
 public:
  __device__ __forceinline__ explicit WarpPair(uint32_t) {}
};

#endif  // __CUDACC__

}  // namespace precast
