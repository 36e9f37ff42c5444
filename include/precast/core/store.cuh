// SPDX-License-Identifier: Apache-2.0
// Eight fp32 numbers written as a vector of a 16-bit type, or as half of one of fp8.
#pragma once

#include "precast/core/fp8.cuh"
#include "precast/core/rows.cuh"
#include "precast/core/vec.cuh"

namespace precast {

#if defined(__CUDACC__)

// What `target` of store_rounded<true>() must be aligned to, in bytes.
template <typename Out>
constexpr int kStoreBytes = 8 * sizeof(Out);

// Rounded to nearest even once; fp8 also saturates. Whole and aligned, or the first `count` to any
// address.
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
