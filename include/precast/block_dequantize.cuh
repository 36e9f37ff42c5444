// SPDX-License-Identifier: Apache-2.0
// Numbers from blocks that share a scale: MXFP4, MXFP8 and NVFP4.
//
//   out[r, c] = round((q[r, c] * s[r, c / block]) * g)
//
// The first product is exact, the second one fp32; g is 1 where there is none.
//
// Layout   input   [rows, columns / 2]  e2m1, the first of two in the lower 4 bits; or
//                  [rows, columns]      e4m3; contiguous, 16-byte aligned
//          scales  core/scale_layout.cuh, ue8m0 or e4m3
//          global  [1]                  fp32
//          out     [rows, columns]      T, contiguous, 16-byte aligned; columns are whole blocks
// Threads  one thread takes one item, 16 bytes of `out` (core/items.cuh).
// Traffic  reads input and scales once, writes out once.
// Source   OCP Microscaling Formats (MX) Specification 1.0.
#pragma once

#include "precast/core/fp4.cuh"
#include "precast/core/items.cuh"
#include "precast/core/launch.cuh"
#include "precast/core/scale_layout.cuh"
#include "precast/core/vec.cuh"

namespace precast {

enum class BlockFormat : int { e2m1_ue8m0, e2m1_e4m3, e4m3_ue8m0 };

struct BlockDequantizeParams {
  const void* input;    // [rows, columns], or half of them
  const void* scales;   // one byte a block
  const float* global;  // [1], or null
  void* out;            // [rows, columns]
  uint32_t rows;
  int64_t columns;
  uint32_t block;  // elements, a power of two of at least 8
  SfLayout layout;
  ScaleLayout scale_layout;  // the launcher sets it
  uint32_t block_shift;      // the launcher sets it
  Items items;               // the launcher sets it
};

#if defined(__CUDACC__)

// The bits of one item's elements: 2 to 8 bytes at an address that is aligned to as many.
template <int kBytes>
__device__ __forceinline__ uint64_t load_packed(const void* source) {
  if constexpr (kBytes == 2) {
    unsigned short bits;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(bits) : "l"(source) : "memory");
    return bits;
  } else if constexpr (kBytes == 4) {
    uint32_t bits;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(bits) : "l"(source) : "memory");
    return bits;
  } else {
    static_assert(kBytes == 8, "2, 4 or 8 bytes");
    uint64_t bits;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(bits) : "l"(source) : "memory");
    return bits;
  }
}

__device__ __forceinline__ uint32_t load_byte(const void* source) {
  unsigned short bits;
  asm volatile("ld.global.u8 %0, [%1];" : "=h"(bits) : "l"(source) : "memory");
  return bits;
}

template <typename T, BlockFormat kFormat>
__global__ __launch_bounds__(kItemThreads) void BlockDequantizeKernel(
    const __grid_constant__ BlockDequantizeParams p) {
  constexpr int kSize = Vec<T>::kSize;
  constexpr bool kE2m1 = kFormat != BlockFormat::e4m3_ue8m0;
  constexpr int kBytes = kE2m1 ? kSize / 2 : kSize;  // that an item reads
  const uint32_t item = blockIdx.x * kItemThreads + threadIdx.x;
  if (item >= p.items.count) return;
  const ItemPosition at(p.items, item, kSize);
  const char* input = static_cast<const char*>(p.input) + uint64_t(item) * kBytes;
  const char* scales =
      static_cast<const char*>(p.scales) +
      scale_offset(p.scale_layout, at.row, static_cast<uint32_t>(at.column >> p.block_shift));

  allow_next_grid();
  if (may_overlap_previous_grid()) prefetch_to_l2(input);
  wait_for_previous_grid();

  const uint64_t bits = load_packed<kBytes>(input);
  const uint32_t scale_bits = load_byte(scales);
  const float global = p.global == nullptr ? 1.0f : __uint_as_float(load_word(p.global));
  const float scale =
      kFormat == BlockFormat::e2m1_e4m3 ? e4m3_to_float(scale_bits) : ue8m0_to_float(scale_bits);
  float x[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const float element = kE2m1 ? e2m1_to_float(uint32_t(bits >> 4 * i))
                                : e4m3_to_float(uint32_t(bits >> 8 * i) & 255u);
    x[i] = __fmul_rn(__fmul_rn(element, scale), global);
  }
  store_vec(static_cast<T*>(p.out) + uint64_t(item) * kSize, pack<T>(x));
}

#if !defined(__CUDACC_RTC__)

// Launches it on `stream`; nothing where there is no element. cudaErrorInvalidValue if `out` has
// more than 2^32 items of 16 bytes.
template <typename T>
cudaError_t launch_block_dequantize(BlockFormat format, BlockDequantizeParams p, bool enable_pdl,
                                    cudaStream_t stream) {
  if (p.rows == 0 || p.columns == 0) return cudaSuccess;
  const ItemPlan plan = plan_items(p.rows, p.columns, Vec<T>::kSize);
  if (!plan.fits) return cudaErrorInvalidValue;
  p.items = plan.items;
  p.scale_layout = make_scale_layout(p.layout, p.columns / p.block);
  p.block_shift = 0;
  while (1u << p.block_shift < p.block) ++p.block_shift;
  const auto kernel =
      format == BlockFormat::e2m1_ue8m0  ? BlockDequantizeKernel<T, BlockFormat::e2m1_ue8m0>
      : format == BlockFormat::e2m1_e4m3 ? BlockDequantizeKernel<T, BlockFormat::e2m1_e4m3>
                                         : BlockDequantizeKernel<T, BlockFormat::e4m3_ue8m0>;
  return launch(kernel, dim3(plan.ctas), dim3(kItemThreads), enable_pdl, stream, p);
}

#endif

#endif  // __CUDACC__

}  // namespace precast
