// SPDX-License-Identifier: Apache-2.0
// Stores of eight fp32 numbers as 16-bit or fp8 elements.
#pragma once

#include "precast/core/fp8.cuh"
#include "precast/core/rows.cuh"
#include "precast/core/vec.cuh"

namespace precast {

#if defined(__CUDACC__)

// The alignment in bytes that store_rounded<true>() requires of `target`.
template <typename Out>
constexpr int kStoreBytes = 8 * sizeof(Out);

// Rounds to nearest even once; fp8 also saturates. Stores all eight to an aligned address, or the
// first `count` to any address.
template <bool kAligned, typename Out>
__device__ __forceinline__ void store_rounded(Out* target, const float (&x)[8], int64_t count) {
  if constexpr (sizeof(Out) == 2) {
    store<kAligned>(target, pack<Out>(x), count);
  } else if constexpr (kAligned) {
    store_fp8(target, x);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < count) store_one_fp8(target + i, x[i]);
    }
  }
}

#endif  // __CUDACC__

}  // namespace precast
