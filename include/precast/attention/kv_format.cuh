// SPDX-License-Identifier: Apache-2.0
// How keys and values lie in global memory and in the stages of a pipeline. FP8 is converted on its
// way to the MMAs. NVFP4 is converted on its way to shared memory, so that from there on it is f16:
// e2m1 times its e4m3 scale has at most 6 significant bits and lies between 2^-10 and 2688, so that
// f16 holds it exactly.
//
// Source   NVIDIA, Pretraining Large Language Models with NVFP4, arXiv:2509.25149
#pragma once

#include "precast/core/fp4.cuh"
#include "precast/core/fp8.cuh"
#include "precast/core/types.cuh"

namespace precast {

// The element type of caches of e2m1 in blocks of 16 that share an e4m3 scale.
struct Nvfp4 {};

#if defined(__CUDACC__)

// kIsPacked: with scales of blocks. Stage: the type in shared memory.
template <typename KV>
struct KvFormat {
  static constexpr bool kIsPacked = false;
  using Stage = KV;
  static constexpr int kBits = sizeof(KV) * 8;  // in global memory
};
template <>
struct KvFormat<Nvfp4> {
  static constexpr bool kIsPacked = true;
  using Stage = f16;
  static constexpr int kBits = 4;
};

template <typename KV>
constexpr int kKvStageBytes = sizeof(typename KvFormat<KV>::Stage);

// Eight numbers of a row and the scale of their block.
struct PackedChunk {
  uint32_t codes = 0;
  uint32_t scale = 0;

  // Why no cp.async: the numbers must pass through registers. A chunk that does not exist is zero,
  // and nothing is read for it.
  __device__ __forceinline__ void load(const unsigned char* codes_at, const unsigned char* scale_at,
                                       bool exists) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        ".reg .u16 s;\n"
        "setp.ne.u32 p, %4, 0;\n"
        "mov.u16 s, 0;\n"
        "mov.u32 %0, 0;\n"
        "@p ld.global.u32 %0, [%2];\n"
        "@p ld.global.u8 s, [%3];\n"
        "cvt.u32.u16 %1, s;\n"
        "}"
        : "=&r"(codes), "=&r"(scale)
        : "l"(codes_at), "l"(scale_at), "r"(exists ? 1u : 0u)
        : "memory");
  }

  // Converts and stores to a shared address that is a multiple of 16.
  __device__ __forceinline__ void store(uint32_t to) const {
    uint32_t pairs[4];
    e2m1_to_f16(codes, pairs);
    const __half2 factor = e4m3_to_f16_pair(scale);
#pragma unroll
    for (uint32_t& pair : pairs) {
      const __half2 x = __hmul2(reinterpret_cast<const __half2&>(pair), factor);
      pair = reinterpret_cast<const uint32_t&>(x);
    }
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(pairs[0]), "r"(pairs[1]),
                 "r"(pairs[2]), "r"(pairs[3])
                 : "memory");
  }
};

#endif  // __CUDACC__

}  // namespace precast
