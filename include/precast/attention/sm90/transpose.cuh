// SPDX-License-Identifier: Apache-2.0
// The transposition of a block of V in e4m3. wgmma reads operands of 8 bits along k alone, which
// are the tokens of P V, so V [tokens, columns] becomes V^T [columns, tokens] in shared memory.
//
// Layouts  V     128 tokens in swizzled rows of 128 or 64 bytes, as TMA writes them
//          V^T   a row of 128 bytes for each column of V, in atoms with the 128-byte swizzle. Byte
//                16 g + 4 q + i of a row, with q, i = 0 .. 3, is token 16 g + 8 (i / 2) + 2 q + i
//                % 2. In that order the accumulator of Q K^T is the A operand of P V without an
//                exchange of registers (core/sm90/wgmma.cuh).
// Threads  Four warps, 32 tokens each. ldmatrix takes two neighbouring columns of a row for one
//          number of 16 bits and transposes them, so a lane gets both columns of the tokens 2 q and
//          2 q + 1, and of those eight further. A byte permutation parts the columns: these four
//          bytes lie side by side in V^T.
// Banks    No conflicts. A matrix that stmatrix stores has even columns in its lower four rows and
//          odd ones in the others: these are eight different columns modulo 8.
#pragma once

#include "precast/core/mma.cuh"
#include "precast/core/sm90/stmatrix.cuh"

namespace precast {

#if defined(__CUDACC__)

// Transposes blocks of V with kColumns columns, in rows of kRowBytes. Its members are this lane's.
template <int kColumns, int kRowBytes>
class ValueTransposer {
  static constexpr int kChunks = kColumns / 16, kChunksOfRow = kRowBytes / 16;
  static constexpr int kTokensOfWarp = 32;

 public:
  // `warp`: 0 to 3. `atom_step` and `panel_step` are the bytes from eight tokens to the next eight,
  // and from the columns of a row to the next ones.
  __device__ __forceinline__ ValueTransposer(int warp, uint32_t atom_step, uint32_t panel_step)
      : panel_step_(panel_step) {
    const int lane = threadIdx.x % 32, token = kTokensOfWarp * warp + lane, in_atom = token % 8;
    source_ = token / 8 * atom_step + in_atom * kRowBytes;
    swizzle_ = (kRowBytes == 128 ? in_atom : in_atom / 2) * 16;
    // Of this lane's row in matrix lane / 8: 0 and 1 have the first 16 tokens, 2 and 3 the others.
    const int row = lane % 8, column = 2 * row + (row / 4 ^ lane / 8 % 2);
    target_ = column * 128 + ((2 * warp + lane / 16) ^ column % 8) * 16;
    first_ = lane < 16 ? 0x6420 : 0x7531;
  }

  // Transposes this warp's tokens from `values` to `transposed`, which are shared addresses. Tokens
  // from `count` on become 0: their P is 0, but memory that is not the request's may hold NaN.
  // Other warps see the result after a barrier.
  __device__ __forceinline__ void run(uint32_t values, uint32_t transposed, int count,
                                      int warp) const {
    const int left = count - kTokensOfWarp * warp;
    if (left >= kTokensOfWarp) {
      run<false>(values, transposed, left);
    } else {
      run<true>(values, transposed, left);
    }
  }

 private:
  template <bool kClears>
  __device__ __forceinline__ void run(uint32_t values, uint32_t transposed, int left) const {
    const uint32_t second = first_ ^ (0x6420 ^ 0x7531);
    const uint32_t from = values + source_, to = transposed + target_;
    uint32_t kept[2];
    if constexpr (kClears) {
      const int token = threadIdx.x % 4 * 2;
      kept[0] = bytes_of_tokens(left - token);
      kept[1] = bytes_of_tokens(left - token - 16);
    }
#pragma unroll kClears ? 1 : 2
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      uint32_t x[4];
      ldmatrix_x4_trans(
          x, from + chunk / kChunksOfRow * panel_step_ + (chunk % kChunksOfRow * 16 ^ swizzle_));
      uint32_t y[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        y[2 * half] = __byte_perm(x[2 * half], x[2 * half + 1], first_);
        y[2 * half + 1] = __byte_perm(x[2 * half], x[2 * half + 1], second);
        if constexpr (kClears) {
          y[2 * half] &= kept[half];
          y[2 * half + 1] &= kept[half];
        }
      }
      stmatrix_x4(to + chunk * (16 * 128), y);
    }
  }

  // The bytes of tokens 0, 1, 8 and 9 that come before token `count`.
  static __device__ __forceinline__ uint32_t bytes_of_tokens(int count) {
    return (count > 0 ? 0x000000ffu : 0u) | (count > 1 ? 0x0000ff00u : 0u) |
           (count > 8 ? 0x00ff0000u : 0u) | (count > 9 ? 0xff000000u : 0u);
  }

  uint32_t source_, swizzle_, target_, first_, panel_step_;
};

#endif  // __CUDACC__

}  // namespace precast
